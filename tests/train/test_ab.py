"""An A/B in processes of its own: parity where the losses are equal, none where one is not, and a report."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

import yaml
from train_runs import FUSED, SRC, STOCK, small_run, wait_for_updates

from logitless.train import ab
from logitless.train.ab_config import AbConfig
from logitless.train.config import LossConfig
from logitless.train.errors import TrainError
from logitless.train.sinks import read_metrics

WRONG = LossConfig(level="hidden", kl_coef=0.6, label="a divergence that weighs more")


@pytest.mark.slow
def test_equal_losses_have_parity_and_a_wrong_one_has_none(tmp_path, capfd, monkeypatch):
    train = small_run("replaced", steps=4)
    config = AbConfig(
        "small_ab", [STOCK, FUSED, WRONG], train, output=str(tmp_path / "runs"), results=str(tmp_path / "results")
    )
    assert ab.run_ab(config) == 1
    record = json.loads((tmp_path / "results" / "small_ab.jsonl").read_text())
    assert record["verdict"]["parity"] == {FUSED.title: True, WRONG.title: False}
    assert [len(run["metrics"]) for run in record["runs"]] == [4, 4, 4]
    # One warm start, and the same completions, for all.
    assert len({str([line["reward/mean"] for line in run["metrics"]]) for run in record["runs"]}) == 1
    report = (tmp_path / "runs" / "report.html").read_text()
    assert "A check failed." in report and WRONG.title in report
    assert "verdict: FAILED" in capfd.readouterr().out

    # What is finished is not trained again: the runs are there already.
    monkeypatch.setattr(ab, "run_process", finished)
    good = replace(config, arms=[STOCK, FUSED])
    assert ab.run_ab(good) == 0
    lines = (tmp_path / "results" / "small_ab.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["verdict"]["passed"]


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_the_comparison_goes_on_from_it(tmp_path):
    train = small_run("replaced", steps=40, checkpoint_every=40)
    config = AbConfig("broken", [STOCK, FUSED], train, output=str(tmp_path / "runs"), results=str(tmp_path))
    path = tmp_path / "ab.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    command = [sys.executable, "-m", "logitless", "ab", str(path)]
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    first = tmp_path / "runs" / "stock_seed0"
    wait_for_updates(process, first, 5)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 130, words
    done = len(read_metrics(first / "metrics.jsonl"))
    assert f"stopped at update {done}, which is kept" in words and 5 <= done < 40
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0 and "resuming at update" in done.stderr, done.stderr


def finished(train, place, timeout_s):
    assert (place / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_refuses_ends_the_comparison_in_one_line(tmp_path):
    bad = replace(small_run("x"), model=replace(small_run("x").model, source=str(tmp_path / "nothing")))
    config = AbConfig("bad", [STOCK, FUSED], bad, output=str(tmp_path / "runs"), results=str(tmp_path))
    with pytest.raises(TrainError, match=r"exit code 2: logitless train: error: model\.source=.*neither tiny"):
        ab.run_ab(config)


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(TrainError, match=r"not done within timeout_s=0\.2"):
        ab.run_process(small_run(tmp_path / "run"), tmp_path / "run", 0.2)
