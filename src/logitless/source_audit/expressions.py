"""Expressions: what is known of the value of each."""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from logitless.source_audit.callables import Closure
from logitless.source_audit.machine import Machine, Scope, plain, view
from logitless.source_audit.names import Assigned, Function, Module
from logitless.source_audit.values import BLANK, NOTHING, Facts, Loop, Outside, Value, joined

MASK_NAMES = ("mask", "valid", "keep", "select", "active", "nonzero", "perm", "order")


def evaluate(machine: Machine, node: ast.expr | None, scope: Scope) -> Value:
    """The value of an expression."""
    if node is None:
        return Value()
    machine.step()
    handler = HANDLERS.get(type(node))
    return handler(machine, node, scope) if handler is not None else _anything(machine, node, scope)


def _anything(machine: Machine, node: ast.expr, scope: Scope) -> Value:
    parts = [evaluate(machine, part, scope) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    return Value(together(parts))


def together(values: list[Value]) -> Facts:
    """Facts of several values, and of what they hold, joined."""
    facts = BLANK
    for value in values:
        facts = facts | value.all_facts()
    return facts


def _constant(machine: Machine, node: ast.Constant, scope: Scope) -> Value:
    return Value(constant=node.value, kind="none" if node.value is None else "")


def _name(machine: Machine, node: ast.Name, scope: Scope) -> Value:
    found = scope.get(node.id)
    return found if found is not None else global_value(machine, scope.module, node.id)


def global_value(machine: Machine, module: Module, name: str) -> Value:
    """The value of a name of a module's top level, or of a builtin."""
    key = (module.file.path, name)
    cache = machine.program.cache
    if key not in cache:
        cache[key] = Value()
        found = machine.program.lookup(module, name) or [Outside(name)]
        functions = [one for one in found if not isinstance(one, Assigned)]
        # What an assignment makes of the function of the same name needs that function.
        cache[key] = joined([value_of_binding(machine, one, name) for one in functions])
        cache[key] = joined([value_of_binding(machine, one, name) for one in found])
    return cache[key]


def value_of_binding(machine: Machine, binding: Any, name: str) -> Value:
    """The value of what a name is bound to."""
    from logitless.source_audit.binding import decorated

    if isinstance(binding, Function):
        return decorated(machine, Value(refs=(Closure(binding, None),)), binding, Scope(binding.module))
    if isinstance(binding, Assigned):
        fresh = Machine(machine.program, budget=4000)
        value = evaluate(fresh, binding.node, Scope(binding.module))
        if binding.at is not None and value.items is not None and binding.at < len(value.items):
            value = value.items[binding.at]
        elif binding.name in binding.module.entries:
            value = _with_entries(fresh, value, binding)
        return value if not value.facts.is_data or value.refs or value.fields else Value(value.facts, path=name)
    return Value(refs=(binding,))


def _with_entries(machine: Machine, value: Value, binding: Assigned) -> Value:
    """A mapping, with what other statements of its module put into it."""
    fields, scope = dict(value.fields or {}), Scope(binding.module)
    for at, (key, one) in enumerate(binding.module.entries[binding.name]):
        named = key.value if isinstance(key, ast.Constant) else f"<{at}>"
        fields.setdefault(str(named), evaluate(machine, one, scope))
    return Value(value.facts, value.refs, fields=fields, element=value.element)


def _attribute(machine: Machine, node: ast.Attribute, scope: Scope) -> Value:
    from logitless.source_audit.members import attribute_of

    return attribute_of(machine, evaluate(machine, node.value, scope), node.attr)


def _binary(machine: Machine, node: ast.BinOp, scope: Scope) -> Value:
    left, right = evaluate(machine, node.left, scope), evaluate(machine, node.right, scope)
    site = machine.site(node, scope)
    if isinstance(node.op, ast.MatMult):
        return array(site, machine.product(site, left.all_facts(), right.all_facts()))
    if isinstance(node.op, ast.Add):
        return _sum(machine, site, left, right)
    if isinstance(node.op, ast.Sub):
        return array(site, machine.minus(site, left.all_facts(), right.all_facts()))
    if isinstance(node.op, ast.Mult):
        return _times(machine, site, left, right)
    if isinstance(node.op, ast.BitAnd | ast.BitOr):
        return Value(_mask(left.facts | right.facts))
    return array(site, machine.settle(site, plain(left.all_facts() | right.all_facts())))


def _mask(facts: Facts) -> Facts:
    if "onehot" in facts.marks:
        return facts
    return Facts(loops=facts.loops, marks=frozenset({"mask"}))


def array(site: Any, facts: Facts) -> Value:
    """A new array, marked with where it was made."""
    return Value(facts, mark=f"@{site.path}:{site.line}")


def _sum(machine: Machine, site: Any, left: Value, right: Value) -> Value:
    if left.items is not None and right.items is not None:
        return Value(left.facts | right.facts, items=[*left.items, *right.items])
    if left.kind == "range" or right.kind == "range":
        return Value(left.facts | right.facts, kind="range")
    if "ptr" in left.facts.marks or "ptr" in right.facts.marks:
        base, offset = (left, right) if "ptr" in left.facts.marks else (right, left)
        facts = base.facts
        if "loaded" in offset.facts.marks:
            facts = machine.pick(site, facts, offset.facts)
        return Value(facts, base.refs, bases=(base,), path=base.path)
    left_facts, right_facts = left.all_facts(), right.all_facts()
    either = left_facts | right_facts
    sized = not either.is_data or machine.kernel is not None and "loaded" not in either.marks
    kept = {"iota"} & either.marks if sized else set()
    if 1 in (left.constant, right.constant):
        # log(1 + exp(x)) is a softplus, no log-sum-exp.
        either = replace(either, softmaxes=frozenset(one for one in either.softmaxes if one.kind != "exp"))
    return array(site, machine.settle(site, plain(either).marked(*kept) if kept else plain(either)))


def _times(machine: Machine, site: Any, left: Value, right: Value) -> Value:
    listed = left if left.items is not None else right if right.items is not None else None
    if listed is not None:
        return Value(listed.facts, items=None, element=joined(listed.items or [Value()]))
    return array(site, machine.times(site, left.all_facts(), right.all_facts()))


def _unary(machine: Machine, node: ast.UnaryOp, scope: Scope) -> Value:
    value = evaluate(machine, node.operand, scope)
    if isinstance(node.op, ast.Not):
        return Value()
    if isinstance(node.op, ast.Invert):
        return Value(_mask(value.facts))
    if isinstance(node.op, ast.USub) and isinstance(value.constant, int):
        return Value(constant=-value.constant)
    return array(machine.site(node, scope), value.all_facts())


def _compare(machine: Machine, node: ast.Compare, scope: Scope) -> Value:
    left, rights = evaluate(machine, node.left, scope), [evaluate(machine, one, scope) for one in node.comparators]
    if isinstance(node.ops[0], ast.Eq | ast.NotEq):
        for positions, ids in ((left, rights[0]), (rights[0], left)):
            if "iota" in positions.facts.marks and ids.facts.is_data and "iota" not in ids.facts.marks:
                return Value(Facts(ids.facts.sources, ids.facts.loops, marks=frozenset({"onehot"})))
    loops = left.facts.loops.union(*(right.facts.loops for right in rights))
    return Value(Facts(loops=loops, marks=frozenset({"mask"})))


def _either(machine: Machine, node: ast.BoolOp, scope: Scope) -> Value:
    return joined([evaluate(machine, one, scope) for one in node.values])


def _conditional(machine: Machine, node: ast.IfExp, scope: Scope) -> Value:
    truth = truth_of(machine, node.test, scope)
    if truth is not None:
        return evaluate(machine, node.body if truth else node.orelse, scope)
    evaluate(machine, node.test, scope)
    return joined([evaluate(machine, node.body, scope), evaluate(machine, node.orelse, scope)])


def truth_of(machine: Machine, node: ast.expr, scope: Scope) -> bool | None:
    """Whether a condition holds, where the source alone says so."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth_of(machine, node.operand, scope)
        return None if inner is None else not inner
    if isinstance(node, ast.Name):
        value = scope.get(node.id)
        if value is None:
            return False if node.id == "TYPE_CHECKING" else None
        if value.kind == "none":
            return False
        return value.constant if isinstance(value.constant, bool) else None
    if isinstance(node, ast.BoolOp):
        return _truth_of_several(node, [truth_of(machine, one, scope) for one in node.values])
    return _truth_of_comparison(machine, node, scope) if isinstance(node, ast.Compare) else None


def _truth_of_several(node: ast.BoolOp, truths: list[bool | None]) -> bool | None:
    decisive = isinstance(node.op, ast.Or)
    if decisive in truths:
        return decisive
    return None if None in truths else not decisive


def _truth_of_comparison(machine: Machine, node: ast.Compare, scope: Scope) -> bool | None:
    if len(node.ops) != 1 or not isinstance(node.left, ast.Name):
        return None
    value = scope.get(node.left.id)
    other = node.comparators[0]
    if value is None or not isinstance(other, ast.Constant):
        return None
    if other.value is None:
        none = True if value.kind == "none" else False if value.constant is not None else None
        return none if none is None or isinstance(node.ops[0], ast.Is | ast.Eq) else not none
    if isinstance(value.constant, str) and isinstance(other.value, str) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return (value.constant == other.value) == isinstance(node.ops[0], ast.Eq)
    return None


def _listed(machine: Machine, node: Any, scope: Scope) -> Value:
    items = []
    for one in node.elts:
        if isinstance(one, ast.Starred):
            inner = evaluate(machine, one.value, scope)
            items += inner.items if inner.items is not None else [element_of(inner, None)]
        else:
            items.append(evaluate(machine, one, scope))
    return Value(items=items)


def _mapping(machine: Machine, node: ast.Dict, scope: Scope) -> Value:
    fields, rest = {}, []
    for key, one in zip(node.keys, node.values, strict=True):
        value = evaluate(machine, one, scope)
        if key is None and value.fields:
            fields |= value.fields
        elif isinstance(key, ast.Constant):
            fields[str(key.value)] = value
        else:
            rest.append(value)
    made = Value(fields=fields)
    if rest:
        made.element = joined(rest)
    return made


def _comprehension(machine: Machine, node: Any, scope: Scope) -> Value:
    inner = Scope(scope.module, scope.function, scope)
    loops = []
    for generator in node.generators:
        loop = Loop(machine.site(node, scope), "comprehension")
        over = evaluate(machine, generator.iter, inner)
        loops.append(loop)
        machine.loops.append(loop)
        assign(machine, generator.target, element_of(over, loop), inner)
        for test in generator.ifs:
            evaluate(machine, test, inner)
    if isinstance(node, ast.DictComp):
        evaluate(machine, node.key, inner)
        element = evaluate(machine, node.value, inner)
    else:
        element = evaluate(machine, node.elt, inner)
    del machine.loops[len(machine.loops) - len(loops) :]
    return Value(element=element, facts=element.all_facts())


def element_of(value: Value, loop: Loop | None) -> Value:
    """An element of what is iterated over, marked as a piece of the loop unless the items are written out."""
    if value.kind == "zip":
        return Value(items=[element_of(one, loop) for one in value.items or []])
    if value.kind == "enumerate":
        return Value(items=[_index_of(loop), element_of((value.items or [Value()])[0], loop)])
    if value.kind == "range":
        return _index_of(loop)
    if value.items is not None and value.element is None:
        return joined(value.items)
    if value.element is not None:
        both = [value.element, *(value.items or ())]
        return _piece(joined(both), loop)
    if value.fields:
        return joined(value.fields.values())
    return _piece(view(value), loop)


def _index_of(loop: Loop | None) -> Value:
    return Value(Facts(loops=frozenset({loop})) if loop is not None else BLANK)


def _piece(value: Value, loop: Loop | None) -> Value:
    if loop is None:
        return value
    made = Value(value.facts | Facts(loops=frozenset({loop})), value.refs, bases=(value,), owner=value.owner)
    made.fields = value.fields
    if value.fields and value.owner is None:
        made.fields = {name: _piece(one, loop) for name, one in value.fields.items()}
    if value.items is not None:
        made.items = [_piece(one, loop) for one in value.items]
    made.path = value.path
    return made


def _slice(machine: Machine, node: ast.Slice, scope: Scope) -> Value:
    loops = NOTHING
    for one in (node.lower, node.upper, node.step):
        if one is not None:
            loops = loops | evaluate(machine, one, scope).all_facts().loops
    return Value(Facts(loops=loops))


def _lambda(machine: Machine, node: ast.Lambda, scope: Scope) -> Value:
    around = scope.function.full_name if scope.function is not None else ""
    return Value(refs=(Closure(machine.program.function(node, scope.module, around), scope),))


def _walrus(machine: Machine, node: ast.NamedExpr, scope: Scope) -> Value:
    value = evaluate(machine, node.value, scope)
    assign(machine, node.target, value, scope)
    return value


def _subscript(machine: Machine, node: ast.Subscript, scope: Scope) -> Value:
    from logitless.source_audit.indexing import subscript

    return subscript(machine, node, scope)


def _starred(machine: Machine, node: ast.Starred, scope: Scope) -> Value:
    return evaluate(machine, node.value, scope)


def _text(machine: Machine, node: ast.JoinedStr, scope: Scope) -> Value:
    return Value()


def _yield(machine: Machine, node: Any, scope: Scope) -> Value:
    if node.value is not None:
        value = evaluate(machine, node.value, scope)
        scope.returned.append(value if isinstance(node, ast.YieldFrom) else Value(value.all_facts(), element=value))
    return Value()


def _call(machine: Machine, node: ast.Call, scope: Scope) -> Value:
    from logitless.source_audit.calls import call_expression

    return call_expression(machine, node, scope)


def assign(machine: Machine, target: ast.expr, value: Value, scope: Scope) -> None:
    """Binds a target to a value; an item or a slice is written in place."""
    if isinstance(target, ast.Name):
        scope.set(target.id, value)
    elif isinstance(target, ast.Tuple | ast.List):
        _take_apart(machine, target.elts, value, scope)
    elif isinstance(target, ast.Starred):
        assign(machine, target.value, value, scope)
    elif isinstance(target, ast.Attribute):
        owner = evaluate(machine, target.value, scope)
        if owner.fields is None:
            owner.fields = {}
        owner.fields[target.attr] = value
    elif isinstance(target, ast.Subscript):
        _store(machine, target, value, scope)


def _take_apart(machine: Machine, targets: list[ast.expr], value: Value, scope: Scope) -> None:
    starred = next((at for at, one in enumerate(targets) if isinstance(one, ast.Starred)), None)
    items = value.items
    if items is None or starred is None and len(items) != len(targets) or starred is not None and not items:
        part = value.element if value.element is not None else None
        for target in targets:
            assign(machine, target, part if part is not None else view(value), scope)
        return
    if starred is None:
        for target, item in zip(targets, items, strict=True):
            assign(machine, target, item, scope)
        return
    after = len(targets) - starred - 1
    rows = [*items[:starred], Value(items=items[starred : len(items) - after]), *items[len(items) - after :]]
    for target, item in zip(targets, rows, strict=False):
        assign(machine, target, item, scope)


def _store(machine: Machine, target: ast.Subscript, value: Value, scope: Scope) -> None:
    owner = evaluate(machine, target.value, scope)
    key = evaluate(machine, target.slice, scope)
    if isinstance(key.constant, str) and not owner.facts.is_data:
        owner.fields = {**(owner.fields or {}), key.constant: value}
        return
    if value.refs and not value.facts.is_data:
        owner.element = joined([owner.element, value]) if owner.element is not None else value
        return
    machine.write(machine.site(target, scope), owner, value.all_facts())


HANDLERS: dict[type[ast.expr], Callable[[Machine, Any, Scope], Value]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.BoolOp: _either,
    ast.IfExp: _conditional,
    ast.Tuple: _listed,
    ast.List: _listed,
    ast.Set: _listed,
    ast.Dict: _mapping,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _comprehension,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.Lambda: _lambda,
    ast.NamedExpr: _walrus,
    ast.Starred: _starred,
    ast.JoinedStr: _text,
    ast.Yield: _yield,
    ast.YieldFrom: _yield,
    ast.Await: lambda machine, node, scope: evaluate(machine, node.value, scope),
    ast.Call: _call,
}
