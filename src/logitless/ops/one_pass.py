"""A token-local loss and its gradient in one go: three head-sized products, four with a backward pass of its own.

Tokens outside, vocabulary inside, twice. The first walk over the vocabulary keeps the logits of one block of tokens,
the loss then says what flows back to each log-probability, and the second walk turns the kept logits into gradients.
The head's gradient is added up in float32 over the blocks of tokens: what this costs in memory beside `chunked`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from logitless._arrays import accumulator, common_dtype
from logitless.ops.blocks import Rows, VocabCut, VocabSlice, cut_tokens
from logitless.ops.chunked import PASSES, linear_token_stats_chunked
from logitless.ops.derivatives import Differentiated, first_only, values_of
from logitless.ops.head_sharding import HeadSharding, on_devices
from logitless.ops.manual import fori_loop, not_manual, varying, varying_axes
from logitless.ops.sharded import on_any_mesh, own_copies, sharded_head
from logitless.ops.softmax import RowTerms, Running, d_logits_tile, finish, meet, row_terms, start
from logitless.ops.tiles import Gradients, add_products, head_block, logits_tile, vocab_cut
from logitless.ops.types import LOGIT_BYTES, HeadOptions, LogitScalars, TokenStats

# The CPU's is measured (docs/measured.md). An accelerator reads and writes the head's gradient once a block of tokens,
# in float32: the fewer blocks, the better, as far as memory goes.
CPU_BLOCK_N = 256
ACCELERATOR_BLOCK_BYTES = 1280 * 2**20
BLOCK_N_MULTIPLE = 64
# With fewer tokens a block, reading the head so often costs more than the product that one pass saves.
FEWEST_TOKENS = 64
PROBES = (-1e-3, -1.0, -20.0)

TokenLoss = Callable[..., Float[Array, ""]]
"""`(log-probability, *token_args)` of ONE token, all scalars, to its loss."""


class _Sweep(NamedTuple):
    """What one pass leaves behind: the loss, the log-probabilities, and the gradients of the loss, unscaled."""

    loss: Float[Array, ""]
    logprobs: Float[Array, " N"]
    gradients: Gradients


def linear_token_loss_one_pass(
    hidden: Float[Array, "... D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "..."],
    mask: Bool[Array, "..."] | None,
    token_args: tuple[Shaped[Array, "..."], ...],
    scalars: LogitScalars,
    options: HeadOptions,
    token_loss: TokenLoss,
) -> tuple[Float[Array, ""], Float[Array, "..."]]:
    """Loss and log-probabilities of N tokens; the contract is that of `logitless.ops.api.linear_token_loss`."""
    if options.sharding is not None:
        hidden, lm_head, bias = own_copies(hidden, lm_head, bias, options.sharding)
    return _token_loss(hidden, lm_head, bias, targets, mask, token_args, scalars, options, token_loss)


def sum_of_token_losses(
    token_loss: TokenLoss,
    logprobs: Float[Array, "..."],
    token_args: tuple[Shaped[Array, "..."], ...],
    counts: Bool[Array, "..."] | None,
) -> Float[Array, ""]:
    """Sum over the tokens that count; what `token_loss` gives elsewhere reaches neither it nor a gradient."""
    if counts is not None:
        logprobs = jnp.where(counts, logprobs, 0.0)
    in_axes, of_all = (0, *(0 if x.ndim else None for x in token_args)), token_loss
    for _ in range(logprobs.ndim):
        of_all = jax.vmap(of_all, in_axes)
    losses = of_all(logprobs, *token_args)
    return jnp.sum(losses if counts is None else jnp.where(counts, losses, 0.0), dtype=logprobs.dtype)


def linear_token_loss_two_pass(
    run: Callable[..., TokenStats],
    hidden: Float[Array, "... D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, "..."],
    mask: Bool[Array, "..."] | None,
    token_args: tuple[Shaped[Array, "..."], ...],
    scalars: LogitScalars,
    options: HeadOptions,
    token_loss: TokenLoss,
) -> tuple[Float[Array, ""], Float[Array, "..."]]:
    """The same by way of `run`, an implementation of `linear_token_stats` with a backward pass of its own."""
    stats = run(hidden, lm_head, bias, targets, mask, scalars, options)
    return sum_of_token_losses(token_loss, stats.logprobs, token_args, mask), lax.stop_gradient(stats.logprobs)


_chunked = on_any_mesh(linear_token_stats_chunked, sharded_head("one_pass", PASSES))


def _primal(hidden, lm_head, bias, targets, mask, token_args, scalars, options, token_loss):
    stats = _chunked(hidden, lm_head, bias, targets, mask, scalars, options)
    return sum_of_token_losses(token_loss, stats.logprobs, token_args, mask), stats.logprobs


_token_loss = jax.custom_vjp(_primal, nondiff_argnums=(7, 8))


# The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
def _token_loss_fwd(hidden, lm_head, bias, targets, mask, token_args, scalars, options, token_loss):
    wanted = Differentiated.by(hidden, lm_head, bias)
    primals = (hidden, lm_head, bias, targets, mask, token_args, scalars)
    primals = values_of("linear_token_loss", primals, scalars, "one_pass")
    sweep = (_sweep if options.sharding is None else _sharded_sweep)(primals, wanted, (options, token_loss))
    # In float32 until the cotangent is known: each gradient is rounded once.
    like = tuple(None if x is None else jnp.zeros((0,), x.dtype) for x in primals[:3])
    # One tree, whatever is differentiated: see `Differentiated`.
    gradients = tuple(y if x is None else x for x, y in zip(sweep.gradients, like, strict=True))
    return (sweep.loss, sweep.logprobs), (gradients, like, wanted)


def _token_loss_bwd(options, token_loss, residuals, cotangents):
    gradients, like, wanted = residuals
    d_loss = cotangents[0]
    if isinstance(d_loss, SymbolicZero):
        return (None,) * 7
    flags = (wanted.hidden, wanted.lm_head, wanted.bias)
    each = zip(gradients, like, flags, strict=True)
    scaled = [(x * d_loss).astype(y.dtype) if flag else None for x, y, flag in each]
    return *scaled, None, None, None, None


_token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)


class _Head(NamedTuple):
    """The head, how its vocabulary is cut, and what stands between its products and the softmax."""

    lm_head: Float[Array, "..."]
    bias: Float[Array, " V"] | None
    scalars: LogitScalars
    options: HeadOptions
    vocab: VocabCut
    dtype: np.dtype

    @property
    def v_axis(self) -> int:
        return self.options.layout.index("V")

    def rows_by(self, tokens: int, width: int) -> Float[Array, "..."]:
        """Zeros with the tokens on the axis on which a tile has them."""
        return jnp.zeros((tokens, width) if self.v_axis else (width, tokens), self.dtype)


@first_only("linear_token_loss", "one_pass")
def _sweep(primals: tuple, wanted: Differentiated, static: tuple[HeadOptions, TokenLoss]) -> _Sweep:
    hidden, lm_head, bias, targets, mask, token_args, scalars = primals
    options, token_loss = static
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    vocab = _cut(lm_head.shape[options.layout.index("V")], options)
    head = _Head(lm_head, bias, scalars, options, vocab, dtype)
    count, width = hidden.shape
    last = _seem_flat(token_loss, token_args, count, dtype)
    tokens = cut_tokens(mask, count, min(_block_n(count, vocab.vocab, options), count), last)
    front, targets = tokens.gather(hidden), tokens.gather(targets, vocab.vocab)
    token_args = tuple(tokens.gather(x) if x.ndim else x for x in token_args)
    present = tokens.order < count

    def token_step(j, carry):
        sweep, logits = carry
        rows = tokens.rows(j)
        h, own, here = rows.of(front), rows.of(targets), rows.of(present)
        logits, running = _keep_logits(head, h, own, logits)
        stats, normaliser = finish(running, own < vocab.vocab, vocab.vocab, ("logprobs",))
        here_args = tuple(rows.of(x) if x.ndim else x for x in token_args)
        loss, pull = jax.vjp(lambda x: sum_of_token_losses(token_loss, x, here_args, here), stats.logprobs)
        (d_logprobs,) = pull(jnp.ones_like(loss))
        terms = row_terms(stats, normaliser, TokenStats(logprobs=d_logprobs), scalars, vocab.vocab)
        # A place without a token has probability 0 everywhere, so that its zeros stay zeros.
        terms = terms._replace(maximum=jnp.where(here, terms.maximum, jnp.finfo(dtype).max))
        # A block of tokens without any gradient has nothing to pour.
        blocks = jnp.where(jnp.any(d_logprobs != 0), vocab.blocks, 0)
        gradients = _pour(head, h, own, logits, terms, rows, sweep.gradients, wanted, blocks)
        return _Sweep(sweep.loss + loss, rows.put(sweep.logprobs, stats.logprobs), gradients), logits

    places = targets.shape[0]
    gradients = Gradients(
        head.rows_by(places, width) if wanted.hidden else None,
        jnp.zeros(lm_head.shape, dtype) if wanted.lm_head else None,
        jnp.zeros(vocab.vocab, dtype) if wanted.bias else None,
    )
    sweep = _Sweep(jnp.zeros((), dtype), jnp.zeros(places, dtype), gradients)
    logits = head.rows_by(tokens.size, vocab.vocab)
    (loss, logprobs, gradients), _ = fori_loop(0, tokens.blocks, token_step, (sweep, logits))
    if (d_hidden := gradients.hidden) is not None:
        gradients = gradients._replace(hidden=tokens.scatter(d_hidden if head.v_axis else d_hidden.T))
    return _Sweep(loss, tokens.scatter(logprobs), gradients)


def _sharded_sweep(primals: tuple, wanted: Differentiated, static: tuple[HeadOptions, TokenLoss]) -> _Sweep:
    """The sweep of each device's tokens, and the sums over devices: those over which no caller's `shard_map` runs."""
    options, token_loss = static
    sharding: HeadSharding = options.sharding
    rows, head_specs = sharding.of_rows(), (sharding.head_spec(options.layout), sharding.bias_spec)
    axes = not_manual(sharding.token_axes)

    def over_devices(x: Any) -> Any:
        return x if x is None or not axes else lax.psum(x, axes)

    def run(hidden, lm_head, bias, targets, mask, token_args, scalars):
        flat_mask, flat_args = jax.tree.map(lambda x: x.reshape(-1) if x.ndim else x, (mask, token_args))
        flat = hidden.reshape(-1, hidden.shape[-1]), lm_head, bias, targets.reshape(-1), flat_mask, flat_args, scalars
        sweep = _sweep(flat, wanted, (replace(options, sharding=None), token_loss))
        d_hidden = sweep.gradients.hidden
        gradients = (
            None if d_hidden is None else d_hidden.reshape(hidden.shape),
            over_devices(sweep.gradients.lm_head),
            over_devices(sweep.gradients.bias),
        )
        return over_devices(sweep.loss), sweep.logprobs.reshape(targets.shape), gradients

    of_hidden, args = sharding.of_rows(ndim=primals[3].ndim), primals[5]
    in_specs = (of_hidden, *head_specs, rows, rows, tuple(rows if x.ndim else P() for x in args), P())
    out_specs = (P(), rows, (of_hidden, *head_specs))
    loss, logprobs, gradients = on_devices(run, sharding, in_specs, out_specs)(*primals)
    gradients = Gradients(*(varying(d, varying_axes(x)) for d, x in zip(gradients, primals[:3], strict=True)))
    return _Sweep(varying(loss, sharding.token_axes), varying(logprobs, sharding.token_axes), gradients)


def _keep_logits(
    head: _Head, h: Float[Array, "n D"], own: Int[Array, " n"], logits: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Running]:
    """First walk over the vocabulary: the block's logits, written into `logits`, and their online softmax."""

    def step(i, carry):
        logits, running = carry
        columns = head.vocab.block(i)
        w, b = head_block(head.lm_head, head.bias, columns, head.options)
        z = logits_tile(h, w, b, head.scalars, head.options, head.dtype)
        running = meet(running, z, columns.column(own), columns.met(), head.v_axis)
        return columns.put(logits, z, head.v_axis), running

    running = start(own.shape[0], head.dtype, ("logprobs",))
    return fori_loop(0, head.vocab.blocks, step, (logits, running))


def _pour(
    head: _Head,
    h: Float[Array, "n D"],
    own: Int[Array, " n"],
    logits: Float[Array, "..."],
    terms: RowTerms,
    rows: Rows,
    gradients: Gradients,
    wanted: Differentiated,
    blocks: Int[Array, ""],
) -> Gradients:
    """Second walk over the vocabulary: adds what the kept logits give to each gradient that is wanted."""
    unit = None
    if common_dtype(h.dtype, head.lm_head.dtype) == jnp.float16:
        # A loss scale has not come yet, and float16 holds no small numbers: the block's largest becomes about 2^14.
        unit = _power_of_two(jnp.maximum(jnp.abs(terms.shared), jnp.abs(terms.target)))
        terms = terms._replace(shared=terms.shared / unit, target=terms.target / unit)

    def step(i, gradients):
        columns = head.vocab.block(i)
        w, _ = head_block(head.lm_head, None, columns, head.options)
        d_x = d_logits_tile(columns.of(logits, head.v_axis), own - columns.start, terms, head.scalars, head.v_axis)
        if (met := columns.met()) is not None:
            # Columns met before must not count a second time.
            d_x = jnp.where(jnp.expand_dims(met, 1 - head.v_axis), 0.0, d_x)
        part = add_products(Gradients(gradients.hidden, None, None), d_x, h, w, rows, wanted, head.options)
        return Gradients(
            part.hidden,
            _add(columns, gradients.lm_head, part.lm_head, unit, head.v_axis),
            _add(columns, gradients.bias, part.bias, unit, 0),
        )

    gradients = fori_loop(0, blocks, step, gradients)
    if unit is not None and gradients.hidden is not None:
        # No other block adds to these rows.
        n_axis = 1 - head.v_axis
        own_rows = rows.of(gradients.hidden, n_axis) * unit
        gradients = gradients._replace(hidden=rows.put(gradients.hidden, own_rows, n_axis))
    return gradients


def _power_of_two(bounds: Float[Array, " n"]) -> Float[Array, ""]:
    """The power of two in which the largest finite one of `bounds` is between 2^13 and 2^14: exact to divide by."""
    _, exponent = jnp.frexp(jnp.max(jnp.where(jnp.isfinite(bounds), bounds, 0.0)))
    return jnp.ldexp(jnp.ones((), bounds.dtype), jnp.clip(exponent - 14, -100, 100))


def _add(
    columns: VocabSlice, total: Array | None, part: Array | None, unit: Float[Array, ""] | None, axis: int
) -> Array | None:
    if total is None or part is None:
        return None
    return columns.put(total, columns.of(total, axis) + (part if unit is None else part * unit), axis)


def _seem_flat(
    token_loss: TokenLoss, token_args: tuple[Shaped[Array, "..."], ...], count: int, dtype: np.dtype
) -> Bool[Array, " N"]:
    """Tokens whose loss has no slope wherever it is probed: a group with zero advantage.

    They go last, so that whole blocks of them may turn out to have no gradient. A wrong guess costs time, never digits.
    """
    flat = jnp.ones(count, bool)
    for probe in PROBES:
        at = jnp.full(count, probe, dtype)
        flat &= jax.grad(lambda x: sum_of_token_losses(token_loss, x, token_args, None))(at) == 0
    return flat


def _cut(vocab: int, options: HeadOptions) -> VocabCut:
    """Blocks of the vocabulary. The bytes that the caller allows go to the rows that are kept."""
    cut = vocab_cut(vocab, replace(options, block_bytes=None))
    # Two blocks at least: XLA unrolls a loop of one, and then fuses a temperature or scale into the exponential of the
    # second walk, which meets other logits than the maximum of the first did: 20 units in the last place off.
    return cut._replace(size=min(cut.size, -(-vocab // 2)))


def tokens_within(block_bytes: int, vocab: int, options: HeadOptions) -> int:
    """How many tokens' logits `block_bytes` hold, beside the tile that is being computed."""
    return block_bytes // (LOGIT_BYTES * (vocab + _cut(vocab, options).size))


def _block_n(count: int, vocab: int, options: HeadOptions) -> int:
    """Tokens of a block: a quarter of a small batch at most, which is then not held whole either."""
    if options.block_n is not None:
        return options.block_n
    if options.block_bytes is None and options.platform == "cpu":
        return min(CPU_BLOCK_N, -(-count // 4))
    most = max(1, tokens_within(options.block_bytes or ACCELERATOR_BLOCK_BYTES, vocab, options))
    # Blocks of about one size: a last one of a few tokens would cost as much as a full one.
    blocks = max(4, -(-count // most))
    even = -(-count // blocks)
    return min(most, -(-even // BLOCK_N_MULTIPLE) * BLOCK_N_MULTIPLE, -(-count // 4))
