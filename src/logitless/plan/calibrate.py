"""Fits what a chip is expected to take to public timings: a factor for kernels, one for copies, the spread left over.

The estimate of a program is

    (xla_ms - copies_ms) + copy_factor * copies_dma_ms + sum over kernels of schedule_ms * factor(dma_ms / schedule_ms)

`factor` is straight between fixed knots, flat below the first, and never falls. All values together make the sum of
squares of (estimate / measured - 1) the smallest. What else XLA compiles keeps XLA's own estimate: its spread is stated
as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from logitless.plan.calibration import Calibration, Points, Spread, expected_kernel_ms, expected_program_ms
from logitless.plan.planner import plan_function
from logitless.plan.public_timings import CHIP, Timing, program
from logitless.plan.report import ProgramPlan

KNOTS = (0.5, 0.7, 0.85, 1.0)
"""Copies over schedule. Below the first, copies hide; above the last, they are what takes the time."""
FEWEST_HELD_OUT = 4


@dataclass(frozen=True)
class Sample:
    """A program with what the compiler says of it and what it took; times in ms.

    Attributes:
        xla_ms: XLA's own estimate.
        copies_ms: of it, what only copies arrays.
        copies_dma_ms: bytes that those copies move, over the bandwidth.
        kernels: schedule and copies of each Mosaic kernel.
        measured_ms: on a chip.
        held_out: not to be fitted to.
    """

    xla_ms: float
    copies_ms: float
    copies_dma_ms: float
    kernels: tuple[tuple[float, float | None], ...]
    measured_ms: float
    held_out: bool = False

    def expected_ms(self, points: Points, copy_factor: float) -> float:
        """The estimate by these factors."""
        return expected_program_ms(self.xla_ms, self.copies_ms, self.copies_dma_ms, self.kernels, points, copy_factor)


def plan_timed(row: Timing, **options: Any) -> ProgramPlan:
    """Compiles the program that was timed; `options` as `plan_function` takes them."""
    fn, args = program(row)
    return plan_function(fn, args, CHIP, **options)


def sample_of(row: Timing, plan: ProgramPlan) -> Sample | None:
    """The sample of a program; None where it did not compile."""
    if plan.xla_ms is None:
        return None
    kernels = tuple((kernel.schedule_ms, kernel.dma_ms) for kernel in plan.kernels)
    return Sample(plan.xla_ms, plan.copies_ms, plan.copies_dma_ms, kernels, row.measured_ms, row.held_out)


def calibrate(samples: Sequence[Sample], origin: dict[str, Any]) -> Calibration:
    """The factors, fitted without the samples that are held out, and all spreads.

    Raises:
        ValueError: fewer samples than it takes.
    """
    fitted = [x for x in samples if x.kernels and not x.held_out]
    held_out = [x for x in samples if x.kernels and x.held_out]
    xla = [x for x in samples if not x.kernels]
    if len(held_out) < FEWEST_HELD_OUT or not xla:
        raise ValueError(
            f"plan calibrate: {len(held_out)} programs held out, {len(xla)} without a kernel; at least "
            f"{FEWEST_HELD_OUT} and 1 are needed to state a spread"
        )
    points, copy_factor = fit(fitted)
    return Calibration(
        chip=CHIP,
        points=points,
        copy_factor=copy_factor,
        fitted=spread(fitted, points, copy_factor),
        held_out=spread(held_out, points, copy_factor),
        xla=spread(xla, points, copy_factor),
        origin=origin,
    )


def fit(samples: Sequence[Sample], knots: Sequence[float] = KNOTS) -> tuple[Points, float]:
    """The factor of kernels at the knots, and that of copies; see the top of this file.

    Raises:
        ValueError: fewer samples than unknowns.
    """
    if len(samples) <= len(knots):
        raise ValueError(
            f"plan calibrate: {len(samples)} programs for a factor of {len(knots)} knots and that of copies; too few"
        )
    measured = np.array([x.measured_ms for x in samples])
    # Unknown are the factor of copies, that at the first knot, and the rises from knot to knot, none of them below 0.
    columns = np.array([_columns(x, knots) for x in samples]) / measured[:, None]
    wanted = 1.0 - np.array([x.xla_ms - x.copies_ms for x in samples]) / measured
    best, least = np.zeros(len(knots) + 1), np.inf
    # The best rises that are not below 0 are the best without that condition among those that are not 0: few enough to
    # try all.
    for count in range(len(knots)):
        for rising in combinations(range(2, len(knots) + 1), count):
            free = [0, 1, *rising]
            values = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
            error = float(np.sum((columns[:, free] @ values - wanted) ** 2))
            if np.all(values >= 0) and error < least:
                best, least = np.zeros(len(knots) + 1), error
                best[free] = values
    factors = np.cumsum(best[1:])
    points = tuple((knot, round(float(factor), 4)) for knot, factor in zip(knots, factors, strict=True))
    return points, round(float(best[0]), 4)


def _columns(x: Sample, knots: Sequence[float]) -> list[float]:
    """Derivatives of the estimate to each unknown, in ms."""
    steps = [tuple((knot, float(i >= place)) for i, knot in enumerate(knots)) for place in range(len(knots))]
    return [x.copies_dma_ms, *(sum((expected_kernel_ms(s, dma, step) for s, dma in x.kernels), 0.0) for step in steps)]


def spread(samples: Sequence[Sample], points: Points, copy_factor: float) -> Spread:
    """How the measured times lie about the estimates."""
    ratios = np.array([x.measured_ms / x.expected_ms(points, copy_factor) for x in samples])
    rms = float(np.sqrt(np.mean(np.log(ratios) ** 2)))
    return Spread(len(samples), round(float(ratios.min()), 4), round(float(ratios.max()), 4), round(rms, 4))
