"""What the backward kernel copies by itself: `d_hidden` through a ring of blocks, `d_lm_head` as it is finished."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless.ops.pallas_tpu_blocks import Cut
from logitless.ops.pallas_tpu_vmem import RING, STAGED_COLUMNS


class Step(NamedTuple):
    """A step of the backward grid, vocabulary outside and tokens inside."""

    token: Any
    tokens: Any
    block: Any
    blocks: Any

    @property
    def number(self) -> Any:
        return self.block * self.tokens + self.token

    @property
    def steps(self) -> Any:
        return self.blocks * self.tokens


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

    def open(self, step: Step) -> None:
        """Before the products: makes room, and starts to read what the next step adds to."""
        moving = step.tokens > RING

        @pl.when(moving & (step.number >= 2))
        def _make_room():
            self._write(step.number - 2, step).wait()

        @pl.when(moving & (step.number + 1 >= step.tokens) & (step.number + 1 < step.steps))
        def _read_ahead():
            self._read(step.number + 1, step).start()

    def ready(self, step: Step) -> Any:
        """The block to add to."""
        slot = self.slots.at[self._slot(step.number, step)]

        @pl.when((step.tokens > RING) & (step.number >= step.tokens))
        def _arrived():
            self._read(step.number, step).wait()

        @pl.when(step.number < step.tokens)
        def _start():
            slot[...] = jnp.zeros(slot.shape, self.slots.dtype)

        return slot

    def close(self, step: Step) -> None:
        """After the sum: starts to write the block back; after the last step, waits for every write under way."""

        @pl.when((step.tokens > RING) | (step.number >= step.steps - step.tokens))
        def _give_back():
            self._write(step.number, step).start()

        for back in range(RING):

            @pl.when((step.number == step.steps - 1) & (back < jnp.where(step.tokens > RING, 2, step.tokens)))
            def _wait(back=back):
                self._write(step.number - back, step).wait()

    def _slot(self, index: Any, step: Step) -> Any:
        return lax.rem(index, jnp.minimum(step.tokens, RING))

    def _block(self, index: Any, step: Step) -> Any:
        block_n = self.slots.shape[1]
        first = pl.multiple_of(lax.rem(index, step.tokens) * block_n, block_n)
        return self.total.at[pl.ds(first, block_n), :]

    def _read(self, index: Any, step: Step) -> Any:
        slot = self._slot(index, step)
        return pltpu.make_async_copy(self._block(index, step), self.slots.at[slot], self.reads.at[slot])

    def _write(self, index: Any, step: Step) -> Any:
        slot = self._slot(index, step)
        return pltpu.make_async_copy(self.slots.at[slot], self._block(index, step), self.writes.at[slot])


class HeadScratch(NamedTuple):
    """`d_lm_head` of one block of the vocabulary, in float32 over all tokens, and how it leaves.

    Attributes:
        sums: a block of the head in float32.
        staged: `[2, ...]` of `STAGED_COLUMNS` columns in the head's dtype, or None where a block leaves whole.
        writes: two semaphores, or None.
    """

    sums: Any
    staged: Any
    writes: Any

    def leave(self, out: Any, block: Any, cut: Cut, columns: int) -> None:
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
