"""Shows the records of a bench: a table on the terminal, sentences, and the tables and plots of the README.

`logitless bench report README.md results`, or `python -m logitless.bench.report` with the same words, rewrites each
table between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` (`plan:NAME` for a plan, `kernels:NAME` for its kernels,
`compile:NAME` for what compiles, `ab:NAME` for an A/B of training, `step:NAME` for its planned updates) from
`results/NAME.jsonl`, and draws each image that the page shows as `NAME_time.png`, `NAME_memory.png` or, of an A/B,
`NAME_curves.png`.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from logitless._files import replace_file
from logitless.bench.compile_matrix import compile_markdown
from logitless.bench.errors import BenchError
from logitless.bench.plan_kernels import kernels_markdown
from logitless.bench.plan_report import LOSSES, plan_markdown
from logitless.bench.records import latest_run, read_records
from logitless.bench.units import duration, factor, markdown, size
from logitless.train.ab_report import ab_markdown, step_markdown

Record = dict[str, Any]

MARKED = re.compile(
    r"(<!-- (?P<kind>bench|plan|kernels|compile|ab|step):(?P<name>[\w.-]+) -->\n).*?(<!-- /(?P=kind):(?P=name) -->)",
    re.DOTALL,
)
USAGE = "usage: logitless bench report [README.md [results]]"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({factor(ratio)})"


def kind(record: Record) -> tuple[str, str | None, float, float]:
    """What makes two records of one size comparable: loss, head, masked share, share of advantages of 0."""
    case = record["case"]
    return (
        # A record from before there were several losses.
        case.get("loss", "grpo"),
        case.get("head"),
        case["masked_fraction"],
        case.get("zero_advantage_fraction", 0.0),
    )


def kind_in_words(record: Record) -> str:
    loss, head, masked, idle = kind(record)
    words = [LOSSES[loss], *([head] if head else [])]
    words += [f"{masked:.0%} masked"] if masked else []
    return ", ".join(words + ([f"{idle:.0%} with advantage 0"] if idle else []))


def memory_on_top(numbers: dict[str, Any]) -> int:
    """What one run takes beside its inputs in RAM; the most in use, inputs included, on an accelerator."""
    device = numbers.get("device_peak_bytes")
    return numbers["peak_bytes"] - numbers["baseline_bytes"] if device is None else device


def _spent(record: Record) -> str:
    spent = [value for key, value in record["gates"]["gradcheck"].items() if key.endswith("/spent")]
    rounded = " (logits rounded)" if record["gates"].get("rounds_logits") else ""
    return f"{max(map(float, spent)):.0%}{rounded}"


def _holds_logits(record: Record) -> str:
    if record["gates"] is None:
        return ""
    return {None: "not audited", True: "yes", False: "no"}[record["gates"]["holds_logits"]]


def _peak(numbers: dict[str, Any]) -> str:
    if numbers.get("device_peak_bytes") is not None:
        return f"{size(numbers['device_peak_bytes'])} on the device"
    return f"{size(numbers['peak_bytes'])} (+{size(memory_on_top(numbers))})"


def _row(record: Record) -> dict[str, str]:
    """Every column that a table can have."""
    case, numbers, status = record["case"], record["numbers"], record["status"]
    row = {
        "tokens": str(case["tokens"]),
        "head": case.get("head") or "",
        "loss": LOSSES[kind(record)[0]],
        "masked": f"{case.get('masked', case['masked_fraction']):.0%}",
        "no gradient": f"{case['no_gradient']:.0%}" if "no_gradient" in case else "",
        "arm": record["arm"]["name"],
    }
    if numbers is None:
        row |= dict.fromkeys(("quartiles", "temp memory", "peak resident", "budget spent"), "")
        return row | {"time": f"{status}: {record['reason']}", "holds logits": _holds_logits(record)}
    low, high = numbers["time_ms_quartiles"]
    temp = numbers["temp_bytes"]
    return row | {
        "time": duration(numbers["time_ms"]) + _times(numbers["time_ratio"]),
        "quartiles": f"{duration(low)} to {duration(high)}",
        "temp memory": "" if temp is None else size(temp) + _times(numbers["temp_ratio"]),
        "peak resident": _peak(numbers),
        "budget spent": _spent(record),
        "holds logits": _holds_logits(record),
    }


HEADERS = (
    "tokens",
    "head",
    "loss",
    "masked",
    "no gradient",
    "arm",
    "time",
    "quartiles",
    "temp memory",
    "peak resident",
    "budget spent",
    "holds logits",
)
SOMETIMES = ("head", "no gradient")
"""Columns that are left out of a table where they would be empty."""


def _table(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The header and the rows."""
    rows = [_row(record) for record in records]
    columns = [name for name in HEADERS if name not in SOMETIMES or any(row[name] for row in rows)]
    return [tuple(columns), *(tuple(row[name] for name in columns) for row in rows)]


def caption(records: Sequence[Record]) -> str:
    """Where and when the numbers were taken."""
    # An arm whose check died tells neither device nor sizes.
    first = next((record for record in records if "device" in record), records[0])
    case = next((record["case"] for record in records if "vocab_size" in record["case"]), None)
    parts = []
    if case is not None:
        one_head = len({record["case"].get("head") for record in records}) == 1
        sizes = f"D={case['hidden_size']}, V={case['vocab_size']}, " if one_head else ""
        losses = " or ".join(dict.fromkeys(LOSSES[kind(record)[0]] for record in records))
        both = len(case.get("differentiate", ("hidden", "lm_head"))) == 2
        gradients = "both gradients" if both else f"the gradient of {case['differentiate'][0]} alone"
        parts.append(f"{sizes}{case['dtype']}, layout {case['layout']}, {losses} loss and {gradients}")
    if "device" in first:
        device = first["device"]
        where = device["kind"] if device["kind"] == device["platform"] else f"{device['platform']} {device['kind']}"
        peers = {name: at for record in records for name, at in record.get("peer", {}).items()}
        versions = "".join(f", {name} {at}" for name, at in sorted(peers.items()))
        parts.append(f"{where}, {device['cores']} cores, jax {first['jax']}{versions}, Python {first['python']}")
    commit = "commit unknown" if first["commit"] == "unknown" else f"commit {first['commit'][:10]}"
    parts.append(f"{commit}{' with changes' if first['dirty'] else ''}, {first['date'][:10]}")
    return "; ".join(parts)


def terminal_table(records: Sequence[Record]) -> Table:
    """The table of one run; a refused arm's row tells why in place of its time."""
    table = Table(title=records[0]["name"], caption=caption(records))
    header, *rows = _table(records)
    for name in header:
        table.add_column(name, overflow="fold")
    for record, row in zip(records, rows, strict=True):
        table.add_row(*row, style=None if record["status"] == "ok" else "red")
    return table


def plain_words(records: Sequence[Record]) -> Iterator[str]:
    """One sentence for each arm at the largest size: what a reader should take home."""
    largest = max(record["case"]["tokens"] for record in records)
    final = [record for record in records if record["case"]["tokens"] == largest]
    for record in final:
        baseline = next((r for r in final if r["arm"]["baseline"] and kind(r) == kind(record)), None)
        if record is baseline and record["status"] == "ok":
            continue
        words = kind_in_words(record).removeprefix("GRPO").removeprefix(", ")
        start = f"{record['arm']['name']}, {largest} tokens{words and ', '}{words}"
        if record["numbers"] is None:
            yield f"{start}: no number ({record['status']}: {record['reason']})"
        elif baseline is None or baseline["numbers"] is None:
            name = "the first arm" if baseline is None else baseline["arm"]["name"]
            yield f"{start}: gradients within budget; no ratio, for {name} has no number"
        else:
            yield f"{start}: {_compared(record, baseline)}"


def _compared(record: Record, baseline: Record) -> str:
    mine, theirs = record["numbers"], baseline["numbers"]
    if mine["temp_ratio"] is None:
        over = memory_on_top(mine) / max(memory_on_top(theirs), 1)
        memory = f"{factor(over)} the memory on top of the inputs"
    else:
        memory = f"{factor(mine['temp_ratio'])} the memory"
    losses = f"{mine['loss']:.4f}", f"{theirs['loss']:.4f}"
    # Logits of 16 bits move the loss, inside the wider budget that they have.
    line = f"{'same loss' if losses[0] == losses[1] else 'loss within budget'} ({losses[0]} vs {losses[1]}), "
    line += f"gradients within budget, {memory}, "
    line += f"{factor(mine['time_ratio'])} the time of {baseline['arm']['name']}"
    # Shares of 0 are the first of any list that has them.
    if any(kind(record)[2:]) and mine["time_ratio_to_first_fraction"] is not None:
        line += f"; {factor(mine['time_ratio_to_first_fraction'])} its own time at the first fraction"
    return line


def markdown_table(records: Sequence[Record]) -> str:
    """The table of one run in markdown, its caption below."""
    table = markdown(_table(records))
    return f"{table}\n\n{caption(records)[0].upper()}{caption(records)[1:]}.\n"


MARKDOWN = {
    "bench": markdown_table,
    "plan": plan_markdown,
    "kernels": kernels_markdown,
    "compile": compile_markdown,
    "ab": ab_markdown,
    "step": step_markdown,
}
"""A table of a run's records, by the kind that its marker names."""


def with_tables(text: str, results: Path) -> str:
    """The text with each marked table made anew from the last run in its record.

    Raises:
        BenchError: a marker has no end or its record is missing.
    """
    opened = re.findall(r"<!-- ((?:bench|plan|kernels|compile|ab|step):[\w.-]+) -->", text)
    closed = [f"{match['kind']}:{match['name']}" for match in MARKED.finditer(text)]
    if opened != closed:
        missing = next(name for name in opened if opened.count(name) != closed.count(name))
        raise BenchError(f"<!-- {missing} --> has no <!-- /{missing} --> after it")

    def table(match: re.Match[str]) -> str:
        records = read_records(results / f"{match['name']}.jsonl")
        # What compiles is one record, whenever its cells were compiled.
        shown = records if match["kind"] == "compile" else latest_run(records)
        return match[1] + MARKDOWN[match["kind"]](shown) + match[4]

    return MARKED.sub(table, text)


def main(argv: Sequence[str]) -> int:
    """Rewrites the tables and the plots of the page `argv[0]` from the records in the folder `argv[1]`."""
    from logitless.bench.plots import draw_images

    if len(argv) > 2 or any(word.startswith("-") for word in argv):
        print(USAGE, file=sys.stderr)
        return 2
    page, results = Path([*argv, "README.md"][0]), Path([*argv[1:], "results"][0])
    try:
        text = page.read_text(encoding="utf-8")
        drawn = draw_images(text, page.parent, results)
        replace_file(page, with_tables(text, results).encode())
    except OSError as error:
        print(f"cannot read {page}: {error.strerror}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"no plots: {error.name} is not installed; pip install 'logitless[bench]'", file=sys.stderr)
        return 2
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"made anew: the tables of {page}{''.join(f', {path}' for path in drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
