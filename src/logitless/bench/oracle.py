"""The losses in plain jnp, with all logits: the oracle of every check of a bench.

Of what it judges it shares the choice between float32 and float64, and no arithmetic.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from logitless._arrays import accumulator
from logitless.bench.cases import Case


def plain_loss(
    hidden: Any,
    lm_head: Any,
    targets: Any,
    old_logprobs: Any,
    advantages: Any,
    mask: Any,
    *,
    layout: str,
    loss: str = "grpo",
    softcap: float | None = None,
    rounds_logits: bool = False,
) -> tuple[Any, Any]:
    """The loss, and the log-probabilities with 0 at masked tokens."""
    logprobs = plain_logprobs(hidden, lm_head, targets, layout=layout, softcap=softcap, rounds_logits=rounds_logits)
    value = loss_of_logprobs(logprobs, old_logprobs, advantages, mask, loss=loss)
    return value, jnp.where(mask, logprobs, 0.0)


def plain_logprobs(
    hidden: Any,
    lm_head: Any,
    targets: Any,
    *,
    layout: str,
    softcap: float | None = None,
    rounds_logits: bool = False,
) -> Any:
    """Log-probabilities of the targets; `rounds_logits` rounds the logits to the dtype of the hidden states."""
    head = lm_head if layout == "DV" else lm_head.T
    wide = accumulator(hidden.dtype)
    logits = jnp.matmul(hidden, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    if rounds_logits:
        # A pair of casts does not do: XLA on a CPU drops it as excess precision.
        kept = jnp.finfo(hidden.dtype)
        logits = jax.lax.reduce_precision(logits, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def loss_of_logprobs(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any, *, loss: str) -> Any:
    """GRPO with a clip of 0.2, the mean over sequences of the means over their tokens; or the mean of -logprobs."""
    wide = logprobs.dtype
    if loss == "cross_entropy":
        return jnp.where(mask, -logprobs, 0.0).sum() / jnp.maximum(mask.sum().astype(wide), 1)
    ratio = jnp.exp(logprobs - old_logprobs)
    advantage = advantages[:, None]
    token_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    kept = jnp.where(mask, token_loss, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1).astype(wide), 1)
    return kept.mean()


def share_without_gradient(arrays: Mapping[str, Any], case: Case) -> float:
    """Share of the tokens whose log-probability gets a gradient of exactly 0: masked, clipped, or advantage 0."""

    @jax.jit
    def run(hidden, lm_head, targets, old_logprobs, advantages, mask):
        logprobs = plain_logprobs(hidden, lm_head, targets, layout=case.layout, softcap=case.softcap)
        d_logprobs = jax.grad(loss_of_logprobs)(logprobs, old_logprobs, advantages, mask, loss=case.loss)
        return (d_logprobs == 0).mean()

    return float(run(**arrays))
