"""DFT: each token's likelihood weighs by its own probability, which carries no gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, fixture

from logitless import cross_entropy, dft_loss, linear_cross_entropy, linear_dft_loss

LABELS = np.array([0, -100, 2, 2, 3, 4])


def _fixture() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states `[6, 3]`, head `[5, 3]`, and softmax probabilities `[6, 5]` by the power of e."""
    f = fixture()
    hidden, head = f["hidden"].reshape(6, 3), f["lm_head"]
    powers = np.e ** (hidden @ head.T)
    return hidden, head, powers / powers.sum(axis=1, keepdims=True)


def _expected(weights: np.ndarray, reduction: str) -> tuple[float, np.ndarray]:
    """The loss and its gradient by the logits: p_target (p - onehot), by hand."""
    _, _, p = _fixture()
    loss, d_logits, divisor = 0.0, np.zeros((6, 5)), 0.0
    for i, label in enumerate(LABELS):
        if label == -100:
            continue
        chance = p[i, label]
        loss -= weights[i] * chance * np.log(chance)
        divisor += weights[i]
        for v in range(5):
            d_logits[i, v] = weights[i] * chance * (p[i, v] - (v == label))
    divisor = divisor if reduction == "mean" else 1.0
    return loss / divisor, d_logits / divisor


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [None, np.array([1.0, 9.0, 0.0, 2.0, 0.5, 3.0])], ids=["plain", "weights"])
def test_value_and_gradients(x64, weights, reduction, implementation):
    hidden, head, _ = _fixture()
    loss, d_logits = _expected(np.ones(6) if weights is None else weights, reduction)
    options: dict[str, Any] = {"reduction": reduction, "weights": weights, "implementation": implementation}

    def linear(h: jax.Array, w: jax.Array) -> jax.Array:
        return linear_dft_loss(h, w, LABELS, layout="VD", **options)

    value, (d_hidden, d_head) = jax.value_and_grad(linear, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    assert_close(value, loss, rtol=1e-12)
    assert_close(d_hidden, d_logits @ head, rtol=1e-10, atol=1e-13, what="d_hidden")
    assert_close(d_head, d_logits.T @ hidden, rtol=1e-10, atol=1e-13, what="d_lm_head")
    z = jnp.asarray(hidden @ head.T)
    value, d_z = jax.value_and_grad(lambda z: dft_loss(z, LABELS, **options))(z)
    assert_close(value, loss, rtol=1e-12)
    assert_close(d_z, d_logits, rtol=1e-10, atol=1e-13, what="d_logits")


def test_token_losses(x64):
    hidden, head, p = _fixture()
    losses = linear_dft_loss(hidden, head, LABELS, layout="VD", reduction="none")
    chances = p[np.arange(6), np.maximum(LABELS, 0)]
    assert_close(losses, np.where(LABELS == -100, 0.0, -chances * np.log(chances)), rtol=1e-12)


def test_a_label_without_probability_weighs_nothing(x64):
    z = jnp.array([[0.0, -jnp.inf, 1.0]])
    value, gradient = jax.value_and_grad(lambda z: dft_loss(z, jnp.array([1])))(z)
    assert_close(value, 0.0, atol=0.0)
    assert_close(gradient, np.zeros((1, 3)), atol=0.0)


def test_nothing_counts():
    h, w = jnp.full((2, 3), jnp.nan), jnp.ones((3, 4))
    value, gradients = jax.value_and_grad(lambda h, w: linear_dft_loss(h, w, jnp.full(2, -100)), (0, 1))(h, w)
    assert_close(value, 0.0, atol=0.0)
    for gradient, like in zip(gradients, (h, w), strict=True):
        assert_close(gradient, np.zeros(like.shape), atol=0.0)


@pytest.mark.parametrize("loss", [linear_cross_entropy, linear_dft_loss])
def test_a_token_of_weight_zero_is_skipped(x64, loss):
    """Also one whose loss would be infinite or whose hidden state is NaN."""
    hidden, head, _ = _fixture()
    wild = hidden.copy()
    wild[3] = np.nan
    weights = np.array([1.0, 1.0, 1.0, 0.0, 2.0, 1.0])

    def f(h: jax.Array, w: jax.Array) -> jax.Array:
        return loss(h, w, LABELS, layout="VD", weights=weights)

    value, gradients = jax.value_and_grad(f, (0, 1))(jnp.asarray(wild), jnp.asarray(head))
    expected, expected_gradients = jax.value_and_grad(f, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    assert_close(value, expected, rtol=1e-14)
    for one, two in zip(gradients, expected_gradients, strict=True):
        assert_close(one, two, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("loss", [cross_entropy, dft_loss])
def test_weight_zero_times_an_infinite_loss(x64, loss):
    z = jnp.array([[0.0, -jnp.inf, 1.0], [0.0, 1.0, 2.0]])
    value = loss(z, jnp.array([1, 0]), weights=jnp.array([0.0, 1.0]))
    assert_close(value, loss(z[1:], jnp.array([0])), rtol=1e-14)


def test_refusals():
    h, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    with pytest.raises(ValueError, match=r"linear_dft_loss: got weights of shape \(3,\), labels of shape \(2,\)"):
        linear_dft_loss(h, w, jnp.zeros(2, jnp.int32), weights=jnp.ones(3))
    with pytest.raises(ValueError, match=r"dft_loss: reduction='average' is unknown; .*did you mean"):
        dft_loss(h, jnp.zeros(2, jnp.int32), reduction="average")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="label_smoothing"):
        dft_loss(h, jnp.zeros(2, jnp.int32), label_smoothing=0.1)  # pyright: ignore[reportCallIssue]
