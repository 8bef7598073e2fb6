"""What one sequence is: a row of the batch, or a segment of a packed row."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from logitless._arrays import Array as AnyArray


class Sequences(NamedTuple):
    """Sums over the tokens of each sequence, and back.

    Attributes:
        places: sequence of every token, as a flat index; None where each row is one sequence.
        present: 1 for every sequence that the batch holds, also where its tokens are all masked.
    """

    places: Int[Array, "B T"] | None
    present: Float[Array, " S"]

    def sum(self, x: Float[Array, "B T"]) -> Float[Array, " S"]:
        """Sum over the tokens of each sequence."""
        if self.places is None:
            return jnp.sum(x, axis=1)
        return jnp.zeros(self.present.shape, x.dtype).at[self.places].add(x)

    def spread(self, x: Float[Array, " S"]) -> Float[Array, "B 1"] | Float[Array, "B T"]:
        """A number per sequence, at each of its tokens (or broadcastable to them)."""
        return x[:, None] if self.places is None else x[self.places]


def find_sequences(shape: tuple[int, int], segment_ids: AnyArray | None, dtype: jnp.dtype) -> Sequences:
    """Rows as sequences, or runs of equal non-zero `segment_ids` (0 is padding)."""
    if segment_ids is None:
        return Sequences(None, jnp.ones(shape[0], dtype))
    ids = jnp.asarray(segment_ids)
    starts = jnp.concatenate([jnp.zeros_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    run = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    places = jnp.arange(shape[0], dtype=jnp.int32)[:, None] * shape[1] + run
    present = jnp.zeros(shape[0] * shape[1], dtype).at[places].max((ids != 0).astype(dtype))
    return Sequences(places, present)
