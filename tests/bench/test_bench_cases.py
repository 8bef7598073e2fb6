"""Configs that are refused, and inputs that hold what they promise."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser

from logitless.bench.cases import ArmConfig, BenchConfig, Case, cases_of, known_head
from logitless.bench.errors import BenchError
from logitless.bench.hidden_states import write_npz
from logitless.bench.inputs import (
    as_arrays,
    device_logprobs,
    load_arrays,
    numpy_logprobs,
    random_arrays,
    sequences_of,
)
from logitless.bench.oracle import plain_loss, share_without_gradient

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
        ({"hidden_size": None}, "needs heads, or both hidden_size and vocab_size"),
        ({"heads": ("gpt2",)}, "not both"),
        ({"heads": ("gpt3",), "hidden_size": None, "vocab_size": None}, "no model named 'gpt3'; nearest known: gpt2"),
        ({"heads": ("granite-3.1-2b",), "hidden_size": None, "vocab_size": None}, "whose logits are scaled"),
        ({"losses": ()}, "losses is empty"),
        ({"losses": ("grpo", "grpo")}, "name each once"),
        ({"differentiate": ()}, "differentiate is empty"),
        ({"zero_advantage_fractions": (-0.5,)}, "zero_advantage_fractions holds -0.5"),
        ({"off_policy": 0.5}, "off_policy is 0.5; give 1, or from 0 to 0.3"),
        ({"arms": (ArmConfig("torch", framework="host"),)}, "those are for module:function"),
        ({"arms": (ArmConfig("a:b", block_sizes={"block_n": 8}),)}, "block_sizes are for named implementations"),
        ({"arms": (ArmConfig("a:b", logits_dtype="float32"),)}, "logits_dtype is for named implementations"),
        ({"arms": (ArmConfig("chunked", logits_dtype="bfloat16"),)}, "rounds to float32 or to dtype, float32"),
        ({"vocab_size": 1}, "must be positive"),
        ({"sequences": 0}, "sequences is 0"),
        ({"inputs": "smollm2"}, "are SmolLM2's own"),
    ],
)
def test_a_config_that_cannot_run_says_why(change, words):
    with pytest.raises(BenchError, match=words):
        dataclasses.replace(GOOD, **change)


BENCHES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name.startswith(("bench_", "quickstart")))


@pytest.mark.parametrize("name", BENCHES)
def test_the_shipped_configs_are_valid(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(BenchConfig)
    parsed = parser.instantiate(parser.parse_object(yaml.safe_load((CONFIGS / name).read_text())))
    config = BenchConfig(**vars(parsed))
    assert config.name == name.removesuffix(".yaml")
    assert config.arms[0].implementation == "reference"


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


def arrays_of(tmp_path, case, noise=1.0):
    arrays = random_arrays(tokens=64, sequences=4, hidden_size=32, vocab_size=500, seed=1, noise=noise)
    write_npz(tmp_path / "inputs.npz", arrays)
    return load_arrays(tmp_path / "inputs.npz", case)


def test_little_noise_between_the_policies_clips_no_token(tmp_path):
    case = Case("random", 64, "float32", "VD", 0.0, 1)
    assert share_without_gradient(as_arrays(arrays_of(tmp_path, case), "float32"), case) > 0
    near = arrays_of(tmp_path, case, noise=0.25)
    assert share_without_gradient(as_arrays(near, "float32"), case) == 0
    _, logprobs = plain_loss(**as_arrays(near, "float32"), layout="VD")
    assert 0.01 < np.abs(np.asarray(logprobs) - near["old_logprobs"]).max() < 0.15


def test_sequences_of_advantage_zero_are_not_masked_and_have_no_gradient(tmp_path):
    case = Case("random", 64, "float32", "VD", 0.0, 1, zero_advantage_fraction=0.5)
    arrays = arrays_of(tmp_path, case, noise=0.25)
    assert (arrays["advantages"] == 0).sum() == 2 and arrays["mask"].all()
    assert share_without_gradient(as_arrays(arrays, "float32"), case) == 0.5
    plain = dataclasses.replace(case, loss="cross_entropy", masked_fraction=0.25)
    assert share_without_gradient(as_arrays(arrays_of(tmp_path, plain), "float32"), plain) == 0.25


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_log_probabilities_of_the_inputs_are_the_same_from_numpy_and_from_the_device(softcap):
    arrays = random_arrays(tokens=16, sequences=2, hidden_size=8, vocab_size=99, seed=0)
    given = (arrays["hidden"].reshape(16, 8), arrays["lm_head"], arrays["targets"].reshape(-1))
    from_numpy = numpy_logprobs(*given, softcap)
    np.testing.assert_allclose(device_logprobs(*given, softcap), from_numpy, rtol=1e-5)
    assert softcap is None or np.abs(from_numpy - numpy_logprobs(*given, None)).max() > 0.1


def test_a_head_by_name_gives_its_sizes_and_its_softcap():
    config = dataclasses.replace(GOOD, heads=("gemma-2-2b",), hidden_size=None, vocab_size=None)
    (case,) = cases_of(config, 24, "grpo", known_head("gemma-2-2b"))
    assert (case.head, case.softcap, case.loss) == ("gemma-2-2b", 30.0, "grpo")


def test_an_advantage_of_zero_makes_no_case_of_cross_entropy():
    config = dataclasses.replace(GOOD, zero_advantage_fractions=(0.0, 0.5), masked_fractions=(0.0, 0.5))
    assert len(cases_of(config, 24, "grpo")) == 4
    assert [case.masked_fraction for case in cases_of(config, 24, "cross_entropy")] == [0.0, 0.5]
