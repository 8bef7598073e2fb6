"""Logits that the caller already holds, on a TPU: each pass reads them once, and the gradient takes their place.

The gradient is written where the logits stand (`input_output_aliases`), so that a program which makes them, or is given
them to keep, holds one array of their size and not two. Where they live on, XLA copies them first.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator
from logitless.ops.derivatives import Passes, logits_vjp
from logitless.ops.manual import shapes_of_kernel
from logitless.ops.pallas_tpu import as_columns, each_sum, merge_lanes
from logitless.ops.pallas_tpu_blocks import USABLE, Cut
from logitless.ops.pallas_tpu_logits_kernels import LogitsRefs, backward_kernel, forward_kernel
from logitless.ops.pallas_tpu_vmem import LANES, MIB, chip_of, up
from logitless.ops.softmax import Normaliser, RowTerms, Running, finish, row_terms
from logitless.ops.types import LOGIT_BYTES, HeadOptions, LogitScalars, TokenStats

# Of the smallest VMEM among the chips, 16 MB on v4, float32 blocks of the backward pass take half.
BLOCK_N, BLOCK_V = 256, 2048
MIN_VMEM_LIMIT = 16 * MIB
OTHER_BYTES = 2 * MIB
"""Of VMEM, set aside for what the compiler adds."""


def token_stats_pallas_tpu(
    logits: Float[Array, "N V"],
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N rows of logits; the contract is that of `logitless.ops.api.token_stats`."""
    _check_dtype(logits.dtype, options)
    check_blocks("token_stats", options, logits.dtype)
    return _token_stats(logits, targets, mask, scalars, options)


def _check_dtype(dtype: np.dtype, options: HeadOptions) -> None:
    if dtype in (jnp.float32, jnp.bfloat16) or (dtype == jnp.float64 and options.interpret is not None):
        return
    raise NotImplementedError(
        f"token_stats: implementation 'pallas_tpu' takes float32 and bfloat16 logits, not {dtype}; use "
        "implementation='chunked'"
    )


def check_blocks(name: str, options: HeadOptions, dtype: np.dtype) -> None:
    """Raises ValueError for a block that is no whole number of TPU registers."""
    for key, unit in (("block_n", row_unit(dtype)), ("block_v", LANES)):
        size = getattr(options, key)
        if size is not None and size % unit:
            below, above = size // unit * unit, up(size, unit)
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"{name}: block_sizes[{key!r}] is {size}; on a TPU it must be a multiple of {unit} for {dtype}: "
                f"give {near}"
            )


def row_unit(dtype: np.dtype) -> int:
    """Rows of a TPU register: 8 of 32 bits, 16 of 16 bits."""
    return max(8, 32 // dtype.itemsize)


def _cut(logits: Array, options: HeadOptions) -> Cut:
    count, vocab = logits.shape
    unit = row_unit(logits.dtype)
    block_n = min(options.block_n or BLOCK_N, up(count, unit))
    block_v = min(options.block_v or BLOCK_V, up(vocab, LANES))
    if options.block_bytes is not None:
        # Columns give way first: a pass reads every block once, whatever its shape.
        elements = options.block_bytes // LOGIT_BYTES
        if options.block_v is None:
            block_v = min(block_v, max(LANES, elements // block_n // LANES * LANES))
        if options.block_n is None:
            block_n = min(block_n, max(unit, elements // block_v // unit * unit))
        if block_n * block_v > elements:
            raise ValueError(
                f"pallas_tpu: block_bytes={options.block_bytes}; the smallest block, {block_n} x {block_v}, has "
                f"{block_n * block_v * LOGIT_BYTES} bytes of float32 logits: give as many, or use "
                "implementation='chunked'"
            )
    cut = Cut(vocab, block_n, block_v, MIN_VMEM_LIMIT, 1, accumulator(logits.dtype), options)
    _check_room(cut, logits.dtype, unit)
    return cut


def _check_room(cut: Cut, dtype: np.dtype, unit: int) -> None:
    """Raises ValueError where the backward pass, which needs more than the forward, would not fit into VMEM."""
    chip = chip_of(cut.options.device_kind)
    room = int(USABLE * chip.vmem_bytes) - OTHER_BYTES

    def taken(block_n: int, block_v: int) -> int:
        sized = replace(cut, block_n=block_n, block_v=block_v)
        return _block_bytes(sized, dtype, big=2, rows=len(RowTerms._fields) + 1)

    if taken(cut.block_n, cut.block_v) <= room:
        return
    fitting = (
        [(cut.block_n, v) for v in range(cut.block_v, 0, -LANES)],
        [(n, cut.block_v) for n in range(cut.block_n, 0, -unit)],
    )
    nearest = [next((sizes for sizes in several if taken(*sizes) <= room), None) for several in fitting]
    found = [f"block_n={n}, block_v={v}" for n, v in filter(None, nearest)]
    needed = taken(cut.block_n, cut.block_v) / MIB
    raise ValueError(
        f"pallas_tpu: blocks of {cut.block_n} x {cut.block_v} {dtype} logits take {needed:.1f} MiB of VMEM where a "
        f"{chip.name} has {room / MIB:.1f}; nearest that fit: {'; or '.join(found)}"
    )


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
    cut = _cut(logits, options)
    lanes = pl.BlockSpec((cut.block_n, LANES), lambda i, j, *live: (i, 0))
    running = _call(
        functools.partial(forward_kernel, cut=cut),
        None if mask is None else _live_blocks(mask, cut),
        (_refs(logits, targets, scalars, cut.dtype),),
        (_specs(cut, scalars),),
        each_sum(lanes, outputs),
        each_sum(jax.ShapeDtypeStruct((logits.shape[0], LANES), cut.dtype), outputs),
        cut,
        name="logitless_logits_forward",
        vmem_bytes=_block_bytes(cut, logits.dtype, big=1, rows=len(Running._fields) + 1),
    )
    return merge_lanes(running, targets < cut.vocab)


def _backward(residuals: tuple, d_stats: TokenStats, options: HeadOptions) -> Float[Array, "N V"]:
    logits, targets, mask, scalars, stats, normaliser = residuals
    cut = _cut(logits, options)
    active = functools.reduce(jnp.logical_or, [d != 0 for d in d_stats if d is not None])
    if mask is not None:
        active &= mask
    terms = row_terms(stats, normaliser, d_stats, scalars, cut.vocab)
    row = pl.BlockSpec((cut.block_n, 1), lambda i, j, *live: (i, 0))
    return _call(
        functools.partial(backward_kernel, cut=cut),
        _live_blocks(active, cut),
        (_refs(logits, jnp.where(active, targets, -1), scalars, cut.dtype), as_columns(terms)),
        (_specs(cut, scalars), jax.tree.map(lambda _: row, terms)),
        pl.BlockSpec((cut.block_n, cut.block_v), lambda i, j, *live: (i, j)),
        jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        cut,
        name="logitless_logits_backward",
        vmem_bytes=_block_bytes(cut, logits.dtype, big=2, rows=len(terms) + 1),
        in_place=_may_alias(logits, cut),
    )


_token_stats = logits_vjp(_forward, _backward, "pallas_tpu")
PASSES = Passes(_sums, _backward)


def _refs(logits: Array, targets: Array, scalars: LogitScalars, dtype: np.dtype) -> LogitsRefs:
    return LogitsRefs(jax.tree.map(lambda x: x.astype(dtype).reshape(1), scalars), targets[:, None], logits)


def _specs(cut: Cut, scalars: LogitScalars) -> LogitsRefs:
    return LogitsRefs(
        jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), scalars),
        pl.BlockSpec((cut.block_n, 1), lambda i, j, *live: (i, 0)),
        # A block of tokens that is skipped keeps its first block of logits: nothing more is fetched for it.
        pl.BlockSpec((cut.block_n, cut.block_v), lambda i, j, *live: (i, j * live[0][i] if live else j)),
    )


def _live_blocks(counts: Bool[Array, " N"], cut: Cut) -> Int[Array, " blocks"]:
    """1 for each block of tokens of which any counts, else 0."""
    padded = jnp.pad(counts, (0, -counts.size % cut.block_n))
    return jnp.any(padded.reshape(-1, cut.block_n), axis=1).astype(jnp.int32)


def _may_alias(logits: Array, cut: Cut) -> bool:
    """False where JAX's interpreter cannot lower an alias: of an array that is no whole number of blocks."""
    ragged = logits.shape[0] % cut.block_n or logits.shape[1] % cut.block_v
    return cut.options.interpret is None or not ragged


def _block_bytes(cut: Cut, dtype: np.dtype, big: int, rows: int) -> int:
    """VMEM of a kernel: each block twice, those with one number or one register a row padded to whole registers."""
    return 2 * cut.block_n * (big * cut.block_v * dtype.itemsize + rows * LANES * cut.dtype.itemsize)


def _call(
    kernel: Any,
    live: Int[Array, " blocks"] | None,
    operands: tuple,
    in_specs: tuple,
    out_specs: Any,
    out_shape: Any,
    cut: Cut,
    *,
    name: str,
    vmem_bytes: int,
    in_place: bool = False,
) -> Any:
    """Runs a kernel over `(token blocks, vocabulary blocks)`; `in_place` writes its one result over the logits."""
    count = operands[0].logits.shape[0]
    prefetched = () if live is None else (live,)
    body = kernel if prefetched else functools.partial(kernel, None)
    # Operands are counted as leaves, those prefetched first; the logits are the last of their tuple.
    place = len(prefetched) + len(jax.tree.leaves(operands[0])) - 1
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(-(-count // cut.block_n), cut.blocks),
            in_specs=list(in_specs),
            # In a list of its own: a bare NamedTuple would be taken apart.
            out_specs=[out_specs],
        ),
        out_shape=shapes_of_kernel([out_shape], operands),
        input_output_aliases={place: 0} if in_place else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(MIN_VMEM_LIMIT, vmem_bytes + OTHER_BYTES),
        ),
        name=name,
        interpret=cut.options.interpret or False,
    )(*prefetched, *operands)[0]
