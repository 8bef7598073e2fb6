"""Kernel bodies of the TPU: refs in, refs out.

A block of logits is made in sub-tiles of `SUB_COLUMNS` vocabulary columns, unrolled: the compiler then runs the softmax
of one beside the product of the next. The running maximum and sums are kept for each of the 128 lanes of a register and
merged once, outside: no step of the grid reduces across lanes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from logitless._arrays import common_dtype
from logitless.ops.derivatives import Differentiated
from logitless.ops.softmax import VANISHED, RowTerms, Running, d_logits, transform_logits
from logitless.ops.tiles import Gradients, product
from logitless.ops.types import HeadOptions, LogitScalars

LANES = 128
SUB_COLUMNS = 256
RING = 3
STAGED_COLUMNS = 256


@dataclass(frozen=True)
class Cut:
    """The static side of a kernel: how tokens and vocabulary are cut.

    Attributes:
        vocab: V.
        block_n: tokens of a block.
        block_v: vocabulary columns of a block.
        dtype: of logits and sums.
        options: of the head.
    """

    vocab: int
    block_n: int
    block_v: int
    dtype: np.dtype
    options: HeadOptions

    @property
    def v_axis(self) -> int:
        return self.options.layout.index("V")

    @property
    def blocks(self) -> int:
        return -(-self.vocab // self.block_v)

    @property
    def last(self) -> int:
        """Columns of the last block of the vocabulary."""
        return self.vocab - (self.blocks - 1) * self.block_v

    @property
    def lowest(self) -> float:
        """Running maximum before any column is met: no finite logit is lower."""
        return float(jnp.finfo(self.dtype).min)

    def of_vocab(self, start: int, size: int) -> tuple[slice, slice]:
        """Columns of a block of the head, as it stands."""
        columns = slice(start, start + size)
        return (slice(None), columns) if self.v_axis else (columns, slice(None))


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


def forward_kernel(head: HeadRefs, running: Running, *, cut: Cut) -> None:
    """Online softmax of a block of tokens over the vocabulary; grid `(token blocks, vocabulary blocks)`.

    The outputs, each `[block_n, LANES]`, stay in VMEM from step to step and carry the sums.
    """
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _start():
        for name, ref in running._asdict().items():
            if ref is not None:
                ref[...] = jnp.full(ref.shape, cut.lowest if name == "maximum" else 0.0, cut.dtype)

    lanes = lax.broadcasted_iota(jnp.int32, (cut.block_n, LANES), 1)
    ahead = head.targets[...] - j * cut.block_v - lanes

    def meet(columns: int) -> None:
        state = jax.tree.map(lambda ref: ref[...], running)
        for start in range(0, columns, SUB_COLUMNS):
            state = meet_lanes(state, head.logits(start, cut), ahead - start, columns - start, cut)
        for ref, x in zip(running, state, strict=True):
            if ref is not None:
                ref[...] = x

    on_each_block(j, cut, meet)


def on_each_block(j: Int[Array, ""], cut: Cut, run: Any) -> None:
    """Runs with the columns of the block: the last one, where it is shorter, as a second copy of its own."""
    if cut.last == cut.block_v:
        run(cut.block_v)
        return
    pl.when(j < cut.blocks - 1)(lambda: run(cut.block_v))
    pl.when(j == cut.blocks - 1)(lambda: run(cut.last))


def meet_lanes(
    state: Running, z: Float[Array, "n v"], ahead: Int[Array, "n lanes"], columns: int, cut: Cut
) -> Running:
    """Adds a sub-tile to each lane's online softmax.

    Args:
        state: the sums of each lane, `[n, LANES]`.
        z: logits.
        ahead: the target's column within the sub-tile, less the lane.
        columns: of the sub-tile that the vocabulary has; what stands behind them is anything.
        cut: the kernel's static side.
    """
    maximum, total, weighted, plain, target = state
    others = []
    lanes = lax.broadcasted_iota(jnp.int32, ahead.shape, 1)
    for k in range(0, min(columns, z.shape[1]), LANES):
        x = z[:, k : k + LANES]
        own = ahead == k
        if k + LANES > columns:
            exists = lanes < columns - k
            x = jnp.where(exists, x, -jnp.inf)
            plain = None if plain is None else plain + jnp.where(exists, x, 0.0)
        elif plain is not None:
            plain += x
        target = jnp.where(own, x, target)
        others.append(jnp.where(own, -jnp.inf, x))
    # A tree, not a chain: each step of a chain would wait for the one before.
    maximum, before = jnp.maximum(maximum, _tree(jnp.maximum, others)), maximum
    shift = jnp.maximum(before - maximum, VANISHED)
    rescale = jnp.exp(shift)
    shifted = [x - maximum for x in others]
    es = [jnp.exp(x) for x in shifted]
    if weighted is not None:
        weighted = rescale * (weighted + total * shift)
        weighted += _tree(jnp.add, [e * jnp.maximum(x, VANISHED) for e, x in zip(es, shifted, strict=True)])
    return Running(maximum, total * rescale + _tree(jnp.add, es), weighted, plain, target)


def _tree(combine: Any, parts: list[Array]) -> Array:
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


class HiddenRing(NamedTuple):
    """`d_hidden` in float32 in HBM, of which `RING` blocks are in VMEM: read, added to and written back.

    A block is read for its next visit only once its last write has ended. Up to `RING` blocks of tokens stay in VMEM
    all the time: with two, a read would have to begin while the write before it is under way.

    Attributes:
        total: `[K, D]` in HBM.
        slots: `[RING, block_n, D]` in VMEM.
        reads: semaphores, one a slot.
        writes: semaphores, one a slot.
    """

    total: Any
    slots: Any
    reads: Any
    writes: Any

    def open(self, step: "Step") -> None:
        """Before the products: makes room, and starts to read what the next step adds to."""
        moving = step.tokens > RING

        @pl.when(moving & (step.index >= 2))
        def _make_room():
            self._write(step.index - 2, step).wait()

        @pl.when(moving & (step.index + 1 >= step.tokens) & (step.index + 1 < step.count))
        def _read_ahead():
            self._read(step.index + 1, step).start()

    def add(self, part: Float[Array, "n D"], step: "Step") -> None:
        slot = self._slot(step.index, step)

        @pl.when((step.tokens > RING) & (step.index >= step.tokens))
        def _arrived():
            self._read(step.index, step).wait()

        @pl.when(step.index < step.tokens)
        def _start():
            self.slots[slot] = jnp.zeros(self.slots.shape[1:], self.slots.dtype)

        self.slots[slot] += part

        @pl.when((step.tokens > RING) | (step.index >= step.count - step.tokens))
        def _give_back():
            self._write(step.index, step).start()

    def close(self, step: "Step") -> None:
        """After the last step: waits for every write that is under way."""
        for back in range(RING):

            @pl.when((step.index == step.count - 1) & (back < jnp.where(step.tokens > RING, 2, step.tokens)))
            def _wait(back=back):
                self._write(step.index - back, step).wait()

    def _slot(self, index: Any, step: "Step") -> Any:
        return lax.rem(index, jnp.minimum(step.tokens, RING))

    def _block(self, index: Any, step: "Step") -> Any:
        block_n = self.slots.shape[1]
        first = pl.multiple_of(lax.rem(index, step.tokens) * block_n, block_n)
        return self.total.at[pl.ds(first, block_n), :]

    def _read(self, index: Any, step: "Step") -> Any:
        slot = self._slot(index, step)
        return pltpu.make_async_copy(self._block(index, step), self.slots.at[slot], self.reads.at[slot])

    def _write(self, index: Any, step: "Step") -> Any:
        slot = self._slot(index, step)
        return pltpu.make_async_copy(self.slots.at[slot], self._block(index, step), self.writes.at[slot])


class Step(NamedTuple):
    """A step of the backward grid, vocabulary outside and tokens inside."""

    token: Any
    tokens: Any
    block: Any
    blocks: Any

    @property
    def index(self) -> Any:
        return self.block * self.tokens + self.token

    @property
    def count(self) -> Any:
        return self.blocks * self.tokens


class HeadScratch(NamedTuple):
    """`d_lm_head` of one block of the vocabulary, in float32 over all tokens, and how it leaves.

    Attributes:
        sums: a block of the head in float32.
        staged: `[2, ...]` of `STAGED_COLUMNS` columns in the head's dtype, or None where a block leaves whole.
        writes: two semaphores, or None.
    """

    sums: Any
    staged: Any | None
    writes: Any | None

    def leave(self, out: Any, block: Any, columns: int, cut: Cut) -> None:
        """Casts once, and writes; through the small staging buffers, for a second whole block would not fit."""
        if self.staged is None:
            out[...] = self.sums[...].astype(out.dtype)
            return
        sizes = [min(STAGED_COLUMNS, columns - start) for start in range(0, columns, STAGED_COLUMNS)]

        def copy(k: int) -> Any:
            first = pl.multiple_of(block * cut.block_v + k * STAGED_COLUMNS, STAGED_COLUMNS)
            place = out.at[:, pl.ds(first, sizes[k])] if cut.v_axis else out.at[pl.ds(first, sizes[k]), :]
            staged = self.staged.at[k % 2]
            return pltpu.make_async_copy(staged.at[cut.of_vocab(0, sizes[k])], place, self.writes.at[k % 2])

        for k, size in enumerate(sizes):
            if k >= 2:
                copy(k - 2).wait()
            source = self.sums[cut.of_vocab(k * STAGED_COLUMNS, size)]
            self.staged[(k % 2, *cut.of_vocab(0, size))] = source.astype(out.dtype)
            copy(k).start()
        for k in range(max(0, len(sizes) - 2), len(sizes)):
            copy(k).wait()


class BackwardScratch(NamedTuple):
    """VMEM of the backward kernel: the gradient of a block of logits, and what the wanted gradients need."""

    d_logits: Any
    ring: HiddenRing | None
    head: HeadScratch | None


def backward_kernel(
    head: HeadRefs, terms: RowTerms, out: Gradients, scratch: BackwardScratch, *, cut: Cut
) -> None:
    """Every gradient from one pass over the logits; grid `(vocabulary blocks, token blocks)`."""
    j, i = pl.program_id(0), pl.program_id(1)
    step = Step(token=i, tokens=pl.num_programs(1), block=j, blocks=cut.blocks)
    ring = None if scratch.ring is None else scratch.ring._replace(total=out.hidden)
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
    d_x, h = scratch.d_logits[...], head.hidden[...].astype(scratch.d_logits.dtype)
    if scratch.head is not None:
        operands = (h, d_x) if cut.v_axis else (d_x, h)
        scratch.head.sums[...] += product(*operands, (0, 0), cut.dtype, cut.options)

        def leave(columns: int) -> None:
            scratch.head.leave(out.lm_head, j, columns, cut)

        pl.when(i == step.tokens - 1)(lambda: on_each_block(j, cut, leave))
    if ring is not None:
        w = head.lm_head[...].astype(scratch.d_logits.dtype)
        ring.add(product(d_x, w, (1, cut.v_axis), cut.dtype, cut.options), step)
        ring.close(step)


def make_d_logits(head: HeadRefs, terms: RowTerms, d_bias: Any | None, d_x: Any, j: Any, cut: Cut) -> None:
    """The gradient of a block of `h W + b`, cast once, into `d_x`; its column sums are added to `d_bias`."""
    scalars = head.numbers()
    rows = jax.tree.map(lambda ref: ref[...], terms)
    column = head.targets[...] - j * cut.block_v
    for start in range(0, cut.block_v, SUB_COLUMNS):
        z = head.logits(start, cut)
        own = lax.broadcasted_iota(jnp.int32, z.shape, 1) == column - start
        tile = d_logits(z, own, rows, scalars)
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
        ref[place] = jnp.zeros([n.stop - n.start if n.stop else m for n, m in zip(place, ref.shape)], ref.dtype)
