"""How tokens and head are laid out over a mesh, what a layout costs, and what of it cannot be."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from logitless._arrays import check_name, is_concrete

Axes = tuple[str, ...]
STRATEGIES = ("gather_head", "gather_tokens")
SUM_BYTES = 4
"""Of a gradient that is added up over devices: float32."""


@dataclass(frozen=True)
class HeadSharding:
    """Over which axes of a mesh tokens and vocabulary are split.

    Every combination is one of four cases. Axes of `tokens` alone: data parallel, the gradient of the head is summed
    over them once. Axes of `vocab` alone: vocabulary parallel, a few numbers per token are combined and the gradient of
    the hidden states is summed. Axes of both: FSDP, where either blocks of the head are gathered or chunks of the
    tokens, never all of either. Axes of neither: every device there does the same.

    Args:
        mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to compile for devices that are not here.
        tokens: axes that split the first axis of `targets`; or a `PartitionSpec` of all its axes, such as
            `P("data", "sequence")` for `[B, T]`.
        vocab: axes that split the vocabulary, of the head, its bias and logits.
        vocab_size: true V of a head that is padded to a multiple: columns from there on take no part and get a gradient
            of 0. None: all columns are true.
        head: what travels where tokens and vocabulary share axes: `"gather_head"`, `"gather_tokens"`, or `"auto"`: that
            with fewer bytes in the whole step, as `logitless.head_strategy` says.

    Raises:
        ValueError: an axis that the mesh lacks, the same axis twice in `tokens` or in `vocab`, a vocab_size below 1.
        TypeError: a mesh that is none.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> HeadSharding(mesh, tokens=("fsdp",), vocab=("tensor", "fsdp")).shared
        ('fsdp',)

    Reference: Megatron-LM's vocabulary-parallel cross-entropy, https://arxiv.org/abs/1909.08053, and FSDP,
    https://arxiv.org/abs/2304.11277. Departures: the head is never gathered whole.
    """

    mesh: Mesh | AbstractMesh
    tokens: Sequence[str] | PartitionSpec | str = ("data",)
    vocab: Sequence[str] | str = ("tensor",)
    vocab_size: int | None = None
    head: Literal["auto", "gather_head", "gather_tokens"] = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise TypeError(f"HeadSharding: mesh is {self.mesh!r}; give a jax.sharding.Mesh or AbstractMesh")
        if not isinstance(self.tokens, PartitionSpec):
            tokens = (self.tokens,) if isinstance(self.tokens, str) else tuple(self.tokens)
            object.__setattr__(self, "tokens", PartitionSpec(tokens) if tokens else PartitionSpec())
        object.__setattr__(self, "vocab", (self.vocab,) if isinstance(self.vocab, str) else tuple(self.vocab))
        for argument, axes in (("tokens", self.token_axes), ("vocab", self.vocab_axes)):
            for axis in axes:
                if axis not in self.mesh.shape:
                    known = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items()) or "no axis"
                    raise ValueError(f"HeadSharding: {argument} names the axis {axis!r}; the mesh has {known}")
                if axes.count(axis) > 1:
                    raise ValueError(f"HeadSharding: {argument} names the axis {axis!r} twice: {axes}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"HeadSharding: vocab_size={self.vocab_size}; the true V must be at least 1")
        check_name("HeadSharding", "head", self.head, ("auto", *STRATEGIES))

    @property
    def token_spec(self) -> PartitionSpec:
        """Of `targets`."""
        assert isinstance(self.tokens, PartitionSpec)
        return self.tokens

    @property
    def token_axes(self) -> Axes:
        return tuple(itertools.chain.from_iterable(axes_of(entry) for entry in self.token_spec))

    @property
    def vocab_axes(self) -> Axes:
        return tuple(self.vocab)

    @property
    def shared(self) -> Axes:
        """Axes that split tokens and vocabulary both, in the order of `vocab`."""
        return tuple(axis for axis in self.vocab_axes if axis in self.token_axes)

    @property
    def vocab_only(self) -> Axes:
        return tuple(axis for axis in self.vocab_axes if axis not in self.token_axes)

    @property
    def tokens_only(self) -> Axes:
        return tuple(axis for axis in self.token_axes if axis not in self.vocab_axes)

    def size(self, axes: Axes) -> int:
        """Devices along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def head_spec(self, layout: str) -> PartitionSpec:
        return PartitionSpec(*(self._vocab_entry if axis == "V" else None for axis in layout))

    @property
    def bias_spec(self) -> PartitionSpec:
        return PartitionSpec(self._vocab_entry)

    def of_rows(self, last: Axes | None = None, ndim: int | None = None) -> PartitionSpec:
        """Of an array with the axes of `targets`, and where they are `ndim`, one more that is split over `last`."""
        if ndim is None:
            return self.token_spec
        return PartitionSpec(*self.token_spec, *(None,) * (ndim - len(self.token_spec)), last or None)

    @property
    def _vocab_entry(self) -> Axes | None:
        return self.vocab_axes or None


def axes_of(entry: object) -> Axes:
    """Of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class HeadStrategy:
    """What travels between devices that share tokens and vocabulary, and the bytes that it takes.

    Attributes:
        name: `gather_head` or `gather_tokens`; empty where nothing is gathered.
        bytes: that a device receives in forward and backward pass, by the name of each strategy.
    """

    name: str
    bytes: dict[str, int]


def head_strategy(
    sharding: HeadSharding,
    tokens: int,
    hidden_size: int,
    vocab: int,
    *,
    hidden_dtype: np.dtype | str = "bfloat16",
    head_dtype: np.dtype | str = "bfloat16",
    trained: tuple[bool, bool] | None = (True, True),
) -> HeadStrategy:
    """Which strategy a step takes under a sharding, and the bytes over the shared axes by which it is chosen.

    Args:
        sharding: whose `head` wins where it names one.
        tokens: N of all devices.
        hidden_size: D.
        vocab: V with its padding.
        hidden_dtype: of the hidden states.
        head_dtype: of the head.
        trained: whether the hidden states and the head get a gradient; None for a forward pass alone.

    Returns:
        `HeadStrategy`; bytes received by one device in the whole step.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
        >>> sharding = HeadSharding(mesh, tokens=("fsdp",), vocab=("fsdp",))
        >>> head_strategy(sharding, 8 * 8192, 4096, 151_936).name
        'gather_tokens'

    Reference: none.
    """
    others = sharding.size(sharding.shared) - 1
    if others == 0:
        return HeadStrategy("", dict.fromkeys(STRATEGIES, 0))
    of_token, of_column = (hidden_size * np.dtype(x).itemsize for x in (hidden_dtype, head_dtype))
    to_hidden, to_head = (False, False) if trained is None else trained
    sweeps = 1 if trained is None else 2
    back = hidden_size * SUM_BYTES
    local_tokens = -(-tokens // sharding.size(sharding.token_axes))
    local_vocab = -(-vocab // sharding.size(sharding.vocab_axes))
    taken = {
        "gather_head": others * local_vocab * (sweeps * of_column + to_head * back),
        "gather_tokens": others * local_tokens * (sweeps * of_token + to_hidden * back),
    }
    best = min(taken, key=lambda name: taken[name])
    return HeadStrategy(best if sharding.head == "auto" else sharding.head, taken)


def inside(sharding: HeadSharding) -> bool:
    """Whether the caller is inside a `shard_map` over every axis of the sharding: arrays are then those of a device."""
    manual = manual_axes()
    return all(axis in manual for axis in (*sharding.token_axes, *sharding.vocab_axes)) and bool(manual)


def manual_axes() -> Axes:
    """Axes of the mesh in scope over which a `shard_map` runs."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return ()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)


def check_layout(name: str, what: str, x: jax.Array | None, spec: PartitionSpec, sharding: HeadSharding) -> None:
    """Raises ValueError for an array that is known to be laid out otherwise than `sharding=` says.

    One that is whole on every device, or on one alone, is cut as it should be. Inside a program that XLA partitions
    nothing is known, and XLA moves what it must.
    """
    found = None if x is None else _known_spec(x)
    if x is None or found is None:
        return
    wanted, given = (_trimmed(some, x.ndim, sharding) for some in (spec, found))
    if any(given) and given != wanted:
        raise ValueError(
            f"{name}: {what} {tuple(x.shape)} is laid out as {_named(given)}, and sharding= says {_named(wanted)}; move "
            f"it with jax.device_put or jax.sharding.reshard to {_named(wanted)}, or say in HeadSharding how it lies"
            + (": the hidden size D cannot be split" if what != "targets" and not any(wanted[-1:]) else "")
        )


def _known_spec(x: jax.Array) -> PartitionSpec | None:
    """How an array lies, where that can be known: of a concrete one, and of a traced one over explicit axes."""
    if is_concrete(x):
        return x.sharding.spec if isinstance(x.sharding, NamedSharding) else None
    mesh = get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
        return None
    return jax.typeof(x).sharding.spec


def _trimmed(spec: PartitionSpec, ndim: int, sharding: HeadSharding) -> tuple[Axes, ...]:
    """By axis of the array, without the axes of the mesh that have one device."""
    entries = [axes_of(entry) for entry in spec] + [()] * (ndim - len(spec))
    sizes = dict(sharding.mesh.shape)
    return tuple(tuple(axis for axis in entry if sizes.get(axis, 2) > 1) for entry in entries)


def _named(entries: tuple[Axes, ...]) -> str:
    parts = ["None" if not x else repr(x[0]) if len(x) == 1 else str(x) for x in entries]
    return f"P({', '.join(parts)})"


def check_division(name: str, shape: tuple[int, ...], sharding: HeadSharding) -> None:
    """Raises ValueError for tokens that the axes do not divide: nothing is padded in silence."""
    if len(sharding.token_spec) > len(shape):
        raise ValueError(
            f"{name}: HeadSharding splits {len(sharding.token_spec)} axes of tokens, and targets has the shape {shape}"
        )
    for i, entry in enumerate(sharding.token_spec):
        axes = axes_of(entry)
        size = sharding.size(axes)
        if shape[i] % size:
            raise ValueError(
                f"{name}: axis {i} of targets has {shape[i]} tokens, and {' x '.join(axes)} has {size} devices; pad it "
                f"to {-(-shape[i] // size) * size} and mask what was added"
            )
