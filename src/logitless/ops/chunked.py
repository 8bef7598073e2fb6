"""Blocks of logits by XLA, on any device: no more than one `[block_n, block_v]` tile lives at a time.

Both sweeps walk the vocabulary outside and the tokens inside, so that a block of the head is read once and its gradient
is finished, in float32 over all tokens, before it is written once in the head's dtype. The last vocabulary block meets
some columns twice: they are written again with the same gradient and count once everywhere else, which costs less than
a padded copy of the head.
"""

import jax
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator
from logitless.ops.blocks import TokenCut
from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals, Passes, head_vjp
from logitless.ops.manual import fori_loop
from logitless.ops.softmax import Normaliser, Running, d_logits_tile, finish, meet, start
from logitless.ops.tiles import (
    Gradients,
    cut_problem,
    head_block,
    logits_tile,
    sweep_gradients,
    terms_in_places,
)
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats


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


def _forward(
    inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...], wanted: Differentiated | None
) -> tuple[TokenStats, Normaliser, None]:
    tokens, running, in_vocab = _running(inputs, options, outputs)
    vocab = inputs.lm_head.shape[options.layout.index("V")]
    return *jax.tree.map(tokens.scatter, finish(running, in_vocab, vocab, outputs)), None


def _sums(inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...]) -> Running:
    """The online softmax of each token over a part of the vocabulary."""
    tokens, running, _ = _running(inputs, options, outputs)
    return jax.tree.map(tokens.scatter, running)


def _running(
    inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...]
) -> tuple[TokenCut, Running, Bool[Array, " K"]]:
    """The tokens' places, and there the online softmax and whether the target is a column."""
    hidden, lm_head, bias, targets, mask, scalars = inputs
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
            met = meet(part, z, columns.column(rows.of(targets)), columns.met(), v_axis, options.padded)
            return jax.tree.map(rows.put, running, met)

        return fori_loop(0, tokens.blocks, token_step, running)

    running = start(targets.shape[0], dtype, outputs)
    running = fori_loop(0, vocab.blocks, vocab_step, running)
    return tokens, running, targets < vocab.vocab


def _backward(
    residuals: HeadResiduals,
    d_stats: TokenStats,
    active: Bool[Array, " N"],
    options: HeadOptions,
    onto: Float[Array, "..."] | None = None,
) -> Gradients:
    hidden, lm_head, bias, _, _, scalars = residuals.inputs
    tokens, vocab = cut_problem(hidden, lm_head, active, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    targets, terms = terms_in_places(residuals, d_stats, tokens, vocab.vocab)
    v_axis = options.layout.index("V")

    def open_block(columns, w, b):
        def d_tile(rows, h):
            z = logits_tile(h, w, b, scalars, options, dtype)
            column = rows.of(targets) - columns.start
            return d_logits_tile(z, column, jax.tree.map(rows.of, terms), scalars, v_axis)

        return d_tile

    return sweep_gradients(tokens, vocab, (hidden, lm_head, bias), residuals.wanted, options, dtype, open_block, onto)


_token_stats = head_vjp("chunked", _forward, _backward)
PASSES = Passes(_sums, _backward)
