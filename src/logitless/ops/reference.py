"""The oracle: plain jnp that holds all logits, differentiated by JAX; it shares no arithmetic with what it judges."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator, common_dtype
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats


def linear_token_stats_reference(
    hidden: Float[Array, "N D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N tokens; the contract is that of `logitless.ops.api.linear_token_stats`."""
    if mask is not None:
        hidden = jnp.where(mask[:, None], hidden, jnp.zeros_like(hidden))
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    common = common_dtype(hidden.dtype, lm_head.dtype)
    precision = jax.lax.Precision.HIGHEST if options.precision is None and common == jnp.float32 else options.precision
    logits = jnp.einsum(
        "nd,dv->nv" if options.layout == "DV" else "nd,vd->nv",
        hidden.astype(common),
        lm_head.astype(common),
        precision=precision,
        preferred_element_type=dtype,
    )
    if bias is not None:
        logits = logits + bias.astype(dtype)[None, :]
    if options.logits_dtype is not None:
        logits = logits.astype(options.logits_dtype).astype(logits.dtype)
    return token_stats_reference(logits, targets, mask, scalars, options)


def token_stats_reference(
    logits: Float[Array, "N V"],
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N rows of logits; the contract is that of `logitless.ops.api.token_stats`."""
    dtype = accumulator(logits.dtype)
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, jnp.zeros_like(logits))
    x = logits.astype(dtype)
    possible = x > -jnp.inf
    if scalars.logit_scale is not None:
        x = x * scalars.logit_scale.astype(dtype)
    if scalars.softcap is not None:
        cap = scalars.softcap.astype(dtype)
        x = jnp.where(possible, cap * jnp.tanh(jnp.where(possible, x, 0.0) / cap), -jnp.inf)
    if scalars.temperature is not None:
        x = x / scalars.temperature.astype(dtype)
    # A NaN logit is not "impossible": it must spoil its row.
    impossible = x == -jnp.inf
    lse = jax.nn.logsumexp(x, axis=1, where=~impossible)
    lse = jnp.where(jnp.all(impossible, axis=1), jnp.nan, lse)
    in_vocab = (targets >= 0) & (targets < x.shape[1])
    picked = jnp.take_along_axis(x, jnp.where(in_vocab, targets, 0)[:, None], axis=1)[:, 0]
    drop = ~in_vocab | (picked == -jnp.inf)
    logprobs = jnp.where(drop, jnp.where(in_vocab, -jnp.inf, jnp.nan), picked - jnp.where(drop, 0.0, lse))
    logprobs = jnp.where(jnp.isnan(lse), jnp.nan, logprobs)
    finite = jnp.where(impossible, 0.0, x)
    p = jnp.where(impossible, 0.0, jnp.exp(finite - lse[:, None]))
    values = {
        "logprobs": logprobs,
        "lse": lse,
        "entropy": jnp.sum(p * (lse[:, None] - finite), axis=1) if "entropy" in options.outputs else None,
        "mean_logits": jnp.mean(x, axis=1) if "mean_logits" in options.outputs else None,
    }
    if mask is not None:
        values = {k: None if v is None else jnp.where(mask, v, 0.0) for k, v in values.items()}
    return TokenStats(**{name: values[name] for name in options.outputs})
