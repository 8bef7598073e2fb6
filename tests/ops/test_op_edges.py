"""Ids narrower than the vocabulary, 16-bit heads on the CPU, options given as any iterable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import linear_logprobs, linear_token_stats
from logitless.ops.api import IMPLEMENTATIONS


def _problem(vocab):
    return jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (4, vocab))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "vocab"), [("int8", 300), ("uint8", 300), ("int16", 40_000), ("uint16", 70_000)])
def test_ids_too_narrow_to_hold_v(dtype, vocab, implementation):
    hidden, lm_head = _problem(vocab)
    targets = np.array([1, 2, 100], dtype)
    wide = linear_logprobs(hidden, lm_head, targets.astype(np.int32), implementation=implementation)
    narrow = linear_logprobs(hidden, lm_head, targets, implementation=implementation)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
    temporary = run.lower(hidden, head, targets).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.25 * 2 * vocab * hidden_size, (
        f"{temporary:,} bytes beside a head of {2 * vocab * hidden_size:,}"
    )


def test_outputs_from_a_generator():
    hidden, lm_head = _problem(9)
    stats = linear_token_stats(hidden, lm_head, np.array([0, 1, 2]), outputs=(name for name in ("lse", "entropy")))
    assert stats.logprobs is None
    assert stats.lse is not None and stats.entropy is not None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
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
