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
        staged: `[2, ...]` of `STAGED_COLUMNS` columns in the dtype that leaves, or None where a block leaves whole.
        reads: two semaphores where what stands there already is added to, or None.
        writes: two semaphores, or None.
    """

    sums: Any
    staged: Any
    reads: Any
    writes: Any

    def leave(self, out: Any, block: Any, cut: Cut, columns: int) -> None:
        """Casts once, and writes; through the small staging buffers, for a second whole block would not fit."""
        if self.staged is None:
            out[...] = self.sums[...].astype(out.dtype)
            return
        sizes = [min(STAGED_COLUMNS, columns - start) for start in range(0, columns, STAGED_COLUMNS)]
        pieces = [_Piece(self, out, block, cut, k, size) for k, size in enumerate(sizes)]
        (self._leave if self.reads is None else self._add)(pieces)
        for piece in pieces[-2:]:
            piece.write().wait()

    def _leave(self, pieces: "list[_Piece]") -> None:
        for k, piece in enumerate(pieces):
            if k >= 2:
                pieces[k - 2].write().wait()
            self.staged[piece.here] = self.sums[piece.source].astype(self.staged.dtype)
            piece.write().start()

    def _add(self, pieces: "list[_Piece]") -> None:
        for piece in pieces[:2]:
            piece.read().start()
        for k, piece in enumerate(pieces):
            piece.read().wait()
            self.staged[piece.here] += self.sums[piece.source]
            piece.write().start()
            if k + 2 < len(pieces):
                # One buffer: what is read next takes the place of what is on its way out.
                piece.write().wait()
                pieces[k + 2].read().start()


class _Piece(NamedTuple):
    """`STAGED_COLUMNS` columns of a block of the head, or what is left of them, and their way through a buffer."""

    scratch: HeadScratch
    out: Any
    block: Any
    cut: Cut
    number: int
    columns: int

    @property
    def source(self) -> Any:
        """In the sums."""
        return self.cut.of_vocab(self.number * STAGED_COLUMNS, self.columns)

    @property
    def here(self) -> Any:
        """In the staging buffers."""
        return (self.number % 2, *self.cut.of_vocab(0, self.columns))

    def read(self) -> Any:
        assert self.scratch.reads is not None
        return pltpu.make_async_copy(self._place, self._staged, self.scratch.reads.at[self.number % 2])

    def write(self) -> Any:
        return pltpu.make_async_copy(self._staged, self._place, self.scratch.writes.at[self.number % 2])

    @property
    def _place(self) -> Any:
        first = self.block * self.cut.block_v + self.number * STAGED_COLUMNS
        columns = pl.ds(pl.multiple_of(first, STAGED_COLUMNS), self.columns)
        return self.out.at[:, columns] if self.cut.v_axis else self.out.at[columns, :]

    @property
    def _staged(self) -> Any:
        return self.scratch.staged.at[self.number % 2].at[self.cut.of_vocab(0, self.columns)]
