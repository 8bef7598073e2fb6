"""What the doors of the ops refuse, and how they say it: names, shapes, dtypes, numbers out of range."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless._arrays import (
    BlockSizes,
    MaskArray,
    Scalar,
    accumulator,
    as_mask,
    check_name,
    is_concrete,
    shape_error,
    target_device,
)
from logitless.ops.head_sharding import HeadSharding
from logitless.ops.types import (
    BLOCK_SIZES,
    LOGIT_BYTES,
    OUTPUT_NAMES,
    HeadOptions,
    Layout,
    LogitScalars,
    OutputName,
    PrecisionLike,
)


def check_dtypes(name: str, floats: Mapping[str, jax.Array | None], targets: jax.Array) -> None:
    """Raises TypeError for arrays that are no floats, or targets that are no integers."""
    for argument, x in floats.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: {argument} is {x.dtype}; it must be a floating-point array: cast it")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"{name}: targets is {targets.dtype}; token ids must be integers: cast with .astype(jnp.int32)")


def check_head(
    name: str, hidden: jax.Array, lm_head: jax.Array, targets: jax.Array, bias: jax.Array | None, layout: str
) -> int:
    """V, once dtypes and shapes fit; else raises naming both shapes."""
    check_dtypes(name, {"hidden": hidden, "lm_head": lm_head, "bias": bias}, targets)
    check_name(name, "layout", layout, ("DV", "VD"))
    if lm_head.ndim != 2:
        raise shape_error(name, {"lm_head": lm_head}, "it must have two axes, [D, V] or [V, D]")
    if hidden.ndim == 0 or hidden.shape[:-1] != targets.shape:
        raise shape_error(
            name,
            {"hidden": hidden, "targets": targets},
            "hidden must be [..., D] and targets [...], with equal leading axes",
        )
    if 0 in lm_head.shape:
        raise shape_error(name, {"lm_head": lm_head}, "an empty head has no softmax: D and V must be at least 1")
    d_axis = layout.index("D")
    if lm_head.shape[d_axis] != hidden.shape[-1]:
        other = "DV" if layout == "VD" else "VD"
        hint = f'; layout="{other}" would fit' if lm_head.shape[1 - d_axis] == hidden.shape[-1] else ""
        raise shape_error(
            name,
            {"hidden": hidden, "lm_head": lm_head, "layout": layout},
            f"lm_head must hold D = {hidden.shape[-1]} on axis {d_axis}{hint}",
        )
    vocab = lm_head.shape[1 - d_axis]
    if bias is not None and bias.shape != (vocab,):
        raise shape_error(name, {"bias": bias, "lm_head": lm_head}, f"bias must be [V] = [{vocab}]")
    return vocab


def check_tokens(name: str, targets: jax.Array, mask: MaskArray | None, vocab: int) -> jax.Array | None:
    """Returns the mask as bool; concrete targets that count must lie in the vocabulary."""
    counts = None
    if mask is not None:
        counts = as_mask(name, mask)
        if counts.shape != targets.shape:
            raise shape_error(name, {"mask": counts, "targets": targets}, "mask must have the shape of targets")
    if is_concrete(targets, counts):
        ids = np.asarray(targets)
        wrong = (ids < 0) | (ids >= vocab)
        if counts is not None:
            wrong &= np.asarray(counts)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(
                f"{name}: targets{list(place)} is {ids[place]}, outside the vocabulary of {vocab} ({int(wrong.sum())} "
                "such in all); give ids from 0 to V - 1, or mask those tokens out"
            )
    return counts


def check_scalars(name: str, temperature: Scalar, softcap: Scalar | None, logit_scale: Scalar) -> LogitScalars:
    """The scalars as arrays, None where they change nothing; raises ValueError for a number that is not above 0."""
    return LogitScalars(
        temperature=_positive(name, "temperature", temperature, neutral=1.0),
        softcap=None if softcap is None else _positive(name, "softcap", softcap),
        logit_scale=_positive(name, "logit_scale", logit_scale, neutral=1.0),
    )


def _positive(name: str, argument: str, value: Scalar, neutral: float | None = None) -> jax.Array | None:
    """None where the value changes nothing; NaN for a traced value that is not above 0."""
    if jnp.ndim(value) != 0:
        raise shape_error(name, {argument: value}, "it must be one number")
    if not is_concrete(value):
        traced = jnp.asarray(value)
        traced = traced.astype(accumulator(traced.dtype) if jnp.issubdtype(traced.dtype, jnp.floating) else jnp.float32)
        return jnp.where(traced > 0, traced, jnp.nan)
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name}: {argument}={number:g}; it must be a finite number above 0")
    return None if number == neutral else jnp.asarray(number, jnp.result_type(float))


def check_options(
    name: str,
    outputs: Iterable[OutputName],
    layout: Layout,
    logits_dtype: str | None,
    block_sizes: BlockSizes | None,
    precision: PrecisionLike,
    sharding: HeadSharding | None = None,
) -> HeadOptions:
    """The static choices as one hashable value; raises ValueError naming what is unknown or out of range."""
    if isinstance(outputs, str) or not (outputs := tuple(outputs)):
        raise ValueError(f"{name}: outputs={outputs!r}; give a tuple of one or more of {', '.join(OUTPUT_NAMES)}")
    for output in outputs:
        check_name(name, "outputs", output, OUTPUT_NAMES)
    if block_sizes is not None and not isinstance(block_sizes, Mapping):
        raise TypeError(f"{name}: block_sizes={block_sizes!r}; give a dict of any of {', '.join(BLOCK_SIZES)}")
    sizes = dict(block_sizes or {})
    for key, size in sizes.items():
        check_name(name, "block_sizes", key, BLOCK_SIZES)
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}: block_sizes[{key!r}] is {size!r}; it must be an integer of at least 1")
    needed = LOGIT_BYTES * sizes.get("block_n", 1) * sizes.get("block_v", 1)
    if (given := sizes.get("block_bytes")) is not None and given < needed:
        raise ValueError(
            f"{name}: block_sizes={sizes}: the smallest block that these allow has {needed} bytes of float32 logits; "
            "give as many block_bytes, or leave block_n and block_v to be chosen by them"
        )
    if logits_dtype is not None:
        dtype = _dtype(logits_dtype)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name}: logits_dtype={logits_dtype!r}; it must be a floating-point dtype such as 'bfloat16'"
            )
        logits_dtype = dtype.name
    ordered: tuple[OutputName, ...] = tuple(output for output in OUTPUT_NAMES if output in outputs)
    blocks = {key: int(size) for key, size in sizes.items()}
    platform, device_kind = target_device(None if sharding is None else sharding.mesh)
    device: Any = {"platform": platform, "device_kind": device_kind, "sharding": sharding}
    return HeadOptions(layout, ordered, logits_dtype, precision, **blocks, **device)


def _dtype(name: str) -> np.dtype | None:
    """The dtype of that name, None where there is none."""
    try:
        return jnp.dtype(name)
    except TypeError:
        return None


def check_token_loss(
    name: str, token_loss: Callable[..., Any], token_args: Sequence[object], targets: jax.Array, dtype: np.dtype
) -> tuple[jax.Array, ...]:
    """The token arguments as arrays; raises ValueError for another shape, or a loss that is none of one token."""
    args = tuple(jnp.asarray(x) for x in token_args)
    for i, x in enumerate(args):
        if x.shape not in ((), targets.shape):
            needed = "each must have the shape of targets, or be one number"
            raise shape_error(name, {f"token_args[{i}]": x, "targets": targets}, needed)
    # A Python number stays one: it gives way to the dtype of the log-probability.
    each = (jax.ShapeDtypeStruct((), x.dtype, weak_type=x.weak_type) for x in args)
    traced, one = jax.make_jaxpr(token_loss, return_shape=True)(jax.ShapeDtypeStruct((), dtype), *each)
    if not is_concrete(traced.consts):
        raise ValueError(
            f"{name}: token_loss reads a traced value from outside itself; give it in token_args, as an array of the "
            "shape of targets or as one number"
        )
    if getattr(one, "shape", None) != () or not jnp.issubdtype(one.dtype, jnp.floating):
        raise ValueError(f"{name}: token_loss gives {one} for one token; it must give one floating-point number")
    return args
