"""Places where a formula is right and its plain evaluation is not: -inf, ties, zero factors, narrow integers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close
from policy_inputs import KLS, POLICIES, full_f, loss_and_grad

from logitless import group_advantages, grpo_loss, linear_cross_entropy, policy_loss


@pytest.mark.parametrize("old", ["finite", "impossible", "on-policy"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_target_without_probability(x64, policy, old):
    """Loss, gradient and metrics stay numbers, and that token has no gradient."""
    arrays = full_f()
    arrays["logprobs"][0, 1] = -np.inf
    if old == "impossible":
        arrays["old_logprobs"][0, 1] = -np.inf
    elif old == "on-policy":
        arrays["old_logprobs"] = None
    loss, grad, metrics = loss_and_grad(arrays, POLICIES[policy])
    assert np.isfinite(loss), loss
    assert np.all(np.isfinite(grad)), grad
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(metrics)), metrics
    if policy in ("cispo", "vespo", "sequence-token-clip"):
        assert grad[0, 1] == 0


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_divergence_of_a_token_that_neither_policy_gives(x64, kl):
    arrays = full_f(ref_logprobs=np.full((2, 3), -1.0))
    arrays["logprobs"][0, 1] = arrays["ref_logprobs"][0, 1] = -np.inf
    loss, grad, metrics = loss_and_grad(arrays, KLS[kl])
    assert np.isfinite(loss) and np.all(np.isfinite(grad)) and np.isfinite(metrics["kl"][0])


def test_divergence_from_a_finite_reference_is_infinite_not_nan(x64):
    arrays = full_f(ref_logprobs=np.full((2, 3), -1.0))
    arrays["logprobs"][0, 1] = -np.inf
    loss, grad, _ = loss_and_grad(arrays, KLS["k3"])
    assert loss == np.inf
    assert np.all(np.isfinite(grad))


def test_token_form_keeps_the_digits_of_the_sequence_ratio():
    """Log-probabilities of -60 in float32 round a log-ratio of 2e-4 by 4e-6; the clip range of GSPO is 3e-4."""
    logprobs = np.array([[-60.0, -0.5, -17.0, -3.0]])
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": logprobs - np.array([[0.0, 8e-4, 0.0, 0.0]]),
        "advantages": np.ones(1),
        "mask": np.ones((1, 4)),
    }
    metrics = [
        loss_and_grad(arrays, {"ratio_level": level}, dtype="float32")[2] for level in ("sequence", "sequence_token")
    ]
    assert metrics[0]["ratio_min"] == metrics[1]["ratio_min"]
    assert metrics[0]["ratio_max"] == metrics[1]["ratio_max"]


def test_the_whole_gradient_is_kept_at_a_ratio_of_delta(x64):
    arrays = full_f(old_logprobs=None, advantages=np.array([1.0, -0.5]))
    _, grad, _ = loss_and_grad(arrays, {"delta": 1.0})
    assert_close(grad, -np.array([[1.0], [-0.5]]) * np.ones((2, 3)) / 6, rtol=1e-14)


@pytest.mark.parametrize("traced", [False, True])
def test_a_factor_of_zero_switches_the_divergence_off(traced):
    """Also where it would overflow: 100 nats in float32."""
    logprobs, ones = jnp.full((1, 2), -101.0), jnp.ones((1, 2))

    def f(logprobs: jax.Array, kl_coef: Any) -> jax.Array:
        return grpo_loss(logprobs, None, ones[:, 0], ones, kl="k3", kl_coef=kl_coef, ref_logprobs=-ones).loss

    run = jax.jit(jax.value_and_grad(f)) if traced else jax.value_and_grad(f)
    loss, grad = run(logprobs, jnp.array(0.0)) if traced else run(logprobs, 0.0)
    assert_close(loss, -1.0)
    assert_close(grad, -ones / 2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_ignore_index_does_not_wrap_to_a_real_token(dtype):
    """-100 as an unsigned integer is a token of its own."""
    token = int(np.array(-100).astype(dtype)) if dtype != "uint32" else 250
    hidden, head = jnp.ones((3, 4)), jax.random.normal(jax.random.key(0), (4, 70_000))
    labels = np.array([min(token, 69_999), 2, 3], dtype)
    losses = linear_cross_entropy(hidden, head, labels, reduction="none")
    assert_close(losses, linear_cross_entropy(hidden, head, labels.astype(np.int32), reduction="none"), rtol=0, atol=0)
    assert np.all(np.asarray(losses) > 0)


def test_dtypes_that_policy_loss_refuses():
    ones = jnp.ones((1, 2))
    with pytest.raises(TypeError, match="logprobs is int32"):
        policy_loss(ones.astype(jnp.int32), None, ones[:, 0], ones)
    with pytest.raises(TypeError, match="segment_ids is float32"):
        policy_loss(ones, None, ones, ones, segment_ids=ones)


def test_epsilon_of_advantages():
    with pytest.raises(ValueError, match="epsilon=nan"):
        group_advantages(jnp.ones((1, 2)), epsilon=float("nan"))
    rewards = jnp.array([[1.0, 0.0]])
    assert_close(jax.jit(lambda e: group_advantages(rewards, epsilon=e))(1e-4), group_advantages(rewards))
