"""The table of Mosaic kernels that `logitless plan` prints: each against the chip's floor and plain JAX."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from logitless.bench.plan_report import about_versions, baseline_of
from logitless.bench.units import duration, factor, markdown, size
from logitless.plan import topology
from logitless.plan.calibration import spread_words
from logitless.plan.report import ESTIMATE

Record = dict[str, Any]

HEADERS = ("chip", "case", "temp", "schedule of the kernels", "copies", "MXU, kernel by kernel", "expected on a chip")
HEADERS += ("floor", "schedule / floor", "{baseline}")
WHAT = (
    f"Schedules, copies and times: {ESTIMATE}. Floor: the products without padding at the chip's peak, each kernel's "
    "logits made again; at the level of logits, three passes over them by bandwidth. Expected: the whole program, by "
    "the calibration"
)


def has_kernels(records: Sequence[Record]) -> bool:
    return any(record["plan"]["kernels"] for record in records)


def kernels_table(records: Sequence[Record]) -> Table:
    """A row for each program with kernels of ours."""
    header, *rows = _rows(records)
    table = Table(title="kernels", caption=f"{WHAT} ({spread_words()}).")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def kernels_markdown(records: Sequence[Record]) -> str:
    """The same in markdown, with what it rests on."""
    return f"{markdown(_rows(records))}\n\n{WHAT} ({spread_words()}). {about_versions(records)}.\n"


def _rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    shown = [record for record in records if record["plan"]["kernels"]]
    header = tuple(name.format(baseline=records[0]["implementation"]) for name in HEADERS)
    return [header, *(_row(record, records) for record in shown)]


def _row(record: Record, records: Sequence[Record]) -> tuple[str, ...]:
    case, plan = record["case"], record["plan"]
    kernels = plan["kernels"]
    schedule_ms = sum(kernel["schedule_ms"] for kernel in kernels)
    copies = [kernel["dma_ms"] for kernel in kernels]
    baseline, floor_ms = baseline_of(record, records), _floor_ms(case)
    usual = ""
    if baseline is not None and baseline is not record and baseline["plan"]["expected_ms"]:
        usual = f"{duration(baseline['plan']['expected_ms'])}, {size(baseline['plan']['temp_bytes'])}"
    return (
        case["where"],
        f"{case['hidden_size']} x {case['vocab_size']:,} {case['layout']}, {case['variant']['name']}".rstrip(", "),
        size(plan["temp_bytes"]),
        duration(schedule_ms) + _range(kernels),
        "unknown" if None in copies else duration(sum(copies)),
        " / ".join(f"{_mxu_use(kernel, case):.3f}" for kernel in kernels),
        duration(plan["expected_ms"]),
        duration(floor_ms),
        factor(schedule_ms / floor_ms),
        usual,
    )


def _range(kernels: Sequence[Record]) -> str:
    """Where data decide, the least and the most that the schedule can be."""
    least, most = (sum(kernel[key] for kernel in kernels) for key in ("least_ms", "most_ms"))
    return "" if least == most else f" ({duration(least)} to {duration(most)})"


def _floor_ms(case: Record) -> float:
    """Four products at a trained head and two at a frozen one, of the tokens that are not skipped."""
    chip, variant = topology(case["where"]).chip, case["variant"]
    tokens = case["tokens"] * (1 - variant["masked"])
    if variant["level"] == "logits":
        width = {"float32": 4}.get(case["dtype"], 2)
        return 3 * tokens * case["vocab_size"] * width / chip.hbm_bytes_per_s * 1e3
    # With the head's gradient the logits are made again, and both gradients or one taken from them.
    wanted = list(variant["differentiate"])
    products = 2.0 if wanted == ["hidden"] else 1.0 + (1 + len(wanted)) * (1 - variant["flat"])
    return products * _product_ms(case, tokens, chip.flops_per_s)


def _product_ms(case: Record, tokens: float, flops_per_s: float) -> float:
    """A product of hidden states and head, without padding, at the chip's peak."""
    return 2 * tokens * case["hidden_size"] * case["vocab_size"] / flops_per_s * 1e3


def _mxu_use(kernel: Record, case: Record) -> float:
    """Share of the matrix units' slots; of the sweep its two products, for it has others that only collect targets."""
    if "_sweep" not in kernel["name"]:
        return kernel["mxu_use"]
    chip, tokens = topology(case["where"]).chip, case["tokens"] * (1 - case["variant"]["masked"])
    return 2 * _product_ms(case, tokens, chip.flops_per_s) / kernel["schedule_ms"]
