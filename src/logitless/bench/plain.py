"""The losses as they are written without a library: what gains are measured against."""

from typing import Any

import jax
import jax.numpy as jnp


def plain_loss(
    loss: str,
    logits: jax.Array,
    targets: Any,
    old_logprobs: Any,
    advantages: Any,
    mask: Any,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> jax.Array:
    """GRPO or cross-entropy of logits in the model's dtype: cast to float32, log_softmax.

    Args:
        loss: `grpo` or `cross_entropy`.
        logits: `[B, T, V]`.
        targets: token ids, `[B, T]`.
        old_logprobs: `[B, T]`; not read by cross-entropy.
        advantages: `[B]`; not read by cross-entropy.
        mask: bool, `[B, T]`.
        softcap: of the logits, or None.
        logit_scale: multiplies the logits first.
    """
    logits = logits.astype(jnp.float32) * logit_scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    if loss == "cross_entropy":
        return jnp.where(mask, -logprobs, 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)
    ratio, advantage = jnp.exp(logprobs - old_logprobs), advantages[:, None]
    token_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return (jnp.where(mask, token_loss, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1.0)).mean()
