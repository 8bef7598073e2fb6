"""Kernel bodies for logits that stand in HBM: refs in, refs out.

A block is walked by chunks of a few rows, unrolled, so that what a chunk reads once stays in registers: its maximum
first, then its exponentials.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from logitless.ops.pallas_tpu_blocks import Cut
from logitless.ops.pallas_tpu_kernels import LANES, meet_lanes, on_each_block, start_sums
from logitless.ops.softmax import RowTerms, Running, d_logits, transform_logits
from logitless.ops.types import LogitScalars

CHUNK_ROWS = 16
CHUNK_COLUMNS = 2048


class LogitsRefs(NamedTuple):
    """What both kernels read: a block of logits and its tokens' targets, the scalars."""

    scalars: LogitScalars
    targets: Any
    logits: Any

    def chunk(self, rows: slice, start: int, size: int, cut: Cut) -> Float[Array, "n v"]:
        """Logits of a chunk, after softcap and temperature."""
        x = self.logits[rows, start : start + size].astype(cut.dtype)
        return transform_logits(x, jax.tree.map(lambda ref: ref[0], self.scalars))

    def ahead(self, rows: slice, j: Int[Array, ""], cut: Cut) -> Int[Array, "n lanes"]:
        """The target's column within the block, less the lane."""
        targets = self.targets[rows, :]
        lanes = lax.broadcasted_iota(jnp.int32, (targets.shape[0], LANES), 1)
        return targets - j * cut.block_v - lanes


def forward_kernel(live: Any | None, refs: LogitsRefs, running: Running, *, cut: Cut) -> None:
    """Online softmax of a block of tokens over the vocabulary; grid `(token blocks, vocabulary blocks)`.

    Args:
        live: for each block of tokens, 0 where none of them counts; None where all do.
        refs: the block.
        running: outputs, each `[block_n, LANES]`, that stay in VMEM from step to step and carry the sums.
        cut: the kernel's static side.
    """
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _start():
        start_sums(running, cut)

    def meet(columns: int) -> None:
        for rows in _chunks(cut):
            state = jax.tree.map(lambda ref: ref[rows, :], running)  # noqa: B023 - run at once
            ahead = refs.ahead(rows, j, cut)
            for start in range(0, columns, CHUNK_COLUMNS):
                z = refs.chunk(rows, start, min(CHUNK_COLUMNS, cut.block_v - start), cut)
                state = meet_lanes(state, z, ahead - start, columns - start, cut)
            for ref, x in zip(running, state, strict=True):
                if ref is not None:
                    ref[rows, :] = x

    if live is None:
        on_each_block(j, cut, meet)
    else:
        pl.when(live[i] != 0)(lambda: on_each_block(j, cut, meet))


def backward_kernel(live: Any, refs: LogitsRefs, terms: RowTerms, out: Any, *, cut: Cut) -> None:
    """Gradient of a block of logits, elementwise; grid `(token blocks, vocabulary blocks)`.

    Args:
        live: for each block of tokens, 0 where none of them has a gradient.
        refs: the block; a token without a gradient has the target -1.
        terms: of its rows, each `[block_n, 1]`.
        out: the gradient of the block.
        cut: the kernel's static side.
    """
    i, j = pl.program_id(0), pl.program_id(1)
    scalars = jax.tree.map(lambda ref: ref[0], refs.scalars)

    @pl.when(live[i] == 0)
    def _clear():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(live[i] != 0)
    def _write():
        for rows in _chunks(cut):
            ahead = refs.ahead(rows, j, cut)
            active = jnp.broadcast_to(refs.targets[rows, :], ahead.shape) >= 0
            of_rows = jax.tree.map(lambda ref: jnp.broadcast_to(ref[rows, :], ahead.shape), terms)  # noqa: B023
            for start in range(0, cut.block_v, LANES):
                d = d_logits(refs.chunk(rows, start, LANES, cut), ahead == start, of_rows, scalars)
                # Selected, not multiplied: a row without a gradient may hold anything.
                out[rows, start : start + LANES] = jnp.where(active, d, 0.0).astype(out.dtype)


def _chunks(cut: Cut) -> list[slice]:
    size = min(CHUNK_ROWS, cut.block_n & -cut.block_n)
    return [slice(first, first + size) for first in range(0, cut.block_n, size)]
