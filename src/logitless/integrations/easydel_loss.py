"""EasyDeL's causal loss: its shift, weights, smoothing, z-loss and factor, from hidden states."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from logitless.integrations.easydel_head import head_arguments
from logitless.losses.aggregate import ratio_or_zero
from logitless.ops.api import linear_token_stats


def causal_loss(
    module: Any,
    hidden: jax.Array,
    labels: jax.Array,
    config: Any,
    batch: Mapping[str, Any],
    loss_kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """What `causal_lm_loss_chunked_lm_head` gives, by its rules for shift, weights and factor."""
    from easydel.infra import loss_utils  # pyright: ignore[reportMissingImports] - installed by those who use it

    config = loss_utils.LossConfig() if config is None else config
    _check_config(config, loss_kwargs)
    attention_mask = batch.get("attention_mask")
    weights = batch.get("decoder_loss_weights")
    if config.shift_tokens:
        if weights is not None and weights.shape == labels.shape:
            weights = weights[:, 1:]
        hidden, labels = hidden[:, :-1], labels[:, 1:]
        attention_mask = None if attention_mask is None else attention_mask[:, 1:]
    if weights is None:
        weights = labels != config.ignore_index if attention_mask is None else attention_mask
    weights = jnp.asarray(weights).astype(jnp.float32)
    targets = {"decoder_target_tokens": labels, **batch, "decoder_loss_weights": weights}
    factor, _ = loss_utils.get_factor_and_weight(config.loss_normalizing_factor, targets)

    hidden, lm_head, head = head_arguments(module, hidden, asked_by="use_logitless")
    vocab = lm_head.shape[1 if head["layout"] == "DV" else 0]
    known = (labels >= 0) & (labels < vocab)
    outputs = ("logprobs", "lse", "mean_logits") if config.label_smoothing else ("logprobs", "lse")
    stats = linear_token_stats(
        hidden, lm_head, jnp.where(known, labels, 0), mask=weights != 0, outputs=outputs, **head, **options
    )
    assert stats.logprobs is not None
    assert stats.lse is not None
    # Of a label outside the vocabulary EasyDeL's one-hot has no 1: such a token counts, at a cross-entropy of 0.
    losses = jnp.where(known, -stats.logprobs, 0)
    if stats.mean_logits is not None:
        losses = _smoothed(losses, stats.lse - stats.mean_logits, config.label_smoothing, vocab)
    z_losses = config.z_loss * stats.lse**2
    total, z_total = jnp.sum(weights * (losses + z_losses)), jnp.sum(weights * z_losses)
    if factor is not None:
        factor = jnp.asarray(factor, total.dtype)
        total, z_total = ratio_or_zero(total, factor), ratio_or_zero(z_total, factor)
    items = loss_kwargs.get("num_items_in_batch", batch.get("num_items_in_batch"))
    if items is not None:
        # As EasyDeL has it, the z-loss that is only reported is not divided once more.
        total = ratio_or_zero(total, jnp.asarray(items, total.dtype))
    return loss_utils.LossMetrics(loss=total, z_loss=z_total, weight_sum=jnp.sum(weights), accuracy=None)


def _smoothed(nll: jax.Array, mean_nll: jax.Array, smoothing: float, vocab: int) -> jax.Array:
    """EasyDeL spreads the smoothing over the V - 1 other columns, and takes the entropy of the targets off."""
    other = smoothing / (vocab - 1)
    entropy = -((1 - smoothing) * jnp.log(1 - smoothing) + smoothing * jnp.log(other + 1e-20))
    return (1 - smoothing - other) * nll + other * vocab * mean_nll - entropy


def _check_config(config: Any, loss_kwargs: Mapping[str, Any]) -> None:
    factor = getattr(config.loss_normalizing_factor, "name", config.loss_normalizing_factor)
    refused = {
        "reduction": config.reduction is not None,
        "divide_weight_sum": config.divide_weight_sum,
        "compute_dtype": config.compute_dtype == "bf16",
        "loss_normalizing_factor": factor in ("NO_WEIGHT_NUM_REAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"),
    }
    for option in (name for name, is_refused in refused.items() if is_refused):
        raise NotImplementedError(
            f"use_logitless: LossConfig.{option}={getattr(config, option)!r} is not supported; leave it at its "
            "default, or keep EasyDeL's own loss for it"
        )
    unknown = set(loss_kwargs) - {"num_items_in_batch", "token_chunk_size"}
    if unknown:
        raise NotImplementedError(
            f"use_logitless: loss_kwargs holds {', '.join(sorted(unknown))}; known are num_items_in_batch and "
            "token_chunk_size, which has no meaning here"
        )
