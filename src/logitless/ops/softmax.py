"""One softmax met block by block, and its gradient: the arithmetic that every blocked implementation shares.

The target's own column never enters the running sums. It joins at the end, so that a log-probability close to 0 is
computed as `-softplus(lse of the others - z_target)` and keeps the digits that `z_target - lse` would lose.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from logitless.ops.types import LogitScalars, TokenStats

VANISHED = -1000.0
"""An exponential of this or less is 0 in every dtype. Differences bounded by it stay numbers that may be multiplied."""


def transform_logits(x: Float[Array, "..."], scalars: LogitScalars) -> Float[Array, "..."]:
    """`softcap tanh(x logit_scale / softcap) / temperature`; -inf stays -inf."""
    if scalars.logit_scale is not None:
        x *= scalars.logit_scale.astype(x.dtype)
    if scalars.softcap is not None:
        cap = scalars.softcap.astype(x.dtype)
        x = jnp.where(x == -jnp.inf, -jnp.inf, cap * jnp.tanh(x / cap))
    if scalars.temperature is not None:
        x /= scalars.temperature.astype(x.dtype)
    return x


def softcap_slope(z: Float[Array, "..."], scalars: LogitScalars) -> Float[Array, "..."]:
    """`1 - tanh(x logit_scale / softcap)^2`, from the logits after softcap and temperature; 0 at -inf."""
    assert scalars.softcap is not None
    cap = scalars.softcap.astype(z.dtype)
    capped = z if scalars.temperature is None else z * scalars.temperature.astype(z.dtype)
    return 1.0 - jnp.square(jnp.maximum(capped / cap, -1.0))


class Running(NamedTuple):
    """Online softmax of the columns met so far without the target's own, which joins exactly at the end.

    Attributes:
        maximum: of the other columns' logits z.
        total: sum of e^(z - maximum).
        weighted: sum of e^(z - maximum) (z - maximum), for the entropy.
        plain: sum of z over all columns.
        target: the target's logit, -inf until it is met.
    """

    maximum: Float[Array, " n"]
    total: Float[Array, " n"]
    weighted: Float[Array, " n"] | None
    plain: Float[Array, " n"] | None
    target: Float[Array, " n"]


def start(count: int, dtype: jnp.dtype, outputs: tuple[str, ...]) -> Running:
    """An online softmax that has met no column yet."""
    zeros = jnp.zeros(count, dtype)
    return Running(
        maximum=zeros - jnp.inf,
        total=zeros,
        weighted=zeros if "entropy" in outputs else None,
        plain=zeros if "mean_logits" in outputs else None,
        target=zeros - jnp.inf,
    )


def meet(
    running: Running,
    z: Float[Array, "..."],
    column: Int[Array, " n"],
    met: Bool[Array, " v"] | None,
    v_axis: int,
    padded: bool = False,
) -> Running:
    """Adds a tile of logits to the online softmax.

    Args:
        running: the sums over the columns before.
        z: the tile, after softcap and temperature.
        column: the target's column within the tile, -1 where it stands in another.
        met: columns that an earlier tile has counted, or None where there are none.
        v_axis: the tile's vocabulary axis: 1 for `[n, v]`, 0 for `[v, n]`.
        padded: whether columns of -inf are padding, which no sum counts.

    Returns:
        The sums with the tile's columns in them.
    """
    skipped = _own(z, column, v_axis)
    if met is not None:
        skipped |= jnp.expand_dims(met, 1 - v_axis)
    others = jnp.where(skipped, -jnp.inf, z)
    maximum = jnp.maximum(running.maximum, jnp.max(others, axis=v_axis))
    # Where every column so far is -inf the maximum is no number to subtract.
    shift_by = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    shift = jnp.maximum(running.maximum - shift_by, VANISHED)
    rescale = jnp.exp(shift)
    shifted = others - jnp.expand_dims(shift_by, v_axis)
    e = jnp.exp(shifted)
    weighted, plain = running.weighted, running.plain
    if weighted is not None:
        carried = rescale * (weighted + running.total * shift)
        weighted = carried + jnp.sum(jnp.where(others == -jnp.inf, 0.0, e * shifted), axis=v_axis)
    if plain is not None:
        counted = z if met is None else jnp.where(jnp.expand_dims(met, 1 - v_axis), 0.0, z)
        if padded:
            counted = jnp.where(z == -jnp.inf, 0.0, counted)
        plain = plain + jnp.sum(counted, axis=v_axis)
    # One element a row is cheaper to fetch than a masked sum over the tile.
    target = jnp.take_along_axis(z, jnp.expand_dims(jnp.maximum(column, 0), v_axis), axis=v_axis)
    return Running(
        maximum=maximum,
        total=running.total * rescale + jnp.sum(e, axis=v_axis),
        weighted=weighted,
        plain=plain,
        target=jnp.where(column >= 0, jnp.squeeze(target, v_axis), running.target),
    )


def merge(parts: Running, largest: Callable[[Array], Array], add: Callable[[Array], Array]) -> Running:
    """One online softmax from several, each of other columns.

    Args:
        parts: what each has met.
        largest: makes one maximum of all: over an axis that stays, or over devices.
        add: makes one sum of all likewise.
    """
    maximum = largest(parts.maximum)
    # Where every column is -inf the maximum is no number to subtract.
    shift = jnp.maximum(parts.maximum - jnp.where(maximum == -jnp.inf, 0.0, maximum), VANISHED)
    total, weighted = rescaled(parts.total, parts.weighted, shift)
    return Running(
        maximum=maximum,
        total=add(total),
        weighted=None if weighted is None else add(weighted),
        plain=None if parts.plain is None else add(parts.plain),
        target=largest(parts.target),
    )


def rescaled(total: Array, weighted: Array | None, shift: Array) -> tuple[Array, Array | None]:
    """The sums about a maximum that is higher by `-shift`."""
    rescale = jnp.exp(shift)
    return total * rescale, None if weighted is None else rescale * (weighted + total * shift)


class Normaliser(NamedTuple):
    """Softmax is `e^(z - maximum) / total`: kept apart, for their sum lse would round a large maximum into every p."""

    maximum: Float[Array, " n"]
    total: Float[Array, " n"]


def finish(
    running: Running, in_vocab: Bool[Array, " n"], vocab: int, outputs: tuple[str, ...]
) -> tuple[TokenStats, Normaliser]:
    """Lets the target's column join, and turns the running sums into statistics.

    Args:
        running: the sums over all columns.
        in_vocab: False where the target is none of them.
        vocab: V.
        outputs: the statistics wanted.

    Returns:
        The statistics, NaN for a row without a finite logit, and the softmax's normaliser.
    """
    maximum = jnp.maximum(running.maximum, running.target)
    finite = maximum > -jnp.inf
    shift_others = jnp.maximum(running.maximum - maximum, VANISHED)
    shift_target = jnp.maximum(running.target - maximum, VANISHED)
    e_others, e_target = jnp.exp(shift_others), jnp.exp(shift_target)
    total = running.total * e_others + e_target
    others = running.maximum + jnp.log(running.total)
    logprobs = -jax.nn.softplus(others - running.target)
    entropy = None
    if running.weighted is not None:
        weighted = e_others * (running.weighted + running.total * shift_others)
        weighted += e_target * shift_target
        entropy = jnp.where(finite, jnp.log(total) - weighted / total, jnp.nan)
    stats = TokenStats(
        logprobs=jnp.where(in_vocab & finite, logprobs, jnp.nan) if "logprobs" in outputs else None,
        lse=jnp.where(finite, maximum + jnp.log(total), jnp.nan) if "lse" in outputs else None,
        entropy=entropy,
        mean_logits=None if running.plain is None else running.plain / vocab,
    )
    return stats, Normaliser(maximum, total)


class RowTerms(NamedTuple):
    """A row's logit gradient: `e^(z - maximum) (shared - entropy (z - maximum)) + mean`, and `target` at the target."""

    maximum: Float[Array, " n"]
    shared: Float[Array, " n"]
    target: Float[Array, " n"]
    entropy: Float[Array, " n"] | None
    mean: Float[Array, " n"] | None


def row_terms(
    stats: TokenStats, normaliser: Normaliser, d_stats: TokenStats, scalars: LogitScalars, vocab: int
) -> RowTerms:
    """Per-token terms of the gradient of the product `h W + b`, logit_scale / temperature included.

    Args:
        stats: the log-probabilities, and the entropy where its cotangent is given.
        normaliser: of the softmax.
        d_stats: cotangents; None stands for zero.
        scalars: as the forward pass had them.
        vocab: V.

    Returns:
        The terms that `d_logits_tile` takes.
    """
    assert stats.logprobs is not None
    zeros = jnp.zeros_like(stats.logprobs)
    # A target without probability, or outside the vocabulary, has no gradient to give.
    given = jnp.isfinite(stats.logprobs)
    d_logprobs = zeros if d_stats.logprobs is None else jnp.where(given, d_stats.logprobs, 0.0)
    d_lse = zeros if d_stats.lse is None else d_stats.lse
    logprobs = jnp.where(given, stats.logprobs, 0.0)
    p_target = jnp.exp(logprobs)
    shared = d_lse - d_logprobs
    # 1 - p comes from the log-probability itself: a peaked token keeps its digits.
    target = p_target * d_lse - jnp.expm1(logprobs) * d_logprobs
    if d_stats.entropy is not None:
        assert stats.entropy is not None
        target -= p_target * d_stats.entropy * (jnp.maximum(logprobs, VANISHED) + stats.entropy)
        shared -= d_stats.entropy * (stats.entropy - jnp.log(normaliser.total))
    mean = None
    if d_stats.mean_logits is not None:
        mean = d_stats.mean_logits / vocab
        target += mean
    factor = jnp.ones((), zeros.dtype) if scalars.logit_scale is None else scalars.logit_scale.astype(zeros.dtype)
    if scalars.temperature is not None:
        factor /= scalars.temperature.astype(zeros.dtype)
    return RowTerms(
        maximum=normaliser.maximum,
        shared=shared * factor / normaliser.total,
        target=target * factor,
        entropy=None if d_stats.entropy is None else d_stats.entropy * factor / normaliser.total,
        mean=None if mean is None else mean * factor,
    )


def d_logits_tile(
    z: Float[Array, "..."], column: Int[Array, " n"], terms: RowTerms, scalars: LogitScalars, v_axis: int
) -> Float[Array, "..."]:
    """Gradient of the product `h W + b`, from the logits of a tile.

    Args:
        z: the tile, after softcap and temperature.
        column: the target's column within the tile; any other number where it stands elsewhere.
        terms: of the tile's rows, from `row_terms`.
        scalars: as the forward pass had them.
        v_axis: the tile's vocabulary axis: 1 for `[n, v]`, 0 for `[v, n]`.

    Returns:
        The gradient, in the dtype of `z`; 0 where z is -inf.
    """
    terms = jax.tree.map(lambda x: jnp.expand_dims(x, v_axis), terms)
    return d_logits(z, _own(z, column, v_axis), terms, scalars)


def d_logits(
    z: Float[Array, "..."],
    own: Bool[Array, "..."] | None,
    terms: RowTerms,
    scalars: LogitScalars,
    impossible: bool = True,
) -> Float[Array, "..."]:
    """`d_logits_tile`, elementwise, where the terms broadcast against `z`.

    Args:
        z: logits, after softcap and temperature.
        own: marks each token's target; None where none is among them.
        terms: of the rows.
        scalars: as the forward pass had them.
        impossible: whether a logit can be -inf.
    """
    shifted = z - terms.maximum
    weight = terms.shared
    if terms.entropy is not None:
        weight = weight - terms.entropy * jnp.maximum(shifted, VANISHED)
    d_x = jnp.exp(shifted) * weight
    if terms.mean is not None:
        d_x += terms.mean
    if own is not None:
        d_x = jnp.where(own, terms.target, d_x)
    if scalars.softcap is not None:
        d_x *= softcap_slope(z, scalars)
    # Selected, not multiplied: 0 times an infinite factor is no zero.
    return jnp.where(z == -jnp.inf, 0.0, d_x) if impossible else d_x


def _own(z: Float[Array, "..."], column: Int[Array, " n"], v_axis: int) -> Bool[Array, "..."]:
    """True at each token's own target."""
    columns = jnp.arange(z.shape[v_axis], dtype=column.dtype)
    return jnp.expand_dims(column, v_axis) == jnp.expand_dims(columns, 1 - v_axis)
