"""Calls of names from outside the target, and of methods of arrays: what each does to the facts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from logitless.source_audit import containers
from logitless.source_audit import operations as ops
from logitless.source_audit.callables import CALLABLE, Call, Closure, Gradient, Launch, Partial
from logitless.source_audit.expressions import element_of, together
from logitless.source_audit.indexing import chosen
from logitless.source_audit.machine import Machine, plain, root, view
from logitless.source_audit.members import attribute_of
from logitless.source_audit.transforms import LOOPS, call_function, wrap
from logitless.source_audit.values import BLANK, NOTHING, Facts, Note, Outside, Value, joined

LINEAR, CATEGORICAL = Outside("<linear>"), Outside("<categorical>")
HANDED_OVER = {"MethodType", "setattr", "wraps", "update_wrapper", "signature", "Thread", "partialmethod", "submit"}
PLAIN_ROOTS = {"torch", "jax", "numpy", "math", "triton", "mlx", "tensorflow", "tl", "np", "jnp", "F", "nn", "scipy"}


def outside_call(machine: Machine, call: Call) -> Value:
    """The value of a call whose insides are not in the target."""
    if call.dotted == LINEAR.name:
        return _linear_layer(machine, call)
    registered = _registered(machine, call)
    if registered:
        return call_function(machine, registered, call.args, call.kwargs, call)
    handler = HANDLERS.get(call.name)
    if handler is not None and not (call.method and call.name in NOT_METHODS):
        return handler(machine, call)
    if call.name.endswith("_") and call.method and not call.name.endswith("__"):
        return _in_place(machine, call)
    given = call.everything()[1:] if call.method else call.everything()
    functions = [ref for value in given for ref in value.refs if isinstance(ref, CALLABLE)]
    if functions:
        if ops.makes_kernel(call.dotted):
            mark_kernels(functions)
        if call.name in HANDED_OVER or call.name.startswith(("register", "patch", "add_", "__")):
            return Value(refs=tuple(functions))
        return wrap(machine, call, functions)
    return _anything(machine, call)


def _registered(machine: Machine, call: Call) -> list[Any]:
    """`torch.ops.space.name(...)`: what the target registers under `space::name`."""
    from logitless.source_audit.calls import registry

    parts = call.dotted.removesuffix(".default").split(".")
    if len(parts) != 4 or parts[:2] != ["torch", "ops"]:
        return []
    return [Closure(one, None) for one in registry(machine).get("::".join(parts[2:]), [])]


def mark_kernels(refs: list[Any]) -> None:
    """Functions that a call makes kernels of."""
    for ref in refs:
        function = getattr(ref, "function", None)
        if function is not None:
            function.kernel = True


def _anything(machine: Machine, call: Call) -> Value:
    facts = together(call.everything())
    if _is_loss_from_elsewhere(call, facts):
        data = [one for one in call.everything() if one.all_facts().is_data]
        if len(data) >= 2:
            note = Note("outside", call.site, machine.phase, call.dotted, facts.products, facts.sources)
            machine.notes.setdefault(note)
            return Value(facts.marked("logp"))
    if call.method and ops.LOSS_WORDS.search(call.name) and not call.args[0].facts.is_data:
        given = together(call.everything()[1:])
        if given.is_data and machine.phase == "forward":
            machine.note("dynamic", call.site, f"calls `{call.name}` of something that is not in this tree", given)
    out = call.kwargs.get("out")
    if out is not None:
        machine.write(call.site, out, facts)
    return Value(machine.settle(call.site, plain(facts)), mark=f"@{call.site.path}:{call.site.line}")


def _is_loss_from_elsewhere(call: Call, facts: Facts) -> bool:
    if not facts.is_data or not ops.LOSS_WORDS.search(call.name):
        return False
    return not call.method and "." in call.dotted and call.dotted.split(".")[0] not in PLAIN_ROOTS


def _operands(call: Call, start: int = 0) -> list[Value]:
    names = (
        ("input", "mat1", "batch1", "a", "A", "lhs", "x"),
        ("other", "weight", "mat2", "batch2", "b", "B", "rhs", "y"),
    )
    named = [call.kwargs[name] for group in names for name in group if name in call.kwargs]
    return [*call.args[start:], *named]


def _product(machine: Machine, call: Call) -> Value:
    start = ops.PRODUCTS[call.name]
    everything = [one for one in _operands(call) if not isinstance(one.constant, str)]
    outputs: list[Value] = []
    if call.method and everything and _is_no_array(everything[0]):
        everything = everything[1:]
        outputs = [one for value in (*call.args[3:], *call.kwargs.values()) for one in (value, *value.parts())]
    operands = everything[start : start + 2]
    if call.name == "einsum" and len(operands) == 2 and call.method:
        operands = everything[-2:]
    if len(operands) < 2:
        return _anything(machine, call)
    facts = machine.product(call.site, operands[0].all_facts(), operands[1].all_facts())
    rest = together([*everything[:start], *everything[start + 2 :]])
    facts = facts | replace(rest, picks=NOTHING, softmaxes=NOTHING)
    for one in outputs:
        if one.marks() and not one.facts.is_data:
            machine.write(call.site, one, facts)
    out = call.kwargs.get("out")
    if out is not None:
        machine.write(call.site, out, facts)
        out.facts = out.facts | facts
        return out
    return Value(facts, mark=f"@{call.site.path}:{call.site.line}")


def _is_no_array(value: Value) -> bool:
    """A function or class of the target whose method is called, as `epilogue.gemm(a, b, out)`."""
    return bool(value.refs) and not value.facts.is_data and any(isinstance(ref, CALLABLE) for ref in value.refs)


def _product_in_place(machine: Machine, call: Call) -> Value:
    if len(call.args) >= 3:
        facts = machine.product(call.site, call.args[1].all_facts(), call.args[2].all_facts())
        machine.write(call.site, call.args[0], facts)
    return call.args[0]


def _linear_layer(machine: Machine, call: Call) -> Value:
    name = call.kwargs.get("<path>")
    head = Facts(frozenset({name.path if name is not None and name.path else "weight of a linear layer"}))
    facts = machine.product(call.site, together(call.args), head)
    return Value(facts, mark=f"@{call.site.path}:{call.site.line}")


def _make_linear(machine: Machine, call: Call) -> Value:
    return Value(refs=(LINEAR,))


def _first(call: Call) -> Value:
    value = call.arg(0, "input", "logits", "x", "a", "self")
    return value if value is not None else Value(together(call.everything()))


def _exponential(machine: Machine, call: Call) -> Value:
    value = _first(call)
    facts = machine.softmax(call.site, value.all_facts(), "exp")
    if call.name.endswith("_") and call.method:
        machine.write(call.site, value, facts)
        return value
    return Value(facts, mark=f"@{call.site.path}:{call.site.line}")


def _logarithm(machine: Machine, call: Call) -> Value:
    if call.name == "log1p":
        # log(1 + exp(x)) is a softplus, no log-sum-exp.
        return Value(_first(call).all_facts(), mark=f"@{call.site.path}:{call.site.line}")
    return Value(machine.logarithm(call.site, _first(call).all_facts()), mark=f"@{call.site.path}:{call.site.line}")


def _softmax(machine: Machine, call: Call) -> Value:
    value = _first(call)
    facts = machine.softmax(call.site, value.all_facts(), ops.SOFTMAXES[call.name])
    out = call.kwargs.get("out")
    if out is not None:
        machine.write(call.site, out, facts)
    return Value(machine.settle(call.site, facts), mark=f"@{call.site.path}:{call.site.line}")


def _pair_softmax(machine: Machine, call: Call) -> Value:
    facts = together(call.everything())
    if not facts.softmaxes:
        facts = machine.softmax(call.site, facts, "lse")
    return Value(machine.settle(call.site, facts))


def _cross_entropy(machine: Machine, call: Call) -> Value:
    logits = call.arg(0, "input", "logits", "log_probs", "predictions")
    targets = call.arg(1, "target", "targets", "labels")
    if logits is None or targets is None:
        return _anything(machine, call)
    facts = machine.cross_entropy(call.site, logits.all_facts(), targets.all_facts(), call.name)
    return Value(facts)


def _cross_entropy_layer(machine: Machine, call: Call) -> Value:
    return Value(refs=(Outside(f"torch.nn.functional.{ops.CROSS_ENTROPY_LAYERS[call.name]}"),))


def _divergence(machine: Machine, call: Call) -> Value:
    left, right = call.arg(0, "input", "p", "log_predictions"), call.arg(1, "target", "q", "targets")
    if left is None or right is None:
        return _anything(machine, call)
    return Value(machine.divergence(call.site, left.all_facts(), right.all_facts(), call.name))


def _categorical(machine: Machine, call: Call) -> Value:
    value = call.arg(0, "logits", "probs")
    return Value(BLANK if value is None else value.all_facts(), (CATEGORICAL,))


def _log_prob(machine: Machine, call: Call) -> Value:
    if call.method and len(call.args) > 1 and CATEGORICAL in call.args[0].refs:
        facts = machine.cross_entropy(call.site, call.args[0].facts, call.args[1].all_facts(), "Categorical.log_prob")
        return Value(facts)
    return _anything(machine, call)


def _preference(machine: Machine, call: Call) -> Value:
    facts = together(call.everything())
    if "logratio" in facts.marks:
        machine.on_logprobs("preference", call.site, facts)
    return Value(machine.settle(call.site, plain(facts)))


def _pick(machine: Machine, call: Call) -> Value:
    value = call.arg(0, "input", "arr", "x")
    candidates = [one for one in (*call.args[1:], *call.kwargs.values()) if one is not value]
    ids = [one.all_facts() for one in candidates if one.all_facts().is_data]
    if value is None or not ids:
        return _anything(machine, call)
    facts = machine.pick(call.site, value.all_facts(), ids[0] if len(ids) == 1 else ids[0] | ids[1])
    return Value(facts, bases=(value,))


def _embedding(machine: Machine, call: Call) -> Value:
    if len(call.args) < 2:
        return _anything(machine, call)
    return Value(machine.pick(call.site, call.args[1].all_facts(), call.args[0].all_facts()))


def _one_hot(machine: Machine, call: Call) -> Value:
    facts = _first(call).all_facts()
    if not facts.is_data or "choice" in facts.marks:
        return Value(facts)
    return Value(Facts(facts.sources, facts.loops, marks=frozenset({"onehot"})))


def _choice(machine: Machine, call: Call) -> Value:
    facts = together(call.everything())
    return Value(facts.marked("choice"))


def _positions(machine: Machine, call: Call) -> Value:
    return Value(Facts(loops=together(call.everything()).loops, marks=frozenset({"iota"})))


def _fresh(machine: Machine, call: Call) -> Value:
    if call.name.startswith(("full", "ones")):
        # What is filled to be padded, or counted up, is no memory for logits.
        return Value()
    mark = f"@{call.site.path}:{call.site.line}"
    return Value(Facts(marks=frozenset({mark})), mark=mark)


def _where(machine: Machine, call: Call) -> Value:
    if len(call.args) < 3:
        return Value(together(call.args).marked("choice"))
    condition = call.args[0].facts
    facts = together(call.args[1:3])
    if "onehot" in condition.marks and facts.is_data:
        return Value(machine.pick(call.site, facts, replace(condition, marks=NOTHING)))
    return Value(machine.settle(call.site, facts), call.args[1].refs)


def _in_place(machine: Machine, call: Call) -> Value:
    target, rest = call.args[0], together(call.everything()[1:])
    either = target.all_facts() | rest
    name = call.name.rstrip("_")
    if name in ("zero", "requires_grad", "fill", "detach", "data", "retain_grad"):
        return target
    if name in ("sub", "subtract"):
        facts = machine.minus(call.site, target.all_facts(), rest)
    elif name in ("mul", "multiply"):
        facts = machine.times(call.site, target.all_facts(), rest)
    elif name in ("softmax", "log_softmax"):
        facts = machine.softmax(call.site, target.all_facts(), name)
    elif name.startswith(("scatter", "index_add")):
        facts = either
    else:
        facts = machine.settle(call.site, either)
    machine.write(call.site, target, facts)
    return target


def _view(machine: Machine, call: Call) -> Value:
    if not call.args:
        return Value(together(call.everything()))
    value = call.args[0]
    if value.items is not None and not call.method:
        return Value(together(call.args))
    made = view(value)
    made.path = value.path
    if value.kind in ("zip", "range"):
        made.kind, made.items = value.kind, value.items
    return made


def _append(machine: Machine, call: Call) -> Value:
    if len(call.args) < 2 or not call.method:
        return _anything(machine, call)
    target, value = call.args[0], call.args[-1]
    if call.name == "extend":
        value = element_of(value, None)
    target.element = value if target.element is None else joined([target.element, value])
    machine.write(call.site, target, value.all_facts())
    return Value()


def _partial(machine: Machine, call: Call) -> Value:
    if not call.args:
        return Value()
    refs = [Partial(ref, tuple(call.args[1:]), call.kwargs) for ref in call.args[0].refs]
    return Value(refs=tuple(refs))


def _getattr(machine: Machine, call: Call) -> Value:
    if len(call.args) < 2:
        return Value()
    name = call.args[1].constant
    if isinstance(name, str):
        found = attribute_of(machine, call.args[0], name)
        return joined([found, *call.args[2:3]])
    machine.note("dynamic", call.site, "takes what `getattr` finds under a name that is computed")
    return Value(call.args[0].all_facts(), path="getattr(...)")


def _execute(machine: Machine, call: Call) -> Value:
    if not call.method and call.dotted in ("exec", "eval"):
        machine.note("dynamic", call.site, f"runs code that is held in a string (`{call.name}`)")
    return Value()


def _get(machine: Machine, call: Call) -> Value:
    """`mapping.get(key, default)`, `pop`, `setdefault`."""
    if not call.method or not call.args:
        return _anything(machine, call)
    target, key = call.args[0], call.args[1].constant if len(call.args) > 1 else None
    defaults = call.args[2:3]
    if target.fields is not None:
        found = target.fields.get(key) if isinstance(key, str) else None
        if found is not None:
            return joined([found, *defaults])
        held = [] if isinstance(key, str) else list(target.fields.values())
        element = [target.element] if target.element is not None else []
        if not (held or element) and not target.facts.is_data and not defaults:
            return Value(path=f"{call.dotted}(...)")
        return chosen([*held, *element, *defaults])
    if target.path and isinstance(key, str):
        return root(f"{target.path}[{key!r}]")
    if target.element is not None:
        return target.element
    return Value(target.facts) if target.facts.is_data else joined(defaults)


def _load(machine: Machine, call: Call) -> Value:
    if not machine.kernels or not call.args:
        return _anything(machine, call)
    facts = call.args[0].all_facts().unmarked("ptr", "iota", "mask").marked("loaded")
    if len(call.args) > 1 and call.method:
        ids = together(call.args[1:])
        if "loaded" in ids.marks:
            facts = machine.pick(call.site, facts, ids)
    return Value(facts)


def _store(machine: Machine, call: Call) -> Value:
    if not machine.kernels or len(call.args) < 2:
        return _anything(machine, call)
    value = call.args[-1] if call.method and len(call.args) > 2 else call.args[1]
    if "value" in call.kwargs:
        value = call.kwargs["value"]
    machine.write(call.site, call.args[0], value.all_facts())
    return Value(call.args[0].facts)


def _pointer(machine: Machine, call: Call) -> Value:
    base = call.arg(0, "base")
    if base is None:
        return Value()
    return Value(base.facts, bases=(base,))


def _pallas(machine: Machine, call: Call) -> Value:
    kernel = call.arg(0, "kernel", "body")
    refs = [] if kernel is None else [ref for ref in kernel.refs if isinstance(ref, CALLABLE)]
    return Value(refs=tuple(Launch(ref, call.site) for ref in refs))


def _save(machine: Machine, call: Call) -> Value:
    if call.method and call.args and call.args[0].fields is not None:
        call.args[0].fields["saved_tensors"] = Value(items=call.args[1:])
    return Value()


def _gradient(machine: Machine, call: Call) -> Value:
    refs = [ref for value in call.args[:1] for ref in value.refs if isinstance(ref, CALLABLE)]
    if refs and call.name in ("vjp", "linearize"):
        result = call_function(machine, refs, call.args[1:], {}, call)
        machine.note("gradient", call.site, call.name, result.all_facts())
        return Value(result.all_facts())
    if refs:
        return Value(refs=tuple(Gradient(ref, call.name) for ref in refs))
    facts = together(call.everything())
    if facts.is_data and call.name == "grad":
        machine.note("gradient", call.site, call.dotted, facts)
    return Value(replace(facts, softmaxes=NOTHING, picks=NOTHING))


def _rule(machine: Machine, call: Call) -> Value:
    """`f.defvjp(forward, backward)` of a function that is defined inside another."""
    for ref in call.args[0].refs if call.args else ():
        function = getattr(ref, "function", None)
        if function is not None:
            function.gradients = call.args[1:3]
    return Value()


def _table() -> dict[str, Callable[[Machine, Call], Value]]:
    table: dict[str, Callable[[Machine, Call], Value]] = {}
    groups: list[tuple[Any, Callable[[Machine, Call], Value]]] = [
        (ops.VIEWS | {"cast", "make_tensor", "as_tensor", "asarray"}, _view),
        (ops.FRESH, _fresh),
        (ops.PRODUCTS, _product),
        (ops.PRODUCTS_IN_PLACE, _product_in_place),
        (ops.LINEAR_LAYERS, _make_linear),
        (ops.EXPONENTIALS, _exponential),
        (ops.LOGARITHMS, _logarithm),
        (ops.SOFTMAXES, _softmax),
        (ops.PAIR_SOFTMAXES, _pair_softmax),
        (ops.CROSS_ENTROPIES, _cross_entropy),
        (ops.CROSS_ENTROPY_LAYERS, _cross_entropy_layer),
        (ops.DIVERGENCES, _divergence),
        (ops.CATEGORICALS, _categorical),
        ({"log_prob", "log_probs"}, _log_prob),
        (ops.PREFERENCES, _preference),
        (ops.PICKS, _pick),
        (ops.EMBEDDINGS, _embedding),
        (ops.ONE_HOT, _one_hot),
        (ops.CHOICES, _choice),
        (ops.POSITIONS, _positions),
        ({"where", "select"}, _where),
        (ops.SAME_ITEMS, containers.of_same),
        ({"zip"}, containers.of_zip),
        ({"enumerate"}, containers.of_enumerate),
        ({"range", "static_range", "tile_static_range", "arange_loop"}, containers.of_range),
        ({"next"}, containers.of_next),
        ({"append", "extend", "insert", "add_module"}, _append),
        ({"clone", "copy", "deepcopy"}, containers.of_copy),
        ({"partial"}, _partial),
        ({"getattr"}, _getattr),
        ({"exec", "eval"}, _execute),
        ({"get", "pop", "setdefault"}, _get),
        ({"items", "values", "keys"}, containers.of_values),
        ({"dict", "SimpleNamespace"}, containers.of_mapping),
        (ops.LOADS, _load),
        (ops.STORES - {"copy"}, _store),
        (ops.POINTERS, _pointer),
        (ops.PALLAS_CALLS, _pallas),
        ({"save_for_backward"}, _save),
        (ops.GRADIENTS, _gradient),
        ({"defvjp"}, _rule),
    ]
    for names, handler in groups:
        table |= dict.fromkeys(names, handler)
    return table | LOOPS


HANDLERS = _table()
NOT_METHODS = {"partial", "range", "zip", "linear", "normal", "uniform", "select", "info", "debug", "eval", "where"}
