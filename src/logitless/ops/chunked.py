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
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator, common_dtype
from logitless.ops.blocks import Rows, TokenCut, VocabCut, VocabSlice, cut_tokens
from logitless.ops.derivatives import Differentiated, first_only, live, values_of
from logitless.ops.softmax import (
    Normaliser,
    d_logits_tile,
    finish,
    meet,
    row_terms,
    start,
    transform_logits,
)
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats

# Tokens and columns of a block. Those of the CPU are measured (docs/measured.md); those of accelerators, which want
# larger products, are not yet.
CPU_BLOCKS = (512, 1536)
ACCELERATOR_BLOCKS = (2048, 4096)
SMALLEST_BLOCK_N = 128


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
    differentiated = Differentiated(hidden.perturbed, lm_head.perturbed, bias is not None and bias.perturbed)
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
    tokens, vocab = _cut(hidden, lm_head, mask, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    front, targets = tokens.gather(hidden), tokens.gather(targets, vocab.vocab)
    v_axis = options.layout.index("V")

    def vocab_step(i, running):
        columns = vocab.block(i)
        w, b = _head_block(lm_head, bias, columns, options)

        def token_step(j, running):
            rows = tokens.rows(j)
            z = _logits_tile(rows.of(front), w, b, scalars, options, dtype)
            part = jax.tree.map(rows.of, running)
            met = meet(part, z, columns.column(rows.of(targets)), columns.met(), v_axis)
            return jax.tree.map(rows.put, running, met)

        return lax.fori_loop(0, tokens.blocks, token_step, running)

    running = start(targets.shape[0], dtype, options.outputs)
    running = lax.fori_loop(0, vocab.blocks, vocab_step, running)
    results = finish(running, targets < vocab.vocab, vocab.vocab, (*options.outputs, *also))
    return jax.tree.map(tokens.scatter, results)


class _Gradients(NamedTuple):
    """Gradients on their way, None where nobody asks for one or nothing has been added yet."""

    hidden: Float[Array, "..."] | None
    lm_head: Float[Array, "..."] | None
    bias: Float[Array, " v"] | None


@first_only("linear_token_stats")
def _backward(residuals: _Residuals, d_stats: TokenStats, options: HeadOptions) -> _Gradients:
    (hidden, lm_head, bias, targets, mask, scalars), stats, normaliser, wanted = residuals
    flowing = [d != 0 for d in d_stats if d is not None]
    if not flowing:
        return _Gradients(None, None, None)
    active = functools.reduce(jnp.logical_or, flowing)
    tokens, vocab = _cut(hidden, lm_head, active if mask is None else active & mask, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    front, targets = tokens.gather(hidden), tokens.gather(targets, vocab.vocab)
    terms = row_terms(stats, normaliser, d_stats, scalars, vocab.vocab)
    # A place without a token has probability 0 everywhere, so that its zeros stay zeros.
    nowhere = tokens.gather(terms.maximum, float(jnp.finfo(dtype).max))
    terms = jax.tree.map(tokens.gather, terms)._replace(maximum=nowhere)
    v_axis = options.layout.index("V")

    def vocab_step(i, total):
        columns = vocab.block(i)
        w, b = _head_block(lm_head, bias, columns, options)
        fresh = w
        if (met := columns.met()) is not None:
            # Columns met before must not reach d_hidden a second time.
            fresh = jnp.where(jnp.expand_dims(met, 1 - v_axis), jnp.zeros_like(w), w)

        def token_step(j, block):
            rows = tokens.rows(j)
            h = rows.of(front)
            z = _logits_tile(h, w, b, scalars, options, dtype)
            column = rows.of(targets) - columns.start
            d_x = d_logits_tile(z, column, jax.tree.map(rows.of, terms), scalars, v_axis)
            return _add_products(block, d_x, h, fresh, rows, wanted, options)

        # The first block of tokens starts the sums, which then need neither zeros nor an addition.
        block = token_step(0, _Gradients(total.hidden, None, None))
        if tokens.order.shape[0] > tokens.size:
            block = lax.fori_loop(1, tokens.blocks, token_step, block)
        return _Gradients(
            block.hidden,
            None if block.lm_head is None else columns.put(total.lm_head, block.lm_head, v_axis),
            None if block.bias is None else columns.put(total.bias, block.bias, 0),
        )

    places = (targets.shape[0], hidden.shape[1])
    total = _Gradients(
        jnp.zeros(places if v_axis else places[::-1], dtype) if wanted.hidden else None,
        jnp.zeros_like(lm_head) if wanted.lm_head else None,
        jnp.zeros_like(bias) if wanted.bias else None,
    )
    total = lax.fori_loop(0, vocab.blocks, vocab_step, total)
    if total.hidden is not None:
        d_hidden = total.hidden.astype(hidden.dtype)
        total = total._replace(hidden=tokens.scatter(d_hidden if v_axis else d_hidden.T))
    return total


def _add_products(
    block: _Gradients,
    d_x: Float[Array, "..."],
    h: Float[Array, "n D"],
    w: Float[Array, "..."],
    rows: Rows,
    wanted: Differentiated,
    options: HeadOptions,
) -> _Gradients:
    """Adds what a tile of logit gradients gives to each gradient that is wanted."""
    v_axis = options.layout.index("V")
    d_hidden, d_w, d_bias = block
    dtype = d_x.dtype
    if wanted.bias:
        part = jnp.sum(d_x, axis=1 - v_axis)
        d_bias = part if d_bias is None else d_bias + part
    # The one downcast of the logit gradient, for both products.
    d_x = d_x.astype(common_dtype(h.dtype, w.dtype))
    if d_hidden is not None:
        part = _product(d_x, w, (1, 1), dtype, options) if v_axis else _product(w, d_x, (0, 0), dtype, options)
        n_axis = 1 - v_axis
        d_hidden = rows.put(d_hidden, rows.of(d_hidden, n_axis) + part, n_axis)
    if wanted.lm_head:
        part = _product(h, d_x, (0, 0), dtype, options) if v_axis else _product(d_x, h, (1, 0), dtype, options)
        d_w = part if d_w is None else d_w + part
    return _Gradients(d_hidden, d_w, d_bias)


def _cut(
    hidden: Float[Array, "N D"], lm_head: Float[Array, "..."], mask: Bool[Array, " N"] | None, options: HeadOptions
) -> tuple[TokenCut, VocabCut]:
    vocab = vocab_cut(lm_head.shape[options.layout.index("V")], options)
    # Two blocks at least of a batch worth cutting, so that a small one can skip its masked half too.
    half = max(SMALLEST_BLOCK_N, -(-hidden.shape[0] // 2))
    return cut_tokens(mask, hidden.shape[0], options.block_n or min(_rule()[0], half)), vocab


def vocab_cut(vocab: int, options: HeadOptions) -> VocabCut:
    """Blocks of a quarter of the vocabulary at most: a small problem holds no `[N, V]` array either."""
    return VocabCut(vocab, min(options.block_v or min(_rule()[1], -(-vocab // 4)), vocab))


def _rule() -> tuple[int, int]:
    return CPU_BLOCKS if jax.default_backend() == "cpu" else ACCELERATOR_BLOCKS


def _head_block(
    lm_head: Float[Array, "..."], bias: Float[Array, " V"] | None, columns: VocabSlice, options: HeadOptions
) -> tuple[Float[Array, "..."], Float[Array, " v"] | None]:
    return columns.of(lm_head, options.layout.index("V")), None if bias is None else columns.of(bias, 0)


def _logits_tile(
    h: Float[Array, "n D"],
    w: Float[Array, "..."],
    bias: Float[Array, " v"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """Logits of a block, `[n, v]` for a head `[D, V]` and `[v, n]` for `[V, D]`: no large operand is transposed."""
    v_axis = options.layout.index("V")
    x = _product(h, w, (1, 0), dtype, options) if v_axis else _product(w, h, (1, 1), dtype, options)
    if bias is not None:
        x += jnp.expand_dims(bias.astype(dtype), 1 - v_axis)
    if options.logits_dtype is not None:
        x = x.astype(options.logits_dtype).astype(dtype)
    return transform_logits(x, scalars)


def _product(
    x: Array, y: Array, contract: tuple[int, int], dtype: np.dtype, options: HeadOptions
) -> Float[Array, "a b"]:
    """A product in the wider of the two dtypes, accumulated and returned in `dtype`."""
    common = common_dtype(x.dtype, y.dtype)
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if options.precision is None and common == jnp.float32 else options.precision
    return lax.dot_general(
        x.astype(common), y.astype(common), dimensions, precision=precision, preferred_element_type=dtype
    )
