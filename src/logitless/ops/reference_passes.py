"""Plain jnp over a part of the vocabulary, which holds its logits: no oracle, which is `reference.py` on one device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator, common_dtype
from logitless.ops.derivatives import HeadInputs, HeadResiduals, Passes
from logitless.ops.softmax import Normaliser, Running
from logitless.ops.tiles import Gradients
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats


def _z(x: Float[Array, "N V"], mask: Bool[Array, " N"] | None, scalars: LogitScalars) -> Float[Array, "N V"]:
    """Logits after softcap and temperature."""
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0.0)
    possible = x > -jnp.inf
    if scalars.logit_scale is not None:
        x = x * scalars.logit_scale.astype(x.dtype)
    if scalars.softcap is not None:
        cap = scalars.softcap.astype(x.dtype)
        x = jnp.where(possible, cap * jnp.tanh(jnp.where(possible, x, 0.0) / cap), -jnp.inf)
    return x if scalars.temperature is None else x / scalars.temperature.astype(x.dtype)


def _own(z: Float[Array, "N V"], targets: Int[Array, " N"]) -> Bool[Array, "N V"]:
    return targets[:, None] == jnp.arange(z.shape[1], dtype=targets.dtype)[None, :]


def _softmax_sums(
    z: Float[Array, "N V"], targets: Int[Array, " N"], options: HeadOptions, outputs: tuple[str, ...]
) -> Running:
    own = _own(z, targets)
    others = jnp.where(own, -jnp.inf, z)
    maximum = jnp.max(others, axis=1)
    shifted = others - jnp.where(maximum == -jnp.inf, 0.0, maximum)[:, None]
    e = jnp.exp(shifted)
    counted = jnp.where(z == -jnp.inf, 0.0, z) if options.padded else z
    return Running(
        maximum=maximum,
        total=jnp.sum(e, axis=1),
        weighted=jnp.sum(jnp.where(e == 0, 0.0, e * shifted), axis=1) if "entropy" in outputs else None,
        plain=jnp.sum(counted, axis=1) if "mean_logits" in outputs else None,
        target=jnp.max(jnp.where(own, z, -jnp.inf), axis=1),
    )


def _d_z(
    z: Float[Array, "N V"],
    targets: Int[Array, " N"],
    active: Bool[Array, " N"],
    stats: TokenStats,
    normaliser: Normaliser,
    d_stats: TokenStats,
) -> Float[Array, "N V"]:
    """Gradient of z, by the formula; -inf and what carries none gets 0."""
    d_logprobs, d_lse, d_entropy, d_mean = (None if d is None else d[:, None] for d in d_stats)
    shifted = z - (normaliser.maximum + jnp.log(normaliser.total))[:, None]
    weight = jnp.zeros_like(normaliser.total)[:, None]
    d_z = jnp.zeros_like(z)
    if d_logprobs is not None:
        d_logprobs = jnp.where(jnp.isfinite(stats.logprobs)[:, None], d_logprobs, 0.0)
        weight -= d_logprobs
        d_z += jnp.where(_own(z, targets), d_logprobs, 0.0)
    if d_lse is not None:
        weight += d_lse
    if d_entropy is not None:
        weight = weight - d_entropy * (jnp.where(z == -jnp.inf, 0.0, shifted) + stats.entropy[:, None])
    d_z += jnp.exp(shifted) * weight
    if d_mean is not None:
        d_z += d_mean / z.shape[1]
    return jnp.where((z == -jnp.inf) | ~active[:, None], 0.0, d_z)


def _product(hidden: Array, lm_head: Array, bias: Array | None, options: HeadOptions) -> Float[Array, "N V"]:
    """`h W + b` of inputs that were cast up: exact products of 16-bit numbers, summed in float32."""
    equation = "nd,dv->nv" if options.layout == "DV" else "nd,vd->nv"
    x = jnp.einsum(equation, hidden, lm_head, precision=options.precision or jax.lax.Precision.HIGHEST)
    x = x if bias is None else x + bias[None, :]
    return x if options.logits_dtype is None else x.astype(options.logits_dtype).astype(x.dtype)


def _cast_up(inputs: HeadInputs) -> tuple[Array, Array, Array | None]:
    dtype = accumulator(inputs.hidden.dtype, inputs.lm_head.dtype)
    common = common_dtype(inputs.hidden.dtype, inputs.lm_head.dtype)
    hidden = inputs.hidden
    if inputs.mask is not None:
        hidden = jnp.where(inputs.mask[:, None], hidden, jnp.zeros_like(hidden))
    bias = None if inputs.bias is None else inputs.bias.astype(dtype)
    return hidden.astype(common).astype(dtype), inputs.lm_head.astype(common).astype(dtype), bias


def _sums(inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...]) -> Running:
    z = _z(_product(*_cast_up(inputs), options), None, inputs.scalars)
    return _softmax_sums(z, inputs.targets, options, outputs)


def _gradients(
    residuals: HeadResiduals,
    d_stats: TokenStats,
    active: Bool[Array, " N"],
    options: HeadOptions,
    onto: Float[Array, "..."] | None = None,
) -> Gradients:
    inputs, wanted = residuals.inputs, residuals.wanted

    def logits(hidden, lm_head, bias):
        return _z(_product(hidden, lm_head, bias, options), None, inputs.scalars)

    z, pull = jax.vjp(logits, *_cast_up(inputs))
    # Read as a constant: what is -inf has no slope that JAX could follow.
    d_z = _d_z(jax.lax.stop_gradient(z), inputs.targets, active, residuals.stats, residuals.normaliser, d_stats)
    found = zip(pull(d_z), (wanted.hidden, wanted.lm_head, wanted.bias), inputs[:3], strict=True)
    leaving = [
        (d if options.wide_gradients else d.astype(x.dtype)) if flag and x is not None else None for d, flag, x in found
    ]
    found = Gradients(*leaving)
    return found if onto is None or found.lm_head is None else found._replace(lm_head=onto + found.lm_head)


def _logits_sums(logits, targets, mask, scalars, options: HeadOptions, outputs: tuple[str, ...]) -> Running:
    return _softmax_sums(_z(logits.astype(accumulator(logits.dtype)), mask, scalars), targets, options, outputs)


def _logits_gradient(residuals: tuple, d_stats: TokenStats, options: HeadOptions) -> Float[Array, "N V"]:
    logits, targets, mask, scalars, stats, normaliser = residuals
    z, pull = jax.vjp(lambda x: _z(x, mask, scalars), logits.astype(accumulator(logits.dtype)))
    active = jnp.ones(targets.shape, bool) if mask is None else mask
    (d_logits,) = pull(_d_z(z, targets, active, stats, normaliser, d_stats))
    return d_logits.astype(logits.dtype)


PASSES = Passes(_sums, _gradients)
LOGITS_PASSES = Passes(_logits_sums, _logits_gradient)
