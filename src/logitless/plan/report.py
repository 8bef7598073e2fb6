"""What is reported of a program on a chip: a record, a table, a plot."""

from dataclasses import asdict, dataclass, field
from typing import Any

from logitless.plan.calibration import spread_words

ESTIMATE = "compiler estimate, not a measurement"


@dataclass(frozen=True)
class KernelPlan:
    """One Mosaic kernel of a program, by its final schedule.

    Attributes:
        name: of the kernel.
        grid: of its steps; empty where the schedule does not name it.
        runs: how often the program calls it.
        schedule_ms: bundles weighted by how often their region runs, over the clock; all runs. Regions that hang on
            data count by the share that was given for the kernel, else in full.
        least_ms: the same where no region runs that hangs on data.
        most_ms: the same where each does.
        dma_ms: bytes that it moves from and to HBM, over the bandwidth; all runs. None where they cannot be told.
        mxu_use: share of the slots of the matrix units that are used in `schedule_ms`.
        least_mxu_use: the same in `least_ms`.
        spills: registers spilled and read again, over all steps.
        vmem_bytes: that it takes.
        unknown: regions that hang on data, and axes of unknown length.
    """

    name: str
    grid: tuple[int, ...]
    runs: float
    schedule_ms: float
    dma_ms: float | Any = None
    mxu_use: float | Any = None
    spills: int | Any = None
    vmem_bytes: int | Any = None
    unknown: tuple[str, ...] = ()
    least_ms: float = 0.0
    most_ms: float = 0.0
    least_mxu_use: float | Any = None


@dataclass(frozen=True)
class ProgramPlan:
    """A program on one device of a topology.

    Who knows that a program compiled need not tell a type checker that a figure is there: hence `Any` beside it.

    Attributes:
        topology: chip and wiring, as `v6e:2x4`.
        fits: it compiles and `total_bytes` and the reserve are within `hbm_bytes`.
        reason: why it does not fit, None where it does.
        hbm_bytes: of the device, that the compiler lets a program have.
        temp_bytes: beyond arguments and results; exact, like all bytes here.
        argument_bytes: of the arguments.
        output_bytes: of the results.
        alias_bytes: of results that stand in the place of donated arguments.
        total_bytes: arguments, results and temporaries, aliases counted once. Where the program does not compile for
            want of HBM, what the compiler asks for.
        reserve_bytes: kept for what else the device holds.
        xla_ms: XLA's own estimate of what it compiles itself, times trip counts.
        copies_ms: of `xla_ms`, what only copies arrays or pieces of them.
        copies_dma_ms: the bytes that these copies read and write, over the bandwidth.
        kernels: the Mosaic kernels.
        expected_ms: `xla_ms`, with its copies and the kernels by the calibrated factors: what a chip is expected to
            take. All times are None on a card: XLA estimates none for it.
        mxu_use: products over `expected_ms`, as a share of the bfloat16 peak.
        flops: of the products, kernels left out.
        collective_bytes: that the device receives in collectives, by rings: (n - 1) / n of what n devices gather or
            scatter, twice that of a sum which all of them get. No time is estimated for them.
        compile_s: seconds that the compiler took; 0 where it took none.
        cached: whether the answer came from the cache.
        notes: what was assumed, such as the bound of a loop.
    """

    topology: str
    fits: bool
    reason: str | Any
    hbm_bytes: int
    reserve_bytes: int = 0
    temp_bytes: int | Any = None
    argument_bytes: int | Any = None
    output_bytes: int | Any = None
    alias_bytes: int | Any = None
    total_bytes: int | Any = None
    xla_ms: float | Any = None
    copies_ms: float = 0.0
    copies_dma_ms: float = 0.0
    kernels: tuple[KernelPlan, ...] = ()
    expected_ms: float | Any = None
    mxu_use: float | Any = None
    flops: float | Any = None
    collective_bytes: float | Any = None
    compile_s: float = 0.0
    cached: bool = False
    notes: tuple[str, ...] = field(default=())

    def record(self) -> dict[str, Any]:
        """The plan as JSON takes it."""
        return asdict(self) | {"kind": ESTIMATE, "spread": spread_words()}
