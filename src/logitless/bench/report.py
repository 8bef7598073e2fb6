"""Shows the records of a bench: a table on the terminal, a sentence, a plot, and the tables of the README.

`python -m logitless.bench.report README.md results` rewrites each table between `<!-- bench:NAME -->` and
`<!-- /bench:NAME -->` from `results/NAME.jsonl`.
"""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from logitless.bench.errors import BenchError
from logitless.bench.records import latest_run, read_records, replace_file

Record = dict[str, Any]

HEADERS = (
    "tokens",
    "masked",
    "arm",
    "time",
    "quartiles",
    "temp memory",
    "peak resident",
    "budget spent",
    "holds logits",
)
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w.-]+) -->\n).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)


def size(bytes_: float | int | None) -> str:
    """A memory size to three digits, in units of 1000."""
    if bytes_ is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_ < 999.5 or unit == "GB":
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError


def duration(time_ms: float) -> str:
    """A time to three digits."""
    return f"{time_ms / 1000:.3g} s" if time_ms >= 999.5 else f"{time_ms:.3g} ms"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" ({factor(ratio)})"


def factor(ratio: float) -> str:
    """A ratio to two digits."""
    return f"{ratio:.2g}x" if ratio < 0.1 else f"{ratio:.2f}x"


def _spent(record: Record) -> str:
    spent = [value for key, value in record["gates"]["gradcheck"].items() if key.endswith("/spent")]
    return f"{max(map(float, spent)):.0%}"


def _cells(record: Record) -> tuple[str, ...]:
    case, numbers = record["case"], record["numbers"]
    masked = f"{case.get('masked', case['masked_fraction']):.0%}"
    head = (str(case["tokens"]), masked, record["arm"]["name"])
    holds = "" if record["gates"] is None else "yes" if record["gates"]["holds_logits"] else "no"
    if numbers is None:
        return (*head, f"{record['status']}: {record['reason']}", "", "", "", "", holds)
    low, high = numbers["time_ms_quartiles"]
    time = duration(numbers["time_ms"]) + _times(numbers["time_ratio"])
    memory = size(numbers["temp_bytes"]) + _times(numbers["temp_ratio"])
    spread = f"{duration(low)} to {duration(high)}"
    return (*head, time, spread, memory, size(numbers["peak_bytes"]), _spent(record), holds)


def caption(records: Sequence[Record]) -> str:
    """Where and when the numbers were taken."""
    # An arm whose check died tells neither device nor sizes.
    first = next((record for record in records if "device" in record), records[0])
    case = next((record["case"] for record in records if "vocab_size" in record["case"]), None)
    parts = []
    if case is not None:
        sizes = f"D={case['hidden_size']}, V={case['vocab_size']}, {case['dtype']}, layout {case['layout']}"
        parts.append(f"{sizes}, GRPO loss and both gradients")
    if "device" in first:
        device = first["device"]
        kind = device["kind"] if device["kind"] == device["platform"] else f"{device['platform']} {device['kind']}"
        parts.append(f"{kind}, {device['cores']} cores, jax {first['jax']}, Python {first['python']}")
    commit = "commit unknown" if first["commit"] == "unknown" else f"commit {first['commit'][:10]}"
    parts.append(f"{commit}{' with changes' if first['dirty'] else ''}, {first['date'][:10]}")
    return "; ".join(parts)


def terminal_table(records: Sequence[Record]) -> Table:
    """The table of one run; a refused arm's row tells why in place of its time."""
    table = Table(title=records[0]["name"], caption=caption(records))
    for header in HEADERS:
        table.add_column(header, overflow="fold")
    for record in records:
        table.add_row(*_cells(record), style=None if record["status"] == "ok" else "red")
    return table


def plain_words(records: Sequence[Record]) -> Iterator[str]:
    """One sentence for each arm at the largest size: what a reader should take home."""
    largest = max(record["case"]["tokens"] for record in records)
    final = [record for record in records if record["case"]["tokens"] == largest]
    for record in final:
        baseline = next(
            r
            for r in final
            if r["arm"]["baseline"] and r["case"]["masked_fraction"] == record["case"]["masked_fraction"]
        )
        if record is baseline and record["status"] == "ok":
            continue
        start = f"{record['arm']['name']}, {largest} tokens"
        if record["case"]["masked_fraction"]:
            start += f", {record['case']['masked']:.0%} masked" if record["numbers"] else ""
        if record["numbers"] is None:
            yield f"{start}: no number ({record['status']}: {record['reason']})"
            continue
        mine, theirs = record["numbers"], baseline["numbers"]
        if theirs is None:
            yield f"{start}: gradients within budget; no ratio, for {baseline['arm']['name']} has no number"
            continue
        memory = "unknown times" if mine["temp_ratio"] is None else factor(mine["temp_ratio"])
        line = f"{start}: same loss ({mine['loss']:.4f} vs {theirs['loss']:.4f}), gradients within budget, "
        line += f"{memory} the memory, {factor(mine['time_ratio'])} the time of {baseline['arm']['name']}"
        if record["case"]["masked_fraction"] and mine["time_ratio_to_first_fraction"] is not None:
            line += f"; {factor(mine['time_ratio_to_first_fraction'])} its own time at the first masked fraction"
        yield line


def plot(records: Sequence[Record], path: Path) -> None:
    """Draws temp memory and time against N, a line for each arm and masked fraction that has numbers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    lines: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        if record["numbers"] is not None:
            lines.setdefault((record["arm"]["name"], record["case"]["masked_fraction"]), []).append(record)
    for axes, key, scale, label in (
        (panels[0], "temp_bytes", 1e-6, "temporary memory (MB)"),
        (panels[1], "time_ms", 1.0, "time (ms)"),
    ):
        for (arm, fraction), group in lines.items():
            points = sorted(
                (r["case"]["tokens"], r["numbers"][key] * scale) for r in group if r["numbers"][key] is not None
            )
            name = f"{arm}, {fraction:.0%} masked" if fraction else arm
            axes.plot(
                [n for n, _ in points],
                [value for _, value in points],
                marker="o",
                linestyle="--" if fraction else "-",
                label=name,
            )
        axes.set_xlabel("tokens N")
        axes.set_xticks(sorted({record["case"]["tokens"] for record in records}))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if lines:
            axes.legend()
    figure.suptitle(f"{records[0]['name']}: {caption(records)}", fontsize=7)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    replace_file(path, png.getvalue())


def markdown_table(records: Sequence[Record]) -> str:
    """The table of one run in markdown, its caption below."""
    rows = [HEADERS, ("---",) * len(HEADERS), *(_cells(record) for record in records)]
    # A pipe in a reason would open a new column.
    table = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )
    return f"{table}\n\n{caption(records)[0].upper()}{caption(records)[1:]}.\n"


def with_tables(text: str, results: Path) -> str:
    """The text with each marked table made anew from the last run in its record.

    Raises:
        BenchError: a marker has no end or its record is missing.
    """
    opened = re.findall(r"<!-- bench:([\w.-]+) -->", text)
    closed = [match["name"] for match in MARKED.finditer(text)]
    if opened != closed:
        missing = next(name for name in opened if opened.count(name) != closed.count(name))
        raise BenchError(f"<!-- bench:{missing} --> has no <!-- /bench:{missing} --> after it")

    def table(match: re.Match[str]) -> str:
        return match[1] + markdown_table(latest_run(read_records(results / f"{match['name']}.jsonl"))) + match[3]

    return MARKED.sub(table, text)


def main(argv: Sequence[str]) -> int:
    """Rewrites the tables of the file `argv[0]` from the records in the folder `argv[1]`."""
    if len(argv) != 2:
        print("usage: python -m logitless.bench.report README.md results", file=sys.stderr)
        return 2
    page = Path(argv[0])
    try:
        text = page.read_text(encoding="utf-8")
        replace_file(page, with_tables(text, Path(argv[1])).encode())
    except OSError as error:
        print(f"cannot read {page}: {error.strerror}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
