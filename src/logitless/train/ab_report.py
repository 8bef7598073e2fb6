"""The report of an A/B: a page that stands alone, with plots, table and verdict, and a table for the terminal."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logitless._files import replace_file
from logitless.bench.units import duration, factor, markdown, size
from logitless.train.ab_config import RISE_UPDATES
from logitless.train.compare import SETTLED, Run

Record = Mapping[str, Any]

PLOTS = (
    ("reward/mean", "reward, mean of a batch", None),
    ("loss", "loss (nats)", None),
    ("kl", "divergence to the reference (nats)", None),
    ("entropy", "entropy (nats)", None),
    ("grad_norm", "norm of the gradient", None),
    ("time/train/step_s", "time of an update (s)", SETTLED),
)
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{border-bottom:1px solid #ddd;padding:.35rem .6rem;text-align:left;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.pass{color:#1a7f37;font-weight:600}.fail{color:#b42318;font-weight:600}
.verdict{border-left:.4rem solid;padding:.6rem 1rem;background:#f6f8fa}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}
.plots svg{width:100%;height:auto}
.note{color:#555;font-size:.9rem}
pre{background:#f6f8fa;padding:.8rem;overflow-x:auto;font-size:.8rem}
"""


def arms_of(record: Record) -> list[str]:
    """Titles in the order of the config."""
    return list(dict.fromkeys(run["arm"] for run in record["runs"]))


def series(record: Record, arm: str, name: str) -> np.ndarray:
    """`[seeds, updates]`; NaN where a number was not to be had."""
    return np.stack([Run(**run).series(name) for run in record["runs"] if run["arm"] == arm])


def table(record: Record) -> list[list[str]]:
    """The arms side by side; the first row names the columns."""
    rows = [
        [
            "arm",
            "temp of the update",
            "time of an update",
            "loss",
            "kl",
            f"reward, first {RISE_UPDATES}",
            f"reward, last {RISE_UPDATES}",
            "parity",
        ]
    ]
    verdict = record["verdict"]
    for number, arm in enumerate(arms_of(record)):
        ratio = verdict["ratios"][arm]
        reward = series(record, arm, "reward/mean")
        parity = verdict["parity"].get(arm, True)
        rows.append(
            [
                arm,
                f"{size(ratio['temp_bytes'])} ({factor(ratio['temp'])})",
                f"{duration(ratio['step_s'] * 1e3)} ({factor(ratio['step_time'])})",
                _mean_and_spread(series(record, arm, "loss")[:, -RISE_UPDATES:]),
                _mean_and_spread(series(record, arm, "kl")[:, -RISE_UPDATES:]),
                _mean_and_spread(reward[:, :RISE_UPDATES]),
                _mean_and_spread(reward[:, -RISE_UPDATES:]),
                "the baseline" if number == 0 else "yes" if parity else "NO",
            ]
        )
    return rows


def _mean_and_spread(values: np.ndarray) -> str:
    """The mean over seeds of the mean over updates, with the standard deviation over seeds."""
    if np.isnan(values).all():
        return "none"
    means = values.mean(axis=1)
    text = f"{means.mean():.4g}"
    return text if len(means) < 2 else f"{text} ± {means.std(ddof=1):.2g}"


def print_table(record: Record) -> None:
    """The table and the checks, for the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        # Into a file or a log, where nothing is gained by narrow columns.
        console.width = 140
    header, *rows = table(record)
    shown = Table(*header, title=record["name"])
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    for check in record["verdict"]["checks"]:
        word = "ok    " if check["passed"] else "FAILED"
        console.print(
            f"{word} {check['arm']}: {check['what']}: {_value(check)} (bound {check['bound']:.4g})", markup=False
        )
    console.print("verdict: " + ("passed" if record["verdict"]["passed"] else "FAILED"))


def planned(records: Sequence[Record]) -> list[list[str]]:
    """The planned updates of an A/B side by side; the first row names the columns."""
    rows = [["arm", "temp", "weights, optimizer, batch", "total of HBM", "fits", "collectives", "time (estimate)"]]
    base = records[0]["plan"]["temp_bytes"]
    for record in records:
        plan = record["plan"]
        if plan["temp_bytes"] is None:
            rows.append([record["arm"], plan["reason"] or "", "", "", "no", "", ""])
            continue
        rows.append(
            [
                record["arm"],
                size(plan["temp_bytes"]) + (f" ({factor(plan['temp_bytes'] / base)})" if base else ""),
                size(plan["argument_bytes"]),
                f"{size(plan['total_bytes'])} of {size(plan['hbm_bytes'])}",
                "yes" if plan["fits"] else "NO",
                size(plan["collective_bytes"]),
                "unknown" if plan["expected_ms"] is None else duration(plan["expected_ms"]),
            ]
        )
    return rows


def planned_words(records: Sequence[Record]) -> str:
    """What the numbers of a planned update are."""
    first = records[0]
    return (
        f"One update on {first['topology']}, per device, compiled for it and not executed on a TPU. Memory: exact. "
        f"Time: compiler estimate, not a measurement. Commit {first['commit'][:10]}, {first['date'][:10]}."
    )


def step_markdown(records: Sequence[Record]) -> str:
    """The planned updates as a table, for a page."""
    return f"{markdown(planned(records))}\n\n{planned_words(records)}\n"


def write_report(record: Record, path: Path) -> Path:
    """Writes the page; it needs no other file and no network."""
    replace_file(path, page(record).encode())
    return path


def page(record: Record) -> str:
    """The report as HTML."""
    e = html.escape
    verdict = record["verdict"]
    word, mark = ("All checks passed.", "pass") if verdict["passed"] else ("A check failed.", "fail")
    head, *rows = table(record)
    titles = "".join(f"<th{' class=n' if i else ''}>{e(title)}</th>" for i, title in enumerate(head))
    cells = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i else ''}>{e(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    checks = "".join(_check_row(check) for check in verdict["checks"])
    plots = "".join(f"<figure style='margin:0'>{plot(record, *one)}</figure>" for one in PLOTS) + memory_plot(record)
    return f"""<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>{e(record["name"])}: A/B of losses</title><style>{STYLE}</style>
<h1>{e(record["name"])}: {e(" against ".join(arms_of(record)))}</h1>
<p class="verdict {mark}">{word}</p>
<p>{e(circumstances(record))}</p>
<h2>Arms</h2><table><tr>{titles}</tr>{cells}</table>
<p class=note>Temp: what the compiled update needs beside its arguments and results on one device, by its compiler.
Time: median without the first {SETTLED} updates, which compile; the arms ran one after the other, each in a process of
its own. Loss, divergence and reward: means of {RISE_UPDATES} updates, over seeds ± their standard deviation.</p>
<h2>Checks</h2><table><tr><th>arm<th>what<th class=n>value<th class=n>bound<th></tr>{checks}</table>
<h2>Curves</h2><div class=plots>{plots}</div>
<h2>Config</h2><pre>{e(config_text(record))}</pre></html>
"""


def _check_row(check: Mapping[str, Any]) -> str:
    word, mark = ("passed", "pass") if check["passed"] else ("FAILED", "fail")
    numbers = f"<td class=n>{_value(check)}</td><td class=n>{check['bound']:.4g}</td>"
    texts = f"<td>{html.escape(check['arm'])}</td><td>{html.escape(check['what'])}</td>"
    return f"<tr>{texts}{numbers}<td class={mark}>{word}</td></tr>"


def _value(check: Mapping[str, Any]) -> str:
    # A record has words for what JSON has no numbers for.
    return f"{float(check['value']):.4g}"


def circumstances(record: Record) -> str:
    """Where and how the runs were made, in one sentence or two."""
    summary, config = record["runs"][0]["summary"], record["config"]
    commits = {_commit(one) for run in record["runs"] for one in run["summary"].get("commits", [record])}
    commit = " and ".join(sorted(commits))
    train = config["train"]
    shared = (
        "All arms trained on the completions that the first one sampled, so the rewards are the same by construction."
        if config["rollouts"] == "shared"
        else "Each arm sampled its own completions."
    )
    return (
        f"{train['steps']} updates with seed{'s' * (len(config['seeds']) > 1)} {', '.join(map(str, config['seeds']))}; "
        f"{summary['tokens_per_step']:,} completion tokens an update, vocabulary {summary['vocab_size']:,}, model "
        f"{train['model']['source']}, task {train['data']['task']}. {shared} Ran on {summary['device']}, jax "
        f"{summary['jax']}, Python {summary['python']}; commit {commit}, "
        f"{record['date'][:10]}. Nothing here was executed on a TPU or a GPU unless the device says so."
    )


def _commit(one: Mapping[str, Any]) -> str:
    return one["commit"][:10] + " with changes" * bool(one["dirty"])


def config_text(record: Record) -> str:
    """The config as YAML."""
    import yaml

    return yaml.safe_dump(record["config"], sort_keys=False)


def _figure() -> Any:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def plot(record: Record, name: str, label: str, start: int | None) -> str:
    """One number against updates, as SVG."""
    figure = _figure()
    draw(figure.subplots(), record, name, label, start)
    return _svg(figure)


def draw(axes: Any, record: Record, name: str, label: str, start: int | None) -> None:
    """A line for the mean over seeds of each arm, a band from the least seed to the largest."""
    from matplotlib.ticker import MaxNLocator

    drawn = 0
    for color, arm in zip(_colors(record), arms_of(record), strict=True):
        values = series(record, arm, name)
        if np.isnan(values).all():
            continue
        updates = np.arange(1, values.shape[1] + 1)[start or 0 :]
        values = values[:, start or 0 :]
        # The first arm wide and pale, so that one that lies upon it can be seen.
        width, alpha = (4.0, 0.45) if drawn == 0 else (1.3, 1.0)
        axes.plot(updates, values.mean(axis=0), color=color, linewidth=width, alpha=alpha, label=arm)
        if len(values) > 1:
            axes.fill_between(updates, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)
        drawn += 1
    if not drawn:
        axes.text(0.5, 0.5, "not computed", ha="center", va="center", transform=axes.transAxes)
    else:
        axes.legend(fontsize=8)
    axes.set_title(label, fontsize=10)
    axes.set_xlabel("update", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)


def draw_curves(record: Record, path: Path) -> None:
    """All curves of an A/B in one PNG, for a page of the documentation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, one in zip(figure.subplots(2, 3).flat, PLOTS, strict=True):
        draw(axes, record, *one)
    figure.suptitle(f"{record['name']}; commit {record['commit'][:10]}, {record['date'][:10]}", fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    replace_file(path, png.getvalue())


def ab_markdown(records: Sequence[Record]) -> str:
    """The last A/B of a record as a table with its verdict, for a page."""
    record = [one for one in records if "verdict" in one][-1]
    verdict = record["verdict"]
    word = "passed" if verdict["passed"] else "FAILED"
    checks = "; ".join(f"{c['arm']}: {c['what']} {_value(c)} (bound {c['bound']:.3g})" for c in verdict["checks"])
    return f"{markdown(table(record))}\n\n{circumstances(record)} Verdict: {word}. {checks}.\n"


def memory_plot(record: Record) -> str:
    """Temp memory of the compiled update, a bar for each arm."""
    figure = _figure()
    axes = figure.subplots()
    arms = arms_of(record)
    values = [record["verdict"]["ratios"][arm]["temp_bytes"] for arm in arms]
    bars = axes.barh(arms, [value / 1e6 for value in values], color=_colors(record))
    axes.bar_label(bars, [size(value) for value in values], padding=3, fontsize=9)
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set_title("temp memory of the compiled update (MB)", fontsize=10)
    return f"<figure style='margin:0'>{_svg(figure)}</figure>"


def _colors(record: Record) -> Sequence[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(arms_of(record)))]
