"""Cross-entropy from token statistics: smoothing, z-loss, weights, reduction; DFT. Users call them through `linear`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from logitless._arrays import FloatArray, check_name, is_concrete, shape_error
from logitless.losses.aggregate import ratio_or_zero

if TYPE_CHECKING:
    Reduction = Literal["mean", "sum", "none"]
else:
    # The door refuses an unknown name, and names the nearest one.
    Reduction = str
REDUCTIONS = ("mean", "sum", "none")


def check_cross_entropy(
    name: str, labels: Array, weights: FloatArray | None, label_smoothing: float, z_loss: float, reduction: str
) -> None:
    """Raises ValueError for weights of another shape, a number out of range, an unknown reduction."""
    check_name(name, "reduction", reduction, REDUCTIONS)
    if weights is not None and jnp.shape(weights) != jnp.shape(labels):
        raise shape_error(name, {"weights": weights, "labels": labels}, "weights are per token, of the shape of labels")
    if is_concrete(label_smoothing) and not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing={label_smoothing}; it must be at least 0 and at most 1")
    if is_concrete(z_loss) and not z_loss >= 0:
        raise ValueError(f"{name}: z_loss={z_loss}; it must be at least 0")


def needed_stats(label_smoothing: float, z_loss: float) -> Sequence[Literal["logprobs", "lse", "mean_logits"]]:
    """The token statistics that the options read."""
    smooth = not is_concrete(label_smoothing) or label_smoothing != 0
    regular = not is_concrete(z_loss) or z_loss != 0
    return ("logprobs", *(("lse",) if smooth or regular else ()), *(("mean_logits",) if smooth else ()))


def cross_entropy_of_stats(
    logprobs: Float[Array, "..."],
    lse: Float[Array, "..."] | None,
    mean_logits: Float[Array, "..."] | None,
    valid: Bool[Array, "..."],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Cross-entropy of labels from their log-probabilities.

    Args:
        logprobs: of the labels, in nats.
        lse: log-sum-exp of the logits; None where neither smoothing nor z-loss is on.
        mean_logits: mean logit over the true vocabulary; None without smoothing.
        valid: tokens that count.
        label_smoothing: s in (1 - s) nll + s (lse - mean_logits).
        z_loss: factor of lse^2.
        weights: per token; what stands at tokens that do not count is not read.
        reduction: `"mean"` divides by the weights of the valid tokens, 0 where they sum to 0.

    Returns:
        A number, or token losses for `"none"`.
    """
    losses = -logprobs
    if mean_logits is not None:
        assert lse is not None
        losses = (1 - label_smoothing) * losses + label_smoothing * (lse - mean_logits)
    if lse is not None:
        losses = losses + z_loss * jnp.square(lse)
    return reduce_losses(losses, valid, weights, reduction)


def nll_of_logprobs(
    logprobs: Float[Array, "..."],
    valid: Bool[Array, "..."],
    *,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """`cross_entropy_of_stats` without smoothing and z-loss."""
    return reduce_losses(-logprobs, valid, weights, reduction)


def dft_of_logprobs(
    logprobs: Float[Array, "..."],
    valid: Bool[Array, "..."],
    *,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Cross-entropy in which each token weighs by the probability that the model gives it, detached.

    Args:
        logprobs: of the labels, in nats.
        valid: tokens that count.
        weights: per token, beside the probability.
        reduction: as `cross_entropy_of_stats`.

    Returns:
        A number, or token losses for `"none"`.
    """
    # A label without probability weighs nothing: 0, where 0 times -inf would be NaN.
    nll = jnp.where(logprobs == -jnp.inf, 0.0, -logprobs)
    return reduce_losses(jnp.exp(stop_gradient(logprobs)) * nll, valid, weights, reduction)


def reduce_losses(
    losses: Float[Array, "..."], valid: Bool[Array, "..."], weights: FloatArray | None, reduction: Reduction
) -> Float[Array, "..."]:
    """Token losses, weighed, as the reduction wants them; what stands outside `valid` is not read."""
    count = valid.astype(losses.dtype)
    losses = jnp.where(valid, losses, 0.0)
    if weights is not None:
        count = jnp.where(valid, jnp.asarray(weights).astype(losses.dtype), 0.0)
        losses = losses * count
    if reduction == "none":
        return losses
    return jnp.sum(losses) if reduction == "sum" else ratio_or_zero(jnp.sum(losses), jnp.sum(count))


def tokens_that_count(labels: Array, weights: FloatArray | None, ignore_index: int) -> Bool[Array, "..."]:
    """Neither ignored nor of weight 0: the rest is skipped, whatever stands there."""
    info = jnp.iinfo(labels.dtype)
    # Compared as it is, an index that the labels' dtype cannot hold would wrap to a real token.
    valid = labels != ignore_index if info.min <= ignore_index <= info.max else jnp.ones(labels.shape, bool)
    return valid if weights is None else valid & (jnp.asarray(weights) != 0)
