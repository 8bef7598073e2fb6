"""Estimators of the divergence from a reference policy, per token: http://joschu.net/blog/kl-approx.html."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def kl_estimate(
    logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"], estimator: str, clamp: float | None = None
) -> Float[Array, "B T"]:
    """Estimate of KL(policy, reference) from sampled tokens, in nats.

    Args:
        logprobs: of the policy.
        ref_logprobs: of the reference.
        estimator: `"k1"`: logprob - ref; `"k2"`: half its square; `"k3"`: exp(ref - logprob) - (ref - logprob) - 1.
        clamp: bound of |ref - logprob|; beyond it the estimate has no gradient. None for none.

    Returns:
        Token estimates, differentiable in both arguments.
    """
    # A token that neither policy can give tells nothing of how far they are apart.
    impossible = (logprobs == -jnp.inf) & (ref_logprobs == -jnp.inf)
    away = jnp.where(impossible, 0.0, ref_logprobs) - jnp.where(impossible, 0.0, logprobs)
    if clamp is not None:
        away = jnp.clip(away, -clamp, clamp)
    if estimator == "k1":
        return -away
    if estimator == "k2":
        return jnp.square(away) / 2
    assert estimator == "k3"
    # expm1 keeps the digits of a small divergence.
    # Infinitely far is infinite, not inf - inf.
    finite = jnp.where(away == jnp.inf, 0.0, away)
    return jnp.where(away == jnp.inf, jnp.inf, jnp.expm1(finite) - finite)
