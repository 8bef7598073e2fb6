"""The plots of a bench: lines against N where there are several sizes, bars by arm where there is one."""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logitless._files import replace_file
from logitless.bench.records import latest_run, read_records
from logitless.bench.report import Record, caption, kind, kind_in_words, memory_on_top
from logitless.bench.units import duration, factor, size
from logitless.plan.report import ESTIMATE
from logitless.train.ab_report import draw_curves

IMAGE = re.compile(r"\]\((?P<path>(?:[\w.-]+/)*(?P<name>[\w.-]+)_(?P<what>time|memory|curves)\.png)\)")
COLORS = {"jax": "tab:blue", "torch": "tab:orange", "host": "tab:green"}
FRAMEWORKS = {"jax": "JAX", "torch": "torch", "host": "other"}


def plot(records: Sequence[Record], path: Path) -> None:
    """Draws memory and time of one run into one image."""
    if len({record["case"]["tokens"] for record in records}) > 1:
        _save(_lines(records), records, path)
    else:
        _save(_bars(records, ("time", "memory")), records, path)


def draw_images(page: str, folder: Path, results: Path) -> list[Path]:
    """Draws the images `NAME_time.png`, `NAME_memory.png` and `NAME_curves.png` of a page, from the last run recorded.

    Raises:
        BenchError: its record is missing.
    """
    drawn = []
    for match in IMAGE.finditer(page):
        record_file = results / f"{match['name']}.jsonl"
        records = latest_run(read_records(record_file))
        path = folder / match["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if match["what"] == "curves":
            draw_curves(records[-1], path)
        else:
            _save(_bars(records, (match["what"],)), records, path)
        drawn.append(path)
    return drawn


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, records: Sequence[Record], path: Path) -> None:
    lines = caption(records).replace("; ", "\n")
    _write(figure, f"{records[0]['name']}: {lines}", path)


def _write(figure: Any, heading: str, path: Path) -> None:
    figure.suptitle(heading, fontsize=7)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    replace_file(path, png.getvalue())


def _time_bar(record: Record) -> tuple[float, str]:
    numbers = record["numbers"]
    if numbers["time_ratio"] is None:
        return numbers["time_ms"], duration(numbers["time_ms"])
    return numbers["time_ratio"], f"{factor(numbers['time_ratio'])} ({duration(numbers['time_ms'])})"


def _memory_bar(record: Record) -> tuple[float, str]:
    value = memory_on_top(record["numbers"])
    return value * 1e-6, size(value)


BARS: dict[str, tuple[Callable[[Record], tuple[float, str]], str]] = {
    "time": (_time_bar, "time, times that of the first arm"),
    "memory": (_memory_bar, "peak memory on top of the inputs (MB)"),
}


def _bars(records: Sequence[Record], quantities: Sequence[str]) -> Any:
    """A row of panels for each kind of case, a bar for each arm that has numbers."""
    kinds = list(dict.fromkeys((record["case"]["tokens"], *kind(record)) for record in records))
    most = max(sum((r["case"]["tokens"], *kind(r)) == one for r in records) for one in kinds)
    figure = _figure(6.0 * len(quantities), 1.0 + len(kinds) * (0.5 + 0.3 * most))
    panels = figure.subplots(len(kinds), len(quantities), squeeze=False)
    for row, one in zip(panels, kinds, strict=True):
        group = [r for r in records if (r["case"]["tokens"], *kind(r)) == one and r["numbers"] is not None]
        for axes, quantity in zip(row, quantities, strict=True):
            read, label = BARS[quantity]
            values = [read(record) for record in group]
            names = [record["arm"]["name"] for record in group]
            frameworks = [record["arm"].get("framework", "jax") for record in group]
            bars = axes.barh(names, [value for value, _ in values], color=[COLORS[name] for name in frameworks])
            if len(set(frameworks)) > 1:
                one_of_each = {FRAMEWORKS[name]: bar for name, bar in zip(frameworks, bars, strict=True)}
                axes.legend(one_of_each.values(), one_of_each.keys(), fontsize=7)
            axes.bar_label(bars, [text for _, text in values], padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.45)
            axes.set_xlim(left=0)
            axes.set_xlabel(label, fontsize=8)
            title = kind_in_words(group[0]) if group else "no arm has numbers"
            axes.set_title(f"{title}, N={one[0]}", fontsize=9)
    return figure


def _lines(records: Sequence[Record]) -> Any:
    """Temp memory and time against N, a line for each arm and kind of case."""
    figure = _figure(10.0, 4.0)
    panels = figure.subplots(1, 2)
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record["numbers"] is not None:
            lines.setdefault((record["arm"]["name"], *kind(record)), []).append(record)
    for axes, key, scale, label in (
        (panels[0], "temp_bytes", 1e-6, "temporary memory (MB)"),
        (panels[1], "time_ms", 1.0, "time (ms)"),
    ):
        for (arm, *_, masked, idle), group in lines.items():
            points = sorted(
                (r["case"]["tokens"], r["numbers"][key] * scale) for r in group if r["numbers"][key] is not None
            )
            words = kind_in_words(group[0]).removeprefix("GRPO").removeprefix(", ")
            axes.plot(
                [n for n, _ in points],
                [value for _, value in points],
                marker="o",
                linestyle="--" if masked or idle else "-",
                label=f"{arm}{words and ', '}{words}",
            )
        axes.set_xlabel("tokens N")
        axes.set_xticks(sorted({record["case"]["tokens"] for record in records}))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        if lines:
            axes.legend()
    return figure


def plot_plans(records: Sequence[Record], path: Path) -> None:
    """Bars of memory and time for each implementation, a row of panels for each chip and head."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        case = record["case"]
        size_ = "" if case["solve"] else f", N={case['tokens']:,}"
        title = f"{case['where']}, {case['head'] or 'D=' + str(case['hidden_size'])}{size_}"
        groups.setdefault(title, []).append(record)
    most = max(len(group) for group in groups.values())
    figure = _figure(12.0, 1.0 + len(groups) * (0.5 + 0.3 * most))
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for row, (title, group) in zip(panels, groups.items(), strict=True):
        room = (
            ("tokens a device that fit", lambda r: r["case"]["tokens"], "{:,.0f}".format)
            if group[0]["case"]["solve"] is not None
            else ("temporary memory (bytes), exact", lambda r: r["plan"]["temp_bytes"], size)
        )
        time = ("time (ms), compiler estimate", lambda r: r["plan"]["expected_ms"], duration)
        for axes, (label, read, words) in zip(row, (room, time), strict=True):
            values = [read(record) for record in group]
            drawn = axes.barh([record["implementation"] for record in group], [value or 0 for value in values])
            texts = ["none" if value is None else words(value) for value in values]
            axes.bar_label(drawn, texts, padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.margins(x=0.45)
            axes.set_xlim(left=0)
            axes.set_xlabel(label, fontsize=8)
            axes.set_title(title, fontsize=9)
    _write(figure, f"{records[0]['name']}: per device; time is a {ESTIMATE}", path)
