"""Tables, sentences and the README's blocks, from records made by hand."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from logitless import cli
from logitless.bench.errors import BenchError
from logitless.bench.plots import draw_images, plot
from logitless.bench.report import (
    duration,
    main,
    markdown_table,
    plain_words,
    size,
    terminal_table,
    with_tables,
)

ROOT = Path(__file__).parents[2]


def record(arm: str, tokens: int = 64, date: str = "2026-01-02T03:04:05+00:00", reason: str | None = None, **numbers):
    values = {"time_ms": 100.0, "time_ms_quartiles": [90.0, 110.0], "time_ratio": 1.0, "temp_ratio": 1.0}
    values |= {"temp_bytes": 604_000_000, "peak_bytes": 10**9, "baseline_bytes": 10**8, "loss": 0.1234567}
    values |= {"time_ratio_to_first_fraction": 1.0}
    case = {"tokens": tokens, "masked_fraction": 0.0, "masked": 0.25, "dtype": "float32", "layout": "VD"}
    return {
        "name": "toy",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": date,
        "device": {"platform": "cpu", "kind": "cpu", "cores": 2},
        "jax": "0.12.0",
        "python": "3.12.1",
        "case": case | {"hidden_size": 8, "vocab_size": 100},
        "arm": {"name": arm, "baseline": arm == "reference"},
        "status": "ok" if reason is None else "refused",
        "reason": reason,
        "gates": {"gradcheck": {"budget/abs_diff_loss/spent": 0.5}, "holds_logits": arm == "reference"},
        "numbers": values | numbers if reason is None else None,
    }


RUN = [record("reference"), record("chunked", time_ratio=0.9, time_ms=90.0, temp_bytes=3 * 10**7, temp_ratio=0.0497)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (604_000_000, "604 MB"), (1.2e12, "1.2e+03 GB"), (None, "unknown")],
)
def test_sizes_read_as_people_say_them(value, text):
    assert size(value) == text


def test_durations_change_their_unit_at_a_second():
    assert [duration(value) for value in (0.1234, 12.3, 999.0, 1500.0)] == ["0.123 ms", "12.3 ms", "999 ms", "1.5 s"]


def test_the_sentence_says_loss_gradients_memory_and_time():
    assert list(plain_words(RUN)) == [
        "chunked, 64 tokens: same loss (0.1235 vs 0.1235), gradients within budget, "
        "0.05x the memory, 0.90x the time of reference"
    ]


def test_a_loss_that_differs_in_what_is_shown_is_not_called_the_same():
    (sentence,) = plain_words([RUN[0], record("torch", loss=0.1239)])
    assert "loss within budget (0.1239 vs 0.1235)" in sentence and "same" not in sentence


def test_a_refused_arm_shows_its_reason_and_no_number():
    run = [RUN[0], record("wrong", reason="gradcheck: d_lm_head: error 2")]
    table = markdown_table(run)
    (row,) = [line for line in table.splitlines() if "wrong" in line]
    assert "refused: gradcheck: d_lm_head: error 2" in row and " ms" not in row and "MB" not in row
    assert list(plain_words(run)) == ["wrong, 64 tokens: no number (refused: gradcheck: d_lm_head: error 2)"]


def test_a_refused_baseline_leaves_the_others_without_ratio():
    run = [record("reference", reason="gradcheck"), record("chunked", time_ratio=None, temp_ratio=None)]
    assert "no ratio" in list(plain_words(run))[1]
    assert "| chunked | 100 ms |" in markdown_table(run)


def test_the_terminal_table_names_commit_device_and_date():
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(terminal_table(RUN))
    text = console.export_text()
    for words in (
        "reference",
        "30 MB (0.05x)",
        "90 ms (0.90x)",
        "commit 0123456789",
        "2 cores",
        "jax 0.12.0",
        "2026-01-02",
    ):
        assert words in text


def other(arm: str, loss: str = "cross_entropy", head: str | None = None, **numbers):
    """A record of today: with a loss, perhaps a head, and an arm of torch."""
    made = record(arm, temp_bytes=None, temp_ratio=None, peak_ratio=0.5, **numbers)
    made["case"] |= {"loss": loss, "head": head, "no_gradient": 0.25, "differentiate": ["hidden"]}
    made["gates"] |= {"holds_logits": None, "rounds_logits": True}
    made["arm"]["framework"] = "torch"
    return made | {"peer": {"torch": "2.13.0"}}


def test_losses_heads_and_arms_outside_jax_have_their_place_in_the_table():
    run = [RUN[0], other("torch", head="gpt2")]
    table = markdown_table(run).splitlines()
    assert table[0].startswith("| tokens | head | loss | masked | no gradient | arm | time |")
    assert table[2].startswith("| 64 |  | GRPO | 25% |  | reference | 100 ms (1.00x) |")
    assert table[3] == (
        "| 64 | gpt2 | cross-entropy | 25% | 25% | torch | 100 ms (1.00x) | 90 ms to 110 ms |  "
        "| 1 GB (+900 MB) | 50% (logits rounded) | not audited |"
    )
    assert "GRPO or cross-entropy loss" in table[-1] and "torch 2.13.0" in table[-1]
    assert "no gradient" not in markdown_table(RUN) and "head" not in markdown_table(RUN).splitlines()[0]


def test_the_sentence_names_the_loss_and_compares_with_the_baseline_of_its_own_kind():
    baseline = other("reference", peak_bytes=2 * 10**9) | {"arm": {"name": "reference", "baseline": True}}
    assert list(plain_words([*RUN, baseline, other("torch")]))[1:] == [
        "torch, 64 tokens, cross-entropy: same loss (0.1235 vs 0.1235), gradients within budget, "
        "0.47x the memory on top of the inputs, 1.00x the time of reference"
    ]
    assert "no ratio, for the first arm has no number" in list(plain_words([RUN[0], other("torch")]))[0]


def test_a_page_gets_the_plots_that_it_shows(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots: pip install 'logitless[bench]'")
    run = [*RUN, other("torch"), record("wrong", reason="x")]
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run))
    page = tmp_path / "README.md"
    page.write_text(PAGE + "![time](docs/toy_time.png) ![memory](docs/toy_memory.png) ![other](docs/logo.png)\n")
    assert cli.main(["bench", "report", str(page), str(tmp_path)]) == 0
    drawn = sorted((tmp_path / "docs").iterdir())
    assert [path.name for path in drawn] == ["toy_memory.png", "toy_time.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert "docs/toy_time.png" in capsys.readouterr().out
    with pytest.raises(BenchError, match="cannot read"):
        draw_images("![x](gone_time.png)", tmp_path, tmp_path)


def test_the_command_for_reports_says_how_it_is_called(capsys):
    assert cli.main(["bench", "report", "--help"]) == 2
    assert "usage: logitless bench report" in capsys.readouterr().err


def test_the_plot_is_a_png_and_survives_a_run_without_numbers(tmp_path):
    pytest.importorskip("matplotlib", reason="plots: pip install 'logitless[bench]'")
    larger = [record(arm, tokens=128) for arm in ("reference", "chunked")]
    runs = [RUN + larger, RUN, [*RUN, other("torch")], [record("wrong", reason="x")]]
    for run in runs:
        plot(run, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


PAGE = "before\n<!-- bench:toy -->\nold\n<!-- /bench:toy -->\nafter\n"


def test_the_readme_gets_the_table_of_the_last_run_only(tmp_path):
    old = record("reference", date="2025-01-01T00:00:00+00:00", time_ms=7.0)
    (tmp_path / "toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [old, *RUN]))
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    assert main([str(page), str(tmp_path)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- bench:toy -->\n| tokens |") and text.endswith("<!-- /bench:toy -->\nafter\n")
    assert "\nold\n" not in text and "7 ms" not in text and "| chunked | 90 ms (0.90x) |" in text
    assert with_tables(text, tmp_path) == text


def test_a_page_that_cannot_be_filled_is_left_as_it_is(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    assert main([str(page), str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err and page.read_text() == PAGE
    with pytest.raises(BenchError, match="has no <!-- /bench:toy -->"):
        with_tables("<!-- bench:toy -->\n", tmp_path)


@pytest.mark.parametrize("page", ["README.md", "docs/kernels.md", "docs/scaling.md"])
def test_the_pages_of_this_project_hold_the_tables_of_its_records(page):
    text = (ROOT / page).read_text()
    assert with_tables(text, ROOT / "results") == text
