"""Runs a kernel's scalar instructions, as far as they decide its branches and copies, over its whole grid."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .bundles import Branch, Instruction, Program, ScheduleError

MAX_BLOCKS = 30_000_000
"""Blocks of bundles after which a run is given up: about a minute."""

MASK = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Undecided:
    """Bundles whose frequency hangs on a value that only the chip knows: a region, or a loop's further turns."""

    start: int
    end: int
    condition: str
    """What makes the region run, or the loop turn again."""
    holds: bool
    """Whether the condition must hold, or fail, for that."""
    is_loop: bool


@dataclasses.dataclass
class Run:
    """What a run saw."""

    visits: list[int]
    """How often each bundle ran; undecided regions always, undecided loops once."""
    undecided: list[Undecided]
    copies: collections.Counter[tuple[int, int | None]]
    """How often each copy started, by its bundle and its size in granules (None where that is unknown)."""
    directions: dict[int, str]
    """Between which memories the copy in a bundle goes, as `hbm_to_vmem`."""


Value = int | bool | None
"""None is a value that only the chip knows."""


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**32 if value >> 31 else value


ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda a, b: a + b,
    "ssub": lambda a, b: a - b,
    "smul": lambda a, b: a * b,
    "smulhi": lambda a, b: (a & MASK) * (b & MASK) >> 32,
    "sand": lambda a, b: a & b,
    "sor": lambda a, b: a | b,
    "sxor": lambda a, b: a ^ b,
    "sshll": lambda a, b: a << (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "sshrl": lambda a, b: (a & MASK) >> (b & 31),
    "smin": min,
    "smax": max,
}
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
COMPLEMENT = {"ne": "eq", "ge": "lt", "gt": "le"}


def evaluate(operation: str, values: Sequence[Value]) -> Value:
    """The result of one scalar instruction, in 32 bits; None if it is not known."""
    base, _, kind = operation.partition(".")
    if base in ("smov", "int_to_ptr", "pmov", "sld", "sst"):
        return values[0] if len(values) == 1 else None
    if base in ("por", "pand", "pnand", "pnor", "pneg"):
        return _evaluate_predicate(base, values)
    if base == "scalar_select" and len(values) == 3:
        choice, if_true, if_false = values
        if choice is None:
            return if_true if if_true == if_false else None
        return if_true if choice else if_false
    if len(values) != 2 or any(value is None for value in values):
        return None
    left, right = (int(value) for value in values if value is not None)
    if kind.endswith("u32") and base in ("scmp", "smin", "smax"):
        left, right = left & MASK, right & MASK
    if base == "scmp":
        return COMPARE[kind.partition(".")[0]](left, right)
    if base in ARITHMETIC:
        return _signed(ARITHMETIC[base](left, right))
    return None


def _evaluate_predicate(base: str, values: Sequence[Value]) -> Value:
    if base == "pneg":
        return None if values[0] is None else not values[0]
    # One operand decides these whatever the other is: false an "and", true an "or".
    deciding = base in ("por", "pnor")
    inverted = base in ("pnand", "pnor")
    if any(value is not None and bool(value) == deciding for value in values):
        return deciding != inverted
    return None if any(value is None for value in values) else deciding == inverted


def _literal(operand: str) -> Value:
    try:
        return _signed(int(operand, 0))
    except ValueError:
        return None


def _is_copy(instruction: Instruction) -> bool:
    operation = instruction.operation
    return operation == "dma.general" or (operation.startswith("dma.") and "_to_" in operation)


def _is_slot(name: str) -> bool:
    """Whether a place in SMEM is the compiler's own, so that nothing but the stores seen here writes it."""
    return name.endswith("_spill]]")


class Definitions:
    """Where each value and spill slot is defined."""

    def __init__(self, program: Program):
        self.by_target: dict[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in program.instructions:
            self.by_target[instruction.target].append(instruction)

    def needed(self, program: Program) -> list[Instruction]:
        """The instructions that branches and copies to or from HBM depend on, with the copies."""
        copies = [instruction for instruction in program.instructions if _is_copy(instruction)]
        waiting = [branch.predicate for branch in program.branches]
        for copy in copies:
            waiting += [copy.predicate, *copy.operands[1:2]]
        reached: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in reached:
                continue
            reached.add(name)
            for found in self.by_target.get(name, ()):
                waiting += [found.predicate, found.fallback, *found.operands]
        return [found for found in program.instructions if found.target in reached or _is_copy(found)]

    def direction(self, copy: Instruction, hbm_arguments: frozenset[str]) -> str:
        """Between which memories a copy goes, as `hbm_to_vmem`; a strided one shows it by its two addresses."""
        if copy.operation != "dma.general":
            return copy.operation.removeprefix("dma.")
        source, _, target = copy.operands[:3]
        return "_to_".join(self._memory(address, hbm_arguments) for address in (source, target))

    def _memory(self, address: str, hbm_arguments: frozenset[str]) -> str:
        found = self._only(address)
        if address in hbm_arguments or (found is not None and found.operation == "scalar_lea.hbm"):
            return "hbm"
        if found is not None and found.operation in ("sld", "sst", "smov", "smov.u32"):
            # The address was copied, or spilled and loaded again.
            return self._memory(found.operands[0], hbm_arguments)
        return "vmem"

    def condition(self, predicate: str, holds: bool) -> tuple[str, bool]:
        """A predicate in words, in one of the two forms that a condition and its negation share."""
        found = self._only(predicate)
        if found is None or found.predicate:
            return predicate, holds
        if found.operation == "pneg":
            return self.condition(found.operands[0], not holds)
        if not found.operation.startswith("scmp.") or len(found.operands) != 2:
            return f"{found.operation}({', '.join(found.operands)})", holds
        relation = found.operation.split(".")[1]
        left, right = found.operands
        inner = self._only(left)
        if (
            inner is not None
            and right == "0"
            and inner.operation == "scalar_select"
            and inner.operands[1:] == ("1", "0")
        ):
            return self.condition(inner.operands[0], holds == (relation == "ne"))
        if relation in COMPLEMENT:
            relation, holds = COMPLEMENT[relation], not holds
        return f"{self._describe(left)} {relation} {self._describe(right)}", holds

    def _only(self, name: str) -> Instruction | None:
        found = self.by_target.get(name, ())
        return found[0] if len(found) == 1 else None

    def _describe(self, name: str, depth: int = 3) -> str:
        found = self._only(name)
        if found is None or depth == 0 or found.operation == "sphi":
            return name
        return f"{found.operation}({', '.join(self._describe(operand, depth - 1) for operand in found.operands)})"


class _Machine:
    """The values of the scalar unit, and what ran so far."""

    def __init__(self, program: Program, arguments: Mapping[str, int]):
        self.definitions = Definitions(program)
        self.needed = self.definitions.needed(program)
        self.values: dict[str, Value] = dict(arguments)
        self.written_at: dict[str, int] = {}
        self.clock = 0
        self.copies: collections.Counter[tuple[int, int | None]] = collections.Counter()

    def read(self, operand: str) -> Value:
        if operand.startswith("%") or _is_slot(operand):
            return self.values.get(operand)
        return _literal(operand)

    def holds(self, predicate: str, negated: bool) -> Value:
        value = self.read(predicate)
        return None if value is None else bool(value) != negated

    def execute(self, instruction: Instruction) -> None:
        self.clock += 1
        if instruction.operation == "sphi":
            # The operands of a phi share its register: it holds the one that was written last.
            source = max(instruction.operands, key=lambda name: self.written_at.get(name, -1))
            self.write(instruction.target, self.read(source))
            return
        applies = self.holds(instruction.predicate, instruction.negated) if instruction.predicate else True
        if _is_copy(instruction):
            # A copy that may or may not start is counted.
            if applies is not False:
                size = self.read(instruction.operands[1])
                self.copies[instruction.address, None if size is None else int(size)] += 1
            return
        if applies is False and not instruction.fallback:
            return
        value = evaluate(instruction.operation, [self.read(operand) for operand in instruction.operands])
        if instruction.fallback and applies is not True:
            otherwise = self.read(instruction.fallback)
            value = otherwise if applies is False or otherwise == value else None
        self.write(instruction.target, value)

    def write(self, target: str, value: Value) -> None:
        self.values[target] = value
        self.written_at[target] = self.clock

    def forget(self, start: int, end: int) -> None:
        """What bundles wrote that may not have run, or not that often, is unknown from here on."""
        for instruction in self.needed:
            if start <= instruction.address < end:
                self.values[instruction.target] = None


@dataclasses.dataclass(frozen=True)
class _Block:
    """Bundles that run one after the other, and the branch (if any) that decides where to go on."""

    start: int
    end: int
    instructions: tuple[Instruction, ...]
    branch: Branch | None


def _blocks(program: Program, needed: list[Instruction]) -> dict[int, _Block]:
    branches = {branch.following: branch for branch in program.branches}
    leaders = {0, program.bundles} | {branch.destination for branch in program.branches} | set(branches)
    starts = sorted(leader for leader in leaders if leader <= program.bundles)
    blocks = {}
    for start, end in zip(starts, starts[1:], strict=False):
        branch = branches.get(end)
        if branch is not None and branch.address < start:
            raise ScheduleError(f"bundle {start:#x} is jumped to, and in the delay slots of a branch")
        inside = [instruction for instruction in needed if start <= instruction.address < end]
        # Within a bundle a phi comes first: the others read the value that it took on.
        inside.sort(key=lambda instruction: (instruction.address, instruction.operation != "sphi"))
        blocks[start] = _Block(start, end, tuple(inside), branch)
    return blocks


def run(program: Program, arguments: Mapping[str, int]) -> Run:
    """Runs a kernel from its first bundle to its last.

    Args:
        program: its bundles.
        arguments: the values of those scalar operands that are known: the dynamic axes of its grid.

    Raises:
        ScheduleError: if it takes too long, or branches in a way that is not understood.
    """
    machine = _Machine(program, arguments)
    blocks = _blocks(program, machine.needed)
    counts: collections.Counter[int] = collections.Counter()
    undecided: dict[tuple[int, int], Undecided] = {}
    pending: list[tuple[int, int]] = []
    address, steps = 0, 0
    while address < program.bundles:
        for start, end in [region for region in pending if region[1] <= address]:
            machine.forget(start, end)
            pending.remove((start, end))
        block = blocks[address]
        counts[address] += 1
        steps += 1
        if steps > MAX_BLOCKS:
            raise ScheduleError(f"gave the run up after {MAX_BLOCKS} blocks of bundles: is the grid right?")
        for instruction in block.instructions:
            machine.execute(instruction)
        address = block.end
        if block.branch is not None:
            address = _follow(block.branch, machine, pending, undecided)
    visits = [0] * program.bundles
    for start, count in counts.items():
        visits[start : blocks[start].end] = [count] * (blocks[start].end - start)
    directions = {
        copy.address: machine.definitions.direction(copy, program.hbm_arguments)
        for copy in machine.needed
        if _is_copy(copy)
    }
    return Run(visits, list(undecided.values()), machine.copies, directions)


def _follow(
    branch: Branch,
    machine: _Machine,
    pending: list[tuple[int, int]],
    undecided: dict[tuple[int, int], Undecided],
) -> int:
    """Where a run goes on after a branch; an undecided one runs the region that it may skip, and leaves a loop."""
    following, destination = branch.following, branch.destination
    taken = machine.holds(branch.predicate, branch.negated)
    if taken is not None:
        return destination if taken else following
    is_loop = destination <= branch.address
    region = (destination, following) if is_loop else (following, destination)
    # A region runs where its branch is not taken, a loop turns again where it is.
    condition, holds = machine.definitions.condition(branch.predicate, branch.negated != is_loop)
    undecided[region] = Undecided(*region, condition, holds, is_loop)
    if is_loop:
        machine.forget(*region)
    else:
        pending.append(region)
    return following
