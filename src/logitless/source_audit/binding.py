"""Arguments to parameters, and what decorators make of a function."""

import ast
from dataclasses import replace

from logitless.source_audit.callables import Bound, Checkpointed, Closure, Partial
from logitless.source_audit.expressions import evaluate, together
from logitless.source_audit.machine import Machine, Scope
from logitless.source_audit.names import Assigned, Class, Function
from logitless.source_audit.operations import CHECKPOINTS, CUSTOM_GRADIENTS, OWN_LANGUAGES, last, makes_kernel
from logitless.source_audit.values import Outside, Site, Value


def replace_kind(value: Value, kind: str) -> Value:
    """The same value, to be read in another way."""
    made = Value(value.facts, value.refs, value.items, value.fields, (value,), None, value.path, value.owner)
    made.element, made.kind = value.element, kind
    return made


def bind(
    machine: Machine,
    scope: Scope,
    args: list[Value],
    kwargs: dict[str, Value],
    pointer_site: Site | None = None,
) -> None:
    """Binds arguments to the parameters of a scope's function; in a kernel each array is a pointer."""
    function = scope.function
    assert function is not None
    spec = function.node.args
    positional = [*spec.posonlyargs, *spec.args]
    star = next((value for value in args if value.kind == "star"), None)
    plain = [value for value in args if value.kind != "star"]
    rest = kwargs.get("**")
    for at, parameter in enumerate(positional):
        if at < len(plain):
            scope.names[parameter.arg] = plain[at]
        elif parameter.arg in kwargs:
            scope.names[parameter.arg] = kwargs[parameter.arg]
        elif star is not None:
            scope.names[parameter.arg] = replace_kind(star, "")
        else:
            scope.names[parameter.arg] = _default(machine, function, parameter.arg, rest, scope)
    for parameter in spec.kwonlyargs:
        given = kwargs.get(parameter.arg)
        scope.names[parameter.arg] = given or _default(machine, function, parameter.arg, rest, scope)
    if spec.vararg is not None:
        more = plain[len(positional) :]
        scope.names[spec.vararg.arg] = Value(items=more) if star is None else Value(together(args), element=star)
    if spec.kwarg is not None:
        known = {one.arg for one in function.parameters}
        fields = {name: value for name, value in kwargs.items() if name not in known and name != "**"}
        scope.names[spec.kwarg.arg] = Value(fields=fields, element=rest)
    _remember_functions(machine, function, scope)
    if pointer_site is not None:
        scope.names = {name: _pointer(value, name, pointer_site) for name, value in scope.names.items()}


def _remember_functions(machine: Machine, function: Function, scope: Scope) -> None:
    known = machine.program.cache.setdefault("arguments", {})
    for name, value in scope.names.items():
        refs = tuple(ref for ref in value.refs if isinstance(ref, Closure | Bound | Partial | Class))
        if refs:
            before = known.get((id(function.node), name), ())
            known[id(function.node), name] = tuple(dict.fromkeys((*before, *refs)))[:8]


def _pointer(value: Value, name: str, site: Site) -> Value:
    if value.refs or value.constant is not None or value.kind == "none":
        return value
    if not value.marks():
        value.mark = f"@{site.path}:{site.line}:{name}"
    facts = value.all_facts()
    facts = replace(facts, marks=facts.marks | value.marks() | {"ptr"})
    if value.items is not None:
        return Value(facts, items=[_pointer(one, name, site) for one in value.items], bases=(value,))
    return Value(facts, bases=(value,))


def _default(machine: Machine, function: Function, name: str, rest: Value | None, scope: Scope) -> Value:
    if rest is not None and rest.all_facts().is_data:
        return Value(rest.all_facts(), rest.all_refs())
    spec = function.node.args
    positional = [*spec.posonlyargs, *spec.args]
    pairs = list(zip(reversed(positional), reversed(spec.defaults), strict=False))
    pairs += [(one, node) for one, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if node is not None]
    for parameter, node in pairs:
        if parameter.arg == name:
            return evaluate(machine, node, scope.parent or Scope(function.module))
    return Value()


def decorated(machine: Machine, value: Value, function: Function, scope: Scope) -> Value:
    """A function as its decorators leave it: most only wrap it, some make a kernel or a custom VJP of it."""
    for decorator in reversed(function.decorators):
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        dotted = _dotted_of(machine, node, scope)
        if makes_kernel(dotted):
            function.kernel = True
        elif isinstance(decorator, ast.Call) and last(dotted) == "partial" and decorator.args:
            inner = _dotted_of(machine, decorator.args[0], scope)
            function.kernel = function.kernel or makes_kernel(inner)
            dotted = inner
        function.custom = function.custom or last(dotted) in CUSTOM_GRADIENTS
        if last(dotted) in CHECKPOINTS:
            site = Site(function.module.file.path, decorator.lineno)
            value = Value(refs=tuple(Checkpointed(ref, site) for ref in value.refs))
    return value


def language_of(machine: Machine, function: Function) -> str:
    """The kernel language of its own that a decorator names; empty for Python, Triton and Pallas."""
    if function.language is None:
        dotted = [_dotted_of(machine, _bare(one), Scope(function.module)) for one in function.decorators]
        parts = [name.split(".") for name in dotted if last(name) in ("kernel", "jit", "prim_func")]
        named = [OWN_LANGUAGES[part] for one in parts for part in one[:-1] if part in OWN_LANGUAGES]
        function.language = named[0] if named else ""
    return function.language


def _bare(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _dotted_of(machine: Machine, node: ast.expr, scope: Scope) -> str:
    """What a decorator is called, in full; aliases are resolved."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call):
        return _dotted_of(machine, node.func, scope)
    if not isinstance(node, ast.Name):
        return ".".join(reversed(parts))
    found = machine.program.lookup(scope.module, node.id)
    head = next((one.name for one in found if isinstance(one, Outside)), node.id)
    assigned = next((one for one in found if isinstance(one, Assigned)), None)
    if assigned is not None and isinstance(assigned.node, ast.Attribute):
        head = _dotted_of(machine, assigned.node, scope)
    return ".".join([head, *reversed(parts)])
