"""Reads the schedule that libtpu writes of a Mosaic kernel: cycles, slots, copies, spills and VMEM, without a TPU."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from logitless.plan import bundles, scalar_unit
from logitless.plan.bundles import DYNAMIC_BOUND, Program, ScheduleError

MXU_COLUMNS = ("MATMUL", "MXU")
"""The column of the matrix units' products: libtpu 0.0.52 names it apart from loading weights, 0.0.42 does not."""


@dataclasses.dataclass(frozen=True)
class UndecidedRegion:
    """Bundles whose frequency the dump does not tell: a region under a data-dependent condition, or a loop over one."""

    start: int
    end: int
    """The first bundle, and the one after the last."""
    condition: str
    """The condition in the dump's own names under which they run (once more, if a loop)."""
    is_loop: bool
    cycles: int
    """Their part of the kernel's cycles: as if they ran each time, a loop once; 0 if a longer region excludes them."""


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """A kernel over its whole grid, as scheduled."""

    name: str
    grid: tuple[int, ...]
    unknown_axes: int
    """Dynamic axes of the grid whose length nobody knew: counted as one step."""
    cycles: int
    """Bundles, waiting ones included, each as often as it runs."""
    least_cycles: int
    """The same where undecided regions do not run, of two under a condition and its negation the shorter one does."""
    bundles: int
    """Bundles of the program, waiting ones included."""
    slot_use: dict[str, float]
    """Share of all slots that are used, over all cycles, by the dump's name of the slot."""
    mxu: float
    """Share of the matrix units' peak."""
    least_mxu: float
    """The same over `least_cycles`."""
    spill_stores: int
    spill_loads: int
    """Spilled vector registers written and read again, over all cycles."""
    vmem_bytes: int
    hbm_read_bytes: int | None
    hbm_write_bytes: int | None
    """Bytes copied from and to HBM; None where a copy's size is known only to the chip."""
    undecided: tuple[UndecidedRegion, ...]


def kernel_names(dump: Path) -> list[str]:
    """The instructions of a dumped program that have bundles of their own, kernels among them, such as `kernel.1`."""
    pattern = re.compile(rf"(?:\d+-)?(.+)-\d+-{re.escape(bundles.BUNDLES)}(?:\.gz)?")
    matches = (pattern.fullmatch(path.name) for path in dump.iterdir())
    return sorted({match.group(1) for match in matches if match})


def read_kernel(
    dump: Path,
    name: str,
    grid: tuple[int, ...] | None = None,
    *,
    steps: tuple[int | None, ...] = (),
    granule_bytes: int = 32,
) -> KernelSchedule:
    """Reads the schedule of one kernel.

    The bundles are those before waits are folded away, so that a bundle is a cycle; the kernel's own scalar code is
    run over the grid to see how often each is reached.

    Args:
        dump: folder of `--xla_jf_dump_to`, written with `--xla_jf_dump_llo_text=true`.
        name: the kernel's instruction, as `kernel.1`; without a number the only one of that name.
        grid: its grid, to be checked against the dump; a dynamic axis as the number of steps to count. None where only
            the dump knows it.
        steps: without a grid, the numbers of steps to count of its dynamic axes, None for one that is not known; more
            than it has are left out.
        granule_bytes: what the chip counts copies in: 32 bytes on v5e, v5p, v6e and 7x, 512 on v4.

    Raises:
        ScheduleError: if the dump lacks the kernel or does not fit the grid.
    """
    instruction = _instruction(dump, name)
    program = bundles.parse_program(bundles.read_text(bundles.find_file(dump, instruction, bundles.BUNDLES)))
    slots = bundles.parse_slots(bundles.read_text(bundles.find_file(dump, instruction, bundles.SLOTS)))
    allocations = bundles.read_text(bundles.find_file(dump, instruction, bundles.ALLOCATIONS))
    rows = len(next(iter(slots.used.values())))
    if rows != program.bundles:
        raise ScheduleError(f"{instruction} has {program.bundles} bundles, but {rows} rows of used slots")
    if grid is None:
        bounds = next(iter(program.iteration_bounds), ()) if len(program.iteration_bounds) == 1 else ()
        # Other scalars may follow those of the grid.
        steps = steps[: bounds.count(DYNAMIC_BOUND)]
        counted = tuple(1 if n is None else n for n in steps)
        ran = scalar_unit.run(program, dict(zip(program.scalar_arguments, counted, strict=False)))
        rest = iter(counted)
        grid = tuple(next(rest, 1) if bound == DYNAMIC_BOUND else bound for bound in bounds)
    else:
        ran = scalar_unit.run(program, _dynamic_axes(program, instruction, grid))
    least_visits = _least_visits(ran)
    undecided = _settle_exclusive(ran)
    cycles, least_cycles = sum(ran.visits), sum(least_visits)
    totals = {column: _over(used, ran.visits) for column, used in slots.used.items()}
    slot_use = {column: total / (cycles * slots.capacity[column]) for column, total in totals.items()}
    mxu = next(column for column in MXU_COLUMNS if column in slot_use)
    return KernelSchedule(
        name=instruction,
        grid=grid,
        unknown_axes=sum(n is None for n in steps),
        cycles=cycles,
        least_cycles=least_cycles,
        bundles=program.bundles,
        slot_use=slot_use,
        mxu=slot_use[mxu],
        least_mxu=_over(slots.used[mxu], least_visits) / (least_cycles * slots.capacity[mxu]),
        spill_stores=totals["VSTORE:SPILL"],
        spill_loads=totals["VLOAD:FILL"],
        vmem_bytes=bundles.parse_vmem_bytes(allocations),
        hbm_read_bytes=_copied_bytes(ran, "hbm_to", granule_bytes),
        hbm_write_bytes=_copied_bytes(ran, "to_hbm", granule_bytes),
        undecided=tuple(undecided),
    )


def _over(used: Sequence[int], visits: Sequence[int]) -> int:
    """Slots over all visits of the bundles that use them."""
    return sum(count * times for count, times in zip(used, visits, strict=True))


def _unnumbered(name: str) -> str:
    return re.sub(r"\.\d+$", "", name)


def _instruction(dump: Path, name: str) -> str:
    names = kernel_names(dump)
    found = [known for known in names if name in (known, known.rpartition(".")[0])]
    if not found:
        # Of kernels that are alike, such as that of a loop and that of its last round, one is compiled.
        found = [known for known in names if _unnumbered(known) == _unnumbered(name)]
    if len(found) != 1:
        raise ScheduleError(f"{len(found)} instructions in {dump} are named {name}; those there: {', '.join(names)}")
    return found[0]


def _dynamic_axes(program: Program, instruction: str, grid: tuple[int, ...]) -> dict[str, int]:
    """The values of the operands that hold the grid's dynamic axes, which come first among the operands."""
    fitting = [
        bounds
        for bounds in program.iteration_bounds
        if len(bounds) == len(grid) and all(b in (g, DYNAMIC_BOUND) for b, g in zip(bounds, grid, strict=True))
    ]
    if program.iteration_bounds and not fitting:
        found = ", ".join(map(str, sorted(program.iteration_bounds)))
        raise ScheduleError(f"{instruction} was compiled for the grid {found}, not {grid}")
    dynamic = [g for bounds in fitting[:1] for b, g in zip(bounds, grid, strict=True) if b == DYNAMIC_BOUND]
    return dict(zip(program.scalar_arguments, dynamic, strict=False))


def _settle_exclusive(ran: scalar_unit.Run) -> list[UndecidedRegion]:
    """Of two undecided regions under a condition and its negation, counts the longer one only."""
    regions = sorted(ran.undecided, key=lambda region: sum(ran.visits[region.start : region.end]))
    for k, shorter in enumerate(regions):
        if any(_exclude_each_other(shorter, longer) for longer in regions[k + 1 :]):
            ran.visits[shorter.start : shorter.end] = [0] * (shorter.end - shorter.start)
            for copy in [copy for copy in ran.copies if shorter.start <= copy[0] < shorter.end]:
                del ran.copies[copy]
    return [
        UndecidedRegion(
            start=region.start,
            end=region.end,
            condition=region.condition if region.holds else f"not {region.condition}",
            is_loop=region.is_loop,
            cycles=sum(ran.visits[region.start : region.end]),
        )
        for region in sorted(ran.undecided, key=lambda region: region.start)
    ]


def _least_visits(ran: scalar_unit.Run) -> list[int]:
    """Visits where no undecided region runs that need not; a loop turns once all the same."""
    visits = list(ran.visits)
    regions = sorted(ran.undecided, key=lambda region: sum(ran.visits[region.start : region.end]))
    for k, region in enumerate(regions):
        may_run_instead = [other for other in regions if _exclude_each_other(region, other)]
        is_needed = region.is_loop or any(regions.index(other) > k for other in may_run_instead)
        if not is_needed:
            visits[region.start : region.end] = [0] * (region.end - region.start)
    return visits


def _exclude_each_other(a: scalar_unit.Undecided, b: scalar_unit.Undecided) -> bool:
    apart = a.end <= b.start or b.end <= a.start
    return apart and not (a.is_loop or b.is_loop) and a.condition == b.condition and a.holds != b.holds


def _copied_bytes(ran: scalar_unit.Run, direction: str, granule_bytes: int) -> int | None:
    total = 0
    for (address, granules), count in ran.copies.items():
        if direction in ran.directions[address]:
            if granules is None:
                return None
            total += granules * count
    return total * granule_bytes
