"""Plans a function for a chip that is not here, and finds the largest size that fits."""

import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from logitless._files import cache_dir, replace_file
from logitless.plan.calibration import expected_program_ms
from logitless.plan.chips import Chip, Topology, topology
from logitless.plan.compiler import OUT_OF_HBM, Compiled, CompileFailed, compiled, versions
from logitless.plan.estimate import KernelCall, estimate
from logitless.plan.hlo import parse
from logitless.plan.program import LoweringFailed, Program, export_program
from logitless.plan.report import KernelPlan, ProgramPlan
from logitless.plan.schedule import ScheduleError, read_kernel

TIMEOUT_S = 600.0
STOPPED = "stopped at size"
FIRST_SHARE = 128
"""The first size that is tried: this share of the largest."""

# What does not bear on how a program is read: these come after the cache.
_AFTER_CACHE = ("calibration.py", "calibrate.py", "public_timings.py")


def plan_function(
    fn: Callable[..., Any],
    args: Sequence[Any],
    where: str = "v6e",
    *,
    donate_argnums: int | Sequence[int] = (),
    reserve_bytes: int = 0,
    timeout_s: float = TIMEOUT_S,
    python: str | None = None,
    use_cache: bool = True,
    schedules: bool = True,
    data_shares: Callable[[str, tuple[int, ...]], float | None] | None = None,
    axis_shares: Mapping[str, float] | None = None,
) -> ProgramPlan:
    """Memory and time of a function on a chip that is not here, by the chip's real compiler. Nothing is run.

    Equal to
        memory: jax.jit(fn, donate_argnums=...).lower(*args).compile().memory_analysis(), with a TPU as the device
        time: the compiler's estimated cycles of every fusion times how often it runs, over the clock

    Args:
        fn: what `jax.jit` takes: a loss with its gradients, a whole training step.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct` in trees. For several devices each has a `NamedSharding`
            over one `jax.sharding.AbstractMesh`, whose size is the number of devices of the topology.
        where: `"v6e"` for one chip, `"v6e:2x4"`, `"v5p:2x2x1"`, ..., or a card: `"h100"`, `"a100"`, `"b200"`.
        donate_argnums: arguments whose memory the results may take.
        reserve_bytes: of HBM, for what else the device holds, such as the rest of the model.
        timeout_s: seconds that the compiler may take.
        python: interpreter of the environment that has the compiler; this one unless given.
        use_cache: keep answers in `$LOGITLESS_CACHE/plan`, and take them from there.
        schedules: read the schedules of Mosaic kernels, without which a program that has any gets no time. The compiler
            writes out those of all that it compiles: for a whole training step thousands of files.
        data_shares: `(kernel, grid)` to the share of its steps in which the regions of a kernel run whose condition
            hangs on data, None where nobody knows; of two regions under a condition and its negation, the longer one.
            Without it they count in full.
        axis_shares: for kernels of a name that contains a key, the share of the steps of each run-time axis of the grid
            that is counted, such as half of the blocks of tokens that there can be; others count in full.

    Returns:
        A `ProgramPlan`, per device. A program that does not compile is one that does not fit, with the reason.

    Raises:
        ValueError: an unknown topology; a mesh of another size.
        CompilerMissing: the compiler is not installed; says what to install. A ValueError.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from logitless.plan import plan_function
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> plan_function(lambda x: x @ x, (x,), "v6e").total_bytes  # doctest: +SKIP
        67108864

    Reference: https://docs.jax.dev/en/latest/aot.html (ahead-of-time compilation). Departures: the compiler runs in a
    process of its own. JAX itself loads an installed libtpu into this process unless JAX_PLATFORMS=cpu is set.
    """
    place = topology(where)
    found = versions(place.chip.platform, python or sys.executable)
    try:
        program = export_program(fn, args, place, donate_argnums)
    except LoweringFailed as error:
        return ProgramPlan(str(place), False, str(error), place.chip.hbm_bytes, reserve_bytes)
    shares = dict(axis_shares or {})
    entry = cache_dir() / "plan" / f"{_key(program, place, found, shares, schedules)}.json"
    plan = _read(entry) if use_cache else None
    if plan is None:
        plan, lasting = _compile(program, place, timeout_s, python or sys.executable, shares, schedules)
        if use_cache and lasting:
            entry.parent.mkdir(parents=True, exist_ok=True)
            replace_file(entry, json.dumps(dataclasses.asdict(plan)).encode())
    return _with_reserve(_with_expected(_with_shares(plan, data_shares), place.chip), reserve_bytes)


def largest(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    where: str = "v6e",
    *,
    step: int = 1024,
    most: int = 2**20,
    tell: Callable[[int, ProgramPlan], None] = lambda size, plan: None,
    **options: Any,
) -> tuple[int, ProgramPlan]:
    """The largest size whose program fits, by bisection; memory is taken to grow with the size.

    Args:
        make: a size to the function and its arguments, as `plan_function` takes them.
        where: see `plan_function`.
        step: sizes are multiples of it.
        most: no size above it is tried.
        tell: called with each size and its plan.
        **options: as `plan_function` takes them.

    Returns:
        The size and its plan; 0 and the plan of the smallest size where that does not fit. Where a size is refused for
        another reason than HBM the search ends there, and the last of the plan's notes says so.

    Raises:
        ValueError: as `plan_function`; a step that is not above 0, or above `most`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from logitless.plan import largest
        >>> def make(n):
        ...     return (lambda x: x @ x.T), (jax.ShapeDtypeStruct((n, 1024), jnp.float32),)
        >>> largest(make, "v6e")[0]  # doctest: +SKIP
        90112

    Reference: the secant method, with a halving after a guess that gained little.
    """
    if not 0 < step <= most:
        raise ValueError(f"plan: step={step}, most={most}; they must be 0 < step <= most")

    limit = most // step
    plans: dict[int, ProgramPlan] = {}
    # `low` fits and `high` does not, as far as is known: nothing always fits, and above `most` nothing is tried.
    low, high, guess_next = 0, limit + 1, True
    units = max(1, limit // FIRST_SHARE)
    while high - low > 1:
        width = high - low
        fn, args = make(units * step)
        plans[units] = plan_function(fn, args, where, **options)
        tell(units * step, plans[units])
        if (refused := plans[units]).reason is not None and OUT_OF_HBM not in refused.reason:
            note = f"{STOPPED} {units * step:,}: {refused.reason}"
            return low * step, dataclasses.replace(plans[low or units], notes=(*plans[low or units].notes, note))
        low, high = (units, high) if plans[units].fits else (low, units)
        # A guess that leaves more than half is followed by a halving.
        guess_next = not guess_next or 2 * (high - low) <= width
        units = _guess(plans, low, high) if guess_next or len(plans) < 3 else (low + high) // 2
    return low * step, plans[max(low, 1)]


def _guess(plans: dict[int, ProgramPlan], low: int, high: int) -> int:
    """The size between `low` and `high` at which a line through the bytes of two plans around it meets the limit."""
    sizes = sorted(n for n, plan in plans.items() if plan.total_bytes is not None)
    around = [n for n in sizes if n <= low][-2:] + [n for n in sizes if n >= high][:1]
    guess = 2 * low if low else high // 2
    if len(around) > 1:
        one, other = around[-2:]
        below, above = plans[one].total_bytes or 0, plans[other].total_bytes or 0
        if above > below:
            room = plans[one].hbm_bytes - plans[one].reserve_bytes - below
            guess = one + int((other - one) * room / (above - below))
    return min(max(guess, low + 1), high - 1)


def _compile(
    program: Program, place: Topology, timeout_s: float, python: str, shares: Mapping[str, float], schedules: bool
) -> tuple[ProgramPlan, bool]:
    """The plan, and whether the same answer would come again."""
    empty = ProgramPlan(str(place), fits=False, reason=None, hbm_bytes=place.chip.hbm_bytes)
    try:
        with compiled(program, place, timeout_s=timeout_s, python=python, schedules=schedules) as result:
            return _plan_of(result, program, place, shares), True
    except CompileFailed as error:
        return dataclasses.replace(empty, reason=str(error), total_bytes=error.needed_bytes), error.lasting


def _plan_of(result: Compiled, program: Program, place: Topology, shares: Mapping[str, float]) -> ProgramPlan:
    sizes, chip = result.sizes, place.chip
    plan = ProgramPlan(
        str(place),
        fits=True,
        reason=None,
        hbm_bytes=chip.hbm_bytes,
        temp_bytes=sizes["temp"],
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        alias_bytes=sizes["alias"],
        total_bytes=sizes["temp"] + sizes["argument"] + sizes["output"] - sizes["alias"],
        compile_s=round(result.seconds, 1),
    )
    if chip.clock_hz is None:
        return plan
    sums = estimate(parse(result.hlo))
    bounds = "; ".join(dict.fromkeys(sums.bounded))
    notes = (*((f"loops over what may be skipped count in full ({bounds})",) if bounds else ()), *sums.unknown)
    if sums.kernels and result.schedules is None:
        notes = (*notes, "no time: the schedules of its kernels were not asked for")
        return dataclasses.replace(plan, collective_bytes=sums.collective_bytes, notes=notes)
    try:
        kernels = tuple(_kernel(name, call, result, chip, shares) for name, call in sums.kernels.items())
    except ScheduleError as error:
        # The bytes are exact all the same.
        return dataclasses.replace(plan, notes=(*notes, f"no time: a schedule that cannot be read ({error})"))
    notes += tuple(f"kernel {kernel.name}: {words}" for kernel in kernels for words in kernel.unknown)
    return dataclasses.replace(
        plan,
        xla_ms=sums.cycles / chip.clock_hz * 1e3,
        copies_ms=sums.copy_cycles / chip.clock_hz * 1e3,
        copies_dma_ms=sums.copy_bytes / chip.hbm_bytes_per_s * 1e3,
        kernels=kernels,
        flops=sums.flops,
        collective_bytes=sums.collective_bytes,
        notes=notes,
    )


def _kernel(name: str, call: KernelCall, result: Compiled, chip: Chip, shares: Mapping[str, float]) -> KernelPlan:
    """A kernel by its schedule, all of its runs together."""
    assert result.schedules is not None and chip.clock_hz is not None
    share = next((share for part, share in shares.items() if part in name), 1.0)
    steps = tuple(None if n is None else ceil(n * share) for n in call.steps)
    schedule = read_kernel(result.schedules, name, steps=steps, granule_bytes=chip.granule_bytes)
    unknown = [
        f"{'loop' if region.is_loop else 'region'} of {region.end - region.start} bundles under "
        f"{region.condition or 'a condition'}: of unknown frequency, counted {'once' if region.is_loop else 'in full'}"
        for region in schedule.undecided
    ]
    if schedule.unknown_axes:
        unknown.append(f"{schedule.unknown_axes} axes of its grid: of unknown length, counted once")
    moved = (schedule.hbm_read_bytes, schedule.hbm_write_bytes)
    dma_ms = None if None in moved else sum(n or 0 for n in moved) / chip.hbm_bytes_per_s * 1e3 * call.runs
    most_ms = schedule.cycles / chip.clock_hz * 1e3 * call.runs
    return KernelPlan(
        name=name,
        grid=schedule.grid,
        runs=call.runs,
        schedule_ms=most_ms,
        least_ms=schedule.least_cycles / chip.clock_hz * 1e3 * call.runs,
        most_ms=most_ms,
        dma_ms=dma_ms,
        mxu_use=schedule.mxu,
        least_mxu_use=schedule.least_mxu,
        spills=schedule.spill_stores + schedule.spill_loads,
        vmem_bytes=schedule.vmem_bytes,
        unknown=tuple(unknown),
    )


def _with_shares(plan: ProgramPlan, data_shares: Callable[[str, tuple[int, ...]], float | None] | None) -> ProgramPlan:
    """The plan with its kernels' times by how often what hangs on data runs, which is no part of the cache either."""

    def shared(kernel: KernelPlan) -> KernelPlan:
        share = None if data_shares is None else data_shares(kernel.name, kernel.grid)
        if share is None or kernel.most_ms == kernel.least_ms:
            return kernel
        schedule_ms = kernel.least_ms + share * (kernel.most_ms - kernel.least_ms)
        # A region may have products of its own, as the one that collects targets.
        least_busy, most_busy = kernel.least_ms * kernel.least_mxu_use, kernel.most_ms * kernel.mxu_use
        busy = least_busy + share * (most_busy - least_busy)
        return dataclasses.replace(kernel, schedule_ms=schedule_ms, mxu_use=busy / schedule_ms)

    return dataclasses.replace(plan, kernels=tuple(map(shared, plan.kernels)))


def _with_expected(plan: ProgramPlan, chip: Chip) -> ProgramPlan:
    """The plan with what the calibration, which is no part of the cache, makes of its times."""
    if plan.xla_ms is None:
        return plan
    expected_ms = expected_program_ms(
        plan.xla_ms, plan.copies_ms, plan.copies_dma_ms, [(k.schedule_ms, k.dma_ms) for k in plan.kernels]
    )
    # The share of a kernel's schedule in which the matrix units work is in its own entry.
    busy_ms = (plan.flops or 0.0) / chip.flops_per_s * 1e3
    busy_ms += sum(kernel.schedule_ms * (kernel.mxu_use or 0.0) for kernel in plan.kernels)
    return dataclasses.replace(plan, expected_ms=expected_ms, mxu_use=busy_ms / expected_ms if expected_ms else None)


def _with_reserve(plan: ProgramPlan, reserve_bytes: int) -> ProgramPlan:
    """Whether the plan fits beside `reserve_bytes`, and why not."""
    total, reason = plan.total_bytes, plan.reason
    if reason is None and total is not None and total + reserve_bytes > plan.hbm_bytes:
        reason = OUT_OF_HBM if total > plan.hbm_bytes else f"{OUT_OF_HBM} beside the reserve"
    return dataclasses.replace(plan, fits=reason is None, reason=reason, reserve_bytes=reserve_bytes)


def _key(program: Program, place: Topology, found: dict[str, str], shares: dict[str, float], schedules: bool) -> str:
    parts = (
        program.identity,
        program.mesh,
        program.donated,
        dataclasses.asdict(place),
        found,
        shares,
        schedules,
        _source(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@cache
def _source() -> str:
    """Of this package, whose reading of a program may change."""
    files = [path for path in sorted(Path(__file__).parent.glob("*.py")) if path.name not in _AFTER_CACHE]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _read(entry: Path) -> ProgramPlan | None:
    """The plan that an entry of the cache holds, None where there is none; a corrupt one is dropped with a warning."""
    try:
        fields = json.loads(entry.read_text(encoding="utf-8"))
        kernels = tuple(
            KernelPlan(**kernel | {key: tuple(kernel[key]) for key in ("grid", "unknown")})
            for kernel in fields["kernels"]
        )
        return ProgramPlan(
            **fields | {"kernels": kernels, "notes": tuple(fields["notes"]), "compile_s": 0.0, "cached": True}
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        warnings.warn(f"plan: dropped a corrupt entry of the cache, {entry.name}; planning it anew", stacklevel=3)
        entry.unlink(missing_ok=True)
        return None
