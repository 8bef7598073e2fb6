"""Runs: their numbers, their end by force, and the same curve afterwards."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

import numpy as np
import optax  # pyright: ignore[reportMissingImports]
import yaml
from train_runs import FUSED, SRC, STOCK, small_run, wait_for_updates

from logitless.integrations import tunix as adapter
from logitless.train.ab import share_warm_start
from logitless.train.config import LoraConfig, ModelConfig, RolloutConfig, TinyModel
from logitless.train.errors import TrainError
from logitless.train.models import add_lora, load_policy
from logitless.train.run import run_train
from logitless.train.session import check_free_space, make_mesh
from logitless.train.sinks import read_metrics

CURVE = ("loss", "reward/mean", "kl", "entropy", "grad_norm")


def curve(folder):
    lines = read_metrics(Path(folder) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {name: np.array([line[name] for line in lines], float) for name in CURVE}


def assert_same_curve(got, want):
    for name in CURVE:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of six updates that nothing stopped, and its recorded completions."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = small_run(folder / "run", record_rollouts=str(folder / "rollouts"), loss=STOCK)
    assert run_train(config) == 0
    return folder


def test_every_update_has_its_numbers(unbroken):
    lines = read_metrics(unbroken / "run" / "metrics.jsonl")
    assert len(lines) == 6
    for line in lines:
        assert all(np.isfinite(line[name]) for name in CURVE)
        assert line["time/train/step_s"] > 0 and line["mem/step_temp_bytes"] > 0
        assert line["mem/process_peak_resident_bytes"] > 0
        # A CPU reports no peak of its own, and none is made up.
        assert line["mem/peak_bytes_in_use_max"] is None
    last = np.mean([line["time/train/step_s"] for line in lines])
    assert lines[-1]["time/train/step_avg_last10_s"] == pytest.approx(last)
    assert np.ptp([line["loss"] for line in lines]) > 0
    assert 0 < np.mean([line["reward/mean"] for line in lines]) < 1
    summary = json.loads((unbroken / "run" / "summary.json").read_text())
    assert summary["memory"]["temp"] == lines[0]["mem/step_temp_bytes"]


def test_completions_differ_from_step_to_step_and_follow_the_seed(unbroken):
    batches = [np.load(path) for path in sorted((unbroken / "rollouts").iterdir())]
    assert len(batches) == 6
    texts = [(b["tokens"].tolist(), b["lengths"].tolist()) for b in batches]
    assert len({str(text) for text in texts}) == 6


def test_the_fused_loss_trains_alike_on_the_same_completions(unbroken, tmp_path):
    config = small_run(tmp_path / "run", replay_rollouts=str(unbroken / "rollouts"), loss=FUSED)
    share_warm_start(unbroken / "run", tmp_path / "run")
    assert run_train(config) == 0
    got, want = curve(tmp_path / "run"), curve(unbroken / "run")
    np.testing.assert_array_equal(got["reward/mean"], want["reward/mean"])
    for name in ("loss", "kl"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=name)


def without_mask(monkeypatch):
    real = adapter.policy_loss
    monkeypatch.setattr(adapter, "policy_loss", lambda lp, old, a, mask, **k: real(lp, old, a, mask | True, **k))


def without_temperature(monkeypatch):
    real = adapter.linear_token_stats
    monkeypatch.setattr(adapter, "linear_token_stats", lambda *a, temperature, **k: real(*a, temperature=1.1, **k))


def with_half_the_divergence(monkeypatch):
    real = adapter.options_of_tunix

    def halved(*arguments):
        options = real(*arguments)
        return options | {"kl_coef": options["kl_coef"] / 2}

    monkeypatch.setattr(adapter, "options_of_tunix", halved)


def with_targets_one_late(monkeypatch):
    real = adapter.hidden_states
    monkeypatch.setattr(adapter, "hidden_states", lambda *a, **k: adapter.jnp.roll(real(*a, **k), 1, axis=1))


@pytest.mark.parametrize("plant", [without_mask, without_temperature, with_half_the_divergence, with_targets_one_late])
def test_a_planted_wrong_loss_has_no_parity(plant, unbroken, tmp_path, monkeypatch):
    from logitless.train.ab_config import AbConfig
    from logitless.train.compare import Run, compare

    arms = [STOCK, FUSED]
    share_warm_start(unbroken / "run", tmp_path / "run")
    plant(monkeypatch)
    config = small_run(tmp_path / "run", replay_rollouts=str(unbroken / "rollouts"), loss=arms[1])
    assert run_train(config) == 0
    runs = []
    for arm, folder in zip(arms, (unbroken / "run", tmp_path / "run"), strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        runs.append(Run(arm.title, 0, summary, read_metrics(folder / "metrics.jsonl")))
    verdict = compare(AbConfig("x", arms, small_run("x")), runs)
    assert not verdict.parity[arms[1].title]


def start(config, folder):
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    command = [sys.executable, "-m", "logitless", "train", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_run_that_was_stopped_ends_with_the_curve_of_an_unbroken_one(how, tmp_path):
    steps = {"steps": 40, "rollout": RolloutConfig(2, 4, 4, 3, updates_per_rollout=2), "checkpoint_every": 4}
    whole = small_run(tmp_path / "whole", **steps)
    assert run_train(whole) == 0
    broken = replace(whole, output=str(tmp_path / "broken"))
    process = start(broken, tmp_path)
    wait_for_updates(process, tmp_path / "broken", 11)
    process.send_signal(how)
    _, words = process.communicate(timeout=300)
    done = len(read_metrics(tmp_path / "broken" / "metrics.jsonl"))
    assert 11 <= done < 40, "stopped too late to show anything"
    assert process.returncode == (-9 if how == signal.SIGKILL else 130), words
    if how == signal.SIGINT:
        assert f"stopped at update {done}" in words and done % 2 == 0
    process = start(broken, tmp_path)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words
    resumed = int(words.split("resuming at update ")[1].split()[0])
    # The last checkpoint may have been on its way to the disk.
    assert 4 <= resumed <= done and (how == signal.SIGKILL or resumed == done)
    assert_same_curve(curve(tmp_path / "broken"), curve(tmp_path / "whole"))


def test_a_finished_run_is_not_run_again(unbroken, capsys):
    before = (unbroken / "run" / "metrics.jsonl").read_bytes()
    config = small_run(unbroken / "run", record_rollouts=str(unbroken / "rollouts"), loss=STOCK)
    assert run_train(config) == 0
    assert "all 6 updates are done already" in capsys.readouterr().err
    assert (unbroken / "run" / "metrics.jsonl").read_bytes() == before


def test_the_folder_of_another_run_is_left_alone(unbroken):
    with pytest.raises(TrainError, match=r"holds a run of another config \(differs in seed, record_rollouts"):
        run_train(small_run(unbroken / "run", seed=3, loss=STOCK))


def test_replaying_other_prompts_is_refused(unbroken, tmp_path):
    with pytest.raises(TrainError, match=r"step_000000\.npz was recorded for other prompts"):
        run_train(small_run(tmp_path / "run", replay_rollouts=str(unbroken / "rollouts"), seed=5))
    with pytest.raises(TrainError, match="cannot read"):
        run_train(small_run(tmp_path / "run2", replay_rollouts=str(tmp_path / "nothing")))


def test_a_prompt_that_is_too_long_is_named(tmp_path):
    rollout = RolloutConfig(2, 4, max_prompt_tokens=3, max_new_tokens=3)
    config = small_run(tmp_path / "run", rollout=rollout, warm_start=None)
    with pytest.raises(TrainError, match=r"max_prompt_tokens=3 is less than the 4 tokens of the prompt '\d\+\d='"):
        run_train(config)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    config = small_run(tmp_path / "run")
    usage, real = shutil.disk_usage(tmp_path), shutil.disk_usage
    calls = []

    def full_later(path):
        calls.append(path)
        return real(path) if len(calls) == 1 else usage._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", full_later)
    with pytest.raises(TrainError, match=r"GB are free and a checkpoint needs .* earlier ones are whole"):
        run_train(config)
    monkeypatch.setattr(shutil, "disk_usage", real)
    assert run_train(config) == 0
    assert run_train(small_run(tmp_path / "whole")) == 0
    assert_same_curve(curve(tmp_path / "run"), curve(tmp_path / "whole"))


def test_of_a_model_with_adapters_the_adapters_alone_need_space(tmp_path, monkeypatch):
    from flax import nnx  # pyright: ignore[reportMissingImports]

    policy = load_policy(ModelConfig(tiny=TinyModel(vocab_size=40_000)), 0)
    model = add_lora(policy.model, LoraConfig(rank=2), make_mesh({"fsdp": 1, "tp": 1}), 0)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam)
    # The head alone has 20 MB.
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    check_free_space(tmp_path, model, optimizer)
    with pytest.raises(TrainError, match="a checkpoint needs"):
        check_free_space(tmp_path, policy.model, nnx.Optimizer(policy.model, optax.adamw(1e-3), wrt=nnx.Param))


def test_without_tunix_nothing_is_begun(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("logitless.integrations.versions.version", missing)
    with pytest.raises(TrainError, match=r"logitless train: tunix is not installed: pip install 'logitless\[train\]'"):
        run_train(small_run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_cut_recording_is_named(unbroken, tmp_path):
    kept = shutil.copytree(unbroken / "rollouts", tmp_path / "rollouts")
    first = kept / "step_000000.npz"
    first.write_bytes(first.read_bytes()[:100])
    share_warm_start(unbroken / "run", tmp_path / "run")
    with pytest.raises(TrainError, match=r"replay_rollouts: cannot read .*step_000000\.npz"):
        run_train(small_run(tmp_path / "run", replay_rollouts=str(kept)))


def test_a_warm_start_that_was_copied_in_part_is_copied_anew(unbroken, tmp_path):
    part = tmp_path / "run" / "warm_start.part"
    part.mkdir(parents=True)
    (part / "cut").touch()
    share_warm_start(unbroken / "run", tmp_path / "run")

    def names(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    assert names(tmp_path / "run" / "warm_start") == names(unbroken / "run" / "warm_start") and not part.exists()


def test_lora_and_a_warm_start_train(tmp_path):
    model = ModelConfig(tiny=small_run("x").model.tiny, lora=LoraConfig(rank=2))
    config = small_run(tmp_path / "run", model=model, steps=2)
    assert run_train(config) == 0
    assert curve(tmp_path / "run")["kl"][1] > 0


def test_over_a_mesh_of_virtual_devices(unbroken, tmp_path):
    replayed = {"replay_rollouts": str(unbroken / "rollouts"), "loss": FUSED, "steps": 2}
    config = small_run(tmp_path / "run", mesh={"fsdp": 4, "tp": 2}, **replayed)
    share_warm_start(unbroken / "run", tmp_path / "run")
    assert run_train(config) == 0
    got, want = curve(tmp_path / "run"), curve(unbroken / "run")
    np.testing.assert_allclose(got["loss"], want["loss"][:2], atol=1e-6)


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(TrainError, match="needs 512 devices; there are 8"):
        run_train(small_run(tmp_path / "run", mesh={"fsdp": 512, "tp": 1}))
