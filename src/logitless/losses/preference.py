"""Preference losses, from the log-probabilities of whole completions; `sequence_logprobs` makes those of tokens.

A completion without tokens has log-probability 0, and its pair still counts: `mask` leaves it out. Infinite
log-probabilities, such as the -inf of a target outside the support: two equal infinities cancel to 0, without a
gradient, where one is subtracted from the other; otherwise the loss is infinite where the formula says so, with finite
gradients but for the square of IPO.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from logitless._arrays import FloatArray, MaskArray, Scalar, accumulator, as_mask, is_concrete, shape_error
from logitless.losses.aggregate import ratio_or_zero
from logitless.losses.policy import LossOutput, Metrics
from logitless.losses.policy_options import check_name, is_off

if TYPE_CHECKING:
    DPOKind = Literal["sigmoid", "ipo", "hinge"]
else:
    # The door refuses an unknown name, and names the nearest one.
    DPOKind = str
DPO_KINDS = ("sigmoid", "ipo", "hinge")


def sequence_logprobs(logprobs: FloatArray, mask: MaskArray, *, mean: bool = False) -> Float[Array, " B"]:
    """Sum, or mean, of each row's log-probabilities: what preference losses take.

    Equal to
        jnp.where(mask, logprobs, 0).sum(1)

    Args:
        logprobs: `[B, T]`, in nats.
        mask: `[B, T]`; 1 counts, what stands elsewhere (NaN, inf) is not read and has a gradient of 0.
        mean: divides by the tokens that count.

    Returns:
        `[B]`, float32 (float64 for float64 log-probabilities). 0 for a row without a token that counts. -inf where a
        token that counts is -inf.

    Raises:
        ValueError: shapes that differ.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> print(sequence_logprobs(jnp.array([[-1.0, -2.0, -9.0]]), jnp.array([[1, 1, 0]])))
        [-3.]

    Reference: https://arxiv.org/abs/2305.18290. Departures: TRL and Liger give NaN for the mean of an empty row.
    """
    name = "sequence_logprobs"
    if jnp.ndim(logprobs) != 2 or jnp.shape(mask) != jnp.shape(logprobs):
        raise shape_error(name, {"logprobs": logprobs, "mask": mask}, "both must be [B, T]")
    counts, logprobs = as_mask(name, mask), jnp.asarray(logprobs)
    total = jnp.sum(jnp.where(counts, logprobs.astype(accumulator(logprobs.dtype)), 0.0), axis=1)
    return ratio_or_zero(total, jnp.sum(counts, axis=1, dtype=total.dtype)) if mean else total


def dpo_loss(
    chosen: FloatArray,
    rejected: FloatArray,
    ref_chosen: FloatArray,
    ref_rejected: FloatArray,
    *,
    beta: Scalar = 0.1,
    kind: DPOKind = "sigmoid",
    label_smoothing: Scalar = 0.0,
    mask: MaskArray | None = None,
) -> LossOutput:
    """DPO: pushes the policy's preference for the chosen completion above the reference's.

    Equal to (s the label smoothing)
        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        mean(-(1 - s) * log_sigmoid(beta * h) - s * log_sigmoid(-beta * h))

    Args:
        chosen: sums of log-probabilities, `[B]`, from `sequence_logprobs`.
        rejected: `[B]`.
        ref_chosen: of the reference, `[B]`; detached.
        ref_rejected: of the reference, `[B]`; detached.
        beta: strength of the tie to the reference, above 0.
        kind: `"sigmoid"`; `"ipo"`: (h - 1 / (2 beta))^2, see `ipo_loss`; `"hinge"`: max(0, 1 - beta h).
        label_smoothing: share of preferences taken to be flipped, from 0 to below 0.5; for `"sigmoid"` only.
        mask: `[B]`; pairs that count (1), the rest is not read; None: all.

    Returns:
        `LossOutput`, float32 (float64 for float64 inputs), a mean over the pairs that count: 0 where there are none.
        Metrics, as (sum, count) over pairs: `reward_chosen` and `reward_rejected`, beta times the log-ratio to the
        reference; `reward_margin`, their difference; `accuracy`, whether it is above 0.

    Raises:
        ValueError: shapes that differ, an unknown kind, a number out of range, smoothing with another kind.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> zero = jnp.zeros(2)
        >>> round(dpo_loss(zero, zero, zero, zero).loss.item(), 4)  # ln 2
        0.6931

    Reference: https://arxiv.org/abs/2305.18290; hinge https://arxiv.org/abs/2309.06657; smoothing (cDPO)
    https://ericmitchell.ai/cdpo.pdf. Departures: none. In TRL and Liger of 2026 `label_smoothing` does
    nothing to "sigmoid" and belongs to "robust", another formula; Liger has no IPO.
    """
    arrays = {"chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    return _dpo("dpo_loss", arrays, beta, kind, label_smoothing, mask)


def ipo_loss(
    chosen: FloatArray,
    rejected: FloatArray,
    ref_chosen: FloatArray,
    ref_rejected: FloatArray,
    *,
    beta: Scalar = 0.1,
    mask: MaskArray | None = None,
) -> LossOutput:
    """IPO: a squared distance to a fixed margin, which does not run away where preferences are certain.

    Equal to
        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        mean((h - 1 / (2 * beta)) ** 2)

    Args:
        chosen: MEANS of log-probabilities, `[B]`, from `sequence_logprobs(..., mean=True)`; sums for the paper's form.
        rejected: `[B]`.
        ref_chosen: of the reference, `[B]`; detached.
        ref_rejected: of the reference, `[B]`; detached.
        beta: strength of the tie to the reference, above 0 (tau in the paper).
        mask: `[B]`; pairs that count; None: all.

    Returns:
        `LossOutput`, as `dpo_loss`. An infinite margin has an infinite gradient.

    Raises:
        ValueError: shapes that differ, beta out of range.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> zero = jnp.zeros(2)
        >>> ipo_loss(zero, zero, zero, zero, beta=0.5).loss.item()
        1.0

    Reference: https://arxiv.org/abs/2310.12036. Departures: the paper writes sums; TRL averages over tokens, as its
    authors did. This loss takes what it is given.
    """
    arrays = {"chosen": chosen, "rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    return _dpo("ipo_loss", arrays, beta, "ipo", 0.0, mask)


def simpo_loss(
    chosen: FloatArray,
    rejected: FloatArray,
    *,
    beta: Scalar = 2.0,
    gamma: Scalar = 0.5,
    label_smoothing: Scalar = 0.0,
    mask: MaskArray | None = None,
) -> LossOutput:
    """SimPO: preference of mean log-probabilities by a margin, without a reference.

    Equal to (s the label smoothing)
        z = beta * (chosen - rejected) - gamma
        mean(-(1 - s) * log_sigmoid(z) - s * log_sigmoid(-z))

    Args:
        chosen: MEANS of log-probabilities, `[B]`, from `sequence_logprobs(..., mean=True)`.
        rejected: `[B]`.
        beta: scale of the rewards, above 0.
        gamma: margin between the rewards, at least 0.
        label_smoothing: share of preferences taken to be flipped, from 0 to below 0.5.
        mask: `[B]`; pairs that count; None: all.

    Returns:
        `LossOutput`, as `dpo_loss`; the rewards are beta times the mean log-probabilities, without gamma.

    Raises:
        ValueError: shapes that differ, a number out of range.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> round(simpo_loss(jnp.zeros(2), jnp.zeros(2), gamma=0.0).loss.item(), 4)
        0.6931

    Reference: https://arxiv.org/abs/2405.14734; smoothing is of the authors' code. Departures: gamma is the margin
    itself, as in the paper, TRL (`simpo_gamma`) and Liger; the authors' code takes gamma / beta. The defaults are those
    of the authors' code, where TRL and Liger have beta 0.1. No likelihood term (the defaults of TRL and Liger add one).
    """
    name = "simpo_loss"
    counts, (chosen, rejected) = _prepare(name, {"chosen": chosen, "rejected": rejected}, mask)
    beta = _number(name, "beta", beta, chosen.dtype)
    gamma = _number(name, "gamma", gamma, chosen.dtype)
    losses = _smooth_sigmoid(name, beta * _difference(chosen, rejected) - gamma, label_smoothing)
    return _output(losses, beta, chosen, rejected, counts)


def cpo_loss(
    chosen: FloatArray,
    rejected: FloatArray,
    chosen_nll: Scalar | None,
    *,
    beta: Scalar = 0.1,
    nll_coef: Scalar = 1.0,
    label_smoothing: Scalar = 0.0,
    mask: MaskArray | None = None,
) -> LossOutput:
    """CPO: DPO without a reference, kept near the data by the likelihood of the chosen completion.

    Equal to (s the label smoothing)
        z = beta * (chosen - rejected)
        mean(-(1 - s) * log_sigmoid(z) - s * log_sigmoid(-z)) + nll_coef * mean(chosen_nll)

    Args:
        chosen: sums of log-probabilities, `[B]`, from `sequence_logprobs`.
        rejected: `[B]`.
        chosen_nll: negative log-likelihood of the chosen completions as it should count: `[B]`, averaged over the pairs
            that count, or one number, which the caller averaged over tokens. None only with `nll_coef=0`.
        beta: scale of the preference, above 0.
        nll_coef: factor of the likelihood, at least 0.
        label_smoothing: share of preferences taken to be flipped, from 0 to below 0.5.
        mask: `[B]`; pairs that count; None: all. A `chosen_nll` of one number is the caller's to mask.

    Returns:
        `LossOutput`, as `dpo_loss`, the rewards beta times the log-probabilities; and the metric `nll` where given.

    Raises:
        ValueError: shapes that differ, a number out of range, no `chosen_nll` where it counts.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> round(cpo_loss(jnp.zeros(2), jnp.zeros(2), jnp.ones(2)).loss.item(), 4)
        1.6931

    Reference: https://arxiv.org/abs/2401.08417; smoothing is of TRL and Liger. Departures: the paper averages the
    likelihood over pairs; TRL (`cpo_alpha`) and Liger over all chosen tokens of a batch, for which `chosen_nll` is that
    one number. TRL's hinge and IPO forms are left out.
    """
    name = "cpo_loss"
    counts, (chosen, rejected) = _prepare(name, {"chosen": chosen, "rejected": rejected}, mask)
    beta = _number(name, "beta", beta, chosen.dtype)
    losses = _smooth_sigmoid(name, beta * _difference(chosen, rejected), label_smoothing)
    output = _output(losses, beta, chosen, rejected, counts)
    coef = _number(name, "nll_coef", nll_coef, chosen.dtype)
    if chosen_nll is None:
        if not is_off(nll_coef):
            raise ValueError(f"{name}: nll_coef={nll_coef} has no meaning with chosen_nll=None: give it, or nll_coef=0")
        return output
    return _with_nll(name, output, chosen_nll, None if is_off(nll_coef) else coef, counts)


def orpo_loss(
    chosen: FloatArray,
    rejected: FloatArray,
    chosen_nll: Scalar,
    *,
    beta: Scalar = 0.1,
    mask: MaskArray | None = None,
) -> LossOutput:
    """ORPO: likelihood of the chosen completion and the log of an odds ratio, in one stage and without a reference.

    Equal to
        odds = (chosen - log(1 - exp(chosen))) - (rejected - log(1 - exp(rejected)))
        mean(chosen_nll) - beta * mean(log_sigmoid(odds))

    Args:
        chosen: MEANS of log-probabilities, `[B]`, from `sequence_logprobs(..., mean=True)`.
        rejected: `[B]`.
        chosen_nll: negative log-likelihood of the chosen completions, `[B]` (the paper: `-chosen`) or one number, as
            `cpo_loss` takes it.
        beta: factor of the odds-ratio term, above 0 (lambda in the paper).
        mask: `[B]`; pairs that count; None: all.

    Returns:
        `LossOutput`, as `cpo_loss`, and the metric `log_odds`, the log of the odds ratio.

    Raises:
        ValueError: shapes that differ, beta out of range.
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> mean = jnp.array([-1.0])
        >>> round(orpo_loss(mean, mean, -mean).loss.item(), 4)
        1.0693

    Reference: https://arxiv.org/abs/2403.07691. Departures: a probability counts as at most 1 - epsilon of the dtype in
    log(1 - p), so that certainty stays finite, gradient included (TRL and Liger: infinite or NaN). TRL's likelihood is
    a mean over the tokens of prompts and chosen completions, Liger's over those of the completions by default.
    """
    name = "orpo_loss"
    counts, (chosen, rejected) = _prepare(name, {"chosen": chosen, "rejected": rejected}, mask)
    beta = _number(name, "beta", beta, chosen.dtype)
    odds = _difference(chosen, rejected) - (log1mexp(chosen) - log1mexp(rejected))
    output = _output(-beta * jax.nn.log_sigmoid(odds), beta, chosen, rejected, counts)
    output.metrics["log_odds"] = _total(odds, counts)
    return _with_nll(name, output, chosen_nll, jnp.ones((), chosen.dtype), counts)


def kto_loss(
    logprobs: FloatArray,
    ref_logprobs: FloatArray,
    desirable: MaskArray,
    kl: Scalar,
    *,
    beta: Scalar = 0.1,
    desirable_weight: Scalar = 1.0,
    undesirable_weight: Scalar = 1.0,
    mask: MaskArray | None = None,
) -> LossOutput:
    """KTO: single completions marked good or bad, weighed as prospect theory has it.

    Equal to
        h = logprobs - ref_logprobs; kl = max(kl, 0)
        mean(where(desirable, w_d * (1 - sigmoid(beta * (h - kl))), w_u * (1 - sigmoid(beta * (kl - h)))))

    Args:
        logprobs: sums of log-probabilities, `[B]`, from `sequence_logprobs`.
        ref_logprobs: of the reference, `[B]`; detached.
        desirable: `[B]`, bool or numbers; 1 is good.
        kl: estimate of the divergence from the reference, in nats, one number: the mean of the log-ratios of prompts
            with the completions of other prompts, over all devices and micro-batches; detached, and below 0 counts
            as 0.
        beta: strength of the tie to the reference, above 0.
        desirable_weight: weight of good completions, at least 0.
        undesirable_weight: weight of bad ones, at least 0.
        mask: `[B]`; completions that count; None: all.

    Returns:
        `LossOutput`, float32 (float64 for float64 inputs), a mean over the completions that count: 0 where there are
        none. Metrics, as (sum, count): `reward_chosen` over the good, `reward_rejected` over the bad, `kl` over all.

    Raises:
        ValueError: shapes that differ, a number out of range.
        TypeError: `desirable` or a mask that is neither bool nor numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> kto_loss(jnp.zeros(2), jnp.zeros(2), jnp.array([1, 0]), 0.0).loss.item()
        0.5

    Reference: https://arxiv.org/abs/2402.01306. Departures: none. TRL averages over good and bad completions together,
    as here, but drops NaN losses; Liger has no weights and takes kl as it is.
    """
    name = "kto_loss"
    counts, (logprobs, ref_logprobs) = _prepare(name, {"logprobs": logprobs, "ref_logprobs": ref_logprobs}, mask)
    if jnp.shape(desirable) != logprobs.shape:
        raise shape_error(name, {"desirable": desirable, "logprobs": logprobs}, "both must be [B]")
    if jnp.ndim(kl) != 0:
        raise shape_error(name, {"kl": kl}, "it must be one number for the batch")
    good, dtype = as_mask(name, desirable, "desirable"), logprobs.dtype
    beta = _number(name, "beta", beta, dtype)
    weight = jnp.where(
        good,
        _number(name, "desirable_weight", desirable_weight, dtype),
        _number(name, "undesirable_weight", undesirable_weight, dtype),
    )
    gain = _difference(logprobs, stop_gradient(ref_logprobs))
    base = jnp.maximum(stop_gradient(jnp.asarray(kl, dtype)), 0.0)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps the digits of a large x.
    losses = weight * jax.nn.sigmoid(beta * jnp.where(good, base - gain, gain - base))
    rewards = beta * gain
    metrics: Metrics = {
        "reward_chosen": _total(rewards, counts & good),
        "reward_rejected": _total(rewards, counts & ~good),
        "kl": _total(jnp.broadcast_to(base, gain.shape), counts),
    }
    return LossOutput(_mean(losses, counts), metrics)


def log1mexp(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """`log(1 - e^a)` for a <= 0, where any a above -epsilon of its dtype counts as that, without a gradient."""
    floor = -float(jnp.finfo(a.dtype).eps)
    return jnp.log(-jnp.expm1(jnp.where(a < floor, a, floor)))


def _dpo(
    name: str,
    arrays: dict[str, FloatArray],
    beta: Scalar,
    kind: DPOKind,
    label_smoothing: Scalar,
    mask: MaskArray | None,
) -> LossOutput:
    check_name(name, "kind", kind, DPO_KINDS)
    if kind != "sigmoid" and not is_off(label_smoothing):
        raise ValueError(
            f"{name}: label_smoothing={label_smoothing} has no meaning with kind={kind!r}: only 'sigmoid' has it"
        )
    counts, (chosen, rejected, ref_chosen, ref_rejected) = _prepare(name, arrays, mask)
    beta = _number(name, "beta", beta, chosen.dtype)
    chosen_gain = _difference(chosen, stop_gradient(ref_chosen))
    rejected_gain = _difference(rejected, stop_gradient(ref_rejected))
    margin = _difference(chosen_gain, rejected_gain)
    if kind == "sigmoid":
        losses = _smooth_sigmoid(name, beta * margin, label_smoothing)
    elif kind == "ipo":
        losses = jnp.square(margin - 0.5 / beta)
    else:
        losses = jax.nn.relu(1.0 - beta * margin)
    return _output(losses, beta, chosen_gain, rejected_gain, counts)


def _prepare(
    name: str, arrays: dict[str, FloatArray], mask: MaskArray | None
) -> tuple[Bool[Array, " B"], tuple[Array, ...]]:
    """What counts, and the arrays as `[B]`, widened to float32 at least, 0 where nothing counts."""
    shape = jnp.shape(next(iter(arrays.values())))
    if len(shape) != 1 or any(jnp.shape(x) != shape for x in arrays.values()):
        raise shape_error(name, arrays, "all must be [B]: one number a completion, from sequence_logprobs")
    if mask is not None and jnp.shape(mask) != shape:
        first = next(iter(arrays))
        raise shape_error(
            name, {"mask": mask, first: arrays[first]}, "both must be [B]: sequence_logprobs masks tokens"
        )
    counts = jnp.ones(shape, bool) if mask is None else as_mask(name, mask)
    given = [jnp.asarray(x) for x in arrays.values()]
    dtype = accumulator(*(x.dtype for x in given))
    return counts, tuple(jnp.where(counts, x.astype(dtype), 0.0) for x in given)


_RANGES: dict[str, tuple[str, Callable[[Scalar], object]]] = {
    "beta": ("above 0 and finite", lambda x: 0 < x < math.inf),
    "gamma": ("at least 0 and finite", lambda x: 0 <= x < math.inf),
    "label_smoothing": ("at least 0 and below 0.5", lambda x: 0 <= x < 0.5),
    "nll_coef": ("at least 0 and finite", lambda x: 0 <= x < math.inf),
    "desirable_weight": ("at least 0 and finite", lambda x: 0 <= x < math.inf),
    "undesirable_weight": ("at least 0 and finite", lambda x: 0 <= x < math.inf),
}


def _number(name: str, option: str, value: Scalar, dtype: np.dtype) -> Float[Array, ""]:
    """The value in the dtype of the loss; its range is checked unless it is traced."""
    if jnp.ndim(value) != 0:
        raise shape_error(name, {option: value}, "it must be one number")
    needed, holds = _RANGES[option]
    if is_concrete(value) and not holds(value):
        raise ValueError(f"{name}: {option}={value}; it must be {needed}")
    return jnp.asarray(value, dtype)


def _difference(a: Float[Array, " B"], b: Float[Array, " B"]) -> Float[Array, " B"]:
    """`a - b`, where two equal infinities cancel instead of giving NaN."""
    cancel = (a == b) & jnp.isinf(a)
    return jnp.where(cancel, 0.0, a) - jnp.where(cancel, 0.0, b)


def _smooth_sigmoid(name: str, z: Float[Array, " B"], label_smoothing: Scalar) -> Float[Array, " B"]:
    share = _number(name, "label_smoothing", label_smoothing, z.dtype)
    losses = -(1.0 - share) * jax.nn.log_sigmoid(z)
    # Selected: 0 times the infinite loss of an infinite margin would be NaN.
    return losses - jnp.where(share > 0, share * jax.nn.log_sigmoid(-z), 0.0)


def _mean(x: Float[Array, " B"], counts: Bool[Array, " B"]) -> Float[Array, ""]:
    return ratio_or_zero(jnp.sum(jnp.where(counts, x, 0.0)), jnp.sum(counts, dtype=x.dtype))


def _total(x: Float[Array, " B"], counts: Bool[Array, " B"]) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(counts, stop_gradient(x), 0.0)), jnp.sum(counts, dtype=x.dtype)


def _output(
    losses: Float[Array, " B"],
    beta: Float[Array, ""],
    chosen: Float[Array, " B"],
    rejected: Float[Array, " B"],
    counts: Bool[Array, " B"],
) -> LossOutput:
    margin = beta * _difference(chosen, rejected)
    metrics: Metrics = {
        "reward_chosen": _total(beta * chosen, counts),
        "reward_rejected": _total(beta * rejected, counts),
        "reward_margin": _total(margin, counts),
        "accuracy": _total((margin > 0).astype(losses.dtype), counts),
    }
    return LossOutput(_mean(losses, counts), metrics)


def _with_nll(
    name: str, output: LossOutput, nll: Scalar, coef: Float[Array, ""] | None, counts: Bool[Array, " B"]
) -> LossOutput:
    """Adds coef times the mean likelihood; None leaves it to the metrics, whatever it is."""
    if jnp.shape(nll) not in ((), counts.shape):
        raise shape_error(name, {"chosen_nll": nll, "chosen": counts}, "chosen_nll must be [B] or one number")
    nll = jnp.asarray(nll, output.loss.dtype)
    mean = nll if nll.ndim == 0 else _mean(nll, counts)
    metrics = {**output.metrics, "nll": _total(jnp.broadcast_to(nll, counts.shape), counts)}
    return LossOutput(output.loss if coef is None else output.loss + coef * mean, metrics)
