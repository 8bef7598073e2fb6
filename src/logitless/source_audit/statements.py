"""Statements: what each does to the names of a scope."""

import ast
from collections.abc import Callable
from typing import Any

from logitless.source_audit.callables import Closure
from logitless.source_audit.expressions import assign, element_of, evaluate, truth_of
from logitless.source_audit.machine import Machine, Scope, joined_over
from logitless.source_audit.names import Imported, imports
from logitless.source_audit.values import Facts, Loop, Value, joined


def execute(machine: Machine, body: list[ast.stmt], scope: Scope) -> bool:
    """Runs a body; True where no path leads beyond its end."""
    for statement in body:
        machine.step()
        handler = HANDLERS.get(type(statement))
        if handler is not None and handler(machine, statement, scope):
            return True
    return False


def _function(machine: Machine, node: Any, scope: Scope) -> bool:
    from logitless.source_audit.binding import decorated
    from logitless.source_audit.calls import call

    around = scope.function.full_name if scope.function is not None else ""
    function = machine.program.function(node, scope.module, around)
    value = decorated(machine, Value(refs=(Closure(function, scope),)), function, scope)
    scope.set(node.name, value)
    if any(isinstance(one, ast.Call) and _is_when(one.func) for one in node.decorator_list):
        # `@pl.when(condition)` runs the function where it stands.
        call(machine, value, [], {}, machine.site(node, scope), scope)
    elif len(machine.calls) == 1:
        machine.made.append((value, scope))
    return False


def _is_when(node: ast.expr) -> bool:
    return node.id == "when" if isinstance(node, ast.Name) else isinstance(node, ast.Attribute) and node.attr == "when"


def _class(machine: Machine, node: ast.ClassDef, scope: Scope) -> bool:
    around = scope.function.full_name if scope.function is not None else ""
    key = ("class", id(node))
    made = machine.program.cache.get(key) or machine.program.new_class(node, scope.module, around)
    machine.program.cache[key] = made
    made.scope = scope
    value = Value(refs=(made,))
    scope.set(node.name, value)
    if len(machine.calls) == 1:
        machine.made.append((value, scope))
    return False


def _return(machine: Machine, node: ast.Return, scope: Scope) -> bool:
    if node.value is not None:
        scope.returned.append(evaluate(machine, node.value, scope))
    return True


def _assign(machine: Machine, node: ast.Assign, scope: Scope) -> bool:
    value = evaluate(machine, node.value, scope)
    for target in node.targets:
        assign(machine, target, value, scope)
    return False


def _annotated(machine: Machine, node: ast.AnnAssign, scope: Scope) -> bool:
    if node.value is not None:
        assign(machine, node.target, evaluate(machine, node.value, scope), scope)
    return False


def _augmented(machine: Machine, node: ast.AugAssign, scope: Scope) -> bool:
    load = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
    value = evaluate(machine, load, scope)
    old = scope.get(node.target.id) if isinstance(node.target, ast.Name) else None
    if isinstance(node.target, ast.Name) and old is not None:
        if machine.kernels or not old.facts.is_data and old.element is None:
            scope.set(node.target.id, value)
        else:
            machine.write(machine.site(node, scope), old, value.facts)
            scope.set(node.target.id, old)
        return False
    assign(machine, node.target, value, scope)
    return False


def _loaded(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return target


def _expression(machine: Machine, node: ast.Expr, scope: Scope) -> bool:
    evaluate(machine, node.value, scope)
    return False


def _either(machine: Machine, bodies: list[list[ast.stmt]], scope: Scope) -> bool:
    """Several bodies of which one is run."""
    before = scope.names
    ends = []
    for body in bodies:
        scope.names = dict(before)
        if not execute(machine, body, scope):
            ends.append(scope.names)
    scope.names = merged(ends) if ends else dict(before)
    return not ends


def merged(ends: list[dict[str, Value]]) -> dict[str, Value]:
    """Names after one of several paths."""
    found = ends[0]
    for end in ends[1:]:
        different = {name: value for name, value in end.items() if found.get(name) is not value}
        if different:
            found = dict(found)
            for name, value in different.items():
                found[name] = joined([found[name], value]) if name in found else value
    return found


def _if(machine: Machine, node: ast.If, scope: Scope) -> bool:
    truth = truth_of(machine, node.test, scope)
    evaluate(machine, node.test, scope)
    if truth is not None:
        return execute(machine, node.body if truth else node.orelse, scope)
    return _either(machine, [node.body, node.orelse], scope)


def _match(machine: Machine, node: ast.Match, scope: Scope) -> bool:
    evaluate(machine, node.subject, scope)
    return _either(machine, [*(case.body for case in node.cases), []], scope)


def _try(machine: Machine, node: Any, scope: Scope) -> bool:
    bodies = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
    stopped = _either(machine, bodies, scope)
    return execute(machine, node.finalbody, scope) or stopped


def _with(machine: Machine, node: Any, scope: Scope) -> bool:
    for item in node.items:
        value = evaluate(machine, item.context_expr, scope)
        if item.optional_vars is not None:
            assign(machine, item.optional_vars, value, scope)
    return execute(machine, node.body, scope)


def _for(machine: Machine, node: Any, scope: Scope) -> bool:
    over = evaluate(machine, node.iter, scope)
    loop = Loop(machine.site(node, scope), "for")

    def begin() -> None:
        assign(machine, node.target, element_of(over, loop), scope)

    repeat(machine, loop, begin, node.body, scope)
    return execute(machine, node.orelse, scope)


def _while(machine: Machine, node: ast.While, scope: Scope) -> bool:
    loop = Loop(machine.site(node, scope), "while")
    counters = {name for name in _assigned(node.body) if scope.get(name) is not None}

    def begin() -> None:
        evaluate(machine, node.test, scope)
        for name in counters:
            old = scope.get(name)
            if old is not None and not old.facts.is_data:
                scope.set(name, joined_over(old, Value(Facts(loops=frozenset({loop})))))

    repeat(machine, loop, begin, node.body, scope)
    return execute(machine, node.orelse, scope)


def _assigned(body: list[ast.stmt]) -> set[str]:
    found = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def repeat(machine: Machine, loop: Loop, begin: Callable[[], None], body: list[ast.stmt], scope: Scope) -> None:
    """Runs the body of a loop once, and again where what it reads has changed by then."""
    before = scope.names
    # Inside another loop once is enough: that one runs again.
    passes = 1 if machine.loops else 2
    machine.loops.append(loop)
    try:
        for _ in range(passes):
            known = {name: (value.facts, value.constant) for name, value in scope.names.items()}
            scope.names = dict(scope.names)
            begin()
            execute(machine, body, scope)
            scope.names = merged([before, scope.names])
            after = ((scope.names[name].facts, scope.names[name].constant) for name in known)
            if all(old == new for old, new in zip(known.values(), after, strict=True)):
                break
    finally:
        machine.loops.pop()


def _import(machine: Machine, node: Any, scope: Scope) -> bool:
    from logitless.source_audit.expressions import value_of_binding

    for name, imported in imports(node):
        if name != "*":
            found = machine.program.imported(imported, scope.module)
            scope.set(name, joined([value_of_binding(machine, one, name) for one in found]))
        elif isinstance(imported, Imported):
            scope.module.stars.append(imported)
    return False


def _elsewhere(machine: Machine, node: Any, scope: Scope) -> bool:
    scope.elsewhere.update(node.names)
    return False


def _stop(machine: Machine, node: ast.stmt, scope: Scope) -> bool:
    return True


def _assert(machine: Machine, node: ast.Assert, scope: Scope) -> bool:
    return False


HANDLERS: dict[type[ast.stmt], Callable[[Machine, Any, Scope], bool]] = {
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
    ast.Return: _return,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Expr: _expression,
    ast.If: _if,
    ast.Match: _match,
    ast.Try: _try,
    ast.TryStar: _try,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.Nonlocal: _elsewhere,
    ast.Raise: _stop,
    ast.Continue: _stop,
    ast.Break: _stop,
    ast.Assert: _assert,
}
