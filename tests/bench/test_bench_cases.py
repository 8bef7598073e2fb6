"""Configs that are refused, and inputs that hold what they promise."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser

from logitless.bench.cases import (
    ArmConfig,
    BenchConfig,
    Case,
    load_arrays,
    plain_loss,
    random_arrays,
    sequences_of,
)
from logitless.bench.errors import BenchError
from logitless.bench.hidden_states import write_npz

GOOD = BenchConfig(name="good", arms=(ArmConfig("reference"),), tokens=(24,), hidden_size=8, vocab_size=50)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "../up"}, "name is '../up'"),
        ({"arms": ()}, "arms is empty"),
        ({"arms": (ArmConfig("chunked"), ArmConfig("chunked"))}, "give each its own name"),
        ({"tokens": ()}, r"tokens is \[\]"),
        ({"tokens": (0,)}, r"tokens is \[0\]"),
        ({"tokens": (25,)}, "sequences 8 does not divide"),
        ({"repetitions": 0}, "repetitions is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
        ({"masked_fractions": ()}, "masked_fractions is empty"),
        ({"masked_fractions": (1.0,)}, "masked_fractions holds 1.0"),
        ({"hidden_size": None}, "needs hidden_size and vocab_size"),
        ({"vocab_size": 1}, "must be positive"),
        ({"sequences": 0}, "sequences is 0"),
        ({"inputs": "smollm2"}, "are SmolLM2's own"),
    ],
)
def test_a_config_that_cannot_run_says_why(change, words):
    with pytest.raises(BenchError, match=words):
        dataclasses.replace(GOOD, **change)


@pytest.mark.parametrize("name", ["quickstart.yaml", "bench_chunked_cpu.yaml"])
def test_the_shipped_configs_are_valid(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(BenchConfig)
    parsed = parser.instantiate(parser.parse_object(yaml.safe_load((CONFIGS / name).read_text())))
    config = BenchConfig(**vars(parsed))
    assert config.name == name.removesuffix(".yaml")
    assert config.arms[0] == ArmConfig("reference")


def test_random_inputs_are_peaked_and_their_policy_is_near(tmp_path):
    arrays = random_arrays(tokens=64, sequences=4, hidden_size=32, vocab_size=500, seed=1)
    write_npz(tmp_path / "inputs.npz", arrays)
    case = Case("random", 64, "float32", "VD", 0.25, 1)
    loaded = load_arrays(tmp_path / "inputs.npz", case)
    assert loaded["mask"].sum() == 48
    everything = loaded | {"mask": np.ones((4, 16), bool)}
    loss, logprobs = jax.jit(lambda arrays: plain_loss(**arrays, layout="VD"))(everything)
    probs = np.exp(np.asarray(logprobs))
    assert np.isfinite(float(loss))
    assert (probs > 0.1).any() and (probs < 1e-4).any()
    ratio = np.exp(np.asarray(logprobs) - loaded["old_logprobs"])
    clipped = (ratio < 0.8) | (ratio > 1.2)
    assert 0 < clipped.mean() < 0.5
    # A clip that a last digit decides would make gradients of right implementations differ.
    assert np.abs(ratio - 0.8).min() > 0.02 and np.abs(ratio - 1.2).min() > 0.02


def test_both_layouts_hold_the_same_head(tmp_path):
    write_npz(tmp_path / "inputs.npz", random_arrays(tokens=8, sequences=2, hidden_size=4, vocab_size=30, seed=0))
    heads = [
        load_arrays(tmp_path / "inputs.npz", Case("random", 8, "float32", layout, 0.0, 0))["lm_head"]
        for layout in ("VD", "DV")
    ]
    np.testing.assert_array_equal(heads[0].T, heads[1])
    assert heads[1].flags["C_CONTIGUOUS"]


def test_a_case_takes_the_first_sequences_of_a_larger_file():
    assert sequences_of(128, (160, 64)) == 2
    with pytest.raises(BenchError, match="tokens holds 20480, but the inputs have 10240: 160 x 64"):
        sequences_of(20480, (160, 64))
    with pytest.raises(BenchError, match="come in sequences of 64"):
        sequences_of(100, (160, 64))
