"""Presets of `policy_loss` that weigh tokens instead of clipping them."""

from typing import Unpack

from logitless._arrays import FloatArray, MaskArray, Scalar
from logitless.losses.policy import LossOutput, policy_loss
from logitless.losses.policy_options import FIXED, CommonOptions, KLName, preset_kl, preset_options


def cispo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    cispo_max: Scalar = 5.0,
    total: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """CISPO: the importance weight is clipped and detached, so that no token loses its gradient.

    Equal to
        w = stop_gradient(min(exp(logprobs - old_logprobs), cispo_max))
        sum(mask * -w * A * logprobs) / total

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        cispo_max: bound of the weight itself (not a distance from 1), as in TRL and Liger.
        total: tokens of the whole batch, for micro-batches that add up; None: the tokens of this batch.
        kl: estimator of the divergence from the reference; None: `"k3"` where kl_coef is not 0.
        kl_coef: factor of the divergence from the reference.
        ref_logprobs: `[B, T]`.
        **options: the rollout, entropy and packing options and the KL's finer ones, as `policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `policy_loss`.
        TypeError: as `policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> cispo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        0.75

    Reference: https://arxiv.org/abs/2506.13585. Departures: no lower bound, as in the paper's experiments; the
    metric `clip_high` counts weights at the bound with a positive advantage.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        **FIXED["cispo_loss"],
        cispo_max=cispo_max,
        total=total,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("cispo_loss", options),
    )


def sapo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    tau_positive: Scalar = 1.0,
    tau_negative: Scalar = 1.05,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """SAPO: a sigmoid gate around ratio 1 in place of the clip, steeper for negative advantages.

    Equal to
        r = exp(logprobs - old_logprobs); tau = where(A > 0, tau_positive, tau_negative)
        mean_i(sum_t(mask * -A * sigmoid(tau * (r - 1)) * 4 / tau) / sum_t(mask))

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        tau_positive: temperature of the gate where the advantage is positive.
        tau_negative: temperature elsewhere.
        kl: estimator of the divergence from the reference; None: `"k3"` where kl_coef is not 0.
        kl_coef: factor of the divergence from the reference.
        ref_logprobs: `[B, T]`.
        **options: the rollout, entropy and packing options and the KL's finer ones, as `policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `policy_loss`.
        TypeError: as `policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> sapo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        -1.0

    Reference: https://arxiv.org/abs/2511.20347; departures: none. Nothing is clipped, so the clip metrics are 0.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        **FIXED["sapo_loss"],
        tau_positive=tau_positive,
        tau_negative=tau_negative,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("sapo_loss", options),
    )


def vespo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    total: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """VESPO: a smooth weight of the whole sequence's importance, detached, on the plain policy gradient.

    Equal to
        s = clip(sum_t(mask * clip(logprobs - old_logprobs, -20, 20)) + sum_t(mask * log(w)), log(1e-8), 20)
        sum(mask * -stop_gradient(exp(lam + k * s - lam * exp(s))) * A * logprobs) / total

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        vespo_k_pos: exponent k where A >= 0.
        vespo_lambda_pos: rate lam where A >= 0.
        vespo_k_neg: exponent where A < 0.
        vespo_lambda_neg: rate where A < 0.
        total: tokens of the whole batch, for micro-batches that add up; None: the tokens of this batch.
        kl: estimator of the divergence from the reference; None: `"k3"` where kl_coef is not 0.
        kl_coef: factor of the divergence from the reference.
        ref_logprobs: `[B, T]`.
        **options: the rollout, entropy and packing options and the KL's finer ones, as `policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `policy_loss`.
        TypeError: as `policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> vespo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        0.75

    Reference: https://arxiv.org/abs/2602.10693. Departures: rollout weights w enter s with their log kept at
    log 1e-8 or above, and do not multiply the loss again.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        **FIXED["vespo_loss"],
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
        total=total,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("vespo_loss", options),
    )
