"""How tokens and vocabulary are cut into blocks, any sizes: places and counts, no arithmetic on values."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Bool, Int


class VocabSlice(NamedTuple):
    """A block of vocabulary columns whose first `stale` ones an earlier block has met (None: never any)."""

    start: Int[Array, ""]
    size: int
    stale: Int[Array, ""] | None

    def of(self, x: Array, axis: int) -> Array:
        """The block's columns of `x`."""
        return _as_bits(lambda x, start: lax.dynamic_slice_in_dim(x, start, self.size, axis), self.start, x)

    def put(self, x: Array, block: Array, axis: int) -> Array:
        """`x` with these columns replaced, cast to its dtype."""
        block = block.astype(x.dtype)
        return _as_bits(
            lambda x, block, start: lax.dynamic_update_slice_in_dim(x, block, start, axis), self.start, x, block
        )

    def met(self) -> Bool[Array, " v"] | None:
        """Columns that count already, or None where no block has any."""
        return None if self.stale is None else jnp.arange(self.size, dtype=jnp.int32) < self.stale

    def column(self, targets: Int[Array, " n"]) -> Int[Array, " n"]:
        """The column of each target in this block; -1 where another block owns it."""
        column = targets - self.start
        owned = (column >= (0 if self.stale is None else self.stale)) & (column < self.size)
        return jnp.where(owned, column, -1)


class VocabCut(NamedTuple):
    """V columns in blocks of one size; the last block starts at V - size and meets some columns a second time."""

    vocab: int
    size: int

    @property
    def blocks(self) -> int:
        return -(-self.vocab // self.size)

    def block(self, i: Int[Array, ""] | int) -> VocabSlice:
        wanted = jnp.asarray(i, jnp.int32) * self.size
        start = jnp.minimum(wanted, self.vocab - self.size)
        return VocabSlice(start, self.size, wanted - start if self.vocab % self.size else None)


class Rows(NamedTuple):
    """A block of tokens of any array that has them on one axis."""

    start: Int[Array, ""]
    size: int

    def of(self, x: Array, axis: int = 0) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: Array, rows: Array, axis: int = 0) -> Array:
        return lax.dynamic_update_slice_in_dim(x, rows, self.start, axis)


class TokenCut(NamedTuple):
    """The tokens that count, listed at the front and cut into blocks, so that the blocks behind them never run.

    Attributes:
        order: token in each place; N where a place holds none.
        slots: place of each token; past the end where a token does not count.
        size: tokens of a block.
        blocks: how many blocks hold a token: a run-time number where a mask decides.
    """

    order: Int[Array, " K"]
    slots: Int[Array, " N"]
    size: int
    blocks: Int[Array, ""] | int

    def rows(self, j: Int[Array, ""] | int) -> Rows:
        return Rows(jnp.asarray(j, jnp.int32) * self.size, self.size)

    def gather(self, x: Array, fill: float | int = 0) -> Array:
        """Rows of `x` in places; `fill` where a place holds no token."""
        return take(x, self.order, fill)

    def scatter(self, x: Array) -> Array:
        """Rows of `x` back at their tokens; 0 at tokens that do not count."""
        return take(x, self.slots)


def cut_tokens(
    mask: Bool[Array, " N"] | None, count: int, size: int, last: Bool[Array, " N"] | None = None, even: int = 1
) -> TokenCut:
    """Cuts `count` tokens into blocks of `size`, as many as `even` divides.

    First stand those that `mask` keeps, among them those in `last` behind.
    """
    places = -(-count // (size * even)) * size * even
    if mask is None and last is None:
        order = jnp.arange(places, dtype=jnp.int32)
        return TokenCut(order, jnp.arange(count, dtype=jnp.int32), size, places // size)
    kept = jnp.ones(count, bool) if mask is None else mask
    slots = jnp.full(count, places, jnp.int32)
    filled = jnp.zeros((), jnp.int32)
    for group in (kept,) if last is None else (kept & ~last, kept & last):
        rank = jnp.cumsum(group, dtype=jnp.int32)
        slots = jnp.where(group, filled + rank - 1, slots)
        filled = filled + rank[-1]
    return _listed(_inverse(slots), slots, None if mask is None else filled, size, places)


def sort_tokens(key: Int[Array, " N"], mask: Bool[Array, " N"] | None, size: int, even: int = 1) -> TokenCut:
    """Cuts tokens as `cut_tokens` does, those that `mask` keeps in ascending order of `key`."""
    count = key.shape[0]
    places = -(-count // (size * even)) * size * even
    kept = jnp.ones(count, bool) if mask is None else mask
    _, _, order = lax.sort((~kept, key, jnp.arange(count, dtype=jnp.int32)), num_keys=2)
    slots = jnp.where(kept, _inverse(order), places)
    return _listed(order, slots, None if mask is None else jnp.sum(mask, dtype=jnp.int32), size, places)


def _listed(
    order: Int[Array, " N"], slots: Int[Array, " N"], filled: Int[Array, ""] | None, size: int, places: int
) -> TokenCut:
    """The cut of tokens in that order, of which the first `filled` count, or all."""
    count, most = order.shape[0], places // size
    if filled is not None:
        order = jnp.where(jnp.arange(count, dtype=jnp.int32) < filled, order, count)
    order = jnp.concatenate([order, jnp.full(places - count, count, jnp.int32)])
    # Never more than this many; said in the program, `logitless.plan` can read it there.
    return TokenCut(order, slots, size, most if filled is None else jnp.minimum(-(-filled // size), most))


def _inverse(permutation: Int[Array, " N"]) -> Int[Array, " N"]:
    """Where each number stands, the smallest first: sorted, for XLA's TPU compiler dies on a scatter of constants."""
    return lax.sort((permutation, jnp.arange(permutation.shape[0], dtype=jnp.int32)), num_keys=1)[1]


def take(x: Array, index: Int[Array, " k"], fill: float | int = 0) -> Array:
    """Rows of `x`; an index past its end gives `fill`, and never touches what stands elsewhere."""
    # On a TPU by its TensorCores. A gather that XLA gives to the SparseCores fuses with nothing, neither the filling
    # nor a cast after it, and no other array takes its place in HBM: twice the temporaries of the LM head's loss.
    with set_xla_metadata(_xla_compute_type="dense"):
        return jnp.take(x, index, axis=0, mode="fill", fill_value=fill)


def _as_bits(move: Callable[..., Array], start: Int[Array, ""], *arrays: Array) -> Array:
    """Moves 16-bit floats as integers on the CPU, where XLA would widen the whole array to float32 first."""
    dtype = arrays[0].dtype
    if dtype.itemsize != 2:
        return move(*arrays, start)

    def as_bits(start: Int[Array, ""], *arrays: Array) -> Array:
        # Tied to the place, so that the whole array is not turned into integers once before the loop.
        start, *tied = lax.optimization_barrier((start, *arrays))
        moved = move(*(lax.bitcast_convert_type(x, jnp.uint16) for x in tied), start)
        return lax.bitcast_convert_type(moved, dtype)

    return lax.platform_dependent(start, *arrays, cpu=as_bits, default=lambda start, *arrays: move(*arrays, start))
