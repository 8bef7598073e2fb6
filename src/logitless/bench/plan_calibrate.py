"""Runs `logitless plan calibrate`: public kernels with known chip timings, estimated and compared."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from logitless._files import replace_file
from logitless.bench.errors import BenchError
from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.bench.units import duration
from logitless.plan.calibrate import Sample, calibrate, plan_timed, sample_of
from logitless.plan.calibration import Calibration, Points, shipped
from logitless.plan.compiler import versions
from logitless.plan.public_timings import CHIP, TOKAMAX, Timing, public_timings
from logitless.plan.report import ESTIMATE, ProgramPlan

NAME = "plan_calibration"
TABLE_WIDTH = 160
HEADERS = ("program", "direction", "N", "D", "V", "XLA", "XLA's copies", "schedule", "copies / schedule")
HEADERS += ("estimate", "measured", "measured / estimate", "")

DESCRIPTION = f"""\
Compiles public kernels whose times on a TPU {CHIP} are known (tokamax {TOKAMAX} ships them), fits the factor between a
kernel's schedule and its time, without the programs that are held out, and shows estimate against measured. Nothing
is run. Appends a record to results/. Needs tokamax, libtpu and Python 3.12; half a minute a program on two cores.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: the words after `logitless plan calibrate`.

    Returns:
        The exit code: 0 done; 1 a program was not compiled, and the table says why.

    Raises:
        BenchError: words without meaning; files that cannot be written.
        TimingsMissing: tokamax or the Python that it needs is not there.
        CompilerMissing: libtpu is not there.
    """
    options = _read(argv)
    if options is None:
        return 0
    folder = results_folder(options.results)
    out = None if options.out is None else Path(options.out)
    if out is not None and not out.parent.is_dir():
        raise BenchError(f"plan calibrate: --out {options.out}: there is no folder {str(out.parent)!r}")
    rows = public_timings()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {**commit_of_package(), "date": date, "versions": versions("tpu") | {"tokamax": TOKAMAX}}
    plans = list(_plans(rows, cache=not options.no_cache))
    samples = [sample_of(row, plan) for row, plan in zip(rows, plans, strict=True)]
    origin = about | {"times": f"shipped by tokamax {TOKAMAX}, whose authors took them; none taken here"}
    found = calibrate([x for x in samples if x is not None], origin)
    records = [_record(row, plan, x, found) for row, plan, x in zip(rows, plans, samples, strict=True)]
    append_records(folder / f"{NAME}.jsonl", [{"name": NAME} | about | record for record in records])
    if out is not None:
        replace_file(out, (json.dumps(asdict(found), indent=2) + "\n").encode())
    console = Console() if Console().is_terminal else Console(width=TABLE_WIDTH)
    console.print(calibration_table(records))
    for line in calibration_words(found, None if out is None else str(out)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if None not in samples else 1


def _read(argv: Sequence[str]) -> argparse.Namespace | None:
    """The options; None where only help was asked for."""
    parser = argparse.ArgumentParser("logitless plan calibrate", description=DESCRIPTION, add_help=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.exit_on_error = False
    parser.add_argument("--out", metavar="FILE", help="write the fitted factor and the spreads there, as JSON")
    parser.add_argument("--results", metavar="FOLDER", default="results", help="of the record; results unless given")
    parser.add_argument("--no_cache", action="store_true", help="compile anew what the cache holds")
    if any(word in ("-h", "--help") for word in argv):
        parser.print_help()
        return None
    try:
        options, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise BenchError(f"plan calibrate: {error}") from None
    if rest:
        raise BenchError(
            f"plan calibrate: unknown: {' '.join(rest)}; it takes --out FILE, --results FOLDER, --no_cache"
        )
    return options


def _plans(rows: Sequence[Timing], *, cache: bool) -> Iterator[ProgramPlan]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(rows))
        for row in rows:
            progress.update(task, description=str(row))
            yield plan_timed(row, use_cache=cache)
            progress.advance(task)


def _record(row: Timing, plan: ProgramPlan, x: Sample | None, found: Calibration) -> dict[str, Any]:
    """A program, what the compiler says of it, what is expected and what was measured."""
    expected_ms = None if x is None else x.expected_ms(found.points, found.copy_factor)
    # What plan_function expects is by the factor that shipped before this one was fitted.
    kept = ("reason", "xla_ms", "copies_ms", "copies_dma_ms", "kernels", "compile_s", "notes", "kind")
    return {
        "timing": asdict(row),
        "plan": {key: value for key, value in plan.record().items() if key in kept},
        "points": found.points,
        "copy_factor": found.copy_factor,
        "expected_ms": expected_ms,
        "measured_ms": row.measured_ms,
        "measured_over_expected": None if expected_ms is None else row.measured_ms / expected_ms,
    }


def calibration_table(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each program; one that does not compile says why."""
    caption = f"bfloat16, TPU {CHIP}. Estimate: {ESTIMATE}. Measured: by tokamax's authors, median of their times."
    caption += " The estimate is the sum of XLA, its copies by their bytes, and the schedule times the factor"
    table = Table(title="estimate against measured", caption=caption)
    for name in HEADERS:
        table.add_column(name, overflow="fold")
    for record in records:
        table.add_row(*_cells(record))
    return table


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    timing, plan = record["timing"], record["plan"]
    sizes = (f"{timing['tokens']:,}", f"{timing['hidden_size']:,}", f"{timing['vocab_size']:,}")
    program = (timing["code"], timing["direction"], *sizes)
    if record["expected_ms"] is None:
        return (*program, "", "", "", "", plan["reason"], duration(record["measured_ms"]), "", "not compiled")
    schedule_ms = sum(kernel["schedule_ms"] for kernel in plan["kernels"])
    copies = [kernel["dma_ms"] for kernel in plan["kernels"]]
    ratio = "unknown" if None in copies else f"{sum(copies) / schedule_ms:.2f}" if copies else ""
    return (
        *program,
        _nothing_or(plan["xla_ms"] - plan["copies_ms"]),
        _nothing_or(record["copy_factor"] * plan["copies_dma_ms"]),
        duration(schedule_ms) if copies else "",
        ratio,
        duration(record["expected_ms"]),
        duration(record["measured_ms"]),
        f"{record['measured_over_expected']:.3f}",
        "no kernel" if not copies else "held out" if timing["held_out"] else "fitted",
    )


def _nothing_or(time_ms: float) -> str:
    """A time, nothing below a microsecond."""
    return duration(time_ms) if time_ms >= 1e-3 else ""


def calibration_words(found: Calibration, out: str | None) -> Iterator[str]:
    """The fitted factor, the spreads, and what they rest on."""
    yield f"copies / schedule -> factor on the schedule: {_points(found.points)}"
    yield f"copies that XLA compiles: {found.copy_factor:.3f} times their bytes over the bandwidth"
    before = shipped()
    if (before.points, before.copy_factor) == (found.points, found.copy_factor):
        yield "the factors that ship are the same"
    else:
        yield f"the factors that ship are others: {_points(before.points)}; copies {before.copy_factor:.3f}"
    for said, spread in (
        ("fitted", found.fitted),
        ("held out of the fit", found.held_out),
        ("without a kernel", found.xla),
    ):
        yield f"{said}: measured times are {spread}, root mean square of the error {spread.rms:.1%}"
    yield (
        f"Estimates are a {ESTIMATE}. The measured times are those of tokamax's authors on a TPU {CHIP}; nothing was "
        f"run here, and nothing is known of other chips."
    )
    if out is not None:
        yield f"wrote {out}"


def _points(points: Points) -> str:
    return ", ".join(f"{ratio:g} -> {factor:.3f}" for ratio, factor in points)
