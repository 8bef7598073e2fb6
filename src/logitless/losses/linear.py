"""The losses that take hidden states or logits: the only loss module that calls the ops."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from logitless._arrays import BlockSizes, FloatArray, IntArray, MaskArray, Scalar, as_mask, shape_error
from logitless.losses.policy import LossOutput, policy_loss
from logitless.losses.policy_options import PolicyOptions, is_off
from logitless.losses.policy_presets import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss
from logitless.losses.supervised import Reduction, check_cross_entropy, cross_entropy_of_stats, needed_stats
from logitless.ops.api import linear_token_stats, token_stats
from logitless.ops.types import Layout, PrecisionLike, TokenStats


class LogitOptions(TypedDict, total=False):
    """What stands between logits and softmax, and how to compute it; `token_stats` explains each."""

    temperature: Scalar
    softcap: Scalar | None
    logit_scale: Scalar
    implementation: str
    sharding: object
    block_sizes: BlockSizes | None


class HeadOptions(LogitOptions, total=False):
    """The options of a head; `linear_token_stats` explains each."""

    layout: Layout
    bias: FloatArray | None
    logits_dtype: str | None
    precision: PrecisionLike


class LinearPolicyOptions(PolicyOptions, HeadOptions, total=False):
    """The options of a policy loss from hidden states: those of the head and those of `policy_loss`."""


def linear_policy_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """A policy-gradient loss straight from hidden states and LM head: the headline call.

    Equal to
        logprobs = log_softmax(hidden @ lm_head)[targets]
        policy_loss(logprobs, old_logprobs, advantages, mask, ...)

    Never holds the `[B, T, V]` logits, forward or backward. Masked tokens are skipped; in the backward pass so is each
    token without a gradient: a group with zero advantage, a clipped token. Differentiable in hidden, lm_head and bias.

    Args:
        hidden: final hidden states at the positions that predict `targets`, `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, computed with the same temperature and head options; None means on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        **options: those of `policy_loss`, and of the head: `layout`, `bias`, `temperature`, `softcap`, `logit_scale`,
            `logits_dtype`, `implementation`, `sharding`, `block_sizes`, `precision`, as `linear_token_stats` takes
            them. `entropy` is computed in the same pass where `entropy_coef` or `top_entropy_quantile` needs it.

    Returns:
        `LossOutput`, float32 (float64 for float64 inputs).

    Raises:
        ValueError: as `linear_token_stats` and `policy_loss`.
        TypeError: an unknown option; else as `linear_token_stats` and `policy_loss`.
        NotImplementedError: as `linear_token_stats`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> hidden, lm_head = jnp.ones((1, 2, 3)), jnp.zeros((3, 4))
        >>> targets, mask = jnp.array([[0, 3]]), jnp.array([[1, 1]])
        >>> loss = lambda h, w: linear_policy_loss(h, w, targets, None, jnp.array([0.5]), mask)
        >>> (value, metrics), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, lm_head)
        >>> value.item(), gradients[1].shape
        (-0.5, (3, 4))

    Reference: https://arxiv.org/abs/2402.03300 (GRPO) and https://arxiv.org/abs/2411.09009 (losses without logits).
    Departures: as `policy_loss`.
    """
    return _from_hidden(policy_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_grpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """GRPO straight from hidden states and LM head; `grpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        grpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `grpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_grpo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2402.03300; departures: as `grpo_loss`.
    """
    return _from_hidden(grpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_bnpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """BNPO straight from hidden states and LM head; `bnpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        bnpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `bnpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_bnpo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones).loss.item()
        -0.5

    Reference: https://arxiv.org/abs/2506.02864; departures: as `bnpo_loss`.
    """
    return _from_hidden(bnpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_dr_grpo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """Dr. GRPO straight from hidden states and LM head; `dr_grpo_loss` of `linear_logprobs`, without the logits.

    Equal to
        dr_grpo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `dr_grpo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> inputs = hidden, lm_head, targets, None, jnp.array([0.5]), jnp.array([[1, 1]])
        >>> linear_dr_grpo_loss(*inputs, max_completion_length=4).loss.item()
        -0.25

    Reference: https://arxiv.org/abs/2503.20783; departures: as `dr_grpo_loss`.
    """
    return _from_hidden(dr_grpo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_dapo_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    **options: Unpack[LinearPolicyOptions],
) -> LossOutput:
    """DAPO straight from hidden states and LM head; `dapo_loss` of `linear_logprobs`, without the logits.

    Equal to
        dapo_loss(log_softmax(hidden @ lm_head)[targets], old_logprobs, advantages, mask, ...)

    Args:
        hidden: `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, or None for on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts, the rest is skipped.
        **options: those of `dapo_loss`, and of the head as `linear_policy_loss` takes them.

    Returns:
        `LossOutput`.

    Raises:
        ValueError: as `linear_policy_loss`.
        TypeError: as `linear_policy_loss`.
        NotImplementedError: as `linear_policy_loss`.

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((1, 2, 3)), jnp.zeros((3, 4)), jnp.array([[0, 3]])
        >>> ones = jnp.array([[1, 1]])
        >>> linear_dapo_loss(hidden, lm_head, targets, None, jnp.array([0.5]), ones, total=4).loss.item()
        -0.25

    Reference: https://arxiv.org/abs/2503.14476; departures: as `dapo_loss`.
    """
    return _from_hidden(dapo_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


def linear_cross_entropy(
    hidden: FloatArray,
    lm_head: FloatArray,
    labels: IntArray,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
    **head: Unpack[HeadOptions],
) -> Float[Array, "..."]:
    """Cross-entropy straight from hidden states and LM head ("fused linear cross-entropy"), without the logits.

    Equal to
        z = hidden @ lm_head; lse = logsumexp(z); nll = lse - z[labels]
        mean(weights * ((1 - s) * nll + s * (lse - mean(z)) + z_loss * lse**2)) over labels that are not ignored

    Args:
        hidden: final hidden states at the positions that predict `labels`, `[..., D]`: the caller shifts.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        labels: token ids, `[...]`.
        ignore_index: label of tokens that do not count: they are skipped and may hold NaN in `hidden`.
        label_smoothing: s; the mean runs over the true vocabulary.
        z_loss: factor of the squared log-sum-exp.
        weights: per token, of the shape of `labels`.
        reduction: `"mean"` divides by the sum of the weights of the labels that count (0 if that is 0); `"sum"`;
            `"none"`, of the shape of `labels`, 0 at ignored ones.
        **head: `layout`, `bias`, `temperature`, `softcap`, `logit_scale`, `logits_dtype`, `implementation`, `sharding`,
            `block_sizes`, `precision`, as `linear_token_stats` takes them.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs). Where no label counts: 0, with gradients of 0.

    Raises:
        ValueError: as `linear_token_stats`; weights of another shape; smoothing outside [0, 1]; an unknown reduction.
        TypeError: float labels, integer hidden states.
        NotImplementedError: as `linear_token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = linear_cross_entropy(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, -100]))
        >>> round(loss.item(), 4)  # ln 4
        1.3863

    Reference: https://arxiv.org/abs/2411.09009; smoothing https://arxiv.org/abs/1512.00567; z-loss
    https://arxiv.org/abs/2204.02311. Departures: "mean" with weights divides by their sum, as torch does for class
    weights.
    """
    name = "linear_cross_entropy"
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, label_smoothing, z_loss, reduction)
    valid = labels != ignore_index
    outputs = needed_stats(label_smoothing, z_loss)
    stats = linear_token_stats(hidden, lm_head, labels, mask=valid, outputs=outputs, **head)
    return _reduce(stats, valid, label_smoothing, z_loss, weights, reduction)


def cross_entropy(
    logits: FloatArray,
    labels: IntArray,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[LogitOptions],
) -> Float[Array, "..."]:
    """Cross-entropy of logits that exist already, with one array of their size at most: their gradient.

    Equal to
        lse = logsumexp(logits); nll = lse - logits[labels]
        mean(weights * ((1 - s) * nll + s * (lse - mean(logits)) + z_loss * lse**2)) over labels that are not ignored

    Args:
        logits: `[..., V]`.
        labels: token ids, `[...]`.
        ignore_index: see `linear_cross_entropy`, and so for every argument below.
        label_smoothing: s, from 0 to 1.
        z_loss: factor of the squared log-sum-exp.
        weights: per token.
        reduction: `"mean"`, `"sum"` or `"none"`.
        **options: `temperature`, `softcap`, `logit_scale`, `implementation`, `sharding`, `block_sizes`, as
            `token_stats` takes them.

    Returns:
        The loss in nats, float32 (float64 for float64 logits).

    Raises:
        ValueError: as `linear_cross_entropy`.
        TypeError: float labels, integer logits.
        NotImplementedError: as `token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> round(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, -100])).item(), 4)
        1.3863

    Reference: as `linear_cross_entropy`; departures: as there.
    """
    name = "cross_entropy"
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, label_smoothing, z_loss, reduction)
    valid = labels != ignore_index
    stats = token_stats(logits, labels, mask=valid, outputs=needed_stats(label_smoothing, z_loss), **options)
    return _reduce(stats, valid, label_smoothing, z_loss, weights, reduction)


def _reduce(
    stats: TokenStats,
    valid: jax.Array,
    label_smoothing: float,
    z_loss: float,
    weights: FloatArray | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    return cross_entropy_of_stats(
        stats.logprobs,
        stats.lse,
        stats.mean_logits,
        valid,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weights=weights,
        reduction=reduction,
    )


def _from_hidden(
    loss: Callable[..., LossOutput],
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    old_logprobs: FloatArray | None,
    advantages: FloatArray,
    mask: MaskArray,
    options: LinearPolicyOptions,
) -> LossOutput:
    """`loss` of the log-probabilities, and of the entropies where one of its options reads them."""
    name = f"linear_{loss.__name__}"
    head = {key: value for key, value in options.items() if key in HeadOptions.__annotations__}
    rest = {key: value for key, value in options.items() if key not in head}
    if "entropy" in rest:
        raise TypeError(f"{name}: entropy is computed from the hidden states; leave it out")
    counts = as_mask(name, mask)
    if (segment_ids := cast(Any, rest.get("segment_ids"))) is not None:
        if jnp.shape(segment_ids) != jnp.shape(mask):
            raise shape_error(name, {"segment_ids": segment_ids, "mask": mask}, "both must be [B, T]")
        counts = counts & (jnp.asarray(segment_ids) != 0)
    reads_entropy = not is_off(rest.get("entropy_coef", 0.0)) or rest.get("top_entropy_quantile") is not None
    outputs = ("logprobs", "entropy") if reads_entropy else ("logprobs",)
    stats = linear_token_stats(hidden, lm_head, targets, mask=counts, outputs=outputs, **cast(Any, head))
    return loss(stats.logprobs, old_logprobs, advantages, mask, entropy=stats.entropy, **rest)
