"""Tunix's GRPO options as those of `policy_loss`, and the metrics that Tunix expects beside the loss."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from logitless.losses.aggregate import aggregate, ratio_or_zero
from logitless.losses.policy import LossOutput, policy_loss
from logitless.losses.policy_options import CommonOptions
from logitless.losses.policy_presets import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, luspo_loss
from logitless.losses.policy_presets_soft import cispo_loss, sapo_loss, vespo_loss
from logitless.losses.sequences import find_sequences

PRESETS: Mapping[str, Callable[..., LossOutput]] = {
    "grpo": grpo_loss,
    "bnpo": bnpo_loss,
    "dr_grpo": dr_grpo_loss,
    "dapo": dapo_loss,
    "gspo": gspo_loss,
    "luspo": luspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "vespo": vespo_loss,
    "policy": policy_loss,
}
"""The losses that `use_logitless(loss=...)` knows by name; "policy" takes every option of `policy_loss`."""

KL_OF_TUNIX = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}

METRICS = (
    "kl",
    "pg_clipfrac",
    "ppo_kl",
    "approx_kl",
    "is_ratio/mean",
    "is_ratio/min",
    "is_ratio/max",
    "entropy",
)
"""What the loss gives beside its value, by the names that Tunix logs."""

RATIO_LEVELS = {"grpo": "token", "gspo-token": "sequence_token"}

_AGGREGATIONS = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean",
    "sequence-mean-token-scale": "constant",
    "seq-mean-token-sum": "sequence_sum",
    "sequence-mean-token-sum-norm": "sequence_sum",
}


def options_of_preset(name: str) -> tuple[str, ...]:
    """Options that a loss of `PRESETS` takes beside log-probabilities, advantages and mask."""
    preset = signature(PRESETS[name]).parameters
    named = [key for key, one in preset.items() if one.kind is one.KEYWORD_ONLY]
    return tuple(dict.fromkeys([*named, *CommonOptions.__annotations__]))


def options_of_tunix(config: Any, max_completion_length: int, has_reference: bool) -> dict[str, Any]:
    """The options of `policy_loss` that a `GRPOConfig` of Tunix means.

    Args:
        config: a `GRPOConfig`, or anything with its fields.
        max_completion_length: T of the batch.
        has_reference: whether reference log-probabilities are there; the divergence is logged then, whatever `beta`.

    Raises:
        NotImplementedError: a mode or a loss that is not known here.
        ValueError: `beta` without reference log-probabilities.
    """
    mode = config.loss_agg_mode
    if mode not in _AGGREGATIONS:
        raise NotImplementedError(
            f"use_logitless: loss_agg_mode={mode!r} is not known; known are {', '.join(map(repr, _AGGREGATIONS))}"
        )
    own = getattr(config, "policy_loss_fn", "grpo")
    if own != "grpo":
        raise NotImplementedError(
            f"use_logitless: policy_loss_fn={own!r} is a loss of your own, which would be replaced; give loss=, one of "
            f"{', '.join(PRESETS)}"
        )
    if config.loss_algo not in RATIO_LEVELS:
        raise NotImplementedError(
            f"use_logitless: loss_algo={config.loss_algo!r} is not known; known are {', '.join(RATIO_LEVELS)}"
        )
    options: dict[str, Any] = {
        "aggregation": _AGGREGATIONS[mode],
        "ratio_level": RATIO_LEVELS[config.loss_algo],
        "clip_low": config.epsilon,
        "clip_high": getattr(config, "epsilon_high", config.epsilon),
        "delta": getattr(config, "epsilon_c", None),
    }
    if options["aggregation"] == "constant":
        options["max_completion_length"] = max_completion_length
    if has_reference:
        options |= divergence_of_tunix(config)
    elif config.beta:
        raise ValueError(
            f"use_logitless: beta={config.beta} needs ref_per_token_logps in the train example; it has None"
        )
    return options


def divergence_of_tunix(config: Any) -> dict[str, Any]:
    """The estimator, its factor and its clamp."""
    if config.kl_loss_mode not in KL_OF_TUNIX:
        raise NotImplementedError(
            f"use_logitless: kl_loss_mode={config.kl_loss_mode!r} is not known; known are {', '.join(KL_OF_TUNIX)}"
        )
    clamp = getattr(config, "kl_clamp_value", None)
    return {"kl": KL_OF_TUNIX[config.kl_loss_mode], "kl_coef": config.beta or 0.0, "kl_clamp": clamp}


def per_filled_row(loss: jax.Array, mask: jax.Array, aggregation: str) -> jax.Array:
    """A mean over all rows as Tunix takes it: over those with a token, of which an empty completion has none."""
    if aggregation == "token_mean":
        return loss
    filled = jnp.maximum(jnp.sum(jnp.any(mask != 0, axis=-1)), 1)
    return loss * (mask.shape[0] / filled.astype(loss.dtype))


def tunix_metrics(out: LossOutput, logprobs: jax.Array, old: jax.Array | None, mask: jax.Array) -> dict[str, jax.Array]:
    """The numbers that Tunix's learners log, under the names of its own loss; means over the tokens that count."""
    means = {name: ratio_or_zero(*value) if isinstance(value, tuple) else value for name, value in out.metrics.items()}
    zero = jnp.zeros((), out.loss.dtype)
    gap = jnp.zeros_like(logprobs) if old is None else old - stop_gradient(logprobs)
    return {
        "kl": means.get("kl", zero),
        "pg_clipfrac": means["clip_low"] + means["clip_high"],
        "ppo_kl": masked_mean(gap, mask),
        "approx_kl": means["approx_kl"],
        "is_ratio/mean": means["ratio_mean"],
        "is_ratio/min": means["ratio_min"],
        "is_ratio/max": means["ratio_max"],
    }


def entropy_of_tunix(entropy: jax.Array, mask: jax.Array, options: Mapping[str, Any]) -> jax.Array:
    """The mean entropy as Tunix logs it: aggregated as the loss is."""
    mode = options["aggregation"]
    sequences = find_sequences((mask.shape[0], mask.shape[1]), None, entropy.dtype)
    length = options.get("max_completion_length")
    value = aggregate(entropy, mask != 0, sequences, mode, max_completion_length=length)
    return per_filled_row(value, mask, mode)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the tokens that count, 0 where none does."""
    counts = mask != 0
    return ratio_or_zero(jnp.sum(jnp.where(counts, x, 0)), jnp.sum(counts).astype(x.dtype))
