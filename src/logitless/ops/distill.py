"""The divergence between the softmaxes of two heads, both in blocks: one tile of each head's logits lives at a time.

A first sweep over the vocabulary finds the two normalisers, a second one the divergence; the backward pass makes the
tiles once more. The teacher is a constant here.

Logits are kept as `z = slope u`, and the maximum is subtracted from u: compilers fuse a product and the difference that
follows, with one rounding less, in one sweep and not in the other, and the probabilities of a peaked softmax would miss
a sum of 1 by the last digits of a large z.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator
from logitless.ops.blocks import Rows, TokenCut, VocabCut, VocabSlice
from logitless.ops.derivatives import Differentiated, first_only, values_of
from logitless.ops.manual import fori_loop
from logitless.ops.softmax import Normaliser
from logitless.ops.tiles import Gradients, cut_problem, head_block, raw_tile, sweep_gradients
from logitless.ops.types import HeadOptions, LogitScalars

if TYPE_CHECKING:
    Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
else:
    # The door refuses an unknown name, and names the nearest one.
    Divergence = str
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd")


class Head(NamedTuple):
    """Where one model ends: its hidden states `[N, D]`, the weight and bias on them, and the scalars of its logits."""

    hidden: Float[Array, "N D"]
    lm_head: Float[Array, "..."]
    bias: Float[Array, " V"] | None
    scalars: LogitScalars


@dataclass(frozen=True)
class DivergenceOptions:
    """The static choices of a call. The block sizes of the student hold for both heads."""

    kind: Divergence
    student: HeadOptions
    teacher: HeadOptions

    @property
    def cut(self) -> HeadOptions:
        """Those to cut the problem by: each head's tile gets half of the bytes."""
        given = self.student.block_bytes
        return self.student if given is None else replace(self.student, block_bytes=given // 2)


class _Peak(NamedTuple):
    """The student's likeliest token, and what the teacher has there."""

    column: Int[Array, "..."]
    teacher: Float[Array, "..."]


class _Found(NamedTuple):
    """What the forward pass finds of each token.

    Attributes:
        divergence: as it is returned.
        softmaxes: normalisers of the student and of the teacher, with maxima of u (see above).
        peak: for reverse KL and JSD, else None.
        centre: likewise, the mean under the student of what the gradient weighs its probabilities by.
    """

    divergence: Float[Array, " N"]
    softmaxes: tuple[Normaliser, Normaliser]
    peak: _Peak | None
    centre: Float[Array, " N"] | None


class _Residuals(NamedTuple):
    """The inputs as they came, what was found of each token, and whose gradient is wanted."""

    inputs: tuple
    found: _Found
    differentiated: Differentiated


def divergence_chunked(
    student: Head,
    teacher: Head,
    mask: Bool[Array, " N"] | None,
    beta: Float[Array, ""] | None,
    options: DivergenceOptions,
) -> Float[Array, " N"]:
    """Divergence of N tokens, 0 where the mask is False; the contract is that of `linear_distillation_loss`."""
    return _divergence(student, teacher, mask, beta, options)


def _primal(student, teacher, mask, beta, options):
    return _forward(student, teacher, mask, beta, options).divergence


_divergence = jax.custom_vjp(_primal, nondiff_argnums=(4,))


# The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
def _divergence_fwd(student, teacher, mask, beta, options):
    differentiated = Differentiated.by(student.hidden, student.lm_head, student.bias)
    scalars = (student.scalars, teacher.scalars, beta)
    student, teacher, mask, beta = primals = values_of(
        "linear_distillation_loss", (student, teacher, mask, beta), scalars
    )
    found = _forward(student, teacher, mask, beta, options)
    return found.divergence, _Residuals(primals, found, differentiated)


def _divergence_bwd(options, residuals, cotangent):
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None
    d_hidden, d_lm_head, d_bias = _backward(residuals, cotangent, options)
    student = residuals.inputs[0]._replace(hidden=d_hidden, lm_head=d_lm_head, bias=d_bias, scalars=None)
    return student, None, None, None


_divergence.defvjp(_divergence_fwd, _divergence_bwd, symbolic_zeros=True)


class _Terms(NamedTuple):
    """What a row needs to turn its two rows of logits into probabilities and their log-ratio, and to weigh a gradient.

    Attributes:
        maximum: of u, of student and teacher.
        inverse: 1 / total of either softmax.
        gap: log total of the teacher less that of the student.
        peak: as `_Found`, but for the log-ratio in place of the teacher's u.
        centre: as `_Found`; None in the forward pass, and so is `factor`.
        factor: cotangent, times logit_scale / temperature.
    """

    maximum: tuple[Float[Array, "..."], Float[Array, "..."]]
    inverse: tuple[Float[Array, "..."], Float[Array, "..."]]
    gap: Float[Array, "..."]
    peak: _Peak | None
    centre: Float[Array, "..."] | None = None
    factor: Float[Array, "..."] | None = None


Slopes = tuple[Float[Array, ""], Float[Array, ""]]


def _row_terms(softmaxes: tuple[Normaliser, Normaliser], peak: _Peak | None, slopes: Slopes) -> _Terms:
    student, teacher = softmaxes
    gap = jnp.log(teacher.total) - jnp.log(student.total)
    if peak is not None:
        peak = peak._replace(teacher=(peak.teacher - teacher.maximum) * slopes[1] - gap)
    return _Terms((student.maximum, teacher.maximum), (1.0 / student.total, 1.0 / teacher.total), gap, peak)


def _forward(
    student: Head,
    teacher: Head,
    mask: Bool[Array, " N"] | None,
    beta: Float[Array, ""] | None,
    options: DivergenceOptions,
) -> _Found:
    tokens, vocab = cut_problem(student.hidden, student.lm_head, mask, options.cut)
    dtype = _accumulator(student, teacher)
    v_axis = options.student.layout.index("V")
    zeros = jnp.zeros(tokens.order.shape[0], dtype)
    nothing = Normaliser(zeros - jnp.inf, zeros)
    slopes = _slope(student.scalars, dtype), _slope(teacher.scalars, dtype)
    peak = None if options.kind == "forward_kl" else _Peak(zeros.astype(jnp.int32), zeros)

    def normalise(rows, part, u_s, u_t, columns):
        (running_s, running_t), peak = part
        u_s, u_t = (_without(x, columns, v_axis, -jnp.inf) for x in (u_s, u_t))
        met_s, met_t = _meet(running_s, u_s, slopes[0], v_axis), _meet(running_t, u_t, slopes[1], v_axis)
        if peak is not None:
            peak = _climb(peak, met_s.maximum > running_s.maximum, u_s, u_t, columns, v_axis)
        return (met_s, met_t), peak

    softmaxes, peak = _sweep(tokens, vocab, student, teacher, options, normalise, ((nothing, nothing), peak))
    terms = _row_terms(softmaxes, peak, slopes)

    def diverge(rows, part, u_s, u_t, columns):
        row = _of_rows(rows, terms, v_axis)
        pair = _compare(u_s, u_t, row, slopes)
        tiles = _divergence_tile(pair, beta, options.kind), None
        if row.peak is not None:
            weigh = _weigh(pair, row.peak, columns, beta, options.kind, v_axis)
            tiles = tiles[0], jnp.where(pair.out_s, 0.0, pair.p_s * weigh)
        return jax.tree.map(lambda so_far, x: so_far + jnp.sum(_without(x, columns, v_axis, 0.0), v_axis), part, tiles)

    sums = (zeros, None if peak is None else zeros)
    divergence, centre = _sweep(tokens, vocab, student, teacher, options, diverge, sums)
    # A row without a finite logit is no distribution.
    proper = (softmaxes[0].maximum > -jnp.inf) & (softmaxes[1].maximum > -jnp.inf)
    return jax.tree.map(tokens.scatter, _Found(jnp.where(proper, divergence, jnp.nan), softmaxes, peak, centre))


@first_only("linear_distillation_loss")
def _backward(residuals: _Residuals, d_divergence: Float[Array, " N"], options: DivergenceOptions) -> Gradients:
    (student, teacher, mask, beta), found, wanted = residuals
    # An infinite divergence has no slope: like a target without probability, it gives no gradient.
    active = (d_divergence != 0) & ~jnp.isinf(found.divergence)
    hidden, lm_head, bias, scalars = student
    tokens, vocab = cut_problem(hidden, lm_head, active if mask is None else active & mask, options.cut)
    dtype = _accumulator(student, teacher)
    teacher_front = tokens.gather(teacher.hidden)
    v_axis = options.student.layout.index("V")
    slopes = _slope(scalars, dtype), _slope(teacher.scalars, dtype)
    one, two = (Normaliser(tokens.gather(x.maximum), tokens.gather(x.total, 1)) for x in found.softmaxes)
    factor = tokens.gather(d_divergence.astype(dtype))
    if scalars.logit_scale is not None:
        factor *= scalars.logit_scale.astype(dtype)
    if scalars.temperature is not None:
        factor /= scalars.temperature.astype(dtype)
    peak, centre = jax.tree.map(tokens.gather, (found.peak, found.centre))
    terms = _row_terms((one, two), peak, slopes)._replace(centre=centre, factor=factor)

    def open_block(columns, w, b):
        of_teacher = head_block(teacher.lm_head, teacher.bias, columns, options.teacher)

        def d_tile(rows, h):
            hiddens, blocks = (h, rows.of(teacher_front)), ((w, b), of_teacher)
            u_s, u_t = _tiles(hiddens, blocks, (scalars, teacher.scalars), options, dtype)
            row = _of_rows(rows, terms, v_axis)
            d_x = _d_logits_tile(_compare(u_s, u_t, row, slopes), row, columns, beta, options.kind, v_axis)
            if scalars.softcap is not None:
                d_x *= 1.0 - jnp.square(u_s)
            # Selected, not multiplied: neither a column at -inf nor a place without a token need hold finite numbers.
            return jnp.where((u_s == -jnp.inf) | (row.factor == 0), 0.0, d_x)

        return d_tile

    return sweep_gradients(tokens, vocab, (hidden, lm_head, bias), wanted, options.student, dtype, open_block)


def _sweep(
    tokens: TokenCut,
    vocab: VocabCut,
    student: Head,
    teacher: Head,
    options: DivergenceOptions,
    step: Callable[[Rows, Any, Array, Array, VocabSlice], Any],
    running: Any,
) -> Any:
    """`step(rows, their part of running, student tile, teacher tile, columns)` for every block of the logits."""
    dtype = _accumulator(student, teacher)
    fronts = tokens.gather(student.hidden), tokens.gather(teacher.hidden)

    def vocab_step(i, running):
        columns = vocab.block(i)
        blocks = _blocks(columns, student, teacher, options)

        def token_step(j, running):
            rows = tokens.rows(j)
            h = (rows.of(fronts[0]), rows.of(fronts[1]))
            tiles = _tiles(h, blocks, (student.scalars, teacher.scalars), options, dtype)
            part = step(rows, jax.tree.map(rows.of, running), *tiles, columns)
            return jax.tree.map(rows.put, running, part)

        return fori_loop(0, tokens.blocks, token_step, running)

    return fori_loop(0, vocab.blocks, vocab_step, running)


def _accumulator(student: Head, teacher: Head) -> np.dtype:
    return accumulator(*(x.dtype for head in (student, teacher) for x in (head.hidden, head.lm_head)))


def _blocks(
    columns: VocabSlice, student: Head, teacher: Head, options: DivergenceOptions
) -> tuple[tuple[Array, Array | None], tuple[Array, Array | None]]:
    """The block of either head, and of its bias."""
    return (
        head_block(student.lm_head, student.bias, columns, options.student),
        head_block(teacher.lm_head, teacher.bias, columns, options.teacher),
    )


def _tiles(
    hidden: tuple[Array, Array],
    blocks: tuple[tuple[Array, Array | None], tuple[Array, Array | None]],
    scalars: tuple[LogitScalars, LogitScalars],
    options: DivergenceOptions,
    dtype: np.dtype,
) -> tuple[Float[Array, "a b"], Float[Array, "a b"]]:
    """The u of student and teacher, both with the axes that the student's layout gives its own."""
    v_axis = options.student.layout.index("V")
    u_s, u_t = (
        _unit(raw_tile(h, w, b, v_axis, of_head, dtype), scalars)
        for h, (w, b), scalars, of_head in zip(hidden, blocks, scalars, (options.student, options.teacher), strict=True)
    )
    return u_s, u_t


def _unit(x: Float[Array, "..."], scalars: LogitScalars) -> Float[Array, "..."]:
    """U of the raw logits x: x itself, or `tanh(x logit_scale / softcap)`; -inf stays -inf."""
    if scalars.softcap is None:
        return x
    ratio = x / scalars.softcap.astype(x.dtype)
    if scalars.logit_scale is not None:
        ratio *= scalars.logit_scale.astype(x.dtype)
    return jnp.where(x == -jnp.inf, -jnp.inf, jnp.tanh(ratio))


def _slope(scalars: LogitScalars, dtype: np.dtype) -> Float[Array, ""]:
    """What takes u to logits: the softcap, or where there is none logit_scale, over temperature."""
    slope = scalars.logit_scale if scalars.softcap is None else scalars.softcap
    slope = jnp.ones((), dtype) if slope is None else slope.astype(dtype)
    return slope if scalars.temperature is None else slope / scalars.temperature.astype(dtype)


def _meet(normaliser: Normaliser, u: Float[Array, "..."], slope: Float[Array, ""], v_axis: int) -> Normaliser:
    """Adds a tile to a normaliser, whose maximum is that of u."""
    maximum = jnp.maximum(normaliser.maximum, jnp.max(u, axis=v_axis))
    # Where every column so far is -inf the maximum is no number to subtract.
    shift_by = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    total = jnp.sum(jnp.exp((u - jnp.expand_dims(shift_by, v_axis)) * slope), axis=v_axis)
    return Normaliser(maximum, normaliser.total * jnp.exp((normaliser.maximum - shift_by) * slope) + total)


def _climb(
    peak: _Peak,
    higher: Bool[Array, " n"],
    u_s: Float[Array, "..."],
    u_t: Float[Array, "..."],
    columns: VocabSlice,
    v_axis: int,
) -> _Peak:
    """The peak among the columns so far, where `higher` says that this tile has it."""
    column = jnp.argmax(u_s, axis=v_axis)
    u = jnp.squeeze(jnp.take_along_axis(u_t, jnp.expand_dims(column, v_axis), axis=v_axis), v_axis)
    column = column.astype(jnp.int32) + columns.start
    return _Peak(jnp.where(higher, column, peak.column), jnp.where(higher, u, peak.teacher))


def _of_rows(rows: Rows, terms: _Terms, v_axis: int) -> _Terms:
    """The terms of a block of tokens, against tiles."""
    return jax.tree.map(lambda x: jnp.expand_dims(rows.of(x), v_axis), terms)


def _without(x: Float[Array, "..."], columns: VocabSlice, v_axis: int, fill: float) -> Float[Array, "..."]:
    """A tile with `fill` in the columns that an earlier one has counted."""
    met = columns.met()
    return x if met is None else jnp.where(jnp.expand_dims(met, 1 - v_axis), fill, x)


class _Pair(NamedTuple):
    """Two softmaxes on a tile: probabilities, log p_teacher - log p_student (0 where both are 0), and what is -inf."""

    p_s: Float[Array, "..."]
    p_t: Float[Array, "..."]
    log_ratio: Float[Array, "..."]
    out_s: Bool[Array, "..."]
    out_t: Bool[Array, "..."]


def _compare(
    u_s: Float[Array, "..."],
    u_t: Float[Array, "..."],
    row: _Terms,
    slopes: Slopes,
) -> _Pair:
    from_s, from_t = u_s - row.maximum[0], u_t - row.maximum[1]
    out_s, out_t = u_s == -jnp.inf, u_t == -jnp.inf
    shifted_s, shifted_t = from_s * slopes[0], from_t * slopes[1]
    # Equal heads cancel exactly, which two products of which one is fused with the difference would not.
    apart = jnp.where(slopes[0] == slopes[1], (from_t - from_s) * slopes[0], shifted_t - shifted_s)
    return _Pair(
        p_s=jnp.exp(shifted_s) * row.inverse[0],
        p_t=jnp.exp(shifted_t) * row.inverse[1],
        log_ratio=jnp.where(out_s & out_t, 0.0, apart - row.gap),
        out_s=out_s,
        out_t=out_t,
    )


def _divergence_tile(pair: _Pair, beta: Float[Array, ""] | None, kind: Divergence) -> Float[Array, "..."]:
    """What each column adds to the divergence."""
    if kind == "forward_kl":
        return _excess(pair.p_t, pair.p_s, pair.log_ratio, pair.out_t, pair.out_s)
    if kind == "reverse_kl":
        return _excess(pair.p_s, pair.p_t, -pair.log_ratio, pair.out_s, pair.out_t)
    assert beta is not None
    beta = beta.astype(pair.p_s.dtype)
    to_teacher, to_student = _mixture(pair.log_ratio, beta)
    of_teacher = jnp.where(pair.out_t, 0.0, beta * (pair.p_t * to_teacher))
    of_student = jnp.where(pair.out_s, 0.0, (1.0 - beta) * (pair.p_s * to_student))
    return -(of_teacher + of_student)


def _excess(
    p: Float[Array, "..."],
    q: Float[Array, "..."],
    log_ratio: Float[Array, "..."],
    p_out: Bool[Array, "..."],
    q_out: Bool[Array, "..."],
) -> Float[Array, "..."]:
    """`p log(p / q) - p + q`, which sums to KL(p || q) without a term below 0: a small divergence keeps its digits.

    A rounded normaliser moves `sum(p log(p / q))` in first order, and this sum in second order only.
    """
    near = p * (jnp.expm1(-log_ratio) + log_ratio)
    terms = jnp.where(jnp.abs(log_ratio) < 1.0, near, q - p + p * log_ratio)
    return jnp.where(p_out, q, jnp.where(q_out, jnp.inf, terms))


def _mixture(log_ratio: Float[Array, "..."], beta: Float[Array, ""]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`log m - log p_teacher` and `log m - log p_student` of m = beta p_teacher + (1 - beta) p_student.

    Taken from the larger of the two, of which m is at least a share; close to 0 they keep the digits of the log-ratio.
    """
    larger_is_teacher = log_ratio > 0
    share = jnp.where(larger_is_teacher, beta, 1.0 - beta)
    other = jnp.where(larger_is_teacher, 1.0 - beta, beta)
    down = -jnp.abs(log_ratio)
    near = down > -1.0
    inner = jnp.where(near, other * jnp.expm1(down), other / share * jnp.exp(down))
    from_larger = jnp.log1p(inner) + jnp.where(near, 0.0, jnp.log(share))
    from_smaller = from_larger - down
    return (
        jnp.where(larger_is_teacher, from_larger, from_smaller),
        jnp.where(larger_is_teacher, from_smaller, from_larger),
    )


def _weigh(
    pair: _Pair, peak: _Peak, columns: VocabSlice, beta: Float[Array, ""] | None, kind: Divergence, v_axis: int
) -> Float[Array, "..."]:
    """What the gradient weighs the student's probabilities by, less that at the peak.

    Of a student that is sure of its token the gradient is what little the other columns hold: it would drown in the
    rounding of a mean that the peak makes up.
    """
    if kind == "reverse_kl":
        weigh = peak.teacher - pair.log_ratio
    else:
        assert beta is not None
        beta = beta.astype(pair.p_s.dtype)
        weigh = (1.0 - beta) * (_mixture(peak.teacher, beta)[1] - _mixture(pair.log_ratio, beta)[1])
    ids = jnp.arange(columns.size, dtype=jnp.int32) + columns.start
    return jnp.where(jnp.expand_dims(ids, 1 - v_axis) == peak.column, 0.0, weigh)


def _d_logits_tile(
    pair: _Pair, row: _Terms, columns: VocabSlice, beta: Float[Array, ""] | None, kind: Divergence, v_axis: int
) -> Float[Array, "..."]:
    """Gradient of the student's logits after softcap and temperature, times the row's factor."""
    assert row.factor is not None
    if row.peak is None:
        # p_s - p_t; close to 0 it keeps the digits of the log-ratio.
        near = -(pair.p_s * jnp.expm1(pair.log_ratio))
        return jnp.where(jnp.abs(pair.log_ratio) < 1.0, near, pair.p_s - pair.p_t) * row.factor
    assert row.centre is not None
    return pair.p_s * (_weigh(pair, row.peak, columns, beta, kind, v_axis) - row.centre) * row.factor
