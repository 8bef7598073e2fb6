"""Kernel bodies of the TPU: refs in, refs out.

A block of logits is made in sub-tiles of `SUB_COLUMNS` vocabulary columns, unrolled: the compiler then runs the softmax
of one beside the product of the next. The running maximum and sums are kept for each of the 128 lanes of a register and
merged once, outside: no step of the grid reduces across lanes.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from logitless.ops.pallas_tpu_blocks import Cut
from logitless.ops.pallas_tpu_copies import HeadScratch, HiddenRing, Step
from logitless.ops.pallas_tpu_vmem import LANES, SUB_COLUMNS
from logitless.ops.softmax import RowTerms, Running, d_logits, transform_logits
from logitless.ops.tiles import product
from logitless.ops.types import LogitScalars


class HeadRefs(NamedTuple):
    """What every kernel of the head reads: a block of each."""

    scalars: LogitScalars
    targets: Any
    hidden: Any
    lm_head: Any
    bias: Any | None

    def logits(self, start: int, cut: Cut) -> Float[Array, "n v"]:
        """A sub-tile, after softcap and temperature: `[block_n, SUB_COLUMNS]` in both layouts."""
        w = self.lm_head[cut.of_vocab(start, SUB_COLUMNS)]
        z = product(self.hidden[...], w, (1, 1 - cut.v_axis), cut.dtype, cut.options)
        if self.bias is not None:
            z += self.bias[:, start : start + SUB_COLUMNS].astype(cut.dtype)
        if cut.options.logits_dtype is not None:
            z = z.astype(cut.options.logits_dtype).astype(cut.dtype)
        return transform_logits(z, self.numbers())

    def numbers(self) -> LogitScalars:
        return jax.tree.map(lambda ref: ref[0], self.scalars)


class Ranges(NamedTuple):
    """Smallest and largest target of each block of tokens, in SMEM."""

    first: Any
    last: Any

    def meet(self, token: Any, j: Any, cut: Cut) -> Any:
        """Whether a block of the vocabulary may hold a target of a block of tokens."""
        start = j * cut.block_v
        return (self.last[token] >= start) & (self.first[token] < start + cut.block_v)


def forward_kernel(head: HeadRefs, ranges: Ranges, running: Running, *, cut: Cut) -> None:
    """Online softmax of a block of tokens over the vocabulary.

    Grid: `(cores, token blocks of a core, vocabulary blocks)`. The outputs, each `[block_n, LANES]`, stay in VMEM from
    step to step and carry the sums. A target's column is none of those that are summed. The tokens come sorted by their
    targets, so that few steps meet any; the others need not look for them.
    """
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _start():
        _put(running, (cut.floor, 0.0, 0.0, 0.0, 0.0))

    def meet(columns: int, targets: bool) -> None:
        state, ahead = jax.tree.map(lambda ref: ref[...], running), None
        if targets:
            lanes = lax.broadcasted_iota(jnp.int32, (cut.block_n, LANES), 1)
            ahead = head.targets[...] - j * cut.block_v - lanes
        for start in range(0, columns, SUB_COLUMNS):
            here = None if ahead is None else ahead - start
            state = _meet(state, head.logits(start, cut), here, columns - start, cut)
        _put(running, state)

    def meet_either(columns: int) -> None:
        token = pl.program_id(1) * cut.cores + pl.program_id(0)
        lax.cond(ranges.meet(token, j, cut), lambda: meet(columns, True), lambda: meet(columns, False))

    if cut.last == cut.block_v:
        meet_either(cut.block_v)
    else:
        pl.when(j < cut.blocks - 1)(lambda: meet_either(cut.block_v))
        pl.when(j == cut.blocks - 1)(lambda: meet(cut.last, True))


def _put(refs: Running, values: Sequence[Any]) -> None:
    for ref, x in zip(refs, values, strict=True):
        if ref is not None:
            ref[...] = jnp.broadcast_to(jnp.asarray(x, ref.dtype), ref.shape)


def _on_each_block(j: Int[Array, ""], cut: Cut, run: Any) -> None:
    """Runs with the columns of the block: the last one, where it is shorter, as a second copy of its own."""
    if cut.last == cut.block_v:
        run(cut.block_v)
        return
    pl.when(j < cut.blocks - 1)(lambda: run(cut.block_v))
    pl.when(j == cut.blocks - 1)(lambda: run(cut.last))


def _meet(
    state: Running, z: Float[Array, "n v"], ahead: Int[Array, "n lanes"] | None, columns: int, cut: Cut
) -> Running:
    """Adds a sub-tile to each lane's online softmax.

    Args:
        state: the sums of each lane, `[n, LANES]`.
        z: logits.
        ahead: the target's column within the sub-tile, less the lane; None where no target is among them.
        columns: of the sub-tile that the vocabulary has; what stands behind them is anything.
        cut: the kernel's static side.
    """
    maximum, total, weighted, plain, target = state
    xs = []
    for k in range(0, min(columns, z.shape[1]), LANES):
        x = z[:, k : k + LANES]
        exists = None
        if k + LANES > columns:
            exists = lax.broadcasted_iota(jnp.int32, x.shape, 1) < columns - k
            x = jnp.where(exists, x, cut.lowest)
        if plain is not None:
            plain += x if exists is None else jnp.where(exists, x, 0.0)
        if ahead is not None:
            own = ahead == k
            target = jnp.where(own, x, target)
            x = jnp.where(own, cut.lowest, x)
        xs.append(x)
    # A tree, not a chain: each step of a chain would wait for the one before.
    maximum, before = jnp.maximum(maximum, _tree(jnp.maximum, xs)), maximum
    shift = before - maximum
    rescale = jnp.exp(shift)
    # Bounded below, since -inf, as a bias gives it, would make a NaN of 0 * -inf.
    shifted = [x - maximum if weighted is None else jnp.maximum(x - maximum, cut.lowest) for x in xs]
    es = [jnp.exp(x) for x in shifted]
    if weighted is not None:
        weighted = rescale * (weighted + total * shift)
        weighted += _tree(jnp.add, [e * x for e, x in zip(es, shifted, strict=True)])
    return Running(maximum, total * rescale + _tree(jnp.add, es), weighted, plain, target)


def _tree(combine: Any, parts: list[Array]) -> Array:
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


class GradientRefs(NamedTuple):
    """What the backward kernel writes, None where nobody wants it.

    Attributes:
        hidden: `[cores, K, D]` in float32, in HBM.
        lm_head: in the head's dtype: in HBM, or a block where it leaves whole.
        bias: `[1, block_v]` in float32.
    """

    hidden: Any
    lm_head: Any
    bias: Any


class BackwardScratch(NamedTuple):
    """VMEM of the backward kernel: the gradient of a block of logits, and what the wanted gradients need."""

    d_logits: Any
    ring: HiddenRing | None
    head: HeadScratch | None


def backward_kernel(head: HeadRefs, terms: RowTerms, out: GradientRefs, scratch: BackwardScratch, *, cut: Cut) -> None:
    """Every gradient from one pass over the logits; grid `(cores, vocabulary blocks of a core, token blocks)`.

    Each core has its own blocks of the head and its own `d_hidden`: no two ever add to one array.
    """
    core, i = pl.program_id(0), pl.program_id(2)
    first = core * cut.blocks_of_core
    j = first + pl.program_id(1)
    blocks = jnp.minimum(cut.blocks_of_core, cut.blocks - first) if cut.blocks % cut.cores else cut.blocks_of_core
    step = Step(token=i, tokens=pl.num_programs(2), block=pl.program_id(1), blocks=blocks)

    def run() -> None:
        _backward_step(head, terms, out, scratch, step, core, j, cut)

    if cut.blocks % cut.cores:
        pl.when(j < cut.blocks)(run)
    else:
        run()


def _backward_step(
    head: HeadRefs,
    terms: RowTerms,
    out: GradientRefs,
    scratch: BackwardScratch,
    step: Step,
    core: Any,
    j: Any,
    cut: Cut,
) -> None:
    i = step.token
    ring = None if scratch.ring is None else scratch.ring._replace(total=out.hidden.at[core])
    if ring is not None:
        ring.open(step)

    @pl.when(i == 0)
    def _start():
        if scratch.head is not None:
            scratch.head.sums[...] = jnp.zeros(scratch.head.sums.shape, scratch.head.sums.dtype)
        if out.bias is not None:
            out.bias[...] = jnp.zeros(out.bias.shape, out.bias.dtype)
        if cut.last < cut.block_v:
            # What stands behind the vocabulary may be NaN, and a NaN times 0 is one too.
            pl.when(j == cut.blocks - 1)(lambda: _clear(head.lm_head, cut.v_axis, cut.last))

    make_d_logits(head, terms, out.bias, scratch.d_logits, j, cut)
    if scratch.head is not None:
        d_x, h = scratch.d_logits[...], head.hidden[...].astype(scratch.d_logits.dtype)
        operands = (h, d_x) if cut.v_axis else (d_x, h)
        scratch.head.sums[...] += product(*operands, (0, 0), cut.dtype, cut.options)

        leave = functools.partial(scratch.head.leave, out.lm_head, j, cut)
        pl.when(i == step.tokens - 1)(lambda: _on_each_block(j, cut, leave))
    if ring is not None:
        # No product before the wait: it would be kept, a block of float32, from one side of the branch to the other.
        d_hidden, w = ring.ready(step), head.lm_head[...].astype(scratch.d_logits.dtype)
        d_hidden[...] += product(scratch.d_logits[...], w, (1, cut.v_axis), cut.dtype, cut.options)
        ring.close(step)


def d_hidden_kernel(head: HeadRefs, terms: RowTerms, d_hidden: Any, d_x: Any, sums: Any, *, cut: Cut) -> None:
    """Gradient of the hidden states alone; grid `(cores, token blocks of a core, vocabulary blocks)`."""
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _start():
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    if cut.last < cut.block_v:
        pl.when(j == cut.blocks - 1)(lambda: _clear(head.lm_head, cut.v_axis, cut.last))
    make_d_logits(head, terms, None, d_x, j, cut)
    w = head.lm_head[...].astype(d_x.dtype)
    sums[...] += product(d_x[...], w, (1, cut.v_axis), cut.dtype, cut.options)

    @pl.when(j == cut.blocks - 1)
    def _leave():
        d_hidden[...] = sums[...].astype(d_hidden.dtype)


def make_d_logits(head: HeadRefs, terms: RowTerms, d_bias: Any | None, d_x: Any, j: Any, cut: Cut) -> None:
    """The gradient of a block of `h W + b`, cast once, into `d_x`; its column sums are added to `d_bias`."""
    scalars = head.numbers()
    rows = jax.tree.map(lambda ref: ref[...], terms)
    column = head.targets[...] - j * cut.block_v
    for start in range(0, cut.block_v, SUB_COLUMNS):
        z = head.logits(start, cut)
        own = lax.broadcasted_iota(jnp.int32, z.shape, 1) == column - start
        tile = d_logits(z, own, rows, scalars, impossible=head.bias is not None)
        if d_bias is not None:
            d_bias[:, start : start + SUB_COLUMNS] += jnp.sum(tile, axis=0, keepdims=True)
        d_x[:, start : start + SUB_COLUMNS] = tile.astype(d_x.dtype)
    if cut.last < cut.block_v:
        pl.when(j == cut.blocks - 1)(lambda: _clear(d_x, 1, cut.last))


def _clear(ref: Any, axis: int, start: int) -> None:
    """Zeros from `start` on along an axis, by whole registers."""
    size, whole = ref.shape[axis], -(-start // LANES) * LANES

    def part(first: int, end: int) -> tuple[slice, slice]:
        return (slice(None), slice(first, end)) if axis else (slice(first, end), slice(None))

    if start < whole:
        place = part(whole - LANES, whole)
        x = ref[place]
        kept = lax.broadcasted_iota(jnp.int32, x.shape, axis) < start - (whole - LANES)
        ref[place] = jnp.where(kept, x, jnp.zeros_like(x))
    if whole < size:
        place = part(whole, size)
        ref[place] = jnp.zeros_like(ref[place])
