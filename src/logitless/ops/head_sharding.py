"""How tokens and head are laid out over a mesh, what a layout costs, and what of it cannot be."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh
from jaxtyping import Float

from logitless._arrays import accumulator, as_mask, check_name
from logitless.ops.manual import Axes, axes_of_type, manual_axes, not_manual

if TYPE_CHECKING:
    MeshLike = Mesh | AbstractMesh
    Strategy = Literal["auto", "gather_head", "gather_tokens"]
else:
    # What is none of these is refused in words.
    MeshLike, Strategy = object, str
STRATEGIES = ("gather_head", "gather_tokens")


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
        ValueError: an axis that the mesh lacks, the same axis twice in `tokens` or in `vocab`, a vocab_size below 1, an
            unknown `head`.
        TypeError: a mesh that is none.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        >>> HeadSharding(mesh, tokens=("fsdp",), vocab=("tensor", "fsdp")).shared
        ('fsdp',)

    Reference: Megatron-LM's vocabulary-parallel cross-entropy, https://arxiv.org/abs/1909.08053, and FSDP,
    https://arxiv.org/abs/2304.11277. Departures: the head is never gathered whole.
    """

    mesh: MeshLike
    tokens: Sequence[str] | PartitionSpec | str = ("data",)
    vocab: Sequence[str] | str = ("tensor",)
    vocab_size: int | None = None
    head: Strategy = "auto"

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
                    raise ValueError(
                        f"HeadSharding: {argument} names the axis {axis!r}; the mesh has {_axes(self.mesh)}"
                    )
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


if TYPE_CHECKING:
    Sharding = HeadSharding | None
else:
    # The door refuses what is none, in words.
    Sharding = object


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
    back = hidden_size * accumulator(np.dtype(hidden_dtype), np.dtype(head_dtype)).itemsize
    local_tokens = -(-tokens // sharding.size(sharding.token_axes))
    local_vocab = -(-vocab // sharding.size(sharding.vocab_axes))
    taken = {
        "gather_head": others * local_vocab * (sweeps * of_column + to_head * back),
        "gather_tokens": others * local_tokens * (sweeps * of_token + to_hidden * back),
    }
    best = min(taken, key=lambda name: taken[name])
    return HeadStrategy(best if sharding.head == "auto" else sharding.head, taken)


def count_tokens(mask: jax.Array | np.ndarray, sharding: HeadSharding) -> Float[jax.Array, ""]:
    """Tokens that count on all devices: the denominator of a mean over the tokens of a batch.

    Equal to
        (mask != 0).sum() over the whole batch, wherever it is called

    Outside `shard_map` an array is that of all devices, and losses have the right denominators by themselves. Inside
    one of the caller's an array is that of a device: give the losses this number as their total.

    Args:
        mask: of the shape of `targets`; any number but 0 counts.
        sharding: by which the tokens are split.

    Returns:
        One float32 number, the same on every device.

    Raises:
        TypeError: a mask that is neither bool nor numbers.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> print(count_tokens(jnp.array([[1, 1, 0]]), HeadSharding(mesh, vocab=())))
        2.0

    Reference: none.
    """
    counts = as_mask("count_tokens", mask).astype(jnp.float32).sum()
    axes = tuple(axis for axis in sharding.token_axes if axis in manual_axes())
    return jax.lax.psum(counts, axes) if axes else counts


def on_devices(run: Callable[..., Any], sharding: HeadSharding, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`shard_map` over every axis of the mesh; over those that are left where the caller is inside one already."""
    manual, mesh = manual_axes(), get_abstract_mesh()
    if not manual:
        # What `jax.set_mesh` has set stands first: its axes may be explicit where those of the caller's mesh are not.
        mesh = sharding.mesh if mesh.empty else mesh
        return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    left = {name for name in mesh.axis_names if name not in manual}
    if not left.intersection((*sharding.token_axes, *sharding.vocab_axes)):
        return run

    in_specs, out_specs = (
        jax.tree.map(lambda x: _only(x, tuple(left)), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for specs in (in_specs, out_specs)
    )
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False)


def lay_out_head(
    name: str,
    sharding: object,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array],
    layout: str,
    vocab: int,
) -> tuple[HeadSharding | None, tuple[jax.Array, jax.Array, jax.Array | None, jax.Array], int]:
    """Hidden states, head, bias and targets as `sharding=` says, and the true V; raises for what cannot be.

    A head whose V the axes do not divide, which only one that is whole on every device can be, is padded.
    """
    if sharding is None:
        return None, arrays, vocab
    sharding = _checked(name, sharding, arrays[3].shape)
    hidden, lm_head, bias, targets = arrays
    sharding, more, vocab = _true_vocab(name, sharding, vocab)
    if more:
        lm_head = jnp.pad(lm_head, [(0, more if axis == "V" else 0) for axis in layout])
        bias = None if bias is None else jnp.pad(bias, (0, more))
    specs = (sharding.of_rows(ndim=targets.ndim), sharding.head_spec(layout), sharding.bias_spec, sharding.of_rows())
    of_hidden, of_head, of_bias, of_rows = specs
    laid = (
        lay_out(name, "hidden", hidden, of_hidden, sharding, hidden.ndim - 1),
        lay_out(name, "lm_head", lm_head, of_head, sharding, layout.index("D")),
        None if bias is None else lay_out(name, "bias", bias, of_bias, sharding),
        lay_out(name, "targets", targets, of_rows, sharding),
    )
    return sharding, laid, vocab


def lay_out_logits(
    name: str, sharding: object, logits: jax.Array, targets: jax.Array
) -> tuple[HeadSharding | None, jax.Array, jax.Array, int]:
    """Logits and targets as `sharding=` says, and the true V; raises for what cannot be."""
    vocab = logits.shape[-1]
    if sharding is None:
        return None, logits, targets, vocab
    sharding = _checked(name, sharding, targets.shape)
    if sharding.shared:
        raise ValueError(
            f"{name}: HeadSharding splits tokens and vocabulary both over {', '.join(sharding.shared)}; one array of "
            "logits can lie over an axis once: take it out of tokens or of vocab"
        )
    sharding, more, vocab = _true_vocab(name, sharding, vocab)
    if more:
        logits = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, more)])
    logits_spec = sharding.of_rows(sharding.vocab_axes, targets.ndim)
    logits = lay_out(name, "logits", logits, logits_spec, sharding)
    targets = lay_out(name, "targets", targets, sharding.of_rows(), sharding)
    return sharding, logits, targets, vocab


def _checked(name: str, sharding: object, shape: tuple[int, ...]) -> HeadSharding:
    """Raises for a sharding that is none, that is of another mesh, or whose axes do not divide the tokens."""
    if not isinstance(sharding, HeadSharding):
        raise TypeError(f"{name}: sharding is {sharding!r}; give a logitless.HeadSharding")
    mesh = get_abstract_mesh()
    if not mesh.empty and tuple(mesh.shape.items()) != tuple(sharding.mesh.shape.items()):
        raise ValueError(
            f"{name}: the mesh in scope has {_axes(mesh)}, that of sharding= {_axes(sharding.mesh)}; give one mesh"
        )
    if len(sharding.token_spec) > len(shape):
        raise ValueError(
            f"{name}: HeadSharding splits {len(sharding.token_spec)} axes of tokens, and targets has the shape {shape}"
        )
    for i, entry in enumerate(sharding.token_spec):
        axes = not_manual(axes_of(entry))
        size = sharding.size(axes)
        if shape[i] % size:
            raise ValueError(
                f"{name}: axis {i} of targets has {shape[i]} tokens, and {' x '.join(axes)} has {size} devices; pad it "
                f"to {-(-shape[i] // size) * size} and mask what was added"
            )
    return sharding


def _true_vocab(name: str, sharding: HeadSharding, given: int) -> tuple[HeadSharding, int, int]:
    """The sharding with its vocab_size, columns to pad with, and the true V, from the columns that the caller holds."""
    left = not_manual(sharding.vocab_axes)
    more = -given % sharding.size(left)
    if more and len(left) < len(sharding.vocab_axes):
        raise ValueError(
            f"{name}: V = {given} on each device of an outer shard_map, and {' x '.join(left)} has "
            f"{sharding.size(left)} devices; pad the head and say the true V as vocab_size"
        )
    everything = given * sharding.size(sharding.vocab_axes) // sharding.size(left)
    vocab = sharding.vocab_size or everything
    if vocab > everything:
        raise ValueError(f"{name}: HeadSharding has vocab_size={vocab}, and the head has V = {everything} columns")
    # Where nothing is padded no device need think of it.
    return replace(sharding, vocab_size=vocab if vocab < everything + more else None), more, vocab


def _axes(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "no axis"


def lay_out(
    name: str, what: str, x: jax.Array, spec: PartitionSpec, sharding: HeadSharding, d_axis: int | None = None
) -> jax.Array:
    """An array as `sharding=` says; raises ValueError for one that is known to lie otherwise.

    One of which each device has all of its part, and more, is cut as it should be: one that is whole on every device,
    or `advantages` of sequences that are spread over tokens. Inside a program that XLA partitions nothing is known, and
    XLA moves what it must.
    """
    scope = get_abstract_mesh()
    mesh = sharding.mesh if scope.empty else scope
    # Axes by which JAX types every array: nothing but the caller moves one along them.
    explicit = axes_of_type(mesh, AxisType.Explicit)
    as_typed = NamedSharding(mesh, _only(spec, explicit))
    if isinstance(x, Tracer):
        given = jax.typeof(x).sharding.spec if explicit else PartitionSpec()
        if any(given) and not _holds_parts(given, as_typed.spec, x.ndim, sharding):
            raise _laid_out_otherwise(name, what, x, given, spec, sharding, d_axis)
        return jax.sharding.reshard(x, as_typed) if explicit else x
    if not isinstance(sharding.mesh, Mesh):
        if scope.empty:
            raise ValueError(
                f"{name}: {what} is an array, and HeadSharding has an AbstractMesh; give the Mesh of its devices, or "
                "call it within jax.set_mesh"
            )
        return jax.sharding.reshard(x, as_typed) if explicit else x
    if not x.sharding.is_fully_replicated:
        given, wanted = x.sharding, NamedSharding(sharding.mesh, spec)
        given = given.spec if isinstance(given, NamedSharding) and given.mesh == sharding.mesh else given
        holds = isinstance(given, PartitionSpec) and _holds_parts(given, spec, x.ndim, sharding)
        if not holds and not x.sharding.is_equivalent_to(wanted, x.ndim):
            raise _laid_out_otherwise(name, what, x, given, spec, sharding, d_axis)
    if x.committed and x.sharding.device_set != set(sharding.mesh.devices.flat):
        raise ValueError(
            f"{name}: {what} {tuple(x.shape)} is on {len(x.sharding.device_set)} of {sharding.mesh.size} devices"
            f"; move it with jax.device_put to {_named(_trimmed(spec, x.ndim, sharding))}"
        )
    return jax.sharding.reshard(x, as_typed) if explicit else x


def _holds_parts(given: PartitionSpec, wanted: PartitionSpec, ndim: int, sharding: HeadSharding) -> bool:
    """Whether each device has what it should: the first of the wanted axes of the mesh, along each of the array."""
    pairs = zip(_trimmed(given, ndim, sharding), _trimmed(wanted, ndim, sharding), strict=True)
    return all(axes == those[: len(axes)] for axes, those in pairs)


def _laid_out_otherwise(
    name: str,
    what: str,
    x: jax.Array,
    given: object,
    spec: PartitionSpec,
    sharding: HeadSharding,
    d_axis: int | None,
) -> ValueError:
    wanted = _trimmed(spec, x.ndim, sharding)
    is_spec = isinstance(given, PartitionSpec)
    entries = _trimmed(given, x.ndim, sharding) if is_spec else ()
    split = d_axis is not None and is_spec and bool(entries[d_axis])
    return ValueError(
        f"{name}: {what} {tuple(x.shape)} is laid out as {_named(entries) if is_spec else given}, and sharding= says "
        f"{_named(wanted)}; move it with jax.device_put or jax.sharding.reshard to {_named(wanted)}, or say in "
        f"HeadSharding how it lies{': the hidden size D cannot be split' if split else ''}"
    )


def _only(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(tuple(x for x in axes_of(entry) if x in axes) or None for entry in spec))


def _trimmed(spec: PartitionSpec, ndim: int, sharding: HeadSharding) -> tuple[Axes, ...]:
    """By axis of the array, without the axes of the mesh that have one device."""
    entries = [axes_of(entry) for entry in spec] + [()] * (ndim - len(spec))
    sizes = dict(sharding.mesh.shape)
    return tuple(tuple(axis for axis in entry if sizes.get(axis, 2) > 1) for entry in entries)


def _named(entries: tuple[Axes, ...]) -> str:
    parts = ["None" if not x else repr(x[0]) if len(x) == 1 else str(x) for x in entries]
    return f"P({', '.join(parts)})"
