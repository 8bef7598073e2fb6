"""The only place of the losses that divides by a count."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from logitless._arrays import Array as AnyArray
from logitless._arrays import Scalar
from logitless.losses.sequences import Sequences


def ratio_or_zero(total: Float[Array, "..."], count: Float[Array, "..."]) -> Float[Array, "..."]:
    """`total / count`; 0, with a gradient of 0, where the count is 0."""
    empty = count == 0
    return jnp.where(empty, 0.0, total) / jnp.where(empty, 1.0, count)


def sequence_means(x: Float[Array, "B T"], mask: Bool[Array, "B T"], sequences: Sequences) -> Float[Array, " S"]:
    """Mean of `x` over the masked tokens of each sequence; 0 for a sequence without any."""
    counts = sequences.sum(mask.astype(x.dtype))
    return sequences.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(counts, 1.0)


def aggregate(
    losses: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    sequences: Sequences,
    aggregation: str,
    *,
    total: Scalar | AnyArray | None = None,
    max_completion_length: int | None = None,
) -> Float[Array, ""]:
    """One number from token losses.

    Args:
        losses: token losses; what stands outside the mask is not read.
        mask: True counts.
        sequences: what one sequence is.
        aggregation: as `logitless.losses.policy.policy_loss` lists them.
        total: denominator of `"given_total"`; None for the tokens of this batch.
        max_completion_length: tokens a sequence may have, for `"constant"`.

    Returns:
        The loss; 0 where nothing counts.
    """
    losses = jnp.where(mask, losses, 0.0)
    tokens = jnp.sum(mask, dtype=losses.dtype)
    if aggregation == "token_mean":
        return jnp.sum(losses) / jnp.maximum(tokens, 1.0)
    if aggregation == "given_total":
        count = tokens if total is None else jnp.asarray(total).astype(losses.dtype)
        return jnp.sum(losses) / jnp.where(count == 0, 1.0, count)
    rows = jnp.sum(sequences.present)
    if aggregation == "sequence_mean":
        return ratio_or_zero(jnp.sum(sequence_means(losses, mask, sequences)), rows)
    if aggregation == "sequence_sum":
        return ratio_or_zero(jnp.sum(losses), rows)
    assert aggregation == "constant" and max_completion_length is not None
    return ratio_or_zero(jnp.sum(losses), rows * max_completion_length)
