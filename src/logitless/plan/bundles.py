"""Reads what libtpu dumps of one kernel: bundles, the scalar instructions and branches in them, used slots, VMEM."""

import dataclasses
import gzip
import re
from pathlib import Path

BUNDLES = "packed-bundles-post-ra.txt"
SLOTS = "pre-delay_hlo-static-per-bundle-utilization.txt"
ALLOCATIONS = "post-delay-converter.txt"

MOST_DELAY_SLOTS = 8
"""More bundles than run after a branch whether or not it is taken: 1 on v4, 4 on v5 and v6e, 6 on 7x."""

DYNAMIC_BOUND = 2**31 - 1
"""What the dump prints as the bound of a grid axis that is known only at run time."""

BUNDLE_HEAD = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?[A-Z ]*: ", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
QUALIFIER = re.compile(r"\[(?:resolvable|thread):[^\]]*\]")
PREDICATE = re.compile(r"\((!?)(%p\w+)(?:, ([^)]+))?\),?")
ALLOCATION = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+)")
ITERATION_BOUNDS = re.compile(r"iteration_bounds: \(([\d, ]+)\)")
SCALAR_ARGUMENT = re.compile(r"(%s\w+) = inlined_call_operand\.<no memory space> \[shape: s32\[\]")
HBM_ARGUMENT = re.compile(r"(%s\w+) = inlined_call_operand\.hbm")


class ScheduleError(ValueError):
    """A dump that is missing, or that says something this reader does not understand."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One scalar instruction or copy; `target` is what it defines: a value, or the spill slot it stores to."""

    address: int
    target: str
    operation: str
    operands: tuple[str, ...]
    predicate: str = ""
    negated: bool = False
    fallback: str = ""
    """What the target becomes where the predicate does not hold; empty if it then keeps its value."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """A jump to a bundle, taken where the predicate holds (or does not, if negated)."""

    address: int
    destination: int
    following: int
    """The first bundle that it decides about, behind its delay slots."""
    predicate: str
    negated: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """The bundles of a kernel as far as they steer it."""

    bundles: int
    instructions: tuple[Instruction, ...]
    branches: tuple[Branch, ...]
    iteration_bounds: frozenset[tuple[int, ...]]
    scalar_arguments: tuple[str, ...]
    hbm_arguments: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Slots:
    """For each bundle and kind of slot, how many are used; and how many a bundle has."""

    capacity: dict[str, int]
    used: dict[str, list[int]]


def read_text(path: Path) -> str:
    """The text of a dump, which may be compressed."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    return path.read_text(encoding="utf-8", errors="replace")


def find_file(dump: Path, instruction: str, kind: str) -> Path:
    """The dump of one kind of one instruction of the program, as `kernel.1`.

    Raises:
        ScheduleError: if there is none, or if more than one program in the folder has such an instruction.
    """
    pattern = re.compile(rf"(?:\d+-)?{re.escape(instruction)}-\d+-{re.escape(kind)}(?:\.gz)?")
    found = sorted(path for path in dump.iterdir() if pattern.fullmatch(path.name))
    if len(found) != 1:
        raise ScheduleError(
            f"{len(found)} files of {instruction} end in {kind} in {dump}; one is needed. Compile one program into an "
            "empty folder, with LIBTPU_INIT_ARGS='--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true'."
        )
    return found[0]


def parse_program(text: str) -> Program:
    """The scalar instructions, copies and branches of a kernel's bundles."""
    heads = list(BUNDLE_HEAD.finditer(text))
    if [int(head.group(1), 16) for head in heads] != list(range(len(heads))) or not heads:
        raise ScheduleError(f"the bundles are not numbered from 0 without a gap ({len(heads)} found)")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    instructions, jumps, region_ends = [], [], set()
    for address, (head, end) in enumerate(zip(heads, ends, strict=True)):
        bundle = text[head.end() : end]
        if "End region" in bundle:
            region_ends.add(address)
        for part in COMMENT.sub("", bundle).split(";;"):
            part = part.strip(" \n{}>")
            if "sbr." in part:
                jumps.append((address, part))
            elif part.startswith(("%s", "%p")) or "= dma." in part or "= sst " in part:
                instruction = _parse_instruction(address, part)
                if not instruction.operation.startswith("inlined_call_operand"):
                    instructions.append(instruction)
    delay_slots = _delay_slots([address for address, _ in jumps], region_ends)
    bounds = {tuple(map(int, match.group(1).split(","))) for match in ITERATION_BOUNDS.finditer(text)}
    return Program(
        bundles=len(heads),
        instructions=tuple(instructions),
        branches=tuple(_parse_branch(address, delay_slots, part) for address, part in jumps),
        iteration_bounds=frozenset(bounds),
        scalar_arguments=tuple(SCALAR_ARGUMENT.findall(text)),
        hbm_arguments=frozenset(HBM_ARGUMENT.findall(text)),
    )


def _delay_slots(branches: list[int], region_ends: set[int]) -> int:
    """How many bundles behind a branch run in any case: with the last of them, a region of the dump ends."""
    common = [n for n in range(1, MOST_DELAY_SLOTS) if all(address + n in region_ends for address in branches)]
    if not common:
        raise ScheduleError("no number of delay slots fits all branches")
    return common[-1]


def _parse_branch(address: int, delay_slots: int, text: str) -> Branch:
    destination = re.search(r"target bundleno = (\d+)", text)
    predicate = PREDICATE.search(text)
    if destination is None or predicate is None:
        raise ScheduleError(f"bundle {address:#x} has a branch that this reader does not know: {text}")
    return Branch(
        address=address,
        destination=int(destination.group(1)),
        following=address + delay_slots + 1,
        predicate=predicate.group(2),
        negated=predicate.group(1) == "!",
    )


def _parse_instruction(address: int, text: str) -> Instruction:
    target, _, rest = QUALIFIER.sub("", text).partition(" = ")
    operation, _, rest = rest.partition(" ")
    predicate = PREDICATE.search(rest)
    if predicate:
        rest = rest[: predicate.start()] + rest[predicate.end() :]
    if operation == "sst":
        # `sst [smem:[slot]] value`: the slot is what it defines.
        target, rest = rest.strip().rsplit(" ", 1)
    return Instruction(
        address=address,
        target=target.strip(),
        operation=operation.replace(".totalorder", "").replace(".partialorder", ""),
        operands=tuple(operand.strip() for operand in rest.split(",") if operand.strip()),
        predicate=predicate.group(2) if predicate else "",
        negated=predicate is not None and predicate.group(1) == "!",
        fallback=(predicate.group(3) or "").strip() if predicate else "",
    )


def parse_slots(text: str) -> Slots:
    """The table of used slots: names of the columns, their capacities, then a row for each bundle."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    header = next((k for k, line in enumerate(lines) if "," in line), None)
    if header is None:
        raise ScheduleError("the table of slots names no columns")
    names = [name.strip() for name in lines[header].split(",")]
    rows = [[int(cell) for cell in line.split()] for line in lines[header + 1 :] if line[0].isdigit()]
    if len(rows) < 2 or any(len(row) != len(names) for row in rows):
        raise ScheduleError(f"the table of slots has rows that do not fit its columns {names}")
    columns = zip(*rows[1:], strict=True)
    return Slots(dict(zip(names, rows[0], strict=True)), {n: list(c) for n, c in zip(names, columns, strict=True)})


def parse_vmem_bytes(text: str) -> int:
    """The end of the last allocation in VMEM: blocks with their buffers, scratch and spilled registers."""
    return max((int(size, 0) + int(offset, 0) for size, offset in ALLOCATION.findall(text)), default=0)
