"""Tokens and head over a mesh: `shard_map` around the two passes of any implementation.

What one device does in it stands in `sharded_device.py`, how the arrays lie in `head_sharding.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals, Passes, head_vjp, logits_vjp
from logitless.ops.head_sharding import HeadSharding, head_strategy, on_devices
from logitless.ops.manual import manual_axes, not_manual, varying, varying_axes
from logitless.ops.sharded_device import LANES, Device, gradients_of, index, lowered, merged, stats_of
from logitless.ops.softmax import Normaliser, finish
from logitless.ops.tiles import Gradients
from logitless.ops.types import HeadOptions, Layout, LogitScalars, TokenStats

T = TypeVar("T")


def on_any_mesh(run: Callable[..., T], sharded: Callable[..., T]) -> Callable[..., T]:
    """`sharded` where the options have a sharding, else `run`, whose signature it has."""

    @functools.wraps(run)
    def either(*args: Any) -> T:
        return (run if args[-1].sharding is None else sharded)(*args)

    return either


def sharded_head(implementation: str, passes: Passes) -> Callable[..., TokenStats]:
    """An implementation of `linear_token_stats` over the mesh of `options.sharding`.

    Its arrays have the leading axes of the caller: tokens that two axes of the mesh split cannot be made one axis.
    """
    run = head_vjp(
        implementation, functools.partial(_forward, passes=passes), functools.partial(_backward, passes=passes)
    )

    def of_devices(hidden, lm_head, bias, targets, mask, scalars, options):
        heads = own_copies(hidden, lm_head, bias, options.sharding)
        return run(*heads, targets, mask, scalars, options)

    return of_devices


def own_copies(hidden: T, lm_head: T, bias: Any, sharding: HeadSharding) -> tuple[T, T, Any]:
    """Inside a caller's `shard_map`: what devices there have copies of, typed as a value of each device.

    JAX then adds up the gradients of the copies, as it does for all that the caller computes there. Outside it does
    nothing: there the sums over devices are ours.
    """
    lm_head, bias = varying((lm_head, bias), sharding.tokens_only)
    return varying(hidden, sharding.vocab_only), lm_head, bias


def _forward(
    inputs: HeadInputs,
    options: HeadOptions,
    outputs: tuple[str, ...],
    wanted: Differentiated | None,
    passes: Passes,
) -> tuple[TokenStats, Normaliser, None]:
    sharding: HeadSharding = options.sharding
    device = _device(inputs, options, passes, wanted)

    def run(inputs: HeadInputs) -> tuple[TokenStats, Normaliser]:
        found = stats_of(device, _as_stored(_flat(inputs), options, device), outputs)
        return jax.tree.map(lambda x: x.reshape(inputs.targets.shape), found)

    with jax.named_scope(f"logitless_{device.gather or 'sharded'}_forward"):
        found = on_devices(run, sharding, (_specs(inputs, options),), sharding.of_rows())(inputs)
    # What comes out of a `shard_map` within another has lost its type.
    return *varying(found, sharding.token_axes), None


def _backward(
    residuals: HeadResiduals, d_stats: TokenStats, active: Bool[Array, "..."], options: HeadOptions, passes: Passes
) -> Gradients:
    sharding: HeadSharding = options.sharding
    inputs, wanted = residuals.inputs, residuals.wanted
    device = _device(inputs, replace(options, wide_gradients=True), passes, wanted)

    def run(inputs: HeadInputs, *rows: Any) -> Gradients:
        stats, normaliser, d_stats, active = jax.tree.map(lambda x: x.reshape(-1), rows)
        own = HeadResiduals(_as_stored(_flat(inputs), options, device), stats, normaliser, None, wanted)
        d_hidden, d_lm_head, d_bias = gradients_of(device, own, d_stats, active)
        d_hidden = None if d_hidden is None else d_hidden.reshape(inputs.hidden.shape)
        if d_lm_head is not None and device.options.layout != options.layout:
            d_lm_head = d_lm_head.T
        return Gradients(d_hidden, d_lm_head, d_bias)

    specs, rows = _specs(inputs, options), sharding.of_rows()
    out = Gradients(
        specs.hidden if wanted.hidden else None,
        specs.lm_head if wanted.lm_head else None,
        specs.bias if wanted.bias else None,
    )
    with jax.named_scope(f"logitless_{device.gather or 'sharded'}_backward"):
        split = on_devices(run, sharding, (specs, rows, rows, rows, rows), out)
        d_stats = of_all_copies(d_stats, sharding, inputs[:2])
        found = split(inputs, residuals.stats, residuals.normaliser, d_stats, active)
    return Gradients(*(varying(d, varying_axes(x)) for d, x in zip(found, inputs[:3], strict=True)))


def of_all_copies(d_stats: TokenStats, sharding: HeadSharding, typed: Any) -> TokenStats:
    """Cotangents of what several devices have alike: where JAX does not type them, each device has a share of it.

    So it is inside a caller's `shard_map(..., check_vma=False)`, where the transpose of a sum over devices is a sum.
    """
    axes = tuple(axis for axis in sharding.vocab_only if axis in manual_axes())
    return d_stats if not axes or varying_axes(typed) else jax.tree.map(lambda x: lax.psum(x, axes), d_stats)


def _device(inputs: HeadInputs, options: HeadOptions, passes: Passes, wanted: Differentiated | None) -> Device:
    """Sizes of one device, from those of all; where the caller is inside `shard_map` they are of one already."""
    sharding: HeadSharding = options.sharding
    width, tokens = inputs.lm_head.shape[options.layout.index("V")], inputs.targets.size
    parts, manual = sharding.size(sharding.vocab_axes), manual_axes()
    width //= sharding.size(not_manual(sharding.vocab_axes))
    tokens = tokens // sharding.size(not_manual(sharding.token_axes)) * sharding.size(sharding.token_axes)
    strategy = head_strategy(
        sharding,
        tokens,
        inputs.hidden.shape[-1],
        width * parts,
        hidden_dtype=inputs.hidden.dtype,
        head_dtype=inputs.lm_head.dtype,
        trained=None if wanted is None else (wanted.hidden, wanted.lm_head),
    )
    options = replace(options, layout=_layout(inputs, options, width))
    return Device(sharding, options, passes, width, sharding.vocab_size or width * parts, strategy.name, wanted, manual)


def _specs(inputs: HeadInputs, options: HeadOptions) -> HeadInputs:
    sharding: HeadSharding = options.sharding
    rows, trees = sharding.of_rows(), cast(Any, HeadInputs)
    return trees(
        sharding.of_rows(ndim=inputs.targets.ndim),
        sharding.head_spec(options.layout),
        None if inputs.bias is None else sharding.bias_spec,
        rows,
        None if inputs.mask is None else rows,
        jax.tree.map(lambda _: P(), inputs.scalars),
    )


def _flat(inputs: HeadInputs) -> HeadInputs:
    """With one axis of tokens."""
    mask = None if inputs.mask is None else inputs.mask.reshape(-1)
    hidden = inputs.hidden.reshape(-1, inputs.hidden.shape[-1])
    return inputs._replace(hidden=hidden, targets=inputs.targets.reshape(-1), mask=mask)


def _layout(inputs: HeadInputs, options: HeadOptions, width: int) -> Layout:
    """Of the head as a TPU has it in memory.

    XLA keeps `[D, V]` with D inside where D is a whole number of registers and V, of a device, is none: that is
    `[V, D]`, to be read without a copy.
    """
    ragged = width % LANES > 0 and inputs.hidden.shape[-1] % LANES == 0
    return "VD" if options.platform == "tpu" and ragged else options.layout


def _as_stored(inputs: HeadInputs, options: HeadOptions, device: Device) -> HeadInputs:
    turned = device.options.layout != options.layout
    return inputs._replace(lm_head=inputs.lm_head.T) if turned else inputs


def sharded_logits(implementation: str, passes: Passes) -> Callable[..., TokenStats]:
    """An implementation of `token_stats` over the mesh of `options.sharding`: tokens and vocabulary share no axis."""
    return logits_vjp(
        functools.partial(_logits_forward, passes=passes),
        functools.partial(_logits_backward, passes=passes),
        implementation,
    )


def _logits_forward(
    logits: Float[Array, "... V"],
    targets: Int[Array, "..."],
    mask: Bool[Array, "..."] | None,
    scalars: LogitScalars,
    options: HeadOptions,
    also: tuple[str, ...] = (),
    *,
    passes: Passes,
) -> tuple[TokenStats, Normaliser]:
    sharding: HeadSharding = options.sharding
    outputs = tuple(dict.fromkeys((*options.outputs, *also)))

    def run(logits, targets, mask, scalars):
        shape, counts = targets.shape, None if mask is None else mask.reshape(-1)
        own, column, alone, vocab = _own_logits(logits, targets, options)
        running = merged(passes.sums(own, column, counts, scalars, alone, outputs), sharding.vocab_axes)
        stats, normaliser = finish(running, targets.reshape(-1) < vocab, vocab, outputs)
        if stats.mean_logits is not None and alone.padded:
            # The pass has left -inf out of its sums: of the padding, and of a column that the caller took out.
            true = index(sharding.vocab_axes) * own.shape[1] + jnp.arange(own.shape[1]) < vocab
            impossible = jnp.any((own == -jnp.inf) & true[None, :], axis=1)
            stats = stats._replace(mean_logits=lowered(stats.mean_logits, impossible, sharding.vocab_axes))
        if counts is not None:
            stats = jax.tree.map(lambda x: jnp.where(counts, x, 0.0), stats)
        return jax.tree.map(lambda x: x.reshape(shape), (stats, normaliser))

    in_specs, rows = _logits_specs(sharding, targets.ndim), sharding.of_rows()
    with jax.named_scope("logitless_sharded_logits_forward"):
        found = on_devices(run, sharding, (in_specs, rows, rows, P()), rows)(logits, targets, mask, scalars)
    return varying(found, sharding.token_axes)


def _logits_backward(
    residuals: tuple, d_stats: TokenStats, options: HeadOptions, *, passes: Passes
) -> Float[Array, "... V"]:
    sharding: HeadSharding = options.sharding

    def run(logits, targets, mask, scalars, stats, normaliser, d_stats):
        stats, normaliser, d_stats, counts = jax.tree.map(lambda x: x.reshape(-1), (stats, normaliser, d_stats, mask))
        own, column, alone, vocab = _own_logits(logits, targets, options)
        if d_stats.mean_logits is not None:
            # The pass takes the mean over the columns that it sees.
            d_stats = d_stats._replace(mean_logits=d_stats.mean_logits * (own.shape[1] / vocab))
        found = passes.gradients((own, column, counts, scalars, stats, normaliser), d_stats, alone)
        return found.reshape(logits.shape)

    in_specs, rows = _logits_specs(sharding, residuals[1].ndim), sharding.of_rows()
    specs = (in_specs, rows, rows, P(), rows, rows, rows)
    with jax.named_scope("logitless_sharded_logits_backward"):
        d_stats = of_all_copies(d_stats, sharding, residuals[0])
        d_logits = on_devices(run, sharding, specs, in_specs)(*residuals, d_stats)
    return varying(d_logits, varying_axes(residuals[0]))


def _logits_specs(sharding: HeadSharding, ndim: int) -> P:
    return sharding.of_rows(sharding.vocab_axes, ndim)


def _own_logits(
    logits: Float[Array, "... v"], targets: Int[Array, "..."], options: HeadOptions
) -> tuple[Float[Array, "n v"], Int[Array, " n"], HeadOptions, int]:
    """A device's logits as the whole of a vocabulary, the targets' columns in it, options for that, and the true V."""
    sharding: HeadSharding = options.sharding
    width = logits.shape[-1]
    everything = width * sharding.size(sharding.vocab_axes)
    vocab = sharding.vocab_size or everything
    logits, targets = logits.reshape(-1, width), targets.reshape(-1)
    first = index(sharding.vocab_axes) * width
    padded = vocab < everything
    if padded:
        logits = jnp.where((first + jnp.arange(width) < vocab)[None, :], logits, -jnp.inf)
    here = (targets >= first) & (targets < first + width) & (targets < vocab)
    return logits, jnp.where(here, targets - first, width), replace(options, sharding=None, padded=padded), vocab
