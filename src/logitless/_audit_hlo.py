"""The arrays that a compiled program holds in memory, read from its optimised HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Instructions that make no buffer of their own: arguments, constants, names for another buffer, and control flow whose
# results are made by the instructions inside it.
NO_BUFFER = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
NO_BUFFER |= {"opt-barrier", "after-all", "partition-id", "replica-id", "async-done", "copy-done", "domain"}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_FUSED = re.compile(r"calls=%?([\w.\-]+)")


@dataclass(frozen=True)
class Buffer:
    """One array that an instruction outside every fusion leaves in memory."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    opcode: str
    operation: str
    source: str


def _dtype(name: str) -> tuple[str, float]:
    if name == "pred":
        return "bool", 1.0
    match = re.match(r"(bf|f|s|u|c)(\d+)", name)
    if match is None:
        return name, 1.0
    kind = {"f": "float", "s": "int", "u": "uint", "c": "complex", "bf": "bfloat"}[match.group(1)]
    return f"{kind}{name[len(match.group(1)) :]}", int(match.group(2)) / 8


def num_partitions(text: str) -> int:
    """How many devices the program is partitioned over; the shapes in it are one device's."""
    match = re.search(r"num_partitions=(\d+)", text.split("\n", 1)[0])
    return int(match.group(1)) if match else 1


def _source_table(text: str) -> dict[str, str]:
    """`file:line` for every stack frame id of the newer metadata format."""
    section, names, locations, frames = "", {}, {}, {}
    for line in text.splitlines():
        if line in {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}:
            section = line
        elif not (line[:1].isdigit() and section):
            if line.strip():
                section = ""
        else:
            key, rest = line.split(" ", 1)
            if section == "FileNames":
                names[key] = rest.strip('"')
            elif match := re.search(r"file_name_id=(\d+).*? line=(\d+)", rest):
                locations[key] = f"{names.get(match.group(1), 'unknown')}:{match.group(2)}"
            elif match := re.search(r"file_location_id=(\d+)", rest):
                frames[key] = locations.get(match.group(1), "unknown")
    return frames


def _source(line: str, frames: dict[str, str]) -> str:
    if match := re.search(r'source_file="([^"]+)" source_line=(\d+)', line):
        return f"{match.group(1)}:{match.group(2)}"
    if match := re.search(r"stack_frame_id=(\d+)", line):
        return frames.get(match.group(1), "unknown")
    return "unknown"


def buffers(text: str, floor: float) -> Iterator[Buffer]:
    """Every array of at least `floor` elements that is written to memory, in program order."""
    frames = _source_table(text)
    fused = {m.group(1) for line in text.splitlines() if " fusion(" in line and (m := _FUSED.search(line))}
    inside = False
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            inside = head.group(2) not in fused
            continue
        match = _INSTRUCTION.match(line)
        if not inside or match is None or match.group(2) in NO_BUFFER:
            continue
        operation = re.search(r'op_name="([^"]*)"', line)
        for name, dims in _ARRAY.findall(match.group(1)):
            shape = tuple(int(size) for size in dims.split(",") if size)
            if not shape or math.prod(shape) < floor:
                continue
            dtype, width = _dtype(name)
            op_name = operation.group(1).split(";")[0] if operation else ""
            size = int(math.prod(shape) * width)
            yield Buffer(shape, dtype, size, match.group(2), op_name, _source(line, frames))
