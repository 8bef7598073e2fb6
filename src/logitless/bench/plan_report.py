"""The table and the sentences of `logitless plan`."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from logitless.bench.units import duration, factor, markdown, size
from logitless.plan.calibration import spread_words
from logitless.plan.report import ESTIMATE

Record = dict[str, Any]
LOSSES = {"grpo": "GRPO", "cross_entropy": "cross-entropy"}

HEADERS = ("chip", "head", "tokens", "implementation", "temp", "arguments", "results", "total of HBM", "fits")
HEADERS += ("time (estimate)", "MXU", "collectives", "compile")


def plan_table(records: Sequence[Record]) -> Table:
    """A row for each program; one that does not fit says why."""
    table = Table(title=records[0]["name"], caption=plan_caption(records))
    for name in HEADERS:
        table.add_column(name, overflow="fold")
    for record in records:
        table.add_row(*_cells(record, records), style=None if record["plan"]["fits"] else "red")
    return table


def plan_markdown(records: Sequence[Record]) -> str:
    """The table of one run in markdown, its caption below."""
    shown = [i for i, name in enumerate(HEADERS) if name != "compile"]
    rows = [HEADERS, *(_cells(record, records) for record in records)]
    caption, about = plan_caption(records), about_versions(records)
    return f"{markdown([[row[i] for i in shown] for row in rows])}\n\n{caption[0].upper()}{caption[1:]}. {about}.\n"


def about_versions(records: Sequence[Record]) -> str:
    versions = ", ".join(f"{name} {at}" for name, at in records[0]["versions"].items())
    return f"{versions}; commit {records[0]['commit'][:10]}, {records[0]['date'][:10]}"


def plan_caption(records: Sequence[Record]) -> str:
    """What was planned, and how far the figures go."""
    case = records[0]["case"]
    wanted = {tuple(record["case"]["differentiate"]) for record in records}
    both = len(case["differentiate"]) == 2
    gradients = "both gradients" if both else f"the gradient of {case['differentiate'][0]} alone"
    about = f"per device; {LOSSES[case['loss']]} loss and {gradients if len(wanted) == 1 else 'gradients'}"
    about += f", {case['dtype']}"
    return f"{about}. Memory: exact. Time: {ESTIMATE}; see docs/planning.md"


def _cells(record: Record, records: Sequence[Record]) -> tuple[str, ...]:
    case, plan = record["case"], record["plan"]
    baseline = baseline_of(record, records)
    sizes = f"D={case['hidden_size']}, V={case['vocab_size']}"
    total = "" if plan["total_bytes"] is None else f"{size(plan['total_bytes'])} of {size(plan['hbm_bytes'])}"
    if plan["expected_ms"] is None:
        # Cards have no estimate; a program that did not compile has none either.
        time = "not available without the card" if plan["temp_bytes"] is not None else ""
    else:
        time = duration(plan["expected_ms"]) + _ratio(plan, baseline, "expected_ms")
    temp = "" if plan["temp_bytes"] is None else size(plan["temp_bytes"]) + _ratio(plan, baseline, "temp_bytes")
    return (
        case["where"],
        " ".join(filter(None, (case["head"], sizes, _variant(case)))),
        f"{case['tokens']:,}",
        record["implementation"],
        temp,
        _size(plan["argument_bytes"]),
        _size(plan["output_bytes"]),
        total,
        "yes" if plan["fits"] else f"no: {plan['reason']}",
        time,
        "" if plan["mxu_use"] is None else f"{plan['mxu_use']:.0%}",
        _size(plan["collective_bytes"] or None),
        "cached" if plan["cached"] else f"{plan['compile_s']:.0f} s" if plan["compile_s"] else "",
    )


def _variant(case: Record) -> str:
    # Records from before there were variants have none.
    return case.get("variant", {}).get("name", "")


def _size(bytes_: float | int | None) -> str:
    return "" if bytes_ is None else size(bytes_)


def _ratio(plan: Record, baseline: Record | None, key: str) -> str:
    if baseline is None or not baseline["plan"][key] or baseline["case"]["solve"] is not None:
        return ""
    return f" ({factor(plan[key] / baseline['plan'][key])})"


def baseline_of(record: Record, records: Sequence[Record]) -> Record | None:
    """The record of the first implementation at the same chip, head and size."""
    same = ("where", "head", "hidden_size", "vocab_size", "layout")
    size_too = () if record["case"]["solve"] else ("tokens",)
    keys = (*same, *size_too, "variant")
    return next((r for r in records if all(r["case"].get(key) == record["case"].get(key) for key in keys)), None)


def plan_words(records: Sequence[Record]) -> Iterator[str]:
    """What a reader should take home, and what the figures rest on."""
    for record in records:
        case, plan = record["case"], record["plan"]
        baseline = baseline_of(record, records)
        where = ", ".join(
            filter(None, (f"{record['implementation']} on {case['where']}", case["head"], _variant(case)))
        )
        if case["solve"] is not None:
            yield f"{where}: {_solved(record, baseline)}"
        # Plain jnp lies as XLA likes; records from before there were shardings have no strategy.
        if record.get("strategy") and record["implementation"] != "plain_jnp":
            yield f"{where}: {_strategy(record['strategy'])}"
        yield from (f"{where}: {_kernel(kernel)}" for kernel in plan["kernels"])
        yield from (f"{where}: {note}" for note in plan["notes"])
    yield f"Times are a {ESTIMATE}; {spread_words()}. Memory is what the compiled program takes."


def _strategy(strategy: Record) -> str:
    """What travels over the axes that tokens and vocabulary share, and what else could."""
    sizes = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in strategy["bytes"].items())
    return f"takes {strategy['name']}; a chip would receive in a step, over the axes of both: {sizes}"


def _kernel(kernel: Record) -> str:
    """A Mosaic kernel by its schedule."""
    grid = f" over {' x '.join(map(str, kernel['grid']))}" if kernel["grid"] else ""
    copies = "unknown" if kernel["dma_ms"] is None else duration(kernel["dma_ms"])
    schedule = duration(kernel["schedule_ms"])
    return (
        f"kernel {kernel['name']}{grid}, {kernel['runs']:g} runs: schedule {schedule}, copies {copies}, "
        f"{kernel['mxu_use']:.1%} of the MXU's slots, {size(kernel['vmem_bytes'])} of VMEM, {kernel['spills']} spills"
    )


def _solved(record: Record, baseline: Record | None) -> str:
    case, plan = record["case"], record["plan"]
    if not case["tokens"]:
        return f"not even the smallest size fits ({plan['reason']})"
    line = f"{'at least ' if _open_ended(case) else ''}{case['tokens']:,} tokens a device fit"
    line += f" ({size(plan['total_bytes'])} of {size(plan['hbm_bytes'])}"
    line += f", {size(plan['reserve_bytes'])} kept for the rest)" if plan["reserve_bytes"] else ")"
    if baseline is None or baseline is record:
        return line
    if not baseline["case"]["tokens"]:
        return f"{line}; {baseline['implementation']} fits no tokens"
    if _open_ended(baseline["case"]):
        return f"{line}; {baseline['implementation']} fits as many as were tried too"
    more = "at least " if _open_ended(case) else ""
    ratio = factor(case["tokens"] / baseline["case"]["tokens"])
    return f"{line}: {more}{ratio} those of {baseline['implementation']}"


def _open_ended(case: Record) -> bool:
    """Whether the largest size that was tried fits."""
    return case["tokens"] >= case["most"]
