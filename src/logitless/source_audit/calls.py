"""Calls: into functions and classes of the target, which are read in turn, and to names from outside."""

import ast
from dataclasses import replace
from typing import Any

from logitless.source_audit.binding import bind, language_of, replace_kind
from logitless.source_audit.by_name import loss_by_name, product_by_name
from logitless.source_audit.callables import (
    CALLABLE,
    Bound,
    Call,
    Checkpointed,
    Closure,
    Gradient,
    Launch,
    Partial,
    Super,
)
from logitless.source_audit.expressions import element_of, evaluate, together
from logitless.source_audit.machine import DEPTH, Machine, Scope, root
from logitless.source_audit.members import bases_of, member_of_class
from logitless.source_audit.names import Class, Function
from logitless.source_audit.operations import (
    HEAD_WORDS,
    WHOLE_MODELS,
    last,
)
from logitless.source_audit.values import BLANK, NOTHING, Facts, Method, Outside, Site, Value, joined


def call_expression(machine: Machine, node: ast.Call, scope: Scope) -> Value:
    """The value of a call."""
    if isinstance(node.func, ast.Name) and node.func.id == "super" and scope.get("super") is None:
        return _super(machine, node, scope)
    function = evaluate(machine, node.func, scope)
    args, kwargs = _arguments(machine, node, scope)
    return call(machine, function, args, kwargs, machine.site(node, scope), scope)


def _super(machine: Machine, node: ast.Call, scope: Scope) -> Value:
    around: Scope | None = scope
    while around is not None and (around.function is None or around.function.owner is None):
        around = around.parent
    if around is None or around.function is None or around.function.owner is None:
        return Value()
    parameters = around.function.parameters
    receiver = around.names.get(parameters[0].arg) if parameters else None
    return Value(refs=(Super(around.function.owner, receiver or Value()),))


def _arguments(machine: Machine, node: ast.Call, scope: Scope) -> tuple[list[Value], dict[str, Value]]:
    args: list[Value] = []
    for one in node.args:
        if not isinstance(one, ast.Starred):
            args.append(evaluate(machine, one, scope))
            continue
        inner = evaluate(machine, one.value, scope)
        if inner.items is not None:
            args += inner.items
        else:
            element = element_of(inner, None)
            args.append(replace_kind(element, "star"))
    kwargs: dict[str, Value] = {}
    for keyword in node.keywords:
        value = evaluate(machine, keyword.value, scope)
        if keyword.arg is not None:
            kwargs[keyword.arg] = value
        elif value.fields is not None:
            kwargs |= {name: one for name, one in value.fields.items() if name not in kwargs}
        else:
            kwargs["**"] = value
    return args, kwargs


def call(
    machine: Machine,
    function: Value,
    args: list[Value],
    kwargs: dict[str, Value],
    site: Site,
    scope: Scope,
) -> Value:
    """Calls whatever the value may be."""
    if function.choices:
        return _choose(machine, function, args, kwargs, site, scope)
    found = []
    for ref in function.refs:
        more = {**kwargs, "<path>": function} if ref == Outside("<linear>") else kwargs
        found.append(call_ref(machine, ref, args, more, site, scope))
    keyed = _by_key(machine, function, args, kwargs, site, scope)
    found += keyed
    if not function.refs and function.owner is not None:
        method = member_of_class(machine, function.owner, "__call__", function) or member_of_class(
            machine, function.owner, "forward", function
        )
        if method is not None:
            return call(machine, method, args, kwargs, site, scope)
    if not found:
        return _unknown(machine, function, args, kwargs, site)
    return joined(found)


def _choose(
    machine: Machine, function: Value, args: list[Value], kwargs: dict[str, Value], site: Site, scope: Scope
) -> Value:
    """One of several is called, chosen when the program runs: those in which no loss can be followed are named."""
    results, seen, unseen = [], [], []
    for one in function.choices:
        before = machine.reached
        results.append(call(machine, one, args, kwargs, site, scope))
        (unseen if machine.reached == before else seen).append(_label(one))
    data = [value for value in (*args, *kwargs.values()) if value.all_facts().is_data]
    if unseen and len(data) > 1 and machine.phase == "forward":
        text = f"an implementation is chosen at run time: in {', '.join(unseen[:4])} no loss can be followed"
        machine.note("chosen", site, text, together(data))
    return joined(results)


def _label(value: Value) -> str:
    if value.owner is not None:
        return f"`{value.owner.full_name}`"
    ref = value.refs[0] if value.refs else None
    while isinstance(ref, Partial | Gradient | Launch | Checkpointed):
        ref = ref.ref
    ref = ref.closure if isinstance(ref, Bound) else ref
    ref = ref.function if isinstance(ref, Closure) else ref
    return f"`{getattr(ref, 'full_name', '') or getattr(ref, 'name', '') or 'another'}`"


def _by_key(
    machine: Machine, function: Value, args: list[Value], kwargs: dict[str, Value], site: Site, scope: Scope
) -> list[Value]:
    """What functions that are registered under the constant first argument give."""
    key = args[0].constant if args else None
    if not isinstance(key, str) or not any(isinstance(ref, Closure) for ref in function.refs):
        return []
    names = {ref.function.name for ref in function.refs if isinstance(ref, Closure)}
    if any(name.startswith(("register", "declare")) for name in names):
        return []
    registered = registry(machine).get(key, [])
    rest = {name: value for name, value in kwargs.items() if name == "**"}
    return [inline(machine, Closure(one, None), args[1:], kwargs | rest, None, site) for one in registered]


def registry(machine: Machine) -> dict[str, list[Function]]:
    """Functions of the target by the text that a decorator of theirs is given: `@register("name", ...)`."""
    cache = machine.program.cache
    if "registry" not in cache:
        found: dict[str, list[Function]] = {}
        for file in machine.program.tree.files.values():
            if file.tree is None:
                continue
            for bindings in machine.program.module(file.path).scope.values():
                for function in bindings:
                    if isinstance(function, Function):
                        for key in _keys(function):
                            found.setdefault(key, []).append(function)
        cache["registry"] = found
    return cache["registry"]


def _keys(function: Function) -> list[str]:
    found = []
    for decorator in function.decorators:
        if isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant):
            if isinstance(decorator.args[0].value, str):
                found.append(decorator.args[0].value)
    return found


def call_ref(
    machine: Machine,
    ref: Any,
    args: list[Value],
    kwargs: dict[str, Value],
    site: Site,
    scope: Scope,
) -> Value:
    """Calls one thing that a value may be."""
    from logitless.source_audit.outside import outside_call
    from logitless.source_audit.transforms import checkpointed

    if isinstance(ref, Closure):
        return inline(machine, ref, args, kwargs, None, site)
    if isinstance(ref, Bound):
        return inline(machine, ref.closure, args, kwargs, ref.receiver, site)
    if isinstance(ref, Partial):
        return call_ref(machine, ref.ref, [*ref.args, *args], {**ref.kwargs, **kwargs}, site, scope)
    if isinstance(ref, Gradient):
        return _with_gradient(machine, ref, args, kwargs, site, scope)
    if isinstance(ref, Checkpointed):
        return checkpointed(machine, [ref.ref], args, kwargs, Call(ref.site, "", "", args, kwargs, False, scope))
    if isinstance(ref, Launch):
        return _launch(machine, ref, args, kwargs, site)
    if isinstance(ref, Class):
        return instantiate(machine, ref, args, kwargs, site)
    if isinstance(ref, Outside):
        return outside_call(machine, Call(site, last(ref.name), ref.name, args, kwargs, False, scope))
    if isinstance(ref, Method):
        return _method(machine, ref, args, kwargs, site, scope)
    return Value(together([*args, *kwargs.values()]))


def _with_gradient(
    machine: Machine, ref: Gradient, args: list[Value], kwargs: dict[str, Value], site: Site, scope: Scope
) -> Value:
    value = call_ref(machine, ref.ref, args, kwargs, site, scope)
    machine.note("gradient", site, ref.by, value.all_facts())
    return Value(value.all_facts())


def _method(
    machine: Machine, ref: Method, args: list[Value], kwargs: dict[str, Value], site: Site, scope: Scope
) -> Value:
    from logitless.source_audit.outside import outside_call

    receiver = ref.receiver
    classes = [one for one in receiver.refs if isinstance(one, Class)]
    if ref.name == "apply" and classes:
        return joined([apply(machine, one, args, kwargs, site) for one in classes])
    through = kwargs.get("method")
    if ref.name == "apply" and through is not None and len(args) > 1:
        # `model.apply(variables, hidden, method="logits_from_hidden_states")`, as Flax has it.
        name = through.constant if isinstance(through.constant, str) else through.path
        if name and HEAD_WORDS.search(name):
            return _named_head(machine, f"{receiver.path}.{name}".strip("."), args[1:], {}, site)
    if HEAD_WORDS.search(f"{receiver.path}.{ref.name}" if receiver.path else ref.name) and not receiver.facts.products:
        return _named_head(machine, f"{receiver.path}.{ref.name}".strip("."), args, kwargs, site)
    dotted = f"{receiver.path}.{ref.name}" if receiver.path else ref.name
    return outside_call(machine, Call(site, ref.name, dotted, [receiver, *args], kwargs, True, scope))


def _named_head(machine: Machine, name: str, args: list[Value], kwargs: dict[str, Value], site: Site) -> Value:
    hidden = together([*args, *kwargs.values()])
    head = Facts(frozenset({name}))
    facts = machine.product(site, hidden, head, named=True)
    return Value(facts, mark=f"@{site.path}:{site.line}")


def _unknown(machine: Machine, function: Value, args: list[Value], kwargs: dict[str, Value], site: Site) -> Value:
    facts = together([*args, *kwargs.values()])
    if function.path and HEAD_WORDS.search(function.path):
        return _named_head(machine, function.path, args, kwargs, site)
    if function.path and facts.is_data:
        machine.note("dynamic", site, f"calls `{function.path}`, which is not known before the program runs", facts)
    handed = [ref for value in args for ref in value.refs if isinstance(ref, CALLABLE)]
    if function.path and facts.is_data:
        facts = facts | Facts(frozenset({f"{function.path}()"}))
        if WHOLE_MODELS.search(function.path):
            facts = replace(facts, loops=NOTHING)
    return Value(facts | function.facts, tuple(handed))


def instantiate(machine: Machine, made: Class, args: list[Value], kwargs: dict[str, Value], site: Site) -> Value:
    """An instance of a class of the target."""
    value = Value(together([*args, *kwargs.values()]), owner=made, fields={})
    value.facts = BLANK
    init = member_of_class(machine, made, "__init__", value)
    if init is not None:
        call(machine, init, args, kwargs, site, Scope(made.module))
        return value
    names = [name for one in reversed(bases_of(machine, made)) for name in one.assigned]
    value.fields = {**dict(zip(names, args, strict=False)), **kwargs}
    return value


def apply(machine: Machine, made: Class, args: list[Value], kwargs: dict[str, Value], site: Site) -> Value:
    """`Class.apply` of an autograd Function: its forward, then its backward."""
    machine.called.add(id(made.node))
    applied = _class_by_summary(machine, made, args, kwargs, site)
    if applied is not None:
        return applied
    context = Value(fields={}, kind="context")
    receiver = Value(refs=(made,))
    forward = member_of_class(machine, made, "forward", receiver)
    if forward is None:
        return Value(together([*args, *kwargs.values()]))
    scope = Scope(made.module)
    setup = member_of_class(machine, made, "setup_context", receiver)
    if setup is not None:
        result = call(machine, forward, args, kwargs, site, scope)
        call(machine, setup, [context, Value(items=args), result], {}, site, scope)
    else:
        result = call(machine, forward, [*_before(forward, receiver, context), *args], kwargs, site, scope)
    run_backward(machine, made, context, site)
    return result


def _before(forward: Value, receiver: Value, context: Value) -> list[Value]:
    """What stands before the operands of a forward: the context, and the class where a static method names it."""
    for ref in forward.refs:
        if isinstance(ref, Closure):
            names = [one.arg for one in ref.function.parameters[:2]]
            if names == ["cls", "ctx"]:
                return [receiver, context]
    return [context]


def _class_by_summary(
    machine: Machine, made: Class, args: list[Value], kwargs: dict[str, Value], site: Site
) -> Value | None:
    from logitless.source_audit.entries import summary_of
    from logitless.source_audit.summary import apply_summary, usable

    function = next((one.methods["forward"] for one in bases_of(machine, made) if "forward" in one.methods), None)
    if made is machine.subject or made.scope is not None or function is None or kwargs:
        return None
    spec = function.node.args
    if spec.vararg is not None or any(value.kind == "star" for value in args):
        return None
    names = [one.arg for one in function.parameters if one.arg not in ("self", "cls", "ctx")]
    given = dict(zip(names, args, strict=False))
    summary = summary_of(machine, made) if usable(given) else None
    return None if summary is None else apply_summary(machine, summary, given, site)


def run_backward(machine: Machine, made: Class, context: Value, site: Site) -> None:
    """The backward of an autograd Function, once in a reading."""
    backward = member_of_class(machine, made, "backward", Value(refs=(made,)))
    key = ("backward", id(made), site)
    if backward is None or machine.phase == "backward" or key in machine.cache:
        return
    machine.cache[key] = True
    gradient = replace_kind(root("grad_output"), "star")
    _in_backward(machine, backward, [context, gradient], site, Scope(made.module))


def _in_backward(machine: Machine, function: Value, args: list[Value], site: Site, scope: Scope) -> None:
    machine.phase = "backward"
    try:
        call(machine, function, args, {}, site, scope)
    finally:
        machine.phase = "forward"


def _launch(machine: Machine, ref: Launch, args: list[Value], kwargs: dict[str, Value], site: Site) -> Value:
    """A Pallas kernel on its operands; the references beyond them are its results."""
    target, bound, named = ref.ref, [], {}
    while isinstance(target, Partial):
        bound, named, target = [*target.args, *bound], {**target.kwargs, **named}, target.ref
    closure = target.closure if isinstance(target, Bound) else target
    if not isinstance(closure, Closure):
        return Value(together(args))
    function = closure.function
    function.kernel = True
    count = len([one for one in function.parameters if one.arg not in named]) - len(bound) - len(args)
    results = [Value(mark=f"@{site.path}:{site.line}#{at}") for at in range(max(count, 0))]
    if function.node.args.vararg is not None:
        results.append(Value(mark=f"@{site.path}:{site.line}#*"))
    inline(machine, closure, [*bound, *args, *results], {**named, **kwargs}, None, site)
    return Value(together(results), items=None)


def inline(
    machine: Machine,
    closure: Closure,
    args: list[Value],
    kwargs: dict[str, Value],
    receiver: Value | None,
    site: Site,
) -> Value:
    """Reads the body of a function of the target with these arguments."""
    function = closure.function
    machine.called.add(id(function.node))
    if receiver is not None:
        args = [receiver, *args]
    given = [*args, *kwargs.values()]
    if function in machine.calls or len(machine.calls) >= DEPTH:
        return Value(together(given))
    launch = function.kernel and not machine.kernels
    reached = machine.reached
    applied = _by_summary(machine, closure, args, kwargs, site) if receiver is None else None
    if applied is not None:
        if machine.reached == reached:
            loss_by_name(machine, function, given, site)
        return applied
    scope = Scope(function.module, function, closure.scope)
    bind(machine, scope, args, kwargs, pointer_site=site if launch else None)
    key = (id(function.node), id(closure.scope), tuple(machine.loops), machine.kernel, machine.phase, _key(scope))
    if key in machine.cache:
        return machine.cache[key]
    before, reached = machine.writes, machine.reached
    result = _body(machine, function, scope, site if launch else None)
    if machine.reached == reached and loss_by_name(machine, function, given, site):
        return Value(result.all_facts(), result.refs, result.items)
    result = product_by_name(machine, function, given, result, site)
    if machine.writes == before:
        machine.cache[key] = result
    _custom_gradient(machine, closure, args, kwargs, site)
    return result


def _by_summary(
    machine: Machine, closure: Closure, args: list[Value], kwargs: dict[str, Value], site: Site
) -> Value | None:
    """What a call gives by what is known of the function already; None where its body must be read."""
    from logitless.source_audit.entries import summary_of
    from logitless.source_audit.summary import apply_summary, usable

    function = closure.function
    if closure.scope is not None or function.owner is not None or function is machine.subject or machine.kernels:
        return None
    scope = Scope(function.module, function, None)
    if "**" in kwargs or function.node.args.vararg is not None or function.node.args.kwarg is not None:
        return None
    if any(value.kind == "star" for value in args):
        return None
    bind(machine, scope, args, kwargs)
    if not usable(scope.names):
        return None
    summary = summary_of(machine, function)
    if summary is None:
        return None
    for name, value in scope.names.items():
        if function.kernel and value.facts.is_data and not value.marks():
            value.mark = f"@{site.path}:{site.line}:{name}"
            value.facts = value.facts | Facts(marks=frozenset({value.mark}))
    return apply_summary(machine, summary, scope.names, site)


def _body(machine: Machine, function: Function, scope: Scope, launch: Site | None) -> Value:
    from logitless.source_audit.statements import execute

    machine.calls.append(function)
    language = language_of(machine, function)
    if language and machine.kernel is None:
        text = f"kernel `{function.name}` is written in {language}, whose tensor-core products cannot be followed"
        machine.note("own", launch or machine.site(function.node, scope), text, together(list(scope.names.values())))
    if launch is not None:
        machine.kernels.append((Site(function.module.file.path, function.node.lineno), launch))
        machine.note("launch", launch, function.name)
    try:
        if isinstance(function.node, ast.Lambda):
            return evaluate(machine, function.node.body, scope)
        execute(machine, function.node.body, scope)
    finally:
        machine.calls.pop()
        if launch is not None:
            machine.kernels.pop()
    return joined(scope.returned)


def _key(scope: Scope) -> tuple[Any, ...]:
    return tuple(
        (name, value.facts, value.refs, value.constant, value.path, id(value) if value.parts() else 0)
        for name, value in scope.names.items()
    )


def _custom_gradient(
    machine: Machine, closure: Closure, args: list[Value], kwargs: dict[str, Value], site: Site
) -> None:
    """The forward and backward functions of a custom VJP, once in a reading."""
    function = closure.function
    rules = function.gradients or _rules(machine, function, closure.scope)
    key = ("vjp", id(function.node))
    if len(rules) < 2 or machine.phase == "backward" or key in machine.cache:
        return
    machine.cache[key] = True
    scope = Scope(function.module)
    result = call(machine, rules[0], args, kwargs, site, scope)
    residuals = result.items[1] if result.items is not None and len(result.items) == 2 else result
    backward = next((ref for ref in rules[1].refs if isinstance(ref, Closure)), None)
    count = len(backward.function.parameters) if backward is not None else 2
    static = [root(one.arg) for one in backward.function.parameters[: count - 2]] if backward is not None else []
    _in_backward(machine, rules[1], [*static, residuals, root("cotangent")], site, scope)


def _rules(machine: Machine, function: Function, scope: Scope | None) -> list[Value]:
    node = function.module.rules.get(function.name) if scope is None else None
    if node is None:
        return []
    return [evaluate(machine, one, Scope(function.module)) for one in node.args]
