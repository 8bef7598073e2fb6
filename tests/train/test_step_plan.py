"""The update of each arm on a TPU that is not here."""

import importlib.util
from dataclasses import replace

import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

from train_runs import STOCK, small_run

from logitless.bench.records import read_records
from logitless.train.ab_config import AbConfig
from logitless.train.config import LossConfig, ModelConfig, RolloutConfig, TinyModel
from logitless.train.errors import TrainError
from logitless.train.step_plan import run_plan_ab

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler for TPUs is not installed (pip install '.[tpu]')"
)
FUSED = LossConfig(level="hidden", implementation="pallas_tpu", kl_coef=0.5)


def config(results, **changes):
    train = small_run(
        "x",
        model=ModelConfig(tiny=TinyModel(vocab_size=49_152, num_heads=2), dtype="bfloat16"),
        rollout=RolloutConfig(prompts_per_step=16, generations=4, max_prompt_tokens=64, max_new_tokens=192),
        mesh={"fsdp": 4},
    )
    return AbConfig(
        **{"name": "small", "arms": [STOCK, FUSED], "train": train, "results": str(results), "topology": "v6e:2x2"}
        | changes
    )


@pytest.mark.slow
@needs_libtpu
def test_the_update_of_each_arm_is_compiled_for_the_topology(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "cache"))
    assert run_plan_ab(config(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "One update on v6e:2x2, per device, compiled for it and not executed on a TPU" in " ".join(shown.split())
    stock, fused = read_records(tmp_path / "small_plan.jsonl")
    assert not stock["executed"] and fused["arm"] == FUSED.title
    # A quarter of 64 rows of 256 tokens, as stock Tunix makes logits of prompts too; 16 bits each.
    assert stock["plan"]["temp_bytes"] > 16 * 256 * 49_152 * 2 > fused["plan"]["temp_bytes"]
    assert stock["plan"]["collective_bytes"] > 0 and fused["plan"]["collective_bytes"] > 0
    # The schedules of the kernels of a whole update are not read.
    assert stock["plan"]["expected_ms"] > 0 and fused["plan"]["expected_ms"] is None


def test_a_config_without_a_topology(tmp_path):
    with pytest.raises(TrainError, match="names no topology"):
        run_plan_ab(config(tmp_path, topology=None))


def test_a_model_whose_sizes_are_not_known(tmp_path):
    made = config(tmp_path)
    train = replace(made.train, model=replace(made.train.model, source="smollm2"))
    with pytest.raises(TrainError, match="its sizes are not known without its files"):
        run_plan_ab(replace(made, train=train))
