"""The divergence between the softmaxes of two heads, both in blocks: one tile of each head's logits lives at a time.

A first sweep over the vocabulary finds the two normalisers, a second one the divergence; the backward pass makes the
tiles once more. The teacher is a constant here, and its arrays are read but never written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float

from logitless._arrays import accumulator
from logitless.ops.blocks import Rows, TokenCut, VocabCut, VocabSlice
from logitless.ops.chunked import _add_products, _cut, _Gradients, _head_block, _logits_tile
from logitless.ops.derivatives import Differentiated, first_only, values_of
from logitless.ops.softmax import Normaliser
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


class _Residuals(NamedTuple):
    """The inputs as they came, and a few numbers per token.

    Attributes:
        inputs: student, teacher, mask and beta.
        softmaxes: normalisers of the student and of the teacher.
        divergence: as it was returned.
        centre: mean, under the student, of what the gradient weighs its probabilities by; None for forward KL.
        differentiated: the inputs of the student whose gradient is wanted.
    """

    inputs: tuple
    softmaxes: tuple[Normaliser, Normaliser]
    divergence: Float[Array, " N"]
    centre: Float[Array, " N"] | None
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
    return _forward(student, teacher, mask, beta, options)[0]


_divergence = jax.custom_vjp(_primal, nondiff_argnums=(4,))


# The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
def _divergence_fwd(student, teacher, mask, beta, options):
    bias = student.bias
    differentiated = Differentiated(
        student.hidden.perturbed, student.lm_head.perturbed, bias is not None and bias.perturbed
    )
    scalars = (student.scalars, teacher.scalars, beta)
    primals = values_of("linear_distillation_loss", (student, teacher, mask, beta), scalars)
    divergence, softmaxes, centre = _forward(*primals, options)
    return divergence, _Residuals(primals, softmaxes, divergence, centre, differentiated)


def _divergence_bwd(options, residuals, cotangent):
    if isinstance(cotangent, SymbolicZero):
        return None, None, None, None
    gradients = _backward(residuals, cotangent, options)
    return Head(gradients.hidden, gradients.lm_head, gradients.bias, None), None, None, None


_divergence.defvjp(_divergence_fwd, _divergence_bwd, symbolic_zeros=True)


class _Terms(NamedTuple):
    """What a row needs to turn its two rows of logits into probabilities and their log-ratio, and to weigh a gradient.

    Attributes:
        maximum: of the logits, of student and teacher.
        inverse: 1 / total of either softmax.
        gap: log total of the teacher less that of the student.
        centre: see `_Residuals`.
        factor: cotangent, times logit_scale / temperature; None in the forward pass, and so is `centre`.
    """

    maximum: tuple[Float[Array, "..."], Float[Array, "..."]]
    inverse: tuple[Float[Array, "..."], Float[Array, "..."]]
    gap: Float[Array, "..."]
    centre: Float[Array, "..."] | None = None
    factor: Float[Array, "..."] | None = None


def _row_terms(student: Normaliser, teacher: Normaliser) -> _Terms:
    return _Terms(
        maximum=(student.maximum, teacher.maximum),
        inverse=(1.0 / student.total, 1.0 / teacher.total),
        gap=jnp.log(teacher.total) - jnp.log(student.total),
    )


def _forward(
    student: Head,
    teacher: Head,
    mask: Bool[Array, " N"] | None,
    beta: Float[Array, ""] | None,
    options: DivergenceOptions,
) -> tuple[Float[Array, " N"], tuple[Normaliser, Normaliser], Float[Array, " N"] | None]:
    """The divergence, both normalisers and the centre, of every token."""
    tokens, vocab = _cut(student.hidden, student.lm_head, mask, options.student)
    dtype = _accumulator(student, teacher)
    v_axis = options.student.layout.index("V")
    zeros = jnp.zeros(tokens.order.shape[0], dtype)
    nothing = Normaliser(zeros - jnp.inf, zeros)

    def normalise(rows, part, z_s, z_t, met):
        return _meet(part[0], z_s, met, v_axis), _meet(part[1], z_t, met, v_axis)

    softmaxes = _sweep(tokens, vocab, student, teacher, options, normalise, (nothing, nothing))
    terms = _row_terms(*softmaxes)

    def diverge(rows, part, z_s, z_t, met):
        tile = _divergence_tile(_compare(z_s, z_t, _of_rows(rows, terms, v_axis)), beta, options.kind)
        return jax.tree.map(lambda sum_, x: sum_ + jnp.sum(_uncounted(x, met, v_axis), axis=v_axis), part, tile)

    sums = (zeros, zeros if options.kind == "jsd" else None)
    divergence, centre = _sweep(tokens, vocab, student, teacher, options, diverge, sums)
    # A row without a finite logit is no distribution.
    proper = (softmaxes[0].maximum > -jnp.inf) & (softmaxes[1].maximum > -jnp.inf)
    divergence = jnp.where(proper, divergence, jnp.nan)
    # Reverse KL weighs p_student by the log-ratio, whose mean is the divergence itself.
    centre = divergence if options.kind == "reverse_kl" else centre
    return jax.tree.map(tokens.scatter, (divergence, softmaxes, centre))


@first_only("linear_distillation_loss")
def _backward(residuals: _Residuals, d_divergence: Float[Array, " N"], options: DivergenceOptions) -> _Gradients:
    (student, teacher, mask, beta), softmaxes, divergence, centre, wanted = residuals
    # An infinite divergence has no slope: like a target without probability, it gives no gradient.
    active = (d_divergence != 0) & ~jnp.isinf(divergence)
    hidden, lm_head, bias, scalars = student
    tokens, vocab = _cut(hidden, lm_head, active if mask is None else active & mask, options.student)
    dtype = _accumulator(student, teacher)
    fronts = tokens.gather(hidden), tokens.gather(teacher.hidden)
    v_axis = options.student.layout.index("V")
    # A place without a token has probability 0 everywhere, so that its zeros stay zeros.
    nowhere = float(jnp.finfo(dtype).max)
    terms = _row_terms(*(Normaliser(tokens.gather(x.maximum, nowhere), tokens.gather(x.total, 1)) for x in softmaxes))
    factor = tokens.gather(d_divergence.astype(dtype))
    if scalars.logit_scale is not None:
        factor *= scalars.logit_scale.astype(dtype)
    if scalars.temperature is not None:
        factor /= scalars.temperature.astype(dtype)
    terms = terms._replace(centre=None if centre is None else tokens.gather(centre), factor=factor)

    def vocab_step(i, total):
        columns = vocab.block(i)
        blocks = _blocks(columns, student, teacher, options)
        fresh = blocks[0][0]
        if (met := columns.met()) is not None:
            # Columns met before must not reach d_hidden a second time.
            fresh = jnp.where(jnp.expand_dims(met, 1 - v_axis), jnp.zeros_like(fresh), fresh)

        def token_step(j, block):
            rows = tokens.rows(j)
            h = rows.of(fronts[0])
            z_s, z_t = _tiles((h, rows.of(fronts[1])), blocks, (scalars, teacher.scalars), options, dtype)
            row = _of_rows(rows, terms, v_axis)
            d_x = _d_logits_tile(_compare(z_s, z_t, row), row, beta, options.kind)
            if scalars.softcap is not None:
                d_x *= _softcap_slope(z_s, scalars)
            # Selected, not multiplied: 0 times an infinite factor is no zero.
            d_x = jnp.where(z_s == -jnp.inf, 0.0, d_x)
            return _add_products(block, d_x, h, fresh, rows, wanted, options.student)

        # The first block of tokens starts the sums, which then need neither zeros nor an addition.
        block = token_step(0, _Gradients(total.hidden, None, None))
        if tokens.order.shape[0] > tokens.size:
            block = lax.fori_loop(1, tokens.blocks, token_step, block)
        return _Gradients(
            block.hidden,
            None if block.lm_head is None else columns.put(total.lm_head, block.lm_head, v_axis),
            None if block.bias is None else columns.put(total.bias, block.bias, 0),
        )

    places = (tokens.order.shape[0], hidden.shape[1])
    total = _Gradients(
        jnp.zeros(places if v_axis else places[::-1], dtype) if wanted.hidden else None,
        jnp.zeros_like(lm_head) if wanted.lm_head else None,
        None if bias is None or not wanted.bias else jnp.zeros_like(bias),
    )
    total = lax.fori_loop(0, vocab.blocks, vocab_step, total)
    if total.hidden is not None:
        d_hidden = total.hidden.astype(hidden.dtype)
        total = total._replace(hidden=tokens.scatter(d_hidden if v_axis else d_hidden.T))
    return total


def _sweep(
    tokens: TokenCut,
    vocab: VocabCut,
    student: Head,
    teacher: Head,
    options: DivergenceOptions,
    step: Callable[[Rows, Any, Array, Array, Bool[Array, " v"] | None], Any],
    running: Any,
) -> Any:
    """`step(rows, part of running, student tile, teacher tile, columns met before)` for every block of the logits."""
    dtype = _accumulator(student, teacher)
    fronts = tokens.gather(student.hidden), tokens.gather(teacher.hidden)

    def vocab_step(i, running):
        columns = vocab.block(i)
        blocks = _blocks(columns, student, teacher, options)

        def token_step(j, running):
            rows = tokens.rows(j)
            h = (rows.of(fronts[0]), rows.of(fronts[1]))
            tiles = _tiles(h, blocks, (student.scalars, teacher.scalars), options, dtype)
            part = step(rows, jax.tree.map(rows.of, running), *tiles, columns.met())
            return jax.tree.map(rows.put, running, part)

        return lax.fori_loop(0, tokens.blocks, token_step, running)

    return lax.fori_loop(0, vocab.blocks, vocab_step, running)


def _accumulator(student: Head, teacher: Head) -> np.dtype:
    return accumulator(*(x.dtype for head in (student, teacher) for x in (head.hidden, head.lm_head)))


def _blocks(columns: VocabSlice, student: Head, teacher: Head, options: DivergenceOptions) -> tuple[tuple, tuple]:
    """The block of either head, and of its bias."""
    return (
        _head_block(student.lm_head, student.bias, columns, options.student),
        _head_block(teacher.lm_head, teacher.bias, columns, options.teacher),
    )


def _tiles(
    hidden: tuple[Array, Array],
    blocks: tuple[tuple, tuple],
    scalars: tuple[LogitScalars, LogitScalars],
    options: DivergenceOptions,
    dtype: np.dtype,
) -> tuple[Float[Array, "a b"], Float[Array, "a b"]]:
    """Logits of student and teacher, both with the axes that the student's layout gives its own."""
    z_s = _logits_tile(hidden[0], *blocks[0], scalars[0], options.student, dtype)
    z_t = _logits_tile(hidden[1], *blocks[1], scalars[1], options.teacher, dtype)
    return z_s, z_t if options.teacher.layout == options.student.layout else z_t.T


def _meet(normaliser: Normaliser, z: Float[Array, "..."], met: Bool[Array, " v"] | None, v_axis: int) -> Normaliser:
    """Adds a tile of logits to a normaliser."""
    if met is not None:
        z = jnp.where(jnp.expand_dims(met, 1 - v_axis), -jnp.inf, z)
    maximum = jnp.maximum(normaliser.maximum, jnp.max(z, axis=v_axis))
    # Where every column so far is -inf the maximum is no number to subtract.
    shift_by = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    total = jnp.sum(jnp.exp(z - jnp.expand_dims(shift_by, v_axis)), axis=v_axis)
    return Normaliser(maximum, normaliser.total * jnp.exp(normaliser.maximum - shift_by) + total)


def _of_rows(rows: Rows, terms: _Terms, v_axis: int) -> _Terms:
    """The terms of a block of tokens, against tiles."""
    return jax.tree.map(lambda x: jnp.expand_dims(rows.of(x), v_axis), terms)


def _uncounted(x: Float[Array, "..."], met: Bool[Array, " v"] | None, v_axis: int) -> Float[Array, "..."]:
    return x if met is None else jnp.where(jnp.expand_dims(met, 1 - v_axis), 0.0, x)


class _Pair(NamedTuple):
    """Two softmaxes on a tile: probabilities, log p_teacher - log p_student (0 where both are 0), and what is -inf."""

    p_s: Float[Array, "..."]
    p_t: Float[Array, "..."]
    log_ratio: Float[Array, "..."]
    out_s: Bool[Array, "..."]
    out_t: Bool[Array, "..."]


def _compare(z_s: Float[Array, "..."], z_t: Float[Array, "..."], row: _Terms) -> _Pair:
    shifted_s, shifted_t = z_s - row.maximum[0], z_t - row.maximum[1]
    out_s, out_t = z_s == -jnp.inf, z_t == -jnp.inf
    return _Pair(
        p_s=jnp.exp(shifted_s) * row.inverse[0],
        p_t=jnp.exp(shifted_t) * row.inverse[1],
        # Equal heads cancel exactly, maximum by maximum and total by total.
        log_ratio=jnp.where(out_s & out_t, 0.0, (shifted_t - shifted_s) - row.gap),
        out_s=out_s,
        out_t=out_t,
    )


def _divergence_tile(
    pair: _Pair, beta: Float[Array, ""] | None, kind: Divergence
) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
    """What each column adds to the divergence; and, for JSD, to the centre of its gradient."""
    if kind == "forward_kl":
        return _excess(pair.p_t, pair.p_s, pair.log_ratio, pair.out_t, pair.out_s), None
    if kind == "reverse_kl":
        return _excess(pair.p_s, pair.p_t, -pair.log_ratio, pair.out_s, pair.out_t), None
    assert beta is not None
    beta = beta.astype(pair.p_s.dtype)
    to_teacher, to_student = _mixture(pair.log_ratio, beta)
    of_teacher = jnp.where(pair.out_t, 0.0, pair.p_t * to_teacher)
    weighed = jnp.where(pair.out_s, 0.0, (beta - 1.0) * (pair.p_s * to_student))
    return weighed - beta * of_teacher, weighed


def _excess(
    p: Float[Array, "..."],
    q: Float[Array, "..."],
    log_ratio: Float[Array, "..."],
    p_out: Bool[Array, "..."],
    q_out: Bool[Array, "..."],
) -> Float[Array, "..."]:
    """`p log(p / q) - p + q`, which sums to KL(p || q): no term is below 0, so that a small divergence keeps its digits.

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


def _d_logits_tile(pair: _Pair, row: _Terms, beta: Float[Array, ""] | None, kind: Divergence) -> Float[Array, "..."]:
    """Gradient of the student's logits after softcap and temperature, times the row's factor."""
    if kind == "forward_kl":
        return (pair.p_s - pair.p_t) * row.factor
    if kind == "reverse_kl":
        weigh = -pair.log_ratio
    else:
        assert beta is not None
        beta = beta.astype(pair.p_s.dtype)
        weigh = (beta - 1.0) * _mixture(pair.log_ratio, beta)[1]
    return pair.p_s * (weigh - row.centre) * row.factor


def _softcap_slope(z: Float[Array, "..."], scalars: LogitScalars) -> Float[Array, "..."]:
    """Derivative of `softcap tanh(x / softcap)`, from the logits that it became."""
    assert scalars.softcap is not None
    capped = z if scalars.temperature is None else z * scalars.temperature.astype(z.dtype)
    return 1.0 - jnp.square(capped / scalars.softcap.astype(z.dtype))
