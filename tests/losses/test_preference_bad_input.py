"""What the preference losses refuse, and what they say."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from preference_inputs import ARRAYS, LOSSES, PAIR, B

from logitless.losses.preference import sequence_logprobs


def _refusal(error: type[Exception], name: str, *args: Any, **options: Any) -> str:
    call = LOSSES[name].call
    # The check of annotations, which only tests have, would speak first.
    with pytest.raises(error) as raised:
        getattr(call, "__wrapped__", call)(*args, **options)
    message = str(raised.value)
    assert message.startswith(f"{name}_loss: "), message
    return message


def _inputs(name: str, **changes: Any) -> list[Any]:
    return [changes.get(n, ARRAYS[n]) for n in LOSSES[name].takes]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *[(name, "beta", x) for name in LOSSES for x in (0.0, -0.1, math.inf, math.nan)],
        *[(name, "label_smoothing", x) for name in ("dpo", "simpo", "cpo") for x in (-0.1, 0.5, math.nan)],
        ("simpo", "gamma", -0.5),
        ("cpo", "nll_coef", -1.0),
        ("kto", "desirable_weight", -1.0),
        ("kto", "undesirable_weight", -1.0),
    ],
)
def test_numbers_out_of_range(name, option, value):
    message = _refusal(ValueError, name, *_inputs(name), **{option: value})
    assert f"{option}={value}; it must be " in message


@pytest.mark.parametrize("name", LOSSES)
def test_a_number_with_axes(name):
    message = _refusal(ValueError, name, *_inputs(name), beta=jnp.ones(B))
    assert "beta of shape (5,)" in message and "one number" in message


@pytest.mark.parametrize("kind", ["ipo", "hinge"])
def test_102_smoothing_of_a_kind_without_it(kind):
    message = _refusal(ValueError, "dpo", *_inputs("dpo"), kind=kind, label_smoothing=0.1)
    assert "label_smoothing=0.1" in message and f"kind={kind!r}" in message


def test_102_an_unknown_kind_or_option():
    message = _refusal(ValueError, "dpo", *_inputs("dpo"), kind="sigmoyd")
    assert "kind='sigmoyd'" in message and "did you mean 'sigmoid'" in message
    with pytest.raises(TypeError, match="label_smoothing"):
        LOSSES["kto"].call(*_inputs("kto"), label_smoothing=0.1)
    with pytest.raises(TypeError, match="gamma"):
        LOSSES["dpo"].call(*_inputs("dpo"), gamma=0.1)


def test_a_likelihood_that_is_missing():
    message = _refusal(ValueError, "cpo", *_inputs("cpo", chosen_nll=None))
    assert "nll_coef=1.0" in message and "chosen_nll=None" in message


@pytest.mark.parametrize(
    ("name", "changed", "shape", "beside"),
    [
        *[(name, n, (4,), "(5,)") for name, loss in LOSSES.items() for n in loss.takes[1:2]],
        ("dpo", "ref_rejected", (1,), "(5,)"),
        ("dpo", "ref_chosen", (5, 1), "(5,)"),
        ("dpo", "chosen", (), "(5,)"),
        ("cpo", "chosen_nll", (1,), "chosen of shape (5,)"),
        ("orpo", "chosen_nll", (4,), "chosen of shape (5,)"),
        ("kto", "desirable", (4,), "logprobs of shape (5,)"),
        ("kto", "kl", (5,), "one number"),
    ],
)
def test_shapes_that_differ(name, changed, shape, beside):
    message = _refusal(ValueError, name, *_inputs(name, **{changed: jnp.zeros(shape)}))
    assert f"{changed} of shape {shape}" in message and beside in message


@pytest.mark.parametrize("name", LOSSES)
def test_masks_of_another_shape_or_kind(name):
    message = _refusal(ValueError, name, *_inputs(name), mask=np.ones((B, 3)))
    assert f"mask of shape (5, 3), {LOSSES[name].takes[0]} of shape (5,)" in message
    message = _refusal(TypeError, name, *_inputs(name), mask=np.array(["yes"] * B))
    assert "mask is <U3" in message


def test_tokens_instead_of_sequences():
    tokens = {n: np.ones((B, 3)) for n in PAIR}
    message = _refusal(ValueError, "simpo", *_inputs("simpo", **tokens))
    assert "chosen of shape (5, 3)" in message and "sequence_logprobs" in message


def test_desirable_of_words():
    message = _refusal(TypeError, "kto", *_inputs("kto", desirable=np.array(["yes"] * B)))
    assert "desirable is <U3" in message


@pytest.mark.parametrize("shapes", [((2, 3), (2, 2)), ((3,), (3,)), ((2, 3), (3,)), ((1, 2, 3), (1, 2, 3))])
def test_sequence_logprobs_of_other_shapes(shapes):
    with pytest.raises(ValueError) as error:
        sequence_logprobs(jnp.ones(shapes[0]), jnp.ones(shapes[1]))
    assert f"logprobs of shape {shapes[0]}, mask of shape {shapes[1]}; both must be [B, T]" in str(error.value)


def test_sequence_logprobs_of_a_mask_of_words():
    with pytest.raises(TypeError, match="sequence_logprobs: mask is <U3"):
        sequence_logprobs(jnp.ones((1, 2)), np.array([["yes", "yes"]]))
