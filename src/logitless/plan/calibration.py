"""How long a program takes on a chip, by the compiler's figures: a factor for kernels and the spread that is left.

Both are fitted to public timings by `logitless plan calibrate` and ship in `data/plan_calibration.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "plan_calibration.json"
ANEW = "make it anew with: logitless plan calibrate --out FILE"

Points = tuple[tuple[float, float], ...]
"""(copies over schedule, factor on the schedule), rising: a straight line between two, flat below the first."""


@dataclass(frozen=True)
class Spread:
    """How measured times lie about the estimate.

    Attributes:
        rows: programs compared.
        least: the smallest measured time over estimate.
        most: the largest.
        rms: root mean square of the logarithm of measured over estimate; 0.05 is about 5 %.
    """

    rows: int
    least: float
    most: float
    rms: float

    def __str__(self) -> str:
        return f"{self.least:.2f} to {self.most:.2f} times the estimate ({self.rows} programs)"


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and what is left.

    Attributes:
        chip: on which the times were taken; the factor is unproven on any other.
        points: of the factor of kernels.
        copy_factor: on the bytes over bandwidth of what XLA only copies, in place of XLA's own estimate.
        fitted: of programs with a Mosaic kernel that the points were fitted to.
        held_out: of such programs that they were not fitted to.
        xla: of programs without a kernel, for which XLA's own estimate is taken as it is.
        origin: where the times come from, and what compiled the programs.
    """

    chip: str
    points: Points
    copy_factor: float
    fitted: Spread
    held_out: Spread
    xla: Spread
    origin: dict[str, Any]


def expected_program_ms(
    xla_ms: float,
    copies_ms: float,
    copies_dma_ms: float,
    kernels: Sequence[tuple[float, float | None]],
    points: Points | None = None,
    copy_factor: float | None = None,
) -> float:
    """What a program is expected to take on a chip.

    Args:
        xla_ms: XLA's own estimate.
        copies_ms: of it, what only copies arrays.
        copies_dma_ms: bytes that those copies move, over the bandwidth.
        kernels: schedule and copies of each kernel, in ms; see `expected_kernel_ms`.
        points: of the factor of kernels; those that ship unless given.
        copy_factor: on `copies_dma_ms`; what ships unless given.
    """
    factor = shipped().copy_factor if copy_factor is None else copy_factor
    around = xla_ms - copies_ms + factor * copies_dma_ms
    return around + sum(expected_kernel_ms(schedule, dma, points) for schedule, dma in kernels)


def expected_kernel_ms(schedule_ms: float, dma_ms: float | None, points: Points | None = None) -> float:
    """What a kernel is expected to take on a chip.

    Args:
        schedule_ms: of its bundles.
        dma_ms: of its copies from and to HBM; where None, as if they hid behind the schedule.
        points: of the factor; those that ship unless given.
    """
    points = shipped().points if points is None else points
    last_ratio, last = points[-1]
    if dma_ms is not None and dma_ms > last_ratio * schedule_ms:
        # Bound by its copies: they scale with what the last point says of them.
        return dma_ms * last / last_ratio
    return schedule_ms * _factor(dma_ms / schedule_ms if dma_ms and schedule_ms else 0.0, points)


def _factor(ratio: float, points: Points) -> float:
    """At a ratio up to the last point's."""
    if ratio <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in zip(points, points[1:], strict=False):
        if ratio <= high:
            return at_low + (at_high - at_low) * (ratio - low) / (high - low)
    return points[-1][1]


@cache
def shipped() -> Calibration:
    """The calibration of this package."""
    return read_calibration(FILE)


@cache
def spread_words() -> str:
    """How far the estimates lay from public timings, for every output that shows one."""
    found = shipped()
    return (
        f"public timings on a {found.chip} were {found.xla} where XLA compiled all, and {found.held_out} with a Mosaic "
        f"kernel not used to fit its factor; nothing is known of other chips"
    )


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file.

    Raises:
        ValueError: no such file, or it holds something else; says what to do.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"plan: cannot read the calibration {path.name}: {error.strerror}; {ANEW}") from None
    except ValueError as error:
        raise ValueError(f"plan: the calibration {path.name} is no JSON ({error}); {ANEW}") from None
    try:
        points = tuple((float(ratio), float(factor)) for ratio, factor in content["points"])
        spreads = {key: Spread(**content[key]) for key in ("fitted", "held_out", "xla")}
        found = Calibration(
            chip=content["chip"],
            points=points,
            copy_factor=float(content["copy_factor"]),
            origin=content["origin"],
            **spreads,
        )
    except (KeyError, TypeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"plan: the calibration {path.name} is not as it should be: {said}; {ANEW}") from None
    _check(path, points)
    return found


def _check(path: Path, points: Sequence[tuple[float, float]]) -> None:
    ratios, factors = [ratio for ratio, _ in points], [factor for _, factor in points]
    rising = all(low < high for low, high in zip(ratios, ratios[1:], strict=False))
    if not points or not rising or ratios[-1] <= 0 or factors != sorted(factors) or factors[0] <= 0:
        raise ValueError(
            f"plan: the calibration {path.name} has points {list(map(list, points))}; ratios must rise to above 0, "
            f"factors must be above 0 and not fall; {ANEW}"
        )
