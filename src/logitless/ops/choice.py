"""Which implementation runs: what auto picks, and why a named one cannot."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, get_abstract_mesh

from logitless._arrays import check_name
from logitless.ops.head_sharding import HeadSharding
from logitless.ops.manual import manual_axes, varying_axes
from logitless.ops.one_pass import FEWEST_TOKENS, tokens_within
from logitless.ops.pallas_tpu_blocks import has_room
from logitless.ops.types import HeadOptions, PrecisionLike

COMPILED_DTYPES = ("bfloat16", "float32")
PALLAS, INTERPRETED = "pallas_tpu", "pallas_tpu_interpret"


def auto_token_stats(arrays: Sequence[jax.Array | None], options: HeadOptions) -> str:
    if _why_no_kernel(PALLAS, arrays, options):
        return "chunked"
    # Logits come alone, and their kernels take what room there is.
    hidden, lm_head = (*arrays, None)[:2]
    # Over a mesh their gradients are summed before they are cast.
    wide = replace(options, wide_gradients=options.sharding is not None)
    return PALLAS if hidden is None or lm_head is None or has_room(hidden, lm_head, wide) else "chunked"


def auto_token_loss(arrays: Sequence[jax.Array | None], count: int, vocab: int, options: HeadOptions) -> str:
    # By the compiler's estimates for TPUs one pass is no faster there, and it takes more memory.
    if options.platform == "tpu":
        return auto_token_stats(arrays, options)
    if options.sharding is not None and _why_no_one_pass(options.sharding):
        return auto_token_stats(arrays, options)
    if options.block_bytes is None:
        return "one_pass"
    tokens = tokens_within(options.block_bytes, vocab, options)
    return "one_pass" if tokens >= min(options.block_n or FEWEST_TOKENS, count) else "chunked"


def check_bytes(name: str, vocab: int, options: HeadOptions) -> None:
    """Raises ValueError where one_pass is asked for within bytes that are too few for it."""
    if options.block_bytes is None:
        return
    tokens = tokens_within(options.block_bytes, vocab, options)
    if tokens < (options.block_n or 1):
        raise ValueError(
            f"{name}: block_bytes={options.block_bytes} hold the logits of {tokens} tokens over V = {vocab}; "
            f"one_pass keeps those of {options.block_n or 1} at least: give more bytes, or implementation='chunked'"
        )


def check_choice(
    name: str,
    chosen: str,
    known: Collection[str],
    arrays: Sequence[jax.Array | None],
    options: HeadOptions,
) -> None:
    """Raises ValueError for an unknown implementation, NotImplementedError for one that cannot run, and says why."""
    if chosen == "one_pass" and chosen not in known:
        raise NotImplementedError(
            f"{name}: implementation 'one_pass' makes the gradient of a loss in the forward pass and has no "
            "statistics to differentiate; use linear_token_loss, or another implementation"
        )
    check_name(name, "implementation", chosen, ("auto", *known))
    if chosen == "one_pass" and options.sharding is not None and (why := _why_no_one_pass(options.sharding)):
        raise NotImplementedError(
            f"{name}: implementation 'one_pass' cannot run: {why}; use implementation='chunked', or 'auto'"
        )
    if chosen in (PALLAS, INTERPRETED) and (why := _why_no_kernel(chosen, arrays, options)):
        raise NotImplementedError(f"{name}: implementation {chosen!r} cannot run: {why}")


def _why_no_one_pass(sharding: HeadSharding) -> str | None:
    """Why a loss and its gradient cannot be made in one go: each device needs all of a token's logits for that."""
    if sharding.size(sharding.vocab_axes) > 1:
        return f"the vocabulary is split over {', '.join(sharding.vocab_axes)}"
    return None if sharding.vocab_size is None else "HeadSharding gives a vocab_size"


def _why_no_kernel(chosen: str, arrays: Sequence[jax.Array | None], options: HeadOptions) -> str | None:
    """Why a TPU kernel cannot run, and what would; None where it can."""
    compiled = chosen == PALLAS
    if compiled and options.platform != "tpu":
        return (
            f"this program is for {options.platform!r}, and the kernels are for a TPU; use implementation='chunked', "
            f"or {INTERPRETED!r} to check them in JAX's simulation of a TPU"
        )
    dtypes = {str(x.dtype) for x in arrays if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    known = (*COMPILED_DTYPES, *(() if compiled else ("float64",)))
    if other := sorted(dtypes - set(known)):
        return f"an array is {other[0]}; it takes {', '.join(known)}: cast, or use implementation='chunked'"
    if options.logits_dtype not in (None, *known):
        return f"logits_dtype={options.logits_dtype!r}; it rounds to {', '.join(known)}: use implementation='chunked'"
    if not _takes_precision(options.precision):
        return f"precision={options.precision!r}; it multiplies in 'default' or 'highest': use implementation='chunked'"
    if not compiled and (why := _why_no_simulation(arrays)):
        return why
    if options.sharding is None and _are_sharded(arrays):
        return (
            "a kernel runs on one device, and an argument is sharded over several; give sharding=, call it inside "
            "jax.shard_map, or use implementation='chunked', which XLA partitions"
        )
    return None


def _takes_precision(precision: PrecisionLike) -> bool:
    """Whether Mosaic multiplies so: both operands alike, in one pass or to the last digit."""
    # An algorithm is a tuple too.
    if isinstance(precision, lax.DotAlgorithm):
        return False
    x, y = precision if isinstance(precision, tuple) else (precision, precision)
    if isinstance(x, lax.DotAlgorithmPreset) or x in set(lax.DotAlgorithmPreset.__members__):
        return False
    return lax.Precision(x) == lax.Precision(y) != lax.Precision.HIGH


def _why_no_simulation(arrays: Sequence[jax.Array | None]) -> str | None:
    """What of a caller's `shard_map` JAX's simulation of a TPU cannot be inside."""
    manual = manual_axes()
    if manual and len(manual) < len(get_abstract_mesh().axis_names):
        return f"the shard_map around it runs over {', '.join(manual)} alone; let it run over every axis of the mesh"
    if varying_axes(*(x for x in arrays if x is not None)):
        return "JAX's simulation of a TPU knows no types of shard_map; give that check_vma=False"
    return None


def _are_sharded(arrays: Sequence[jax.Array | None]) -> bool:
    """Whether an argument is on several devices, or XLA splits the program over a mesh in scope or of an argument."""
    meshes = [get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays if x is not None)]
    if any(mesh.size > 1 and any(kind != AxisType.Manual for kind in mesh.axis_types) for mesh in meshes):
        return True
    return any(
        isinstance(x, jax.Array) and not isinstance(x, Tracer) and len(x.sharding.device_set) > 1 for x in arrays
    )
