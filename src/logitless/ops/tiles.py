"""What the blocked implementations share: the cut, a block of the head, its products, and the sweep for gradients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import common_dtype
from logitless.ops.blocks import Rows, TokenCut, VocabCut, VocabSlice, cut_tokens
from logitless.ops.derivatives import Differentiated, HeadResiduals
from logitless.ops.manual import fori_loop
from logitless.ops.softmax import RowTerms, row_terms, transform_logits
from logitless.ops.types import LOGIT_BYTES, HeadOptions, LogitScalars, TokenStats

# Tokens and columns of a block. Those of the CPU are measured (docs/measured.md); those of accelerators, which want
# larger products, are not yet.
CPU_BLOCKS = (512, 1536)
ACCELERATOR_BLOCKS = (2048, 4096)
SMALLEST_BLOCK_N = 128
SMALLEST_BLOCK_V = 128


class Gradients(NamedTuple):
    """Gradients on their way, None where nobody asks for one or nothing has been added yet."""

    hidden: Float[Array, "..."] | None
    lm_head: Float[Array, "..."] | None
    bias: Float[Array, " v"] | None


DTile = Callable[[Rows, Array], Array]
"""`(rows, their hidden states)` to the gradient of `h W + b` on a tile, as the head stands: `[n, v]` or `[v, n]`."""


def sweep_gradients(
    tokens: TokenCut,
    vocab: VocabCut,
    head: tuple[Float[Array, "N D"], Float[Array, "..."], Float[Array, " V"] | None],
    wanted: Differentiated,
    options: HeadOptions,
    dtype: np.dtype,
    open_block: Callable[[VocabSlice, Array, Array | None], DTile],
    onto: Float[Array, "..."] | None = None,
) -> Gradients:
    """Gradients of hidden states, head and bias from tiles of logit gradients.

    Args:
        tokens: those that have a gradient.
        vocab: the blocks of the vocabulary.
        head: hidden states, weight and bias.
        wanted: whose gradients.
        options: of the head.
        dtype: of the sums.
        open_block: `(columns, their weight, their bias)` to the function that makes the tiles of that block.
        onto: what the gradient of the head is added to, in `dtype`.

    Returns:
        The gradients, None where nobody wants one, each cast once unless `wide_gradients` are asked for.
    """
    hidden, lm_head, bias = head
    front = tokens.gather(hidden)
    v_axis = options.layout.index("V")

    def vocab_step(i, total):
        columns = vocab.block(i)
        w, b = head_block(lm_head, bias, columns, options)
        d_tile = open_block(columns, w, b)
        fresh = w
        if (met := columns.met()) is not None:
            # Columns met before must not reach d_hidden a second time.
            fresh = jnp.where(jnp.expand_dims(met, 1 - v_axis), jnp.zeros_like(w), w)

        def token_step(j, block):
            rows = tokens.rows(j)
            h = rows.of(front)
            return add_products(block, d_tile(rows, h), h, fresh, rows, wanted, options)

        # The first block of tokens starts the sums, which then need neither zeros nor an addition.
        block = token_step(0, Gradients(total.hidden, None, None))
        if tokens.order.shape[0] > tokens.size:
            block = fori_loop(1, tokens.blocks, token_step, block)
        d_lm_head = block.lm_head
        if onto is not None and d_lm_head is not None:
            if met is not None:
                # Columns met before have it in their sum already.
                d_lm_head = jnp.where(jnp.expand_dims(met, 1 - v_axis), 0.0, d_lm_head)
            d_lm_head += columns.of(total.lm_head, v_axis)
        return Gradients(
            block.hidden,
            None if d_lm_head is None else columns.put(total.lm_head, d_lm_head, v_axis),
            None if block.bias is None else columns.put(total.bias, block.bias, 0),
        )

    def leaving(x: Array) -> np.dtype:
        return dtype if options.wide_gradients else x.dtype

    places = (front.shape[0], hidden.shape[1])
    total = Gradients(
        jnp.zeros(places if v_axis else places[::-1], dtype) if wanted.hidden else None,
        (jnp.zeros(lm_head.shape, leaving(lm_head)) if onto is None else onto) if wanted.lm_head else None,
        jnp.zeros(bias.shape, leaving(bias)) if bias is not None and wanted.bias else None,
    )
    total = fori_loop(0, vocab.blocks, vocab_step, total)
    if total.hidden is not None:
        d_hidden = total.hidden.astype(leaving(hidden))
        total = total._replace(hidden=tokens.scatter(d_hidden if v_axis else d_hidden.T))
    return total


def add_products(
    block: Gradients,
    d_x: Float[Array, "..."],
    h: Float[Array, "n D"],
    w: Float[Array, "..."],
    rows: Rows,
    wanted: Differentiated,
    options: HeadOptions,
) -> Gradients:
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
        part = product(d_x, w, (1, 1), dtype, options) if v_axis else product(w, d_x, (0, 0), dtype, options)
        n_axis = 1 - v_axis
        d_hidden = rows.put(d_hidden, rows.of(d_hidden, n_axis) + part, n_axis)
    if wanted.lm_head:
        part = product(h, d_x, (0, 0), dtype, options) if v_axis else product(d_x, h, (1, 0), dtype, options)
        d_w = part if d_w is None else d_w + part
    return Gradients(d_hidden, d_w, d_bias)


def terms_in_places(
    residuals: HeadResiduals, d_stats: TokenStats, tokens: TokenCut, vocab: int
) -> tuple[Int[Array, " K"], RowTerms]:
    """Targets and terms of the logit gradient in the tokens' places; in an empty place all gradients are zeros."""
    terms = row_terms(residuals.stats, residuals.normaliser, d_stats, residuals.inputs.scalars, vocab)
    # A place without a token has probability 0 everywhere, so that its zeros stay zeros.
    nowhere = tokens.gather(terms.maximum, float(jnp.finfo(terms.maximum.dtype).max))
    terms = jax.tree.map(tokens.gather, terms)._replace(maximum=nowhere)
    return tokens.gather(residuals.inputs.targets, vocab), terms


def cut_problem(
    hidden: Float[Array, "N D"], lm_head: Float[Array, "..."], mask: Bool[Array, " N"] | None, options: HeadOptions
) -> tuple[TokenCut, VocabCut]:
    vocab = vocab_cut(lm_head.shape[options.layout.index("V")], options)
    # Two blocks at least of a batch worth cutting, so that a small one can skip its masked half too.
    count = hidden.shape[0]
    half = max(SMALLEST_BLOCK_N, -(-count // 2))
    return cut_tokens(mask, count, min(options.block_n or min(_rule(options)[0], half), count)), vocab


def vocab_cut(vocab: int, options: HeadOptions) -> VocabCut:
    """Blocks of a quarter of the vocabulary at most: a small problem holds no `[N, V]` array either."""
    return VocabCut(vocab, min(options.block_v or min(_rule(options)[1], -(-vocab // 4)), vocab))


def _rule(options: HeadOptions) -> tuple[int, int]:
    """Tokens and columns of a block: those of the device, cut down to the caller's bytes of float32 logits."""
    block_n, block_v = CPU_BLOCKS if options.platform == "cpu" else ACCELERATOR_BLOCKS
    if options.block_bytes is None:
        return block_n, block_v
    elements = max(1, options.block_bytes // LOGIT_BYTES)
    if options.block_v is not None:
        return max(1, min(block_n, elements // options.block_v)), options.block_v
    # Columns first: they cost no more reads of the head, while fewer tokens do.
    wanted = elements // (options.block_n or block_n)
    if wanted >= SMALLEST_BLOCK_V:
        wanted -= wanted % SMALLEST_BLOCK_V
    elif options.block_n is None:
        return max(1, min(block_n, elements // SMALLEST_BLOCK_V)), min(SMALLEST_BLOCK_V, elements)
    return options.block_n or block_n, max(1, wanted)


def head_block(
    lm_head: Float[Array, "..."], bias: Float[Array, " V"] | None, columns: VocabSlice, options: HeadOptions
) -> tuple[Float[Array, "..."], Float[Array, " v"] | None]:
    return columns.of(lm_head, options.layout.index("V")), None if bias is None else columns.of(bias, 0)


def logits_tile(
    h: Float[Array, "n D"],
    w: Float[Array, "..."],
    bias: Float[Array, " v"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """Logits of a block, `[n, v]` for a head `[D, V]` and `[v, n]` for `[V, D]`: no large operand is transposed."""
    x = raw_tile(h, w, bias, options.layout.index("V"), options, dtype)
    if options.logits_dtype is not None:
        x = x.astype(options.logits_dtype).astype(dtype)
    return transform_logits(x, scalars)


def raw_tile(
    h: Float[Array, "n D"],
    w: Float[Array, "..."],
    bias: Float[Array, " v"] | None,
    v_axis: int,
    options: HeadOptions,
    dtype: np.dtype,
) -> Float[Array, "a b"]:
    """`h W + b` with the vocabulary on axis `v_axis`, whatever the head's layout."""
    # Not transposed afterwards: XLA:CPU makes of that a 16-bit product which it then refuses to run.
    d_axis = options.layout.index("D")
    x = product(h, w, (1, d_axis), dtype, options) if v_axis else product(w, h, (d_axis, 1), dtype, options)
    return x if bias is None else x + jnp.expand_dims(bias.astype(dtype), 1 - v_axis)


def product(
    x: Array, y: Array, contract: tuple[int, int], dtype: np.dtype, options: HeadOptions
) -> Float[Array, "a b"]:
    """A product in the wider of the two dtypes, accumulated and returned in `dtype`."""
    common = common_dtype(x.dtype, y.dtype)
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if options.precision is None and common == jnp.float32 else options.precision
    return lax.dot_general(
        x.astype(common), y.astype(common), dimensions, precision=precision, preferred_element_type=dtype
    )
