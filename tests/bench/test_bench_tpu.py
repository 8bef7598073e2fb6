"""The bench of the TPU kernels where there is no TPU: what it says, and its every step but those of the TPU itself."""

import dataclasses
from pathlib import Path

import pytest

from logitless.bench import run
from logitless.bench.arms import peer_of
from logitless.bench.cases import ArmConfig, Case
from logitless.bench.hidden_states import write_npz
from logitless.bench.inputs import random_arrays
from logitless.bench.measure import check
from logitless.bench.records import read_records
from logitless.cli import main, read_config

CONFIG = Path(__file__).parents[2] / "configs" / "bench_lm_head_t8192_d4096_v151936.yaml"
ROUNDED = ("baseline, bfloat16 logits", "fused, bfloat16 logits")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def interpreted(arm: ArmConfig) -> ArmConfig:
    if arm.implementation != "pallas_tpu":
        return arm
    # In the simulation what is in VMEM is in memory too: a block must be far smaller than all logits.
    blocks = {"block_n": 16, "block_v": 256}
    return dataclasses.replace(arm, implementation="pallas_tpu_interpret", block_sizes=blocks)


def test_the_config_has_both_logits_of_baseline_and_kernels():
    config = read_config("bench", [str(CONFIG)])
    assert (config.sequences, config.tokens, config.hidden_size, config.vocab_size) == (1, (8192,), 4096, 151_936)
    assert [arm.implementation for arm in config.arms] == ["reference", "plain_jnp", "pallas_tpu", "pallas_tpu"]
    rounds = [arm.label for arm in config.arms if arm.logits_dtype == "bfloat16" or peer_of(arm) is not None]
    assert tuple(rounds) == ROUNDED


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_without_a_tpu_one_line_says_so_and_points_to_plan(platform, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "_platform", lambda config: platform)
    assert main(["bench", str(CONFIG)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"skipped: {CONFIG.stem} needs a TPU") and f"JAX's device here is {platform}" in line
    pointed = line.split("logitless plan ")[1]
    assert (CONFIG.parents[1] / pointed).is_file()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_a_tpu_every_arm_gets_its_numbers(monkeypatch, capsys):
    monkeypatch.setattr(run, "_platform", lambda config: "tpu")
    full = read_config("bench", [str(CONFIG)])
    arms = tuple(interpreted(arm) for arm in full.arms)
    changes = {"arms": arms, "tokens": (64,), "hidden_size": 16, "vocab_size": 1301, "repetitions": 1, "plot": False}
    assert run.run_bench(dataclasses.replace(full, **changes)) == 0
    records = read_records(Path("results") / f"{CONFIG.stem}.jsonl")
    for record in records:
        assert record["numbers"]["time_ms"] > 0 and record["numbers"]["temp_bytes"] > 0
        assert record["in_turns"] is False and record["gates"]["gradcheck"]["oracle_dtype"] == "float32"
        assert record["gates"]["rounds_logits"] is (record["arm"]["name"] in ROUNDED)
        assert record["gates"]["holds_logits"] is record["arm"]["name"].startswith("baseline")
    out = capsys.readouterr().out
    assert "temp memory" in out and all(arm.label in out for arm in full.arms)


@pytest.mark.parametrize("loss", ["grpo", "cross_entropy"])
@pytest.mark.parametrize(("dtype", "layout", "softcap"), [("bfloat16", "DV", None), ("float32", "VD", 30.0)])
def test_plain_jnp_passes_its_check(loss, dtype, layout, softcap, tmp_path):
    arrays = random_arrays(tokens=24, sequences=4, hidden_size=16, vocab_size=301, seed=0, noise=0.25, softcap=softcap)
    write_npz(tmp_path / "inputs.npz", arrays)
    case = Case("random", 24, dtype, layout, 0.25, 0, loss, softcap=softcap)
    answer = check(case, ArmConfig("plain_jnp"), tmp_path / "inputs.npz")
    assert answer["refused"] is None
    assert answer["gates"]["rounds_logits"] is (dtype == "bfloat16") and answer["gates"]["holds_logits"] is True
