"""A bench end to end, with child processes as a user gets them, at sizes that take seconds."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from logitless import heads
from logitless.bench.cases import ArmConfig, BenchConfig
from logitless.bench.errors import BenchError
from logitless.bench.records import read_records
from logitless.bench.run import run_bench

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def arms_importable(monkeypatch, tmp_path):
    """The planted arms, here and in the children, and a folder for what a bench writes."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(tmp_path)


def tiny(*arms: str, **changes) -> BenchConfig:
    options = {"name": "tiny", "tokens": (24,), "hidden_size": 16, "vocab_size": 301, "sequences": 4, "repetitions": 3}
    return BenchConfig(arms=tuple(ArmConfig(arm) for arm in arms), **(options | changes))


@pytest.mark.slow
def test_named_implementations_get_numbers_a_record_and_a_plot(capsys):
    config = tiny("reference", "chunked", masked_fractions=(0.0, 0.5))
    assert run_bench(config) == 0
    records = read_records(Path("results/tiny.jsonl"))
    assert len(records) == 4
    for record in records:
        numbers = record["numbers"]
        assert len(numbers["times_ms"]) == 3 and min(numbers["times_ms"]) > 0
        assert numbers["temp_bytes"] >= 0 and numbers["peak_bytes"] >= numbers["baseline_bytes"] // 2 > 0
        assert record["gates"]["gradcheck"]["ok"] is True
        assert record["case"]["vocab_size"] == 301
        assert record["case"]["no_gradient"] >= record["case"]["masked"] and record["in_turns"] is True
        assert {"commit", "dirty", "date", "device", "jax", "jaxlib", "python"} <= record.keys()
    assert [record["case"]["masked"] for record in records] == [0.0, 0.0, 0.5, 0.5]
    text = capsys.readouterr().out
    assert "chunked, 24 tokens: same loss" in text and "gradients within budget" in text
    assert str(Path.cwd()) not in Path("results/tiny.jsonl").read_text()
    assert sorted(path.name for path in Path("results").iterdir()) == ["tiny.jsonl", "tiny.png"]
    assert Path("results/tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_losses_of_a_frozen_head_by_model_with_idle_sequences(monkeypatch):
    small = dataclasses.replace(heads.head("gemma-2-2b"), hidden_size=16, vocab_size=301)
    monkeypatch.setitem(heads.HEADS, "gemma-2-2b", small)
    changes = {"hidden_size": None, "vocab_size": None, "heads": ("gemma-2-2b",), "differentiate": ("hidden",)}
    changes |= {"losses": ("grpo", "cross_entropy"), "zero_advantage_fractions": (0.0, 0.5), "off_policy": 0.25}
    config = tiny("chunked", plot=False, repetitions=1, **changes)
    assert run_bench(config) == 0
    records = read_records(Path("results/tiny.jsonl"))
    assert [(r["case"]["loss"], r["case"]["no_gradient"]) for r in records] == [
        ("grpo", 0.0),
        ("grpo", 0.5),
        ("cross_entropy", 0.0),
    ]
    for record in records:
        assert (record["case"]["head"], record["case"]["softcap"]) == ("gemma-2-2b", 30.0)
        assert "dlm_head_max_abs" not in record["gates"]["gradcheck"]
    assert records[1]["numbers"]["time_ratio_to_first_fraction"] > 0


@pytest.mark.slow
def test_wrong_arms_are_refused_a_number_and_broken_ones_leave_the_rest_alone(capsys):
    arms = (
        "reference",
        "planted_arms:wrong_sign",
        "planted_arms:wrong_loss",
        "planted_arms:dies",
        "planted_arms:raises",
    )
    assert run_bench(tiny(*arms, plot=False, repetitions=1)) == 1
    reference, sign, loss, dead, broken = read_records(Path("results/tiny.jsonl"))
    assert reference["status"] == "ok" and reference["numbers"]["time_ms"] > 0
    for record in (sign, loss, dead, broken):
        assert record["numbers"] is None
    assert sign["status"] == "refused" and "d_lm_head" in sign["reason"]
    assert loss["status"] == "refused" and "loss" in loss["reason"]
    assert dead["status"] == "failed" and "exit code 7" in dead["reason"]
    assert broken["status"] == "failed" and "this arm is broken" in broken["reason"]
    assert "refused: gradcheck" in capsys.readouterr().out


@pytest.mark.slow
def test_an_own_arm_that_holds_logits_is_refused_and_the_baseline_is_not():
    assert run_bench(tiny("reference", "planted_arms:right", plot=False, repetitions=1)) == 1
    reference, right = read_records(Path("results/tiny.jsonl"))
    assert reference["status"] == "ok" and reference["gates"]["holds_logits"] is True
    assert right["status"] == "refused" and right["reason"].startswith("audit: holds logits")


@pytest.mark.slow
def test_an_arm_that_hangs_is_given_up_after_its_time():
    start = time.monotonic()
    assert run_bench(tiny("planted_arms:hangs", plot=False, timeout_s=5.0)) == 1
    assert time.monotonic() - start < 120
    (record,) = read_records(Path("results/tiny.jsonl"))
    assert record["status"] == "failed" and "no answer within 5 s" in record["reason"]


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("chunky", "no implementation 'chunky'; known are"),
        ("no_such_module:loss", "cannot import 'no_such_module'"),
        ("planted_arms:no_such_function", "has no function 'no_such_function'"),
    ],
)
def test_an_unknown_arm_is_one_clear_error_and_nothing_is_written(arm, words, tmp_path):
    with pytest.raises(BenchError, match=re.escape(words)):
        run_bench(tiny("reference", arm))
    assert list(tmp_path.iterdir()) == []


def test_a_results_folder_that_is_a_file_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(BenchError, match="results folder 'results'"):
        run_bench(tiny("reference"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl_c", "kill"])
def test_children_die_with_their_parent(end, tmp_path):
    marker = f"bench-{os.getpid()}-{end.name}"
    code = (
        # Ctrl-C reaches nobody where the suite itself runs in the background of a shell, which ignores it.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from test_bench_run import tiny; from logitless.bench.run import run_bench; "
        "run_bench(tiny('planted_arms:hangs', plot=False))"
    )
    environment = os.environ | {"BENCH_TEST_MARKER": marker}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: len(_processes(marker)) == 2)
        parent.send_signal(end)
        parent.wait(timeout=60)
        _until(lambda: not _processes(marker))
    finally:
        parent.kill()
        parent.wait()
    assert not list(tmp_path.glob("results/*"))


def _processes(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if f"BENCH_TEST_MARKER={marker}" in text:
            found.append(folder.name)
    return found


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_records_are_appended_and_each_line_is_json():
    from logitless.bench.errors import BenchError
    from logitless.bench.records import append_records, read_records

    path = Path("some.jsonl")
    append_records(path, [{"a": 1}])
    with pytest.raises(ValueError, match="JSON compliant"):
        append_records(path, [{"a": 2}, {"a": float("nan")}])
    append_records(path, [{"a": 3}])
    assert read_records(path) == [{"a": 1}, {"a": 3}]
    path.write_text("")
    assert read_records(path) == []
    path.write_text('{"a": 1}\n{"a"')
    with pytest.raises(BenchError, match=r"some\.jsonl, line 2: no JSON"):
        read_records(path)
    assert [entry.name for entry in Path.cwd().iterdir()] == ["some.jsonl"]
