"""Functions that call functions: loops, checkpoints, and wrappers that leave a function what it is."""

from collections.abc import Callable
from typing import Any

from logitless.source_audit import operations as ops
from logitless.source_audit.callables import CALLABLE, Call, Checkpointed
from logitless.source_audit.expressions import element_of, together
from logitless.source_audit.machine import Machine
from logitless.source_audit.values import BLANK, Facts, Loop, Value, joined


def call_function(machine: Machine, refs: list[Any], args: list[Value], kwargs: dict[str, Value], call: Call) -> Value:
    """Calls each of several functions with the same arguments."""
    from logitless.source_audit.calls import call_ref

    return joined([call_ref(machine, ref, args, kwargs, call.site, call.scope) for ref in refs])


def _functions(value: Value | None) -> list[Any]:
    return [] if value is None else [ref for ref in value.refs if isinstance(ref, CALLABLE)]


def in_loop(machine: Machine, call: Call, kind: str, run: Callable[[Loop], Value]) -> Value:
    """Runs something inside a loop."""
    loop = Loop(call.site, kind)
    machine.loops.append(loop)
    try:
        return run(loop)
    finally:
        machine.loops.pop()


def piece_of(value: Value, loop: Loop) -> Value:
    """One piece of an array, or of each array of a tuple or mapping."""
    if value.kind == "none" or value.constant is not None:
        return value
    if value.items is not None and value.kind == "":
        made = Value(value.facts, items=[piece_of(one, loop) for one in value.items])
        return made
    if value.fields:
        return Value(value.facts, fields={name: piece_of(one, loop) for name, one in value.fields.items()})
    return element_of(value, loop)


def _scan(machine: Machine, call: Call) -> Value:
    functions = _functions(call.arg(0, "f", "body_fn", "fn"))
    if not functions:
        return wrap(machine, call, call.functions()) if call.functions() else Value(together(call.everything()))
    carry = call.arg(1, "init", "carry") or Value()
    pieces = call.arg(2, "xs") or Value()

    def run(loop: Loop) -> Value:
        state, result = carry, Value()
        for _ in range(2):
            result = call_function(machine, functions, [state, piece_of(pieces, loop)], {}, call)
            after = result.items[0] if result.items is not None and len(result.items) == 2 else Value(result.facts)
            state = joined([state, after])
        return Value(items=[state, result.items[1]]) if result.items and len(result.items) == 2 else result

    return in_loop(machine, call, "scan", run)


def _map(machine: Machine, call: Call) -> Value:
    functions = _functions(call.arg(0, "f", "fun"))
    if not functions:
        return Value(together(call.everything()))
    rest = [*call.args[1:], *([call.kwargs["xs"]] if "xs" in call.kwargs else [])]

    def run(loop: Loop) -> Value:
        result = call_function(machine, functions, [piece_of(one, loop) for one in rest], {}, call)
        return Value(result.all_facts(), element=result)

    return in_loop(machine, call, "map", run)


def _counted(machine: Machine, call: Call) -> Value:
    functions = _functions(call.arg(2, "body_fun", "body"))
    state = call.arg(3, "init_val", "init") or Value()

    def run(loop: Loop) -> Value:
        value = state
        for _ in range(2):
            index = Value(Facts(loops=frozenset({loop})))
            value = joined([value, call_function(machine, functions, [index, value], {}, call)])
        return value

    return in_loop(machine, call, "fori_loop", run)


def _open(machine: Machine, call: Call) -> Value:
    functions = _functions(call.arg(1, "body_fun", "body"))
    state = call.arg(2, "init_val", "init") or Value()

    def run(loop: Loop) -> Value:
        value = state
        for _ in range(2):
            value = joined([value, call_function(machine, functions, [_counting(value, loop)], {}, call)])
        return value

    return in_loop(machine, call, "while_loop", run)


def _counting(value: Value, loop: Loop) -> Value:
    """The state of an open loop: what in it is no data counts the pieces."""
    if value.items is not None:
        return Value(value.facts, items=[_counting(one, loop) for one in value.items])
    return value if value.facts.is_data else Value(value.facts | Facts(loops=frozenset({loop})), value.refs)


def _checkpoint(machine: Machine, call: Call) -> Value:
    functions = _functions(call.arg(0, "function", "fun", "f"))
    args = call.args[1:]
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("use_reentrant", "policy")}
    if not functions:
        return Value(together(call.everything()))
    if not any(one.all_facts().is_data for one in args):
        return Value(refs=tuple(Checkpointed(ref, call.site) for ref in functions))
    return checkpointed(machine, functions, args, kwargs, call)


def checkpointed(machine: Machine, refs: list[Any], args: list[Value], kwargs: dict[str, Value], call: Call) -> Value:
    """A call whose insides are computed again in the backward pass, so that its arrays are not kept."""

    def run(loop: Loop) -> Value:
        mark = Facts(loops=frozenset({loop}))
        marked = [_marked(one, mark) for one in args]
        return call_function(machine, refs, marked, {name: _marked(one, mark) for name, one in kwargs.items()}, call)

    return in_loop(machine, call, "checkpoint", run)


def _marked(value: Value, mark: Facts) -> Value:
    if not value.facts.is_data and value.items is None:
        return value
    made = Value(value.facts | mark, value.refs, None, value.fields, (value,), None, value.path, value.owner)
    made.items = None if value.items is None else [_marked(one, mark) for one in value.items]
    return made


def wrap(machine: Machine, call: Call, functions: list[Any]) -> Value:
    """An unknown call that takes functions: it may give one of them back, or call it with the other operands."""
    rest = [one for one in call.args if not _functions(one)]
    named = {name: one for name, one in call.kwargs.items() if not _functions(one)}
    result = Value()
    if any(one.all_facts().is_data for one in rest):
        result = call_function(machine, functions, rest, named, call)
    return Value(result.all_facts() if result.all_facts().is_data else BLANK, tuple(functions), result.items)


def _conditional(machine: Machine, call: Call) -> Value:
    """`lax.cond(p, f, g, *operands)` and `lax.switch(i, [f, g], *operands)`."""
    functions = call.functions()
    rest = [one for one in call.args[1:] if not one.all_refs()]
    return call_function(machine, functions, rest, {}, call) if functions else Value(together(call.everything()))


LOOPS: dict[str, Callable[[Machine, Call], Value]] = {
    **dict.fromkeys(ops.SCANS, _scan),
    **dict.fromkeys(ops.MAPS, _map),
    **dict.fromkeys(ops.COUNTED_LOOPS, _counted),
    **dict.fromkeys(ops.OPEN_LOOPS, _open),
    **dict.fromkeys(ops.CHECKPOINTS, _checkpoint),
    **dict.fromkeys(("cond", "switch"), _conditional),
}
