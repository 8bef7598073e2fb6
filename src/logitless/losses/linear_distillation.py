"""Distillation: the divergence between a student's and a teacher's softmax, from hidden states and from logits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from logitless._arrays import (
    BlockSizes,
    FloatArray,
    IntArray,
    Scalar,
    accumulator,
    common_dtype,
    is_concrete,
    shape_error,
)
from logitless.losses.policy_options import check_name, is_off
from logitless.losses.supervised import REDUCTIONS, Reduction, reduce_losses, tokens_that_count
from logitless.ops.checks import check_head, check_options, check_scalars
from logitless.ops.distill import DIVERGENCES, Divergence, DivergenceOptions, Head, divergence_chunked
from logitless.ops.types import Layout, LogitScalars, PrecisionLike


def linear_distillation_loss(
    student_hidden: FloatArray,
    student_head: FloatArray,
    teacher_hidden: FloatArray,
    teacher_head: FloatArray,
    labels: IntArray | None = None,
    *,
    kind: Divergence = "forward_kl",
    beta: Scalar = 0.5,
    temperature: Scalar = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    layout: Layout = "DV",
    teacher_layout: Layout | None = None,
    bias: FloatArray | None = None,
    teacher_bias: FloatArray | None = None,
    softcap: Scalar | None = None,
    teacher_softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    teacher_logit_scale: Scalar = 1.0,
    weights: FloatArray | None = None,
    implementation: str = "auto",
    block_sizes: BlockSizes | None = None,
    precision: PrecisionLike = None,
) -> Float[Array, "..."]:
    """A distillation loss straight from the hidden states and LM heads of student and teacher, without either's logits.

    Equal to
        s = log_softmax(student_hidden @ student_head); t = log_softmax(teacher_hidden @ teacher_head)
        mean(sum(exp(t) * (t - s))) over labels that are not ignored      forward_kl; the other kinds below

    Two sweeps over the vocabulary forward and one backward, in which one `[block_n, block_v]` tile of each head's
    logits lives at a time. Differentiable in the student's hidden states, head and bias; a frozen head costs no
    gradient. The teacher is detached. Sums and probabilities are float32 (float64 for float64 inputs); the gradient of
    the logits is cast once to the student's dtype for the two products, which accumulate in float32 across all blocks.
    Second derivatives and forward mode raise; `implementation="reference"`, which holds all logits, has both.

    Args:
        student_hidden: final hidden states, any leading axes, `[..., Ds]`.
        student_head: `[Ds, V]`, or `[V, Ds]` with `layout="VD"`.
        teacher_hidden: `[..., Dt]`, of the same tokens; Dt need not be Ds.
        teacher_head: `[Dt, V]` or `[V, Dt]`: the same vocabulary, in the same order.
        labels: `[...]`, read only for which tokens are ignored; None where all count.
        kind: `"forward_kl"` is KL(teacher || student), `"reverse_kl"` KL(student || teacher), `"jsd"`
            `beta KL(teacher || m) + (1 - beta) KL(student || m)` with `m = beta teacher + (1 - beta) student`.
        beta: the teacher's share in `"jsd"`, above 0 and below 1. A traced value that is not gives NaN.
        temperature: divides the logits of both, last; above 0.
        ignore_index: label of tokens that do not count: they are skipped and may hold NaN in either hidden states.
        reduction: `"mean"` divides by the tokens that count, or by the sum of their weights (0 if that is 0); `"sum"`;
            `"none"`, of the shape of `labels`, 0 at ignored ones.
        layout: of the student's head.
        teacher_layout: of the teacher's; None for the same.
        bias: `[V]` of the student; -inf in it takes a column out of its vocabulary.
        teacher_bias: `[V]` of the teacher, likewise.
        softcap: bound c of the student's `c tanh(x / c)`, above 0; None for no cap.
        teacher_softcap: that of the teacher.
        logit_scale: multiplies the student's logits first; above 0.
        teacher_logit_scale: multiplies the teacher's.
        weights: per token; a token of weight 0 is skipped like an ignored one.
        implementation: `"auto"`, `"chunked"` or `"reference"`. Auto never picks one that holds all logits.
        block_sizes: `block_n` and `block_v` of the tiles, or `block_bytes` of both tiles together.
        precision: of the products; None means HIGHEST for float32 inputs.

    Returns:
        The loss in nats, float32 (float64 for float64 inputs). Where no token counts: 0, with gradients of 0. A column
        at -inf in both heads adds 0. One that is -inf only in the student makes its forward KL inf, one that is -inf
        only in the teacher makes its reverse KL inf, and a token with an infinite divergence carries no gradient; JSD
        is at most ln 2 always. A row without a finite logit gives NaN.

    Raises:
        ValueError: shapes that do not fit, vocabularies that differ, an unknown name, a beta with a kind other than
            `"jsd"` or outside (0, 1), a temperature, softcap or logit_scale not above 0.
        TypeError: float labels, integer hidden states.
        NotImplementedError: a gradient of beta, temperature, softcap or logit_scale (implementation "chunked").

    Example:
        >>> import jax.numpy as jnp
        >>> hidden, teacher_head = jnp.ones((2, 1)), jnp.log(jnp.array([[3.0, 1.0]]))
        >>> loss = linear_distillation_loss(hidden, jnp.zeros((1, 2)), hidden, teacher_head, jnp.array([0, -100]))
        >>> round(loss.item(), 4)  # ln 2 - entropy(3/4, 1/4)
        0.1308

    Reference: https://arxiv.org/abs/2306.13649 (GKD, whose beta this is) and https://arxiv.org/abs/1503.02531.
    Departures: no factor temperature^2, which Hinton et al. multiply by.
    """
    name, teacher_name = "linear_distillation_loss", "linear_distillation_loss (teacher)"
    student_hidden, teacher_hidden = jnp.asarray(student_hidden), jnp.asarray(teacher_hidden)
    given = {"student_hidden": student_hidden, "teacher_hidden": teacher_hidden}
    shape = _check_tokens(name, given, labels, weights, reduction)
    mixing = _check_divergence(name, kind, beta)
    check_name(name, "implementation", implementation, ("auto", *IMPLEMENTATIONS))
    teacher_layout = layout if teacher_layout is None else teacher_layout
    student = Head(
        student_hidden,
        jnp.asarray(student_head),
        None if bias is None else jnp.asarray(bias),
        check_scalars(name, temperature, softcap, logit_scale),
    )
    teacher = Head(
        teacher_hidden,
        jnp.asarray(teacher_head),
        None if teacher_bias is None else jnp.asarray(teacher_bias),
        check_scalars(teacher_name, temperature, teacher_softcap, teacher_logit_scale),
    )
    _check_heads(name, student, layout, teacher, teacher_layout)
    options = DivergenceOptions(
        kind,
        check_options(name, ("logprobs",), layout, None, block_sizes, precision),
        check_options(teacher_name, ("logprobs",), teacher_layout, None, block_sizes, precision),
    )
    valid = _tokens_that_count(shape, labels, weights, ignore_index)
    losses = jnp.zeros(shape, accumulator(*(x.dtype for head in (student, teacher) for x in head[:2])))
    if losses.size:
        mask = None if labels is None and weights is None else valid.reshape(-1)
        run = _compiled("chunked" if implementation == "auto" else implementation)
        losses = run(_flat(student), _flat(_detached(teacher)), mask, mixing, options=options).reshape(shape)
    return reduce_losses(losses, valid, weights, reduction)


def distillation_loss(
    student_logits: FloatArray,
    teacher_logits: FloatArray,
    labels: IntArray | None = None,
    *,
    kind: Divergence = "forward_kl",
    beta: Scalar = 0.5,
    temperature: Scalar = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    weights: FloatArray | None = None,
) -> Float[Array, "..."]:
    """A distillation loss of logits that exist already; it holds several arrays of their size beside them.

    Equal to
        s = log_softmax(student_logits / temperature); t = log_softmax(teacher_logits / temperature)
        mean(sum(exp(t) * (t - s))) over labels that are not ignored      forward_kl

    Args:
        student_logits: `[..., V]`; -inf takes a column out of a row's vocabulary.
        teacher_logits: `[..., V]`; detached.
        labels: see `linear_distillation_loss`, and so for every argument below.
        kind: `"forward_kl"`, `"reverse_kl"` or `"jsd"`.
        beta: the teacher's share in `"jsd"`.
        temperature: divides both.
        ignore_index: label of tokens that do not count.
        reduction: `"mean"`, `"sum"` or `"none"`.
        weights: per token.

    Returns:
        The loss in nats, float32 (float64 for float64 logits), as from `linear_distillation_loss`.

    Raises:
        ValueError: as `linear_distillation_loss`.
        TypeError: float labels, integer logits.

    Example:
        >>> import jax.numpy as jnp
        >>> student, teacher = jnp.zeros((1, 2)), jnp.log(jnp.array([[3.0, 1.0]]))
        >>> round(distillation_loss(student, teacher, kind="reverse_kl").item(), 4)  # ln(4 / 3) / 2
        0.1438

    Reference: as `linear_distillation_loss`; departures: as there.
    """
    name = "distillation_loss"
    student, teacher = jnp.asarray(student_logits), jnp.asarray(teacher_logits)
    given = {"student_logits": student, "teacher_logits": teacher}
    shape = _check_tokens(name, given, labels, weights, reduction)
    if student.shape[-1] != teacher.shape[-1]:
        raise shape_error(name, given, "both must hold the same vocabulary, [..., V]")
    if student.shape[-1] == 0:
        raise shape_error(name, given, "an empty vocabulary has no softmax: V must be at least 1")
    mixing = _check_divergence(name, kind, beta)
    scalars = check_scalars(name, temperature, None, 1.0)
    valid = _tokens_that_count(shape, labels, weights, ignore_index)
    dtype = accumulator(student.dtype, teacher.dtype)
    # Selected away first: what stands in a token that does not count must not meet its zero gradient.
    counted = [jnp.where(valid[..., None], x, jnp.zeros_like(x)) for x in (student, stop_gradient(teacher))]
    z_s, z_t = (_transformed(x.astype(dtype), scalars) for x in counted)
    return reduce_losses(_divergences(z_s, z_t, mixing, kind), valid, weights, reduction)


def _check_tokens(
    name: str,
    given: dict[str, jax.Array],
    labels: IntArray | None,
    weights: FloatArray | None,
    reduction: str,
) -> tuple[int, ...]:
    """The shape of the tokens; raises for an unknown reduction, and for dtypes and leading axes that do not fit."""
    check_name(name, "reduction", reduction, REDUCTIONS)
    for argument, x in given.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: {argument} is {x.dtype}; it must be a floating-point array: cast it")
    student, teacher = given.values()
    if 0 in (student.ndim, teacher.ndim) or student.shape[:-1] != teacher.shape[:-1]:
        raise shape_error(name, given, "both must have the same leading axes, one entry a token")
    shape = student.shape[:-1]
    argument = next(iter(given))
    for other, x in (("labels", labels), ("weights", weights)):
        if x is not None and jnp.shape(x) != shape:
            raise shape_error(name, {other: x, argument: student}, f"{other} must have the leading axes of {argument}")
    if labels is not None and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels is {labels.dtype}; token ids must be integers: cast with .astype(jnp.int32)")
    return shape


def _check_divergence(name: str, kind: str, beta: Scalar) -> jax.Array | None:
    """Beta as an array, None where the kind has none; NaN for a traced value out of range."""
    check_name(name, "kind", kind, DIVERGENCES)
    if kind != "jsd":
        if not is_off(beta, 0.5):
            raise ValueError(f"{name}: beta={beta!r} has no meaning with kind={kind!r}: only 'jsd' mixes the two")
        return None
    if jnp.ndim(beta) != 0:
        raise shape_error(name, {"beta": beta}, "it must be one number")
    if is_concrete(beta):
        if not 0 < float(beta) < 1:
            raise ValueError(
                f"{name}: beta={float(beta):g}; it must be above 0 and below 1: towards 0 and 1 the JSD vanishes, "
                "take kind='forward_kl' or 'reverse_kl'"
            )
        return jnp.asarray(float(beta), jnp.result_type(float))
    traced = jnp.asarray(beta)
    return jnp.where((traced > 0) & (traced < 1), traced, jnp.nan)


def _check_heads(name: str, student: Head, layout: Layout, teacher: Head, teacher_layout: Layout) -> None:
    """Raises where a head does not fit its hidden states, or the heads not each other."""
    vocabularies = [
        check_head(called, head.hidden, head.lm_head, jnp.zeros(head.hidden.shape[:-1], jnp.int32), head.bias, of_head)
        for called, head, of_head in ((name, student, layout), (f"{name} (teacher)", teacher, teacher_layout))
    ]
    if vocabularies[0] != vocabularies[1]:
        raise shape_error(
            name,
            {
                "student_head": student.lm_head,
                "layout": layout,
                "teacher_head": teacher.lm_head,
                "teacher_layout": teacher_layout,
            },
            f"both heads must share one vocabulary, but V is {vocabularies[0]} and {vocabularies[1]}: cut the padding "
            "off, or pad one with columns of bias -inf",
        )


def _tokens_that_count(
    shape: tuple[int, ...], labels: IntArray | None, weights: FloatArray | None, ignore_index: int
) -> Bool[Array, "..."]:
    if labels is not None:
        return tokens_that_count(jnp.asarray(labels), weights, ignore_index)
    return jnp.ones(shape, bool) if weights is None else jnp.asarray(weights) != 0


def _flat(head: Head) -> Head:
    return head._replace(hidden=head.hidden.reshape(-1, head.hidden.shape[-1]))


def _detached(head: Head) -> Head:
    """The head without a gradient; its scalars, of which temperature is the student's too, keep theirs."""
    hidden, lm_head, bias = stop_gradient((head.hidden, head.lm_head, head.bias))
    return Head(hidden, lm_head, bias, head.scalars)


@functools.cache
def _compiled(implementation: str) -> Callable[..., Float[Array, "..."]]:
    """One compiled program per implementation, so that an eager call is not run step by step."""
    return jax.jit(IMPLEMENTATIONS[implementation], static_argnames=("options",))


def divergence_reference(
    student: Head,
    teacher: Head,
    mask: Bool[Array, " N"] | None,
    beta: Float[Array, ""] | None,
    options: DivergenceOptions,
) -> Float[Array, " N"]:
    """Divergence of N tokens by plain jnp, which holds all logits of both heads, and JAX's own gradient."""
    dtype = accumulator(*(x.dtype for head in (student, teacher) for x in head[:2]))
    logits: list[jax.Array] = []
    for head, of_head in ((student, options.student), (teacher, options.teacher)):
        hidden = head.hidden if mask is None else jnp.where(mask[:, None], head.hidden, jnp.zeros_like(head.hidden))
        common = common_dtype(hidden.dtype, head.lm_head.dtype)
        highest = of_head.precision is None and common == jnp.float32
        x = jnp.einsum(
            "nd,dv->nv" if of_head.layout == "DV" else "nd,vd->nv",
            hidden.astype(common),
            head.lm_head.astype(common),
            precision=jax.lax.Precision.HIGHEST if highest else of_head.precision,
            preferred_element_type=dtype,
        )
        x = x if head.bias is None else x + head.bias.astype(dtype)[None, :]
        logits.append(_transformed(x, head.scalars))
    losses = _divergences(logits[0], logits[1], beta, options.kind)
    return losses if mask is None else jnp.where(mask, losses, 0.0)


IMPLEMENTATIONS: dict[str, Callable[..., Float[Array, " N"]]] = {
    "reference": divergence_reference,
    "chunked": divergence_chunked,
}
"""Two heads to divergences: one signature, `(student, teacher, mask, beta, options)`."""


def _transformed(x: Float[Array, "..."], scalars: LogitScalars) -> Float[Array, "..."]:
    """`softcap tanh(x logit_scale / softcap) / temperature`; -inf stays -inf."""
    possible = x > -jnp.inf
    if scalars.logit_scale is not None:
        x = x * scalars.logit_scale.astype(x.dtype)
    if scalars.softcap is not None:
        cap = scalars.softcap.astype(x.dtype)
        x = jnp.where(possible, cap * jnp.tanh(jnp.where(possible, x, 0.0) / cap), -jnp.inf)
    return x if scalars.temperature is None else x / scalars.temperature.astype(x.dtype)


def _divergences(
    z_s: Float[Array, "... V"], z_t: Float[Array, "... V"], beta: Float[Array, ""] | None, kind: Divergence
) -> Float[Array, "..."]:
    """Divergence of every row of logits, in log space."""
    out_s, out_t = z_s == -jnp.inf, z_t == -jnp.inf
    log_s, log_t = jax.nn.log_softmax(z_s, axis=-1), jax.nn.log_softmax(z_t, axis=-1)
    # Of a column without probability every term is selected away, so that none meets its infinity.
    s, t = jnp.where(out_s, 0.0, log_s), jnp.where(out_t, 0.0, log_t)
    p_s, p_t = jnp.where(out_s, 0.0, jnp.exp(s)), jnp.where(out_t, 0.0, jnp.exp(t))
    apart = jnp.zeros(z_s.shape[:-1], bool)
    if kind == "forward_kl":
        losses = jnp.sum(p_t * (t - s), axis=-1)
        apart = jnp.any(out_s & ~out_t, axis=-1)
    elif kind == "reverse_kl":
        losses = jnp.sum(p_s * (s - t), axis=-1)
        apart = jnp.any(out_t & ~out_s, axis=-1)
    else:
        assert beta is not None
        beta = beta.astype(z_s.dtype)
        of_t, of_s = t + jnp.log(beta), s + jnp.log1p(-beta)
        m = jnp.where(out_s, of_t, jnp.where(out_t, of_s, jnp.logaddexp(of_t, of_s)))
        losses = jnp.sum(beta * (p_t * (t - m)) + (1.0 - beta) * (p_s * (s - m)), axis=-1)
    losses = jnp.where(apart, jnp.inf, losses)
    empty = jnp.all(out_s, axis=-1) | jnp.all(out_t, axis=-1)
    return jnp.where(empty, jnp.nan, losses)
