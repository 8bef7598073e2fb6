"""How often a compiled loop runs: from its counter, its step and its end, wherever the compiler has moved them."""

import re
from dataclasses import dataclass

from logitless.plan.hlo import Computation, Instruction, Module

# What hands a scalar on as it is.
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "broadcast")
# What runs a computation whose parameters are its own operands, in their order.
_HANDS_ON = ("fusion", "call", "async-start")


@dataclass(frozen=True)
class Place:
    """Where a value lives: a computation, and the loop, fusion or call that runs it, in a place of its own."""

    computation: Computation
    caller: "tuple[Instruction, Place] | None" = None

    def __getitem__(self, name: str) -> Instruction:
        return self.computation.instructions[name]

    @property
    def root(self) -> Instruction:
        """The result of the computation."""
        return self[self.computation.root]


@dataclass(frozen=True)
class Value:
    """A number that a scalar is, or does not exceed."""

    number: int
    exact: bool = True


def trip_count(module: Module, loop: Instruction, place: Place) -> Value | None:
    """How often a `while` runs its body, None where nothing tells.

    A counter that starts at a number and grows by a number up to a number is counted. Where the end is known at run
    time alone, a `minimum` with a number in the program says how far it can go.

    Args:
        module: the program.
        loop: the instruction.
        place: the computation that it stands in.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if known:
        return Value(int(known.group(1)))
    inside = Place(module.callee(loop, "condition"), (loop, place))
    at, compared = inside, inside.root
    while compared.op == "fusion":
        at = Place(module.callee(compared, "calls"), (compared, at))
        compared = at.root
    direction = compared.attribute("direction") if compared.op == "compare" else None
    if direction not in ("LT", "GT"):
        return None
    counter, last = compared.operands if direction == "LT" else compared.operands[::-1]
    index = _carried(module, at, counter)
    if index is None:
        return None
    body = Place(module.callee(loop, "body"), (loop, place))
    start = value_of(module, place, place[loop.operands[0]].operands[index])
    end = value_of(module, at, last)
    step = _growth(module, body, body.root.operands[index], index) if body.root.op == "tuple" else None
    if start is None or end is None or not step or not start.exact:
        return None
    return Value(max(0, -(-(end.number - start.number) // step)), end.exact)


def value_of(module: Module, place: Place, name: str) -> Value | None:
    """The number that a scalar is or does not exceed, None where the program does not tell."""
    x = place[name]
    if x.op == "constant":
        return Value(int(x.literal)) if re.fullmatch(r"-?\d+", x.literal) else None
    if x.op in _SAME:
        return value_of(module, place, x.operands[0])
    if x.op == "fusion":
        inner = Place(module.callee(x, "calls"), (x, place))
        return value_of(module, inner, inner.root.name)
    if x.op == "parameter":
        return None if place.caller is None else _argument(module, place, x)
    if x.op == "get-tuple-element":
        return _element(module, place, x)
    return _computed(x.op, [value_of(module, place, operand) for operand in x.operands])


def _computed(op: str, values: list[Value | None]) -> Value | None:
    if op == "minimum":
        known = [x for x in values if x is not None]
        return Value(min(x.number for x in known), all(x and x.exact for x in values)) if known else None
    if op == "maximum" and None not in values:
        known = [x for x in values if x is not None]
        return Value(max(x.number for x in known), all(x.exact for x in known))
    if op == "select":
        # Which, one, other.
        ends = [x.number for x in values[1:] if x is not None]
        return Value(max(ends), exact=False) if len(ends) == 2 else None
    if op == "clamp":
        # Least, value, most.
        most = values[2]
        return None if most is None else Value(most.number, exact=False)
    numbers = [x.number for x in values if x is not None and x.exact]
    if len(numbers) != len(values):
        return None
    arithmetic = {
        "add": lambda a, b: a + b,
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "negate": lambda a: -a,
    }
    return Value(arithmetic[op](*numbers)) if op in arithmetic else None


def _argument(module: Module, place: Place, parameter: Instruction) -> Value | None:
    """A parameter of a fusion or call: what it was given."""
    assert place.caller is not None
    caller, outside = place.caller
    if caller.op not in _HANDS_ON:
        return None
    return value_of(module, outside, caller.operands[int(parameter.literal)])


def _element(module: Module, place: Place, x: Instruction) -> Value | None:
    """An element of a tuple: of one that is built here, or of a loop that hands it on unchanged."""
    index = int(x.attribute("index") or 0)
    source = place[x.operands[0]]
    if source.op == "tuple":
        return value_of(module, place, source.operands[index])
    if source.op == "while":
        loop, outside = source, place
    elif source.op == "parameter" and place.caller is not None and place.caller[0].op == "while":
        loop, outside = place.caller
    else:
        return None
    start = outside[loop.operands[0]]
    if start.op != "tuple" or not _keeps(module, loop, index):
        return None
    return value_of(module, outside, start.operands[index])


def _keeps(module: Module, loop: Instruction, index: int) -> bool:
    """Whether a loop hands an element of its carry on unchanged."""
    body = Place(module.callee(loop, "body"))
    return body.root.op == "tuple" and _carried(module, body, body.root.operands[index]) == index


def _carried(module: Module, place: Place, name: str) -> int | None:
    """Which element of the carry of the loop around it a scalar is, unchanged; None where it is none."""
    x = place[name]
    while x.op in _SAME:
        x = place[x.operands[0]]
    if x.op == "get-tuple-element":
        source, index = place[x.operands[0]], int(x.attribute("index") or 0)
        if source.op == "parameter":
            return index
        if source.op == "while" and _keeps(module, source, index):
            start = place[source.operands[0]]
            return _carried(module, place, start.operands[index]) if start.op == "tuple" else None
    if x.op == "parameter" and place.caller is not None and place.caller[0].op in _HANDS_ON:
        caller, outside = place.caller
        return _carried(module, outside, caller.operands[int(x.literal)])
    return None


def _growth(module: Module, place: Place, name: str, index: int) -> int | None:
    """By how much element `index` of a loop's carry has grown in a value, None where that is no number."""
    if _carried(module, place, name) == index:
        return 0
    x = place[name]
    if x.op in _SAME:
        return _growth(module, place, x.operands[0], index)
    if x.op == "fusion":
        inner = Place(module.callee(x, "calls"), (x, place))
        return _growth(module, inner, inner.root.name, index)
    if x.op == "add":
        for one, other in (x.operands, x.operands[::-1]):
            grown, more = _growth(module, place, one, index), value_of(module, place, other)
            if grown is not None and more is not None and more.exact:
                return grown + more.number
    return None
