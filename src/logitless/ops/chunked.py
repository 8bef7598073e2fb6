"""Blocks of logits by XLA, on any device: no more than one `[block_n, block_v]` tile lives at a time.

Both sweeps walk the vocabulary outside and the tokens inside, so that a block of the head is read once and its gradient
is finished, in float32 over all tokens, before it is written once in the head's dtype. The last vocabulary block meets
some columns twice: they are written again with the same gradient and count once everywhere else, which costs less than
a padded copy of the head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator
from logitless.ops.derivatives import Differentiated, first_only, live, values_of
from logitless.ops.softmax import (
    Normaliser,
    d_logits_tile,
    finish,
    meet,
    row_terms,
    start,
)
from logitless.ops.tiles import Gradients, cut_problem, head_block, logits_tile, sweep_gradients
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats


class _Residuals(NamedTuple):
    """The inputs as they came, and the few numbers per token that the backward pass starts from."""

    inputs: tuple
    stats: TokenStats
    normaliser: Normaliser
    differentiated: Differentiated


def linear_token_stats_chunked(
    hidden: Float[Array, "N D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N tokens; the contract is that of `logitless.ops.api.linear_token_stats`."""
    return _token_stats(hidden, lm_head, bias, targets, mask, scalars, options)


def _primal(hidden, lm_head, bias, targets, mask, scalars, options):
    return _forward(hidden, lm_head, bias, targets, mask, scalars, options)[0]


_token_stats = jax.custom_vjp(_primal, nondiff_argnums=(6,))


# The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
def _token_stats_fwd(hidden, lm_head, bias, targets, mask, scalars, options):
    differentiated = Differentiated.by(hidden, lm_head, bias)
    hidden, lm_head, bias, targets, mask, scalars = primals = values_of(
        "linear_token_stats", (hidden, lm_head, bias, targets, mask, scalars), scalars
    )
    # The backward pass starts from the log-probability, whatever the caller asked for.
    stats, normaliser = _forward(hidden, lm_head, bias, targets, mask, scalars, options, also=("logprobs",))
    asked = TokenStats(**{name: getattr(stats, name) for name in options.outputs})
    return asked, _Residuals(primals, stats, normaliser, differentiated)


def _token_stats_bwd(options, residuals, cotangents):
    return *_backward(residuals, live(cotangents), options), None, None, None


_token_stats.defvjp(_token_stats_fwd, _token_stats_bwd, symbolic_zeros=True)


def _forward(
    hidden: Float[Array, "N D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    also: tuple[str, ...] = (),
) -> tuple[TokenStats, Normaliser]:
    tokens, vocab = cut_problem(hidden, lm_head, mask, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    front, targets = tokens.gather(hidden), tokens.gather(targets, vocab.vocab)
    v_axis = options.layout.index("V")

    def vocab_step(i, running):
        columns = vocab.block(i)
        w, b = head_block(lm_head, bias, columns, options)

        def token_step(j, running):
            rows = tokens.rows(j)
            z = logits_tile(rows.of(front), w, b, scalars, options, dtype)
            part = jax.tree.map(rows.of, running)
            met = meet(part, z, columns.column(rows.of(targets)), columns.met(), v_axis)
            return jax.tree.map(rows.put, running, met)

        return lax.fori_loop(0, tokens.blocks, token_step, running)

    running = start(targets.shape[0], dtype, options.outputs)
    running = lax.fori_loop(0, vocab.blocks, vocab_step, running)
    results = finish(running, targets < vocab.vocab, vocab.vocab, (*options.outputs, *also))
    return jax.tree.map(tokens.scatter, results)


@first_only("linear_token_stats")
def _backward(residuals: _Residuals, d_stats: TokenStats, options: HeadOptions) -> Gradients:
    (hidden, lm_head, bias, targets, mask, scalars), stats, normaliser, wanted = residuals
    flowing = [d != 0 for d in d_stats if d is not None]
    if not flowing:
        return Gradients(None, None, None)
    active = functools.reduce(jnp.logical_or, flowing)
    tokens, vocab = cut_problem(hidden, lm_head, active if mask is None else active & mask, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    targets = tokens.gather(targets, vocab.vocab)
    terms = row_terms(stats, normaliser, d_stats, scalars, vocab.vocab)
    # A place without a token has probability 0 everywhere, so that its zeros stay zeros.
    nowhere = tokens.gather(terms.maximum, float(jnp.finfo(dtype).max))
    terms = jax.tree.map(tokens.gather, terms)._replace(maximum=nowhere)
    v_axis = options.layout.index("V")

    def open_block(columns, w, b):
        def d_tile(rows, h):
            z = logits_tile(h, w, b, scalars, options, dtype)
            column = rows.of(targets) - columns.start
            return d_logits_tile(z, column, jax.tree.map(rows.of, terms), scalars, v_axis)

        return d_tile

    return sweep_gradients(tokens, vocab, (hidden, lm_head, bias), wanted, options, dtype, open_block)
