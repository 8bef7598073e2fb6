"""Logits that the caller already holds, read in blocks by XLA: no second array of their size but their gradient."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator
from logitless.ops.derivatives import Passes, logits_vjp
from logitless.ops.manual import fori_loop
from logitless.ops.softmax import (
    Normaliser,
    Running,
    d_logits_tile,
    finish,
    meet,
    row_terms,
    start,
    transform_logits,
)
from logitless.ops.tiles import vocab_cut
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats


def token_stats_chunked(
    logits: Float[Array, "N V"],
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N rows of logits; the contract is that of `logitless.ops.api.token_stats`."""
    return _token_stats(logits, targets, mask, scalars, options)


def _backward(residuals: tuple, d_stats: TokenStats, options: HeadOptions) -> Float[Array, "N V"]:
    logits, targets, mask, scalars, stats, normaliser = residuals
    terms = row_terms(stats, normaliser, d_stats, scalars, logits.shape[1])
    z = transform_logits(logits.astype(accumulator(logits.dtype)), scalars)
    # Elementwise in the logits: XLA makes it one loop that writes the gradient and nothing else.
    d_logits = d_logits_tile(z, targets, terms, scalars, v_axis=1)
    if mask is not None:
        d_logits = jnp.where(mask[:, None], d_logits, 0.0)
    return d_logits.astype(logits.dtype)


def _forward(
    logits: Float[Array, "N V"],
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    also: tuple[str, ...] = (),
) -> tuple[TokenStats, Normaliser]:
    running = _sums(logits, targets, mask, scalars, options, options.outputs)
    vocab = logits.shape[1]
    stats, normaliser = finish(running, targets < vocab, vocab, (*options.outputs, *also))
    if mask is not None:
        stats = jax.tree.map(lambda x: jnp.where(mask, x, 0.0), stats)
    return stats, normaliser


def _sums(
    logits: Float[Array, "N V"],
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    outputs: tuple[str, ...],
) -> Running:
    """The online softmax of each row over its columns."""
    vocab = logits.shape[1]
    # A tile has the rows of all tokens.
    cut = vocab_cut(vocab, replace(options, block_n=logits.shape[0]))
    dtype = accumulator(logits.dtype)

    def step(i, running):
        block = cut.block(i)
        z = transform_logits(block.of(logits, 1).astype(dtype), scalars)
        return meet(running, z, block.column(targets), block.met(), v_axis=1, padded=options.padded)

    return fori_loop(0, cut.blocks, step, start(logits.shape[0], dtype, outputs))


_token_stats = logits_vjp(_forward, _backward, "chunked")
PASSES = Passes(_sums, _backward)
