"""The LM head on a TPU as Pallas kernels: a softmax and its gradients without logits in HBM.

Forward: tokens outside, vocabulary inside; nothing but a few numbers per token leaves. Backward: vocabulary outside,
tokens inside; the logits are made again, and both gradients taken from them while they are in VMEM.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator, common_dtype
from logitless.ops.blocks import TokenCut, cut_tokens
from logitless.ops.derivatives import Differentiated
from logitless.ops.pallas_tpu_kernels import (
    LANES,
    RING,
    STAGED_COLUMNS,
    SUB_COLUMNS,
    BackwardScratch,
    Cut,
    HeadRefs,
    HeadScratch,
    HiddenRing,
    backward_kernel,
    forward_kernel,
)
from logitless.ops.softmax import VANISHED, Normaliser, RowTerms, Running, finish, row_terms
from logitless.ops.tiles import Gradients
from logitless.ops.types import HeadOptions, LogitScalars, TokenStats

VMEM_LIMIT = 120 * 2**20


def forward(hidden, lm_head, bias, targets, mask, scalars, options, also=()):
    """The statistics and the normaliser of N tokens."""
    vocab, dtype = lm_head.shape[options.layout.index("V")], accumulator(hidden.dtype, lm_head.dtype)
    cut = Cut(vocab, options.block_n or 1024, options.block_v or 2048, dtype, options)
    count = hidden.shape[0]
    tokens = None if mask is None else cut_tokens(mask, count, cut.block_n)
    places, blocks = count, -(-count // cut.block_n)
    if tokens is not None:
        hidden, targets = tokens.gather(hidden), tokens.gather(targets, vocab)
        places, blocks = targets.shape[0], tokens.blocks
    run = _forward_call(cut, places, blocks, hidden.shape[1], bias is not None, scalars)
    running = merge_lanes(run(_refs(scalars, targets, hidden, lm_head, bias, dtype)), cut)
    results = finish(running, targets < vocab, vocab, (*options.outputs, *also))
    return results if tokens is None else jax.tree.map(tokens.scatter, results)


def _refs(scalars, targets, hidden, lm_head, bias, dtype) -> HeadRefs:
    return HeadRefs(
        jax.tree.map(lambda x: x.astype(dtype).reshape(1), scalars),
        targets[:, None],
        hidden,
        lm_head,
        None if bias is None else bias[None, :],
    )


def _head_specs(cut: Cut, d: int, has_bias: bool, scalars: LogitScalars, token: Any, block: Any) -> HeadRefs:
    """Block of each input; `token` and `block` take the grid's indices to those of the blocks."""
    weight = (d, cut.block_v) if cut.v_axis else (cut.block_v, d)
    place = (lambda *at: (0, block(*at))) if cut.v_axis else (lambda *at: (block(*at), 0))
    return HeadRefs(
        jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), scalars),
        pl.BlockSpec((cut.block_n, 1), lambda *at: (token(*at), 0)),
        pl.BlockSpec((cut.block_n, d), lambda *at: (token(*at), 0)),
        pl.BlockSpec(weight, place),
        pl.BlockSpec((1, cut.block_v), lambda *at: (0, block(*at))) if has_bias else None,
    )


def _forward_call(cut: Cut, places: int, blocks: Any, d: int, has_bias: bool, scalars: LogitScalars):
    kept = {
        "maximum": True,
        "total": True,
        "weighted": "entropy" in cut.options.outputs,
        "plain": "mean_logits" in cut.options.outputs,
        "target": True,
    }
    spec = pl.BlockSpec((cut.block_n, LANES), lambda i, j: (i, 0))
    shape = jax.ShapeDtypeStruct((places, LANES), cut.dtype)
    call = pl.pallas_call(
        functools.partial(forward_kernel, cut=cut),
        grid=(blocks, cut.blocks),
        in_specs=[_head_specs(cut, d, has_bias, scalars, lambda i, j: i, lambda i, j: j)],
        out_specs=[Running(**{k: spec if v else None for k, v in kept.items()})],
        out_shape=[Running(**{k: shape if v else None for k, v in kept.items()})],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="logitless_forward",
        interpret=cut.options.interpret or False,
    )
    return lambda refs: call(refs)[0]


def merge_lanes(lanes: Running, cut: Cut) -> Running:
    """The online softmax of each token from those of its lanes."""
    maximum = jnp.max(lanes.maximum, axis=1)
    shift = jnp.maximum(lanes.maximum - maximum[:, None], VANISHED)
    rescale = jnp.exp(shift)
    total = jnp.sum(lanes.total * rescale, axis=1)
    weighted = lanes.weighted
    if weighted is not None:
        weighted = jnp.sum(rescale * (weighted + lanes.total * shift), axis=1)
    return Running(
        maximum=jnp.where(total == 0, -jnp.inf, maximum),
        total=total,
        weighted=weighted,
        plain=None if lanes.plain is None else jnp.sum(lanes.plain, axis=1),
        target=jnp.sum(lanes.target, axis=1),
    )


def backward(hidden, lm_head, bias, targets, scalars, terms: RowTerms, tokens: TokenCut, wanted, options):
    """Gradients of hidden states, head and bias; `targets` and `terms` of the tokens in places."""
    vocab, dtype = lm_head.shape[options.layout.index("V")], accumulator(hidden.dtype, lm_head.dtype)
    cut = Cut(vocab, tokens.size, options.block_v or 2048, dtype, options)
    front = tokens.gather(hidden)
    common = common_dtype(hidden.dtype, lm_head.dtype)
    places, d = front.shape
    weight = (d, cut.block_v) if cut.v_axis else (cut.block_v, d)
    aligned = vocab % LANES == 0
    stage = (2, d, STAGED_COLUMNS) if cut.v_axis else (2, STAGED_COLUMNS, d)
    dma = pltpu.SemaphoreType.DMA
    scratch = BackwardScratch(
        pltpu.VMEM((cut.block_n, cut.block_v), common),
        HiddenRing(None, pltpu.VMEM((RING, cut.block_n, d), dtype), dma((RING,)), dma((RING,)))
        if wanted.hidden
        else None,
        HeadScratch(
            pltpu.VMEM(weight, dtype),
            pltpu.VMEM(stage, lm_head.dtype) if aligned else None,
            dma((2,)) if aligned else None,
        )
        if wanted.lm_head
        else None,
    )
    place = (lambda j, i: (0, j)) if cut.v_axis else (lambda j, i: (j, 0))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    specs = Gradients(
        whole if wanted.hidden else None,
        (whole if aligned else pl.BlockSpec(weight, place)) if wanted.lm_head else None,
        pl.BlockSpec((1, cut.block_v), lambda j, i: (0, j)) if wanted.bias else None,
    )
    shapes = Gradients(
        jax.ShapeDtypeStruct((places, d), dtype) if wanted.hidden else None,
        jax.ShapeDtypeStruct(lm_head.shape, lm_head.dtype) if wanted.lm_head else None,
        jax.ShapeDtypeStruct((1, vocab), dtype) if wanted.bias else None,
    )
    token = lambda j, i: i
    block = lambda j, i: j
    out = pl.pallas_call(
        functools.partial(backward_kernel, cut=cut),
        grid=(cut.blocks, tokens.blocks),
        in_specs=[
            _head_specs(cut, d, bias is not None, scalars, token, block),
            jax.tree.map(lambda _: pl.BlockSpec((cut.block_n, 1), lambda j, i: (i, 0)), terms),
        ],
        out_specs=[specs],
        out_shape=[shapes],
        scratch_shapes=[scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="logitless_backward",
        interpret=options.interpret or False,
    )(_refs(scalars, targets, front, lm_head, bias, dtype), jax.tree.map(lambda x: x[:, None], terms))[0]
    d_hidden = None if out.hidden is None else tokens.scatter(out.hidden).astype(hidden.dtype)
    d_bias = None if out.bias is None else out.bias[0].astype(bias.dtype)
    return Gradients(d_hidden, out.lm_head, d_bias)
