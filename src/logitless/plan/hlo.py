"""Reads the text of a compiled program: computations and their instructions.

Only what XLA prints is read; nothing is run. `loops.py` says how often each loop runs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

ITEM_BYTES = {"pred": 1.0, "bf16": 2.0}
_HEADER = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"\b(?P<dtype>pred|bf16|[sufc]\d+\w*)\[(?P<dims>[\d,]*)\]")
_CALLEES = re.compile(r"\b(?:calls|to_apply|condition|body|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without its `%`.
        op: `fusion`, `while`, `convolution`, ...
        shapes: dtype and dimensions of each array of the result, layouts left out.
        operands: names.
        literal: what stands between the parentheses of a constant or parameter.
        rest: the attributes, as printed.
    """

    name: str
    op: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    literal: str
    rest: str

    def attribute(self, name: str) -> str | None:
        """The word after `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\->]+)", self.rest)
        return found.group(1) if found else None

    @property
    def bytes(self) -> float:
        """Of the result."""
        return sum((item_bytes(dtype) * prod(dims) for dtype, dims in self.shapes), 0.0)

    @property
    def cycles(self) -> int | None:
        """The compiler's own estimate for one run, None where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found.group(1)) if found else None

    @property
    def source(self) -> str:
        """The path of JAX functions that it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = _BRANCHES.search(self.rest)
        if listed:
            return tuple(re.findall(r"%([\w.\-]+)", listed.group(1)))
        return tuple(_CALLEES.findall(self.rest))


@dataclass
class Computation:
    """Instructions by name, in their order, and which of them is the result."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: by name.
        entry: where it starts.
        devices: that run it together, None where the text does not say.
    """

    computations: Mapping[str, Computation]
    entry: str
    devices: int | None = None

    def callee(self, instruction: Instruction, attribute: str) -> Computation:
        """The computation that an attribute (`body`, `calls`, ...) of an instruction names."""
        return self.computations[instruction.attribute(attribute) or ""]


def item_bytes(dtype: str) -> float:
    """Bytes of an element; 4-bit ones take half a byte."""
    if dtype in ITEM_BYTES:
        return ITEM_BYTES[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    assert digits is not None, dtype
    return int(digits.group(1)) / 8


def parse(text: str) -> Module:
    """The computations of a program as `compiled.as_text()` prints it.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = Computation(header["name"])
                computations[current.name] = current
                entry = current.name if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            found = _LINE.match(line)
            if found:
                instruction = _instruction(found["name"], found["rest"])
                current.instructions[instruction.name] = instruction
                current.root = instruction.name if found["root"] else current.root
    if not entry:
        raise ValueError("no HLO program: the text has no ENTRY computation")
    found = re.search(r"\bnum_partitions=(\d+)", text.partition("\n")[0])
    return Module(computations, entry, int(found[1]) if found else None)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, call = text[:end], text[end:].lstrip()
    start = call.index("(")
    stop = _closing(call, start)
    inside = call[start + 1 : stop]
    shapes = tuple(
        (found["dtype"], tuple(int(d) for d in found["dims"].split(",") if d)) for found in _ARRAY.finditer(shape)
    )
    return Instruction(
        name, call[:start], shapes, tuple(re.findall(r"%([\w.\-]+)", inside)), inside, call[stop + 1 :].lstrip(", ")
    )


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"unbalanced parentheses: {text[:80]}")
