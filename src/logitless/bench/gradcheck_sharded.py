"""A gradcheck case over a mesh: its arrays padded and laid out, and what comes back cut to what plain jnp has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from logitless._gradcheck_arrays import values_and_grads
from logitless.bench.errors import BenchError
from logitless.bench.shardings import MeshSharding
from logitless.ops.head_sharding import HeadSharding

if TYPE_CHECKING:
    from logitless.bench.gradcheck_cases import ResolvedCase

GARBAGE = (3e4, np.nan, -3e4, np.inf)
"""What padding holds, column by column: an op may not look at it."""


@dataclass(frozen=True)
class ShardingCase(MeshSharding):
    """How a case lies over the mesh of all devices.

    Attributes:
        axes: of the mesh, slowest first: devices along each, by name; their product is `devices`.
        tokens: axes that split the sequences.
        vocab: axes that split the vocabulary of head, bias and logits.
        head: what travels where tokens and vocabulary share axes: auto, gather_head or gather_tokens.
        positions: axes that split the tokens of each sequence.
        pad_vocab_to: V to which head, bias and logits are padded with garbage, whose gradient must be exactly 0.
    """

    positions: tuple[str, ...] = ()
    pad_vocab_to: int | None = None

    def __str__(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        split = "; ".join(f"{key} by {' and '.join(axes)}" for key, axes in self.split.items() if axes)
        padded = "" if self.pad_vocab_to is None else f"; V padded to {self.pad_vocab_to}"
        return f"{mesh}: {split or 'nothing split'}{padded}; {self.head}"

    @property
    def token_spec(self) -> PartitionSpec:
        return PartitionSpec(self.tokens or None, self.positions or None)

    @property
    def split(self) -> dict[str, tuple[str, ...]]:
        return {"tokens": self.tokens, "positions": self.positions, "vocab": self.vocab}

    def resolve(self, what: str, devices: int, shape: tuple[int, int], vocab: int) -> HeadSharding:
        """The op's own sharding, on the first devices; raises BenchError, which begins with `what`, for what cannot be.

        Args:
            what: the case.
            devices: of the run.
            shape: sequences and tokens of each.
            vocab: V.
        """
        self.check(what, devices)
        if shared := set(self.tokens).intersection(self.positions):
            raise BenchError(f"{what}: tokens and positions both name {', '.join(sorted(shared))}; name it in one")
        counted = zip(("tokens", "positions"), ("sequences", "tokens in each sequence"), shape, strict=True)
        for key, unit, size in counted:
            parts = self.parts(self.split[key])
            if size % parts:
                raise BenchError(f"{what}: {key} splits {size} {unit} over {parts} devices; give a multiple of {parts}")
        parts = self.parts(self.vocab)
        if self.pad_vocab_to is not None and self.pad_vocab_to <= vocab:
            raise BenchError(f"{what}: pad_vocab_to is {self.pad_vocab_to}, and V is {vocab}; it must be above V")
        if (self.pad_vocab_to or vocab) % parts:
            given = f"V = {vocab}" if self.pad_vocab_to is None else f"pad_vocab_to = {self.pad_vocab_to}"
            raise BenchError(
                f"{what}: {given} does not divide over {parts} devices; give pad_vocab_to: {-(-vocab // parts) * parts}"
            )
        true_vocab = None if self.pad_vocab_to is None else vocab
        return self.head_sharding(self.mesh(jax.devices()), true_vocab)


def sharded_values(
    resolved: "ResolvedCase", sharding: HeadSharding, arrays: Mapping[str, jax.Array]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Loss, log-probabilities and gradients of the candidate over its mesh, and what is wrong with those of padding.

    Args:
        resolved: the case.
        sharding: its own.
        arrays: by name, on one device.

    Returns:
        The values without their padding, on the host; and a sentence for each gradient that padding has.
    """
    placed = _placed(resolved, sharding, arrays)
    # Nothing else may run beside it: its devices wait for each other, and share the cores with all that runs.
    jax.block_until_ready(placed)
    found = jax.device_get(values_and_grads(resolved.candidate, placed, resolved.case.moving))
    wrong = []
    for name, axis in _v_axes(resolved).items():
        if (gradient := found.get(f"d_{name}")) is None:
            continue
        found[f"d_{name}"], padding = np.split(gradient, [resolved.vocab_size], axis)
        # NaN is not 0 either.
        places = np.argwhere(padding != 0)
        if places.size:
            value, place = padding[tuple(places[0])], [int(i) for i in places[0]]
            place[axis] += resolved.vocab_size
            wrong.append(
                f"d_{name}: {len(places)} of {padding.size} elements of the padding have a gradient, which must be "
                f"exactly 0; the first is {place} with {float(value):.3g}"
            )
    return found, tuple(wrong)


def _v_axes(resolved: "ResolvedCase") -> dict[str, int]:
    """Where the vocabulary is, by array."""
    return {"lm_head": resolved.case.layout.index("V"), "bias": 0, "logits": -1}


def _placed(resolved: "ResolvedCase", sharding: HeadSharding, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Every array padded and on its devices, each part from the host: no program is compiled to move it."""
    rows, axes = len(resolved.shape), _v_axes(resolved)
    specs = {
        "hidden": sharding.of_rows(ndim=rows),
        "lm_head": sharding.head_spec(resolved.case.layout),
        "bias": sharding.bias_spec,
        "logits": sharding.of_rows(sharding.vocab_axes, rows),
    }
    more = resolved.width - resolved.vocab_size
    placed = {}
    for name, x in jax.device_get(dict(arrays)).items():
        x = _padded(x, axes[name], more) if name in axes and more else x
        placed[name] = jax.device_put(x, NamedSharding(sharding.mesh, specs.get(name, sharding.of_rows())))
    return placed


def _padded(x: np.ndarray, axis: int, more: int) -> np.ndarray:
    out = np.pad(x, [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)])
    np.moveaxis(out, axis, -1)[..., x.shape[axis] :] = np.resize(GARBAGE, more)
    return out
