"""The losses that take hidden states or logits: the only loss module that calls the ops."""

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from logitless._arrays import (
    BlockSizes,
    FloatArray,
    IntArray,
    MaskArray,
    Scalar,
    accumulator,
    as_mask,
    check_keywords,
    check_name,
    is_concrete,
    shape_error,
)
from logitless.losses.policy import LossOutput, policy_loss
from logitless.losses.policy_options import FIXED, CommonOptions, PolicyOptions, is_off, preset_kl
from logitless.losses.supervised import (
    Reduction,
    check_cross_entropy,
    cross_entropy_of_stats,
    dft_of_logprobs,
    needed_stats,
    nll_of_logprobs,
    reduce_losses,
    tokens_that_count,
)
from logitless.losses.token_local import (
    dft_of_token,
    nll_of_token,
    policy_token,
    what_is_not_local,
    with_slope_of,
)
from logitless.ops.api import TOKEN_LOSS_IMPLEMENTATIONS, linear_token_loss, linear_token_stats, token_stats
from logitless.ops.head_sharding import Sharding
from logitless.ops.types import Layout, PrecisionLike, TokenStats


class LogitOptions(TypedDict, total=False):
    """What stands between logits and softmax, and how to compute it; `token_stats` explains each."""

    temperature: Scalar
    softcap: Scalar | None
    logit_scale: Scalar
    implementation: str
    sharding: Sharding
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

    Never holds the `[B, T, V]` logits, forward or backward. Masked tokens are skipped, and tokens without a gradient (a
    group with zero advantage) in the backward pass. Differentiable in hidden, lm_head and bias.

    `implementation="auto"` is `"one_pass"` (see `linear_token_loss`) where the loss is local to the token: token
    ratios, not vespo, no rollout weight of a sequence, no entropy option; `"chunked"` elsewhere and on a TPU: it needs
    less memory and one more product.

    Args:
        hidden: final hidden states at the positions that predict `targets`, `[B, T, D]`.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        targets: sampled token ids, `[B, T]`.
        old_logprobs: `[B, T]`, computed with the same temperature and head options; None means on-policy.
        advantages: `[B]` or `[B, T]`.
        mask: `[B, T]`; 1 counts.
        **options: those of `policy_loss`, and of the head: `layout`, `bias`, `temperature`, `softcap`, `logit_scale`,
            `logits_dtype`, `implementation`, `sharding`, `block_sizes`, `precision`, as `linear_token_loss` takes
            them. `entropy` is computed in the same pass where `entropy_coef` or `top_entropy_quantile` needs it.

    Returns:
        `LossOutput`, float32 (float64 for float64 inputs).

    Raises:
        ValueError: as `linear_token_stats` and `policy_loss`.
        TypeError: an unknown option; else as `linear_token_stats` and `policy_loss`.
        NotImplementedError: as `linear_token_stats`; `"one_pass"` for a loss that is not local to the token.

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
    return policy_from_hidden(policy_loss, hidden, lm_head, targets, old_logprobs, advantages, mask, options)


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

    `implementation="auto"` is `"one_pass"` (see `linear_token_loss`) without smoothing, z-loss and reduction `"none"`;
    else `"chunked"`.

    Args:
        hidden: final hidden states at the positions that predict `labels`, `[..., D]`: the caller shifts.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        labels: token ids, `[...]`.
        ignore_index: label of tokens that do not count: they are skipped and may hold NaN in `hidden`.
        label_smoothing: s; the mean runs over the true vocabulary.
        z_loss: factor of the squared log-sum-exp.
        weights: per token, of the shape of `labels`; a token of weight 0 is skipped like an ignored one.
        reduction: `"mean"` divides by the sum of the weights of the labels that count (0 if that is 0); `"sum"`;
            `"none"`, of the shape of `labels`, 0 at ignored ones.
        **head: `layout`, `bias`, `temperature`, `softcap`, `logit_scale`, `logits_dtype`, `implementation`, `sharding`,
            `block_sizes`, `precision`, as `linear_token_loss` takes them.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs). Where no label counts: 0, with gradients of 0.

    Raises:
        ValueError: as `linear_token_stats`; weights of another shape; smoothing outside [0, 1]; an unknown reduction.
        TypeError: float labels, integer hidden states.
        NotImplementedError: as `linear_token_stats`; `"one_pass"` with smoothing, z-loss or reduction `"none"`.

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
    check_keywords(name, head, HeadOptions.__annotations__, _LABEL_HINTS)
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, label_smoothing, z_loss, reduction)
    valid = tokens_that_count(labels, weights, ignore_index)
    outputs = needed_stats(label_smoothing, z_loss)
    other = "label_smoothing or z_loss" if len(outputs) > 1 else _per_token(reduction)
    if _in_one_pass(name, head, other):
        losses = nll_of_token, nll_of_logprobs
        return _labels_in_one_pass(hidden, lm_head, labels, valid, weights, reduction, head, losses)
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
    check_keywords(name, options, LogitOptions.__annotations__, _LABEL_HINTS)
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, label_smoothing, z_loss, reduction)
    valid = tokens_that_count(labels, weights, ignore_index)
    stats = token_stats(logits, labels, mask=valid, outputs=needed_stats(label_smoothing, z_loss), **options)
    return _reduce(stats, valid, label_smoothing, z_loss, weights, reduction)


def linear_dft_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    labels: IntArray,
    *,
    ignore_index: int = -100,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
    **head: Unpack[HeadOptions],
) -> Float[Array, "..."]:
    """DFT straight from hidden states and LM head: cross-entropy that each token weighs by its own probability.

    Equal to
        logprobs = log_softmax(hidden @ lm_head)[labels]
        mean(-stop_gradient(exp(logprobs)) * logprobs) over labels that are not ignored

    `implementation="auto"` is `"one_pass"`, but `"chunked"` for reduction `"none"`.

    Args:
        hidden: final hidden states at the positions that predict `labels`, `[..., D]`: the caller shifts.
        lm_head: `[D, V]`, or `[V, D]` with `layout="VD"`.
        labels: token ids, `[...]`.
        ignore_index: label of tokens that do not count.
        weights: per token, beside the probability.
        reduction: as `linear_cross_entropy`; the probabilities do not enter the denominator of `"mean"`.
        **head: as `linear_cross_entropy` takes them.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs). Where no label counts: 0, with gradients of 0.

    Raises:
        ValueError: as `linear_token_stats`; weights of another shape; an unknown reduction.
        TypeError: float labels, integer hidden states.
        NotImplementedError: as `linear_token_stats`; `"one_pass"` with reduction `"none"`.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = linear_dft_loss(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, -100]))
        >>> round(loss.item(), 4)  # ln(4) / 4
        0.3466

    Reference: https://arxiv.org/abs/2508.05629; departures: none.
    """
    name = "linear_dft_loss"
    check_keywords(name, head, HeadOptions.__annotations__, _LABEL_HINTS)
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, 0.0, 0.0, reduction)
    valid = tokens_that_count(labels, weights, ignore_index)
    if _in_one_pass(name, head, _per_token(reduction)):
        losses = dft_of_token, dft_of_logprobs
        return _labels_in_one_pass(hidden, lm_head, labels, valid, weights, reduction, head, losses)
    stats = linear_token_stats(hidden, lm_head, labels, mask=valid, outputs=("logprobs",), **head)
    assert stats.logprobs is not None
    return dft_of_logprobs(stats.logprobs, valid, weights=weights, reduction=reduction)


def dft_loss(
    logits: FloatArray,
    labels: IntArray,
    *,
    ignore_index: int = -100,
    weights: FloatArray | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[LogitOptions],
) -> Float[Array, "..."]:
    """DFT of logits that exist already.

    Equal to
        logprobs = log_softmax(logits)[labels]
        mean(-stop_gradient(exp(logprobs)) * logprobs) over labels that are not ignored

    Args:
        logits: `[..., V]`.
        labels: token ids, `[...]`.
        ignore_index: label of tokens that do not count.
        weights: per token, beside the probability.
        reduction: as `linear_dft_loss`.
        **options: as `cross_entropy` takes them.

    Returns:
        The loss in nats, float32 (float64 for float64 logits).

    Raises:
        ValueError: as `linear_dft_loss`.
        TypeError: float labels, integer logits.
        NotImplementedError: as `token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> round(dft_loss(jnp.zeros((2, 4)), jnp.array([0, -100])).item(), 4)
        0.3466

    Reference: https://arxiv.org/abs/2508.05629; departures: none.
    """
    name = "dft_loss"
    check_keywords(name, options, LogitOptions.__annotations__, _LABEL_HINTS)
    labels = jnp.asarray(labels)
    check_cross_entropy(name, labels, weights, 0.0, 0.0, reduction)
    valid = tokens_that_count(labels, weights, ignore_index)
    stats = token_stats(logits, labels, mask=valid, outputs=("logprobs",), **options)
    assert stats.logprobs is not None
    return dft_of_logprobs(stats.logprobs, valid, weights=weights, reduction=reduction)


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


def _in_one_pass(name: str, head: HeadOptions, not_local: str | None) -> bool:
    """Whether the loss goes in one pass; raises NotImplementedError where it was asked to and cannot."""
    asked = head.get("implementation", "auto")
    check_name(name, "implementation", asked, ("auto", *TOKEN_LOSS_IMPLEMENTATIONS))
    if asked == "one_pass" and not_local is not None:
        raise NotImplementedError(
            f"{name}: implementation 'one_pass' needs a loss that is a sum over tokens, each term of its own "
            f"log-probability alone; {not_local} makes it another: use implementation='chunked'"
        )
    return asked == "one_pass" or (asked == "auto" and not_local is None)


def _per_token(reduction: Reduction) -> str | None:
    return "reduction='none'" if reduction == "none" else None


def _labels_in_one_pass(
    hidden: FloatArray,
    lm_head: FloatArray,
    labels: IntArray,
    valid: jax.Array,
    weights: FloatArray | None,
    reduction: Reduction,
    head: HeadOptions,
    losses: tuple[Callable[..., Array], Callable[..., Array]],
) -> Float[Array, ""]:
    """`losses`: that of a token, and that of all log-probabilities."""
    of_token, of_logprobs = losses
    dtype = accumulator(jnp.asarray(hidden).dtype, jnp.asarray(lm_head).dtype)
    # A reduction is linear in the token losses: its gradient is its weights.
    factors = jax.grad(lambda x: reduce_losses(x, valid, weights, reduction))(jnp.zeros(valid.shape, dtype))
    carrier, logprobs = linear_token_loss(hidden, lm_head, labels, of_token, (factors,), mask=valid, **head)
    return with_slope_of(of_logprobs(logprobs, valid, weights=weights, reduction=reduction), carrier)


_HINTS = {
    "entropy": "it is computed from the hidden states; leave it out",
    "beta": "the factor of the divergence is kl_coef",
    "epsilon": "the clip range is clip_low and clip_high",
    "epsilon_low": "the clip range is clip_low and clip_high",
    "epsilon_high": "the clip range is clip_low and clip_high",
    "loss_type": "each type is a preset of its own, such as linear_dapo_loss",
}
_LABEL_HINTS = {
    "mask": "give ignore_index to the labels that do not count, or weights of 0",
    "outputs": "the loss asks for what it needs",
}


_DEFAULTS = {key: p.default for key, p in inspect.signature(policy_loss).parameters.items() if p.default is not p.empty}


def _options_of(loss: Callable[..., LossOutput]) -> set[str]:
    """What a policy loss takes by name, but for the entropies."""
    own = {name for name, p in inspect.signature(loss).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return (own | CommonOptions.__annotations__.keys()) - {"entropy"}


def resolved_options(loss: Callable[..., LossOutput], given: dict[str, Any]) -> dict[str, Any]:
    """Every option of `policy_loss` as `loss`, a preset of it, would hand it on."""
    own = {key: p.default for key, p in inspect.signature(loss).parameters.items() if p.default is not p.empty}
    resolved = _DEFAULTS | {key: value for key, value in (own | given).items() if key in _DEFAULTS}
    return resolved | FIXED[loss.__name__] | {"kl": preset_kl(resolved["kl"], resolved["kl_coef"])}


def _number(value: Any) -> Any:
    """A number for a concrete array without axes; everything else as it is."""
    single = isinstance(value, jax.Array | np.ndarray) and value.ndim == 0 and is_concrete(value)
    return value.item() if single else value


def policy_from_hidden(
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
    head: Any = {key: value for key, value in options.items() if key in HeadOptions.__annotations__}
    rest = {key: value for key, value in options.items() if key not in head}
    check_keywords(name, rest, _options_of(loss), _HINTS)
    counts = as_mask(name, mask)
    if counts.shape != jnp.shape(targets):
        raise shape_error(name, {"mask": mask, "targets": targets}, "mask must have the shape of targets")
    if (segment_ids := cast(Any, rest.get("segment_ids"))) is not None:
        if jnp.shape(segment_ids) != jnp.shape(mask):
            raise shape_error(name, {"segment_ids": segment_ids, "mask": mask}, "both must be [B, T]")
        counts = counts & (jnp.asarray(segment_ids) != 0)
    resolved = resolved_options(loss, rest)
    if _in_one_pass(name, head, what_is_not_local(resolved)):
        # A number in an array is read as a number: inside a trace it could not be compared.
        rest = {key: _number(value) for key, value in rest.items()}
        resolved = resolved_options(loss, rest)

        def of_logprobs(logprobs: FloatArray) -> LossOutput:
            return loss(logprobs, old_logprobs, advantages, mask, **rest)

        dtype = accumulator(jnp.asarray(hidden).dtype, jnp.asarray(lm_head).dtype)
        # What the loss refuses it refuses by its own words, before anything is computed.
        jax.eval_shape(lambda x: of_logprobs(x).loss, jax.ShapeDtypeStruct(jnp.shape(targets), dtype))
        of_token, args = policy_token(counts, old_logprobs, advantages, resolved, dtype)
        carrier, logprobs = linear_token_loss(hidden, lm_head, targets, of_token, args, mask=counts, **head)
        out = of_logprobs(logprobs)
        return out._replace(loss=with_slope_of(out.loss, carrier))
    reads_entropy = not is_off(rest.get("entropy_coef", 0.0)) or rest.get("top_entropy_quantile") is not None
    outputs = ("logprobs", "entropy") if reads_entropy else ("logprobs",)
    stats = linear_token_stats(hidden, lm_head, targets, mask=counts, outputs=outputs, **head)
    return loss(stats.logprobs, old_logprobs, advantages, mask, entropy=stats.entropy, **rest)
