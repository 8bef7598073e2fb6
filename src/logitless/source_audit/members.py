"""Attributes: of arrays, instances, classes and modules, through base classes and what methods assign."""

import ast
from dataclasses import replace
from typing import Any

from logitless.source_audit.callables import Bound, Closure, Super
from logitless.source_audit.expressions import evaluate, value_of_binding
from logitless.source_audit.machine import Machine, Scope, root, view
from logitless.source_audit.names import Assigned, Class, Function, Module
from logitless.source_audit.operations import SIZES, VIEWS
from logitless.source_audit.values import BLANK, NOTHING, Method, Outside, Value, joined


def attribute_of(machine: Machine, value: Value, name: str) -> Value:
    """`value.name`."""
    if value.choices:
        return _of_choices(machine, value, name)
    if value.fields is not None and name in value.fields:
        return value.fields[name]
    found = [one for ref in value.refs for one in _attribute_of_ref(machine, value, ref, name)]
    if value.owner is not None:
        inherited = member_of_instance(machine, value, name)
        if inherited is not None:
            return inherited
    if found:
        return joined(found)
    if name in SIZES:
        return Value(kind="size", constant=None)
    method = Method(name, value)
    # The weight of a module is an array of its own; `lm_head.weight` of what is an array already is that array.
    of_a_module = not value.facts.is_data and (value.owner is not None or name == "weight")
    if value.path and (of_a_module or not (name in VIEWS or name == "weight")):
        path = f"{value.path}.{name}"
        made = root(path)
        known = value.facts.is_data or name == "weight"
        return Value(made.facts if known else BLANK, (method,), path=path, mark=made.mark)
    if name in VIEWS or name == "weight":
        seen = view(value)
        seen.refs, seen.path = (method,), value.path
        return seen
    # An attribute of one of several batches is whole: nobody cut it.
    return Value(replace(value.all_facts(), loops=NOTHING), (method,), bases=(value,))


def _of_choices(machine: Machine, value: Value, name: str) -> Value:
    several = [attribute_of(machine, one, name) for one in value.choices]
    made = joined(several)
    if len(several) > 1 and made not in several:
        made.choices = tuple(one for one in several if one.refs or one.owner is not None)
    return made


def _attribute_of_ref(machine: Machine, value: Value, ref: Any, name: str) -> list[Value]:
    if isinstance(ref, Module):
        return [
            value_of_binding(machine, one, name) if isinstance(one, Assigned | Function) else Value(refs=(one,))
            for one in machine.program.member(ref, name)
        ]
    if isinstance(ref, Outside) and not ref.name.startswith("<"):
        return [Value(refs=(Outside(f"{ref.name}.{name}"),))]
    if isinstance(ref, Class):
        found = member_of_class(machine, ref, name, value)
        return [found] if found is not None else [Value(refs=(Method(name, value),))]
    if isinstance(ref, Super):
        after = bases_of(machine, ref.owner)[1:]
        found = next((member_of_class(machine, one, name, ref.receiver) for one in after if name in one.methods), None)
        return [found] if found is not None else [Value(refs=(Method(name, Value()),))]
    return []


def member_of_class(machine: Machine, owner: Class, name: str, receiver: Value | None) -> Value | None:
    """A method or an attribute of a class or of one that it inherits from; methods are bound to the receiver."""
    for one in bases_of(machine, owner):
        if name in one.methods:
            function = one.methods[name]
            closure = Closure(function, one.scope)
            if receiver is None or function.is_static():
                return Value(refs=(closure,))
            if function.is_class_method() or receiver.owner is not None:
                return Value(refs=(Bound(closure, receiver),))
            return Value(refs=(closure,))
        if one.assigned.get(name):
            return evaluate(machine, one.assigned[name][-1], Scope(one.module, parent=one.scope))
    return None


def bases_of(machine: Machine, owner: Class) -> list[Class]:
    """A class and those that it inherits from, as far as they stand in the target."""
    key = ("bases", id(owner))
    if key not in machine.program.cache:
        machine.program.cache[key] = _order_of(machine, owner)
    return machine.program.cache[key]


def _order_of(machine: Machine, owner: Class) -> list[Class]:
    order: list[Class] = []
    waiting = [owner]
    while waiting:
        one = waiting.pop(0)
        if one in order:
            continue
        order.append(one)
        for base in one.node.bases:
            value = evaluate(Machine(machine.program, budget=2000), base, Scope(one.module, parent=one.scope))
            waiting += [ref for ref in value.refs if isinstance(ref, Class)]
    return order


def outside_bases(machine: Machine, owner: Class) -> set[str]:
    """Dotted names of the classes from elsewhere that a class inherits from."""
    found: set[str] = set()
    for one in bases_of(machine, owner):
        for base in one.node.bases:
            value = evaluate(Machine(machine.program, budget=2000), base, Scope(one.module, parent=one.scope))
            found |= {ref.name for ref in value.refs if isinstance(ref, Outside)}
    return found


def member_of_instance(machine: Machine, value: Value, name: str) -> Value | None:
    """An attribute of an instance: a method, or what one of its methods assigns to it."""
    found = member_of_class(machine, value.owner, name, value)
    if found is not None and found.refs:
        return found
    made = _assigned_in_methods(machine, value, name)
    return made if made is not None else found


def _assigned_in_methods(machine: Machine, value: Value, name: str) -> Value | None:
    if value.fields is None:
        value.fields = {}
    for one in bases_of(machine, value.owner):
        for method in (one.methods.get("__init__"), one.methods.get("setup"), one.methods.get("__post_init__")):
            nodes = [] if method is None else _assignments_to_self(machine, method).get(name, [])
            if method is not None and nodes:
                return _own_attribute(machine, value, name, nodes, method)
    return None


def _assignments_to_self(machine: Machine, method: Function) -> dict[str, list[ast.expr]]:
    """What a method assigns to each attribute of its instance."""
    key = ("assigned", id(method.node))
    if key not in machine.program.cache:
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(method.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        found.setdefault(target.attr, []).append(node.value)
        machine.program.cache[key] = found
    return machine.program.cache[key]


def _own_attribute(machine: Machine, value: Value, name: str, nodes: list[ast.expr], method: Function) -> Value:
    path = f"{value.path or 'self'}.{name}"
    assert value.fields is not None
    value.fields[name] = root(path)
    scope = Scope(method.module, method)
    scope.names = {argument.arg: root(f"{value.path or 'self'}.{argument.arg}") for argument in method.parameters}
    scope.names["self"] = value
    try:
        several = [evaluate(Machine(machine.program, budget=1500), node, scope) for node in nodes[:4]]
    except RecursionError:
        return value.fields[name]
    callable_ones = [one for one in several if one.refs or one.owner is not None]
    made = joined(callable_ones) if len(callable_ones) > 1 else callable_ones[0] if callable_ones else several[0]
    if made.refs or made.owner is not None or made.fields or made.items:
        value.fields[name] = Value(
            made.facts, made.refs, made.items, made.fields, (), None, path, made.owner, made.element
        )
        value.fields[name].choices = made.choices
    elif isinstance(nodes[0], ast.Constant):
        value.fields[name] = Value()
    return value.fields[name]
