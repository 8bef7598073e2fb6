"""One preset of `policy_loss` for each paper: its defaults, and where implementations differ."""

from typing import Unpack

from logitless._arrays import FloatArray, MaskArray, Scalar
from logitless.losses.policy import LossOutput, policy_loss
from logitless.losses.policy_options import FIXED, CommonOptions, KLName, preset_kl, preset_options


def grpo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """GRPO: token ratios, clipped, averaged over each sequence and then over the batch.

    Equal to
        r = exp(logprobs - old_logprobs); l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
        mean_i(sum_t(mask * l) / max(sum_t(mask), 1))

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
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
        >>> grpo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2402.03300. Departures: the paper has a divergence by default; here, as in TRL,
    kl_coef is 0 until given. Fully masked rows count in the mean over the batch, as in TRL.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("grpo_loss", options),
    )


def bnpo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """BNPO's normalising: the loss of GRPO averaged over the tokens of the local batch.

    Equal to
        r = exp(logprobs - old_logprobs); l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
        sum(mask * l) / max(sum(mask), 1)

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
        kl: estimator of the divergence from the reference; None: `"k3"` where kl_coef is not 0.
        kl_coef: factor of the divergence from the reference.
        ref_logprobs: `[B, T]`.
        **options: the rollout, entropy and packing options and the KL's finer ones, as `policy_loss` takes them.

    Returns:
        `LossOutput`. The denominator is that of the batch given: losses of micro-batches do not add up; `dapo_loss`
        with `total` does.

    Raises:
        ValueError: as `policy_loss`.
        TypeError: as `policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> bnpo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2506.02864, of which TRL's `loss_type="bnpo"` keeps the token mean. Departures: no
    Beta normalisation of rewards; that belongs to the advantages.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **FIXED["bnpo_loss"],
        **preset_options("bnpo_loss", options),
    )


def dr_grpo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    max_completion_length: int,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """Dr. GRPO: the loss of GRPO divided by a constant, so that long answers weigh no less per token.

    Equal to
        r = exp(logprobs - old_logprobs); l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
        sum(mask * l) / (B * max_completion_length)

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`; the paper takes them without division by the standard deviation.
        mask: `[B, T]`; 1 counts.
        max_completion_length: tokens that a completion may have.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
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
        >>> ones = jnp.array([[1, 1]])
        >>> dr_grpo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), ones, max_completion_length=4).loss.item()
        -0.25

    Reference: https://arxiv.org/abs/2503.20783; departures: none.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **FIXED["dr_grpo_loss"],
        max_completion_length=max_completion_length,
        **preset_options("dr_grpo_loss", options),
    )


def dapo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    total: Scalar | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.28,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """DAPO: a higher upper clip bound, and the sum over tokens divided by the tokens of the whole (global) batch.

    Equal to
        r = exp(logprobs - old_logprobs); l = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
        sum(mask * l) / total

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        total: tokens of the whole batch: with it the losses of micro-batches and devices add up exactly. None: the
            tokens of this batch. Groups without variance stay in it: their loss is 0, their tokens count.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
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
        >>> dapo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]]), total=10).loss.item()
        -0.10000000149011612

    Reference: https://arxiv.org/abs/2503.14476. Departures: no dynamic sampling and no overlong penalty; those belong
    to the sampler and the rewards.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **FIXED["dapo_loss"],
        total=total,
        **preset_options("dapo_loss", options),
    )


def gspo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    token_level: bool = False,
    clip_low: Scalar = 3e-4,
    clip_high: Scalar = 4e-4,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """GSPO: one ratio a sequence, the exponential of its mean log-ratio, clipped within a far smaller range.

    Equal to
        r_i = exp(sum_t(mask * (logprobs - old_logprobs)) / sum_t(mask))
        mean_i(sum_t(mask * -min(r_i * A, clip(r_i, 1 - clip_low, 1 + clip_high) * A)) / sum_t(mask))

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        token_level: GSPO-token: the same ratio in value, with the gradient of each token's own log-probability, so that
            advantages may differ within a sequence.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
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
        >>> gspo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2507.18071. Departures: none. TRL averages the token losses of the
    sequence, all alike, as here; with `aggregation="token_mean"` a long sequence would weigh by its length.
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        ratio_level="sequence_token" if token_level else FIXED["gspo_loss"]["ratio_level"],
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("gspo_loss", options),
    )


def luspo_loss(
    logprobs: FloatArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    *,
    clip_low: Scalar = 3e-4,
    clip_high: Scalar = 4e-4,
    delta: Scalar | None = None,
    kl: KLName | None = None,
    kl_coef: Scalar = 0.0,
    ref_logprobs: FloatArray | None = None,
    **options: Unpack[CommonOptions],
) -> LossOutput:
    """LUSPO: GSPO with every sequence weighed by its length, so that long answers are not held back.

    Equal to
        r_i = exp(sum_t(mask * (logprobs - old_logprobs)) / sum_t(mask))
        mean_i(sum_t(mask * -min(r_i * A, clip(r_i, 1 - clip_low, 1 + clip_high) * A)))

    Args:
        logprobs: `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        clip_low: distance below 1.
        clip_high: distance above 1.
        delta: upper bound of the ratio, or None.
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
        >>> luspo_loss(jnp.array([[-1.0, -2.0]]), None, jnp.array([0.5]), jnp.array([[1, 1]])).loss.item()
        -1.0

    Reference: https://arxiv.org/abs/2602.05261. Departures: none; the sum runs over the mask, where TRL once
    took the padding in (trl#6654).
    """
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        **FIXED["luspo_loss"],
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        kl=preset_kl(kl, kl_coef),
        kl_coef=kl_coef,
        ref_logprobs=ref_logprobs,
        **preset_options("luspo_loss", options),
    )
