"""The composition behind the GRPO family: ratio, surrogate, KL, aggregate. The presets are in `policy_presets`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from logitless._arrays import FloatArray, IntArray, MaskArray, Scalar, accumulator, as_mask
from logitless.losses.aggregate import aggregate, sequence_means
from logitless.losses.kl import kl_estimate
from logitless.losses.policy_options import (
    Aggregation,
    KLName,
    Level,
    Mode,
    RatioLevel,
    Surrogate,
    check_options,
    check_shapes,
    is_off,
)
from logitless.losses.sequences import Sequences, find_sequences

LARGEST_LOG_RATIO = 80.0
SMALLEST_WEIGHT = 1e-8

Metrics = dict[str, Array | tuple[Array, Array]]


class LossOutput(NamedTuple):
    """A loss and what to log with it; `jax.value_and_grad(f, has_aux=True)` takes it as it is.

    Attributes:
        loss: the scalar to differentiate.
        metrics: `(sum, count)` of each quantity, and `ratio_min` and `ratio_max` as numbers; none carries a gradient.
    """

    loss: Float[Array, ""]
    metrics: Metrics


class _Tokens(NamedTuple):
    """Everything per token, 0 outside the mask, detached but for `logprobs` and `entropy`."""

    logprobs: Float[Array, "B T"]
    old: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    mask: Bool[Array, "B T"]
    ref: Float[Array, "B T"] | None
    rollout_gap: Float[Array, "B T"] | None
    entropy: Float[Array, "B T"] | None


class _Bounds(NamedTuple):
    """What counts as clipped, for the metrics; None where a surrogate clips nothing."""

    low: Scalar | None
    high: Scalar | None


def policy_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    ratio_level: RatioLevel = "token",
    surrogate: Surrogate = "clip",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    delta: Scalar | None = None,
    cispo_max: Scalar = 5.0,
    tau_positive: Scalar = 1.0,
    tau_negative: Scalar = 1.05,
    kl: KLName = "none",
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    kl_bias_correction: bool = False,
    aggregation: Aggregation = "sequence_mean",
    total: Scalar | None = None,
    max_completion_length: int | None = None,
    rollout_logprobs: FloatArray | None = None,
    rollout_level: Level = "token",
    rollout_mode: Mode = "truncate",
    rollout_max: Scalar = 2.0,
    rollout_min: Scalar = 0.0,
    entropy: FloatArray | None = None,
    entropy_coef: Scalar = 0.0,
    top_entropy_quantile: float | None = None,
    kl_clamp: float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    segment_ids: IntArray | None = None,
) -> LossOutput:
    """A policy-gradient loss of per-token log-probabilities, composed from named parts.

    Equal to (surrogate "clip", token level; m the mask)
        r = exp(logprobs - old_logprobs); l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k
        loss = mean_i(sum_t(m * l) / max(sum_t(m), 1))

    What stands outside the mask is never read: NaN, inf or 1e4 there changes nothing. Where nothing counts the loss and
    its gradient are 0. `logprobs` and `entropy` are differentiated, everything else is detached.

    Args:
        logprobs: of the policy, `[B, T]`, from `linear_logprobs` or `token_logprobs`.
        old_logprobs: of the policy that sampled; None means on-policy: ratio 1 in value, gradient kept.
        advantages: `[B]`, one a sequence, or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        ratio_level: `"token"`; `"sequence"`: the exponential of the sequence's mean log-ratio, at each of its tokens
            (GSPO); `"sequence_token"`: that value with the gradient of the token's own log-probability (GSPO-token).
        surrogate: with r the ratio and A the advantage, `"clip"`: -min(min(r, delta) A, clip(r) A); `"none"`: -r A;
            `"cispo"`: -min(r, cispo_max) A logprob, r detached; `"sapo"`: -A sigmoid(tau (r - 1)) 4 / tau; `"vespo"`:
            -exp(lam + k s - lam exp(s)) A logprob, s the sequence's sum of log-ratios and log weights, detached.
        clip_low: distance below 1, from 0 to 1.
        clip_high: distance above 1, at least 0.
        delta: upper bound of the ratio for both signs of A (two-sided clipping), or None.
        cispo_max: the bound itself, not a distance from 1.
        tau_positive: temperature of sapo where A > 0.
        tau_negative: temperature of sapo elsewhere.
        kl: estimator of the divergence from the reference: `"none"`, `"k1"`, `"k2"`, `"k3"`.
        kl_coef: factor of the divergence.
        ref_logprobs: of the reference policy, `[B, T]`.
        kl_bias_correction: multiplies the divergence by the loss's own ratio, before delta, differentiable.
        aggregation: `"sequence_mean"`: mean of the sequences' token means; `"token_mean"`: over all tokens;
            `"constant"`: sum / (B max_completion_length); `"given_total"`: sum / total; `"sequence_sum"`: mean of the
            sequences' sums. Fully masked rows count as sequences.
        total: token count of `"given_total"`, for micro-batches that must add up; None: this batch's. 0 means 1.
        max_completion_length: tokens that a sequence may have, for `"constant"`.
        rollout_logprobs: of the engine that sampled, `[B, T]`; its mismatch to old_logprobs weighs the policy term. NaN
            (missing) weighs 1.
        rollout_level: `"token"`, or `"sequence"`: the exponential of the summed mismatch.
        rollout_mode: `"truncate"` at rollout_max, or `"mask"`: 0 outside [rollout_min, rollout_max].
        rollout_max: upper bound of the weights.
        rollout_min: lower bound of the weights, for `"mask"`.
        entropy: `[B, T]`, in nats, from `linear_token_stats`.
        entropy_coef: factor of the entropy bonus.
        top_entropy_quantile: keeps the policy term of this share of tokens, those of highest entropy.
        kl_clamp: bound of |ref - logprob| in the divergence; off by default, since it kills the gradient beyond.
        vespo_k_pos: exponent of vespo's weight where A >= 0.
        vespo_lambda_pos: rate of vespo's weight where A >= 0.
        vespo_k_neg: exponent where A < 0.
        vespo_lambda_neg: rate where A < 0.
        segment_ids: `[B, T]`, packed rows: each run of one non-zero id is a sequence; 0 is padding.

    Returns:
        `LossOutput`, float32 (float64 for float64 log-probabilities). Metrics, as (sum, count) over tokens: `clip_low`,
        `clip_high`, `clip_region`, `approx_kl` (k3 of old against new), `ratio_mean`, and where their inputs are given
        `kl`, `entropy`, `rollout_mismatch`; as numbers `ratio_min` and `ratio_max`.

    Raises:
        ValueError: shapes that differ, an unknown name, a number out of range, options that exclude each other.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> old = jnp.log(jnp.array([[0.5, 0.5]]))
        >>> out = policy_loss(jnp.log(jnp.array([[0.9, 0.5]])), old, jnp.array([1.0]), jnp.array([[1, 1]]))
        >>> round(float(out.loss), 4)  # -(1.2 + 1.0) / 2
        -1.1

    Reference: https://arxiv.org/abs/2402.03300 (GRPO). Departures: named in each preset.
    """
    options = dict(locals())
    check_options("policy_loss", options)
    tokens, sequences = _prepare(**{name: options[name] for name in _ARRAYS})
    token_log_ratio = _token_log_ratio(tokens)
    log_ratio = _log_ratio(token_log_ratio, tokens, sequences, ratio_level)
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_LOG_RATIO))
    weights = _rollout_weights(tokens, sequences, rollout_level, rollout_mode, rollout_max, rollout_min)
    # A target without probability has no gradient to give, and weight 0 times -inf is no number.
    likelihood = jnp.where(tokens.logprobs == -jnp.inf, 0.0, tokens.logprobs)
    bounds = _Bounds(None, None)
    if surrogate == "clip":
        bounds = _Bounds(1.0 - clip_low, 1.0 + clip_high)
        losses = _clip(ratio, tokens.advantages, bounds, delta)
    elif surrogate == "none":
        losses = -ratio * tokens.advantages
    elif surrogate == "cispo":
        bounds = _Bounds(None, cispo_max)
        losses = -stop_gradient(jnp.minimum(ratio, cispo_max)) * tokens.advantages * likelihood
    elif surrogate == "sapo":
        tau = jnp.where(tokens.advantages > 0, tau_positive, tau_negative).astype(ratio.dtype)
        losses = -tokens.advantages * jax.nn.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    else:
        positive, negative = (vespo_k_pos, vespo_lambda_pos), (vespo_k_neg, vespo_lambda_neg)
        importance = _vespo_weight(token_log_ratio, tokens, sequences, weights, positive, negative)
        losses = -importance * tokens.advantages * likelihood
    if top_entropy_quantile is not None:
        losses = jnp.where(_top_entropy(tokens, top_entropy_quantile), losses, 0.0)
    if weights is not None and surrogate != "vespo":
        losses = losses * weights
    if tokens.ref is not None and kl != "none" and not is_off(kl_coef):
        # A traced coefficient may be 0, and 0 times a divergence that overflows is no number.
        ref = jnp.where(jnp.asarray(kl_coef) == 0, stop_gradient(tokens.logprobs), tokens.ref)
        divergence = kl_estimate(tokens.logprobs, ref, kl, kl_clamp)
        losses = losses + kl_coef * (divergence * ratio if kl_bias_correction else divergence)
    if tokens.entropy is not None:
        losses = losses - entropy_coef * tokens.entropy
    loss = aggregate(
        losses, tokens.mask, sequences, aggregation, total=total, max_completion_length=max_completion_length
    )
    return LossOutput(loss, _metrics(tokens, token_log_ratio, ratio, bounds, "k3" if kl == "none" else kl))


_ARRAYS = (
    "logprobs",
    "old_logprobs",
    "advantages",
    "mask",
    "ref_logprobs",
    "rollout_logprobs",
    "entropy",
    "segment_ids",
)


def _prepare(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    ref_logprobs: FloatArray | None,
    rollout_logprobs: FloatArray | None,
    entropy: FloatArray | None,
    segment_ids: IntArray | None,
) -> tuple[_Tokens, Sequences]:
    """Checks shapes, and selects away whatever stands outside the mask before anything is computed from it."""
    name = "policy_loss"
    given = {
        "old_logprobs": old_logprobs,
        "mask": mask,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "entropy": entropy,
        "segment_ids": segment_ids,
    }
    check_shapes(name, logprobs, given, advantages)
    counts = as_mask(name, mask)
    logprobs = jnp.asarray(logprobs)
    dtype = accumulator(logprobs.dtype)
    if segment_ids is not None:
        counts = counts & (jnp.asarray(segment_ids) != 0)

    def inside(x: FloatArray) -> Float[Array, "B T"]:
        return jnp.where(counts, jnp.asarray(x).astype(dtype), 0.0)

    def fixed(x: FloatArray | None) -> Float[Array, "B T"] | None:
        return None if x is None else stop_gradient(inside(x))

    new = inside(logprobs)
    old = stop_gradient(new) if old_logprobs is None else stop_gradient(inside(old_logprobs))
    spread = jnp.asarray(advantages)
    spread = jnp.broadcast_to(spread[:, None] if spread.ndim == 1 else spread, new.shape)
    rollout = fixed(rollout_logprobs)
    gap = None if rollout is None else jnp.where(jnp.isnan(old - rollout), 0.0, old - rollout)
    tokens = _Tokens(
        logprobs=new,
        old=old,
        advantages=stop_gradient(inside(spread)),
        mask=counts,
        ref=fixed(ref_logprobs),
        rollout_gap=gap,
        entropy=None if entropy is None else inside(entropy),
    )
    return tokens, find_sequences((new.shape[0], new.shape[1]), segment_ids, dtype)


def _token_log_ratio(tokens: _Tokens) -> Float[Array, "B T"]:
    # A token that neither policy can give (a target outside the support) has ratio 1, not -inf - -inf.
    impossible = (tokens.logprobs == -jnp.inf) & (tokens.old == -jnp.inf)
    return jnp.where(impossible, 0.0, tokens.logprobs) - jnp.where(impossible, 0.0, tokens.old)


def _log_ratio(
    log_ratio: Float[Array, "B T"], tokens: _Tokens, sequences: Sequences, level: str
) -> Float[Array, "B T"]:
    if level == "token":
        return log_ratio
    mean = sequences.spread(sequence_means(log_ratio, tokens.mask, sequences))
    if level == "sequence_token":
        # The gradient of the token, at a value of exactly 0: the sequence's mean keeps its digits.
        finite = jnp.where(tokens.logprobs == -jnp.inf, 0.0, tokens.logprobs)
        return stop_gradient(mean) + (finite - stop_gradient(finite))
    return jnp.broadcast_to(mean, log_ratio.shape)


def _clip(
    ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], bounds: _Bounds, delta: Scalar | None
) -> Float[Array, "B T"]:
    plain = (ratio if delta is None else jnp.where(ratio <= delta, ratio, delta)) * advantages
    clipped = jnp.clip(ratio, bounds.low, bounds.high) * advantages
    # Selected rather than jnp.minimum, here and for delta: at a tie (a ratio of 1 with a clip range of 0) the whole
    # gradient is kept.
    return -jnp.where(plain <= clipped, plain, clipped)


def _rollout_weights(
    tokens: _Tokens, sequences: Sequences, level: str, mode: str, largest: Scalar, smallest: Scalar
) -> Float[Array, "B T"] | None:
    if tokens.rollout_gap is None:
        return None
    gap = tokens.rollout_gap
    if level == "sequence":
        gap = jnp.broadcast_to(sequences.spread(sequences.sum(gap)), gap.shape)
    weights = jnp.exp(jnp.minimum(gap, LARGEST_LOG_RATIO))
    if mode == "truncate":
        return jnp.minimum(weights, largest)
    return jnp.where((weights >= smallest) & (weights <= largest), weights, 0.0)


def _vespo_weight(
    log_ratio: Float[Array, "B T"],
    tokens: _Tokens,
    sequences: Sequences,
    weights: Float[Array, "B T"] | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Float[Array, "B T"]:
    terms = jnp.clip(log_ratio, -20.0, 20.0)
    if weights is not None:
        terms = terms + jnp.where(tokens.mask, jnp.log(jnp.maximum(weights, SMALLEST_WEIGHT)), 0.0)
    s = jnp.clip(sequences.sum(terms), jnp.log(SMALLEST_WEIGHT), 20.0)
    s = jnp.broadcast_to(sequences.spread(s), terms.shape)
    k = jnp.where(tokens.advantages >= 0, positive[0], negative[0]).astype(s.dtype)
    rate = jnp.where(tokens.advantages >= 0, positive[1], negative[1]).astype(s.dtype)
    return stop_gradient(jnp.exp(rate + k * s - rate * jnp.exp(s)))


def _top_entropy(tokens: _Tokens, share: float) -> Bool[Array, "B T"]:
    assert tokens.entropy is not None
    # An empty batch has no quantile.
    if tokens.entropy.size == 0:
        return tokens.mask
    entropy = stop_gradient(tokens.entropy)
    threshold = jnp.nanquantile(jnp.where(tokens.mask, entropy, jnp.nan), 1.0 - share)
    return tokens.mask & (entropy >= threshold)


def _metrics(
    tokens: _Tokens, log_ratio: Float[Array, "B T"], ratio: Float[Array, "B T"], bounds: _Bounds, kl: str
) -> Metrics:
    tokens, log_ratio, ratio = jax.tree.map(stop_gradient, (tokens, log_ratio, ratio))
    # One token that the policy cannot give must not turn the sum of a whole batch into NaN.
    log_ratio = jnp.maximum(log_ratio, -LARGEST_LOG_RATIO)
    mask, dtype = tokens.mask, ratio.dtype
    count = jnp.sum(mask, dtype=dtype)

    def total(x: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(mask, x.astype(dtype), 0.0)), count

    none = jnp.zeros_like(mask)
    low = none if bounds.low is None else (ratio < bounds.low) & (tokens.advantages < 0)
    high = none if bounds.high is None else (ratio > bounds.high) & (tokens.advantages > 0)
    metrics: Metrics = {
        "clip_low": total(low),
        "clip_high": total(high),
        "clip_region": total(low | high),
        "approx_kl": total(kl_estimate(log_ratio, jnp.zeros_like(log_ratio), "k3")),
        "ratio_mean": total(ratio),
        "ratio_min": jnp.min(ratio, initial=jnp.inf, where=mask),
        "ratio_max": jnp.max(ratio, initial=-jnp.inf, where=mask),
    }
    if tokens.ref is not None:
        metrics["kl"] = total(kl_estimate(tokens.logprobs, tokens.ref, kl))
    if tokens.entropy is not None:
        metrics["entropy"] = total(tokens.entropy)
    if tokens.rollout_gap is not None:
        metrics["rollout_mismatch"] = total(jnp.abs(tokens.rollout_gap))
    return metrics
