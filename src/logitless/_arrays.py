"""Dimension letters, array aliases and the shape errors that every door shares.

Letters, declared once: B sequences, T positions, N = B * T tokens, D hidden size, V vocabulary.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array | np.ndarray
"""What the public functions take: a JAX array, a tracer, or a numpy array."""

# The doors check dtypes and shapes themselves and say what would do. Were their annotations any narrower, the type
# checker that runs with the tests would speak first, in words that no user sees.
FloatArray = Array
"""A floating-point array."""

IntArray = Array
"""An array of token ids or segment ids: any integer dtype."""

MaskArray = Array
"""Bool, or numbers of which any but 0 counts."""

Scalar = float | int | np.number | Array
"""A Python number, or an array or tracer of no axes."""

BlockSizes = Mapping[str, int]


def shape_error(function: str, given: Mapping[str, object], needed: str) -> ValueError:
    """The one wording of a shape error: the function, every array given with its shape, what is needed."""
    parts = [f"{name} {_describe(value)}" for name, value in given.items()]
    return ValueError(f"{function}: got {', '.join(parts)}; {needed}")


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"of shape {tuple(shape)}"


def check_name(function: str, argument: str, given: object, known: Collection[str]) -> None:
    """Raises ValueError for an unknown name, with the nearest known one."""
    if given not in known:
        near = _nearest(given, known, cutoff=0.0)
        raise ValueError(f"{function}: {argument}={given!r} is unknown; known: {', '.join(known)}{near}")


def check_keywords(function: str, given: Collection[str], known: Collection[str], hints: Mapping[str, str]) -> None:
    """Raises TypeError for a keyword that the function does not take, with a hint or the nearest that it does."""
    for keyword in given:
        if keyword not in known:
            hint = f"; {hints[keyword]}" if keyword in hints else _nearest(keyword, known, cutoff=0.4)
            raise TypeError(f"{function}: got an unexpected keyword argument {keyword!r}{hint}")


def _nearest(given: object, known: Collection[str], cutoff: float) -> str:
    as_written = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(given).lower(), as_written, 1, cutoff=cutoff)
    return f"; did you mean {as_written[near[0]]!r}?" if near else ""


def as_mask(function: str, mask: MaskArray, argument: str = "mask") -> jax.Array:
    """The mask as bool; any number but 0 counts."""
    dtype = np.asarray(mask).dtype if is_concrete(mask) else mask.dtype
    if dtype != np.bool_ and not jnp.issubdtype(dtype, np.number):
        raise TypeError(f"{function}: {argument} is {dtype}; it must be bool, or numbers of which any but 0 counts")
    return jnp.asarray(mask) if dtype == np.bool_ else jnp.asarray(mask) != 0


def is_concrete(*values: object) -> bool:
    """True when no value is traced or on a device of another process, so that numbers may be read and checked."""

    def is_out_of_reach(leaf: object) -> bool:
        return isinstance(leaf, Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)

    return not any(is_out_of_reach(leaf) for leaf in jax.tree.leaves(values))


def common_dtype(*dtypes: np.dtype) -> np.dtype:
    """The narrowest dtype that holds all of the given ones, also where the caller forbids implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def accumulator(*dtypes: np.dtype) -> np.dtype:
    """Float32, or float64 where an input is float64: the dtype of sums, logits and statistics."""
    return common_dtype(np.dtype(np.float32), *dtypes)


_TARGET: ContextVar[tuple[str, str] | None] = ContextVar("logitless_target", default=None)


@contextmanager
def tracing_for(platform: str, device_kind: str) -> Iterator[None]:
    """What is traced inside is for another device than those of this process."""
    token = _TARGET.set((platform, device_kind))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_device(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> tuple[str, str]:
    """Platform and kind of the device that a trace is for.

    As `tracing_for` says, else a device of the mesh, or its abstract one, else those of this process.
    """
    if (named := _TARGET.get()) is not None:
        return named
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].platform, mesh.devices.flat[0].device_kind
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_device
    if device is not None:
        return device.platform, device.device_kind
    return jax.default_backend(), jax.devices()[0].device_kind
