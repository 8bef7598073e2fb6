"""Ids narrower than the vocabulary, 16-bit heads on the CPU, options given as any iterable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import linear_logprobs, linear_token_stats
from problems import HERE


def _problem(vocab):
    return jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (4, vocab))


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("dtype", "vocab"), [("int8", 300), ("uint8", 300), ("int16", 40_000), ("uint16", 70_000)])
def test_ids_too_narrow_to_hold_v(dtype, vocab, implementation):
    hidden, lm_head = _problem(vocab)
    targets = np.array([1, 2, 100], dtype)
    wide = linear_logprobs(hidden, lm_head, targets.astype(np.int32), implementation=implementation)
    narrow = linear_logprobs(hidden, lm_head, targets, implementation=implementation)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(("dtype", "vocab"), [("int8", 300), ("int16", 70_000), ("int32", 300)])
def test_a_traced_negative_id_gives_nan(dtype, vocab, implementation):
    hidden, lm_head = _problem(vocab)
    run = jax.jit(lambda t: linear_logprobs(hidden, lm_head, t, implementation=implementation))
    logprobs = run(np.array([1, -1, 2], dtype))
    np.testing.assert_array_equal(np.isnan(logprobs), [False, True, False])


@pytest.mark.parametrize("wrt", [(), (0,), (0, 1)], ids=["forward", "hidden", "both"])
@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_head_is_not_copied_whole(dtype, layout, wrt):
    vocab, hidden_size = 50_257, 256
    shape = (vocab, hidden_size) if layout == "VD" else (hidden_size, vocab)
    hidden, head = jax.ShapeDtypeStruct((64, hidden_size), dtype), jax.ShapeDtypeStruct(shape, dtype)
    targets = jax.ShapeDtypeStruct((64,), "int32")

    def f(hidden, head, targets):
        return jnp.sum(linear_logprobs(hidden, head, targets, layout=layout, implementation="chunked"))

    run = jax.jit(jax.grad(f, wrt) if wrt else f)
    analysis = run.lower(hidden, head, targets).compile().memory_analysis()
    assert analysis is not None
    temporary = analysis.temp_size_in_bytes
    assert temporary < 0.25 * 2 * vocab * hidden_size, (
        f"{temporary:,} bytes beside a head of {2 * vocab * hidden_size:,}"
    )


def test_outputs_from_a_generator():
    hidden, lm_head = _problem(9)
    stats = linear_token_stats(hidden, lm_head, np.array([0, 1, 2]), outputs=(name for name in ("lse", "entropy")))
    assert stats.logprobs is None
    assert stats.lse is not None and stats.entropy is not None


@pytest.mark.parametrize("implementation", HERE)
def test_rounded_logits_of_float64_stay_float64(x64, implementation):
    hidden, lm_head = (x.astype(jnp.float64) for x in _problem(9))
    logprobs = linear_logprobs(
        hidden, lm_head, np.array([0, 1, 2]), logits_dtype="bfloat16", implementation=implementation
    )
    assert logprobs.dtype == jnp.float64


def test_an_unknown_logits_dtype():
    hidden, lm_head = _problem(9)
    with pytest.raises(ValueError, match="logits_dtype='bf16x'; it must be a floating-point dtype"):
        linear_logprobs(hidden, lm_head, np.array([0, 1, 2]), logits_dtype="bf16x")


@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_token_of_probability_0_999_keeps_its_gradient(dtype, layout):
    """1 - p is 9e-4: p rounded to bfloat16 before the subtraction would leave 0 or 4e-3 of it."""
    vocab, target = 33, 5
    rest = np.random.default_rng(0).integers(-8, 9, (vocab, 7)) / 8
    first = (np.arange(vocab) == target)[:, None]
    head = jnp.asarray(np.concatenate([first, rest], axis=1), dtype)
    hidden = jnp.asarray(np.array([[10.5] + [0.0] * 7]), dtype)

    def f(hidden, head):
        w = head if layout == "VD" else head.T
        return jnp.sum(linear_logprobs(hidden, w, np.array([target]), layout=layout, implementation="chunked"))

    d_hidden, d_head = jax.grad(f, (0, 1))(hidden, head)
    power = np.exp(10.5)
    missing = (vocab - 1) / (power + vocab - 1)
    d_logits = np.where(np.arange(vocab) == target, missing, -missing / (vocab - 1))
    exact_head = np.concatenate([first, rest], axis=1)
    # One cast of d_logits and one of the result, each half a unit in the last place.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(d_hidden, np.float64)[0], d_logits @ exact_head, rtol=2 * eps, atol=2 * eps * missing
    )
    np.testing.assert_allclose(np.asarray(d_head, np.float64)[:, 0], d_logits * 10.5, rtol=2 * eps + 1e-5)
