"""What one device of a mesh does, inside `shard_map`: the online softmax of its tokens over its columns, and gradients.

A few numbers per token then make one softmax of the parts. Where tokens and vocabulary share axes, either blocks of the
head come to the tokens, or chunks of the tokens to the head, gathered one ahead of the one at work: all of neither is
ever on one device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from logitless._arrays import accumulator
from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals, Passes
from logitless.ops.head_sharding import HeadSharding
from logitless.ops.manual import Axes, fori_loop
from logitless.ops.softmax import Normaliser, Running, finish, merge, start
from logitless.ops.tiles import Gradients
from logitless.ops.types import HeadOptions, TokenStats

GATHERED_BYTES = 48 * 2**20
"""Of the head's columns, or the tokens, that are on a device at one time, beside those that it owns, but a register of
each sharer at least; as many again are on their way, and twice or four times as many are their gradient in float32."""
SUMMED_BYTES = 4 * GATHERED_BYTES
"""Of the device's own columns whose gradients are summed over devices at one time: nothing of them has to be gathered,
and the fewer pieces they come in, the less often the gradient of the hidden states is added up."""
LANES, ROWS = 128, 16
"""Of a TPU register of 16-bit numbers."""


@dataclass(frozen=True)
class Device:
    """What one device knows of the split, inside `shard_map`.

    Attributes:
        sharding: of tokens and vocabulary.
        options: of the head.
        passes: of the implementation.
        width: columns of the device's part of the vocabulary.
        vocab: true V.
        gather: `gather_head`, `gather_tokens`, or empty.
        wanted: whose gradients are; None in a pass of which none are asked.
        outer: axes of a `shard_map` of the caller, over which JAX adds up the gradients.
    """

    sharding: HeadSharding
    options: HeadOptions
    passes: Passes
    width: int
    vocab: int
    gather: str
    wanted: Differentiated | None
    outer: Axes

    @property
    def adds_hidden(self) -> Axes:
        """Axes over which the gradient of the hidden states is added up."""
        return tuple(axis for axis in self.sharding.vocab_only if axis not in self.outer)

    @property
    def adds_head(self) -> Axes:
        """Axes over which the gradient of the head is added up, beside those that its parts are scattered over."""
        return tuple(axis for axis in self.sharding.tokens_only if axis not in self.outer)

    @property
    def v_axis(self) -> int:
        return self.options.layout.index("V")

    @property
    def sharers(self) -> int:
        return self.sharding.size(self.sharding.shared)

    @property
    def padded(self) -> bool:
        """Whether the last parts hold columns that are none of the vocabulary."""
        return self.vocab < self.width * self.sharding.size(self.sharding.vocab_axes)

    def parts(self, gathered: bool) -> Int[Array, " P"]:
        """Parts of the vocabulary: the device's own, or of all with whom it shares axes, as a gather orders them."""
        if not gathered:
            return index(self.sharding.vocab_axes)[None]
        sizes, stride, strides = self.sharding.mesh.shape, 1, {}
        for axis in reversed(self.sharding.vocab_axes):
            strides[axis], stride = stride, stride * sizes[axis]
        places = jnp.zeros((1,), jnp.int32)
        for axis in self.sharding.shared:
            steps = jnp.arange(sizes[axis], dtype=jnp.int32) * strides[axis]
            places = (places[:, None] + steps[None, :]).reshape(-1)
        for axis in self.sharding.vocab_only:
            places += lax.axis_index(axis) * strides[axis]
        return places


def index(axes: Axes) -> Int[Array, ""]:
    return lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)


class _Block(NamedTuple):
    """Columns of the head that a device has at one time, gathered or its own: `size` of each part from `start` on.

    Attributes:
        lm_head: their weight.
        bias: theirs, if the head has any.
        start: first of them within a part.
        size: of each part.
        stale: how many of the first ones an earlier block has held.
        overlaps: whether any block has stale ones.
    """

    lm_head: Array
    bias: Array | None
    start: Int[Array, ""]
    size: int
    stale: Int[Array, ""]
    overlaps: bool


class _Cut(NamedTuple):
    """The parts of the vocabulary in `blocks` blocks of `size` columns each; the last may meet columns twice."""

    blocks: int
    size: int

    def fetch(self, device: Device, inputs: HeadInputs, i: Any) -> tuple[Array, Array | None]:
        """Weight and bias of a block, from all who share: the only place where columns of the head are gathered."""

        def piece(x: Array, axis: int) -> Array:
            if self.blocks > 1:
                x = lax.dynamic_slice_in_dim(x, self._first(device, i), self.size, axis)
            return _gather(x, device.sharding.shared, axis)

        return piece(inputs.lm_head, device.v_axis), None if inputs.bias is None else piece(inputs.bias, 0)

    def block(self, device: Device, fetched: tuple[Array, Array | None], i: Any) -> _Block:
        first = self._first(device, i)
        return _Block(*fetched, first, self.size, jnp.asarray(i, jnp.int32) * self.size - first, self._overlaps(device))

    def _first(self, device: Device, i: Any) -> Int[Array, ""]:
        return jnp.minimum(jnp.asarray(i, jnp.int32) * self.size, device.width - self.size)

    def _overlaps(self, device: Device) -> bool:
        return self.blocks * self.size > device.width


def _cut_columns(device: Device, inputs: HeadInputs, alone: bool) -> _Cut:
    """All columns at once where they are the device's own and nothing is summed over devices, else by bytes."""
    if alone:
        return _Cut(1, device.width)
    # Whole registers of a TPU of each part: XLA scatters no others, and gives each device the sum of all instead.
    room = GATHERED_BYTES if device.sharers > 1 else SUMMED_BYTES
    most = room // (inputs.lm_head.dtype.itemsize * inputs.hidden.shape[1] * device.sharers)
    unit = LANES if device.v_axis else ROWS
    count = -(-device.width // max(unit, most // unit * unit))
    return _Cut(count, min(device.width, -(-device.width // (count * unit)) * unit))


def _own_columns(device: Device, inputs: HeadInputs) -> _Block:
    """All that the device owns."""
    nothing = jnp.zeros((), jnp.int32)
    return _Block(inputs.lm_head, inputs.bias, nothing, device.width, nothing, overlaps=False)


def _as_head(device: Device, inputs: HeadInputs, block: _Block) -> tuple[HeadInputs, HeadOptions]:
    """A block as a head of its own: the targets' columns in it, and -inf in the bias where a column takes no part."""
    parts = device.parts(device.gather == "gather_head")
    ids = parts[:, None] * device.width + block.start + jnp.arange(block.size, dtype=jnp.int32)[None, :]
    beyond = (ids >= device.vocab).reshape(-1)
    again = jnp.tile(jnp.arange(block.size, dtype=jnp.int32) < block.stale, parts.size)
    weight, bias, overlaps = block.lm_head, block.bias, block.overlaps
    if device.padded:
        # Padding may hold anything, and NaN times 0 is NaN.
        weight = jnp.where(jnp.expand_dims(beyond, 1 - device.v_axis), jnp.zeros_like(weight), weight)
    if device.padded or overlaps:
        zeros = jnp.zeros(beyond.shape, weight.dtype) if bias is None else bias
        bias = jnp.where(beyond | again, jnp.asarray(-jnp.inf, zeros.dtype), zeros)
    # Which of the parts here holds the target, and where.
    whose, place = inputs.targets // device.width, inputs.targets % device.width - block.start
    # Compared, not looked up: the TPU compiler dies on a scatter of constants.
    matches = parts[:, None] == whose[None, :]
    here = jnp.sum(jnp.where(matches, jnp.arange(parts.size, dtype=jnp.int32)[:, None], 0), axis=0, dtype=jnp.int32)
    found = (inputs.targets < device.vocab) & jnp.any(matches, axis=0) & (place >= block.stale) & (place < block.size)
    targets = jnp.where(found, here * block.size + place, parts.size * block.size)
    head = inputs._replace(lm_head=weight, bias=bias, targets=targets)
    return head, replace(device.options, sharding=None, padded=device.padded or overlaps)


def _walk(count: int, fetch: Callable[[Any], Any], step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """`step(i, fetch(i), carry)` for each i, with the next fetched while one is at work."""
    if count == 1:
        return step(0, fetch(0), carry)

    def body(i: Any, state: Any) -> Any:
        carry, here = state
        ahead = fetch(i + 1)
        return step(i, here, carry), ahead

    carry, last = fori_loop(0, count - 1, body, (carry, fetch(0)))
    return step(count - 1, last, carry)


def stats_of(device: Device, inputs: HeadInputs, outputs: tuple[str, ...]) -> tuple[TokenStats, Normaliser]:
    """Of the device's tokens, over the whole vocabulary."""
    if device.gather == "gather_tokens":
        return _stats_of_chunks(device, inputs, outputs)
    cut = _cut_columns(device, inputs, alone=device.sharers == 1)

    def step(i: Any, fetched: Any, before: Running | None) -> Running:
        head, options = _as_head(device, inputs, cut.block(device, fetched, i))
        running = device.passes.sums(head, options, outputs)
        return running if before is None else _joined(before, running)

    nothing = None if cut.blocks == 1 else start(inputs.targets.size, _sums_dtype(inputs), outputs)
    running = _walk(cut.blocks, functools.partial(cut.fetch, device, inputs), step, nothing)
    return _finished(device, running, inputs, outputs, device.sharding.vocab_only)


def _sums_dtype(inputs: HeadInputs) -> np.dtype:
    return accumulator(inputs.hidden.dtype, inputs.lm_head.dtype)


def _joined(one: Running, two: Running) -> Running:
    pair = jax.tree.map(lambda x, y: jnp.stack([x, y]), one, two)
    largest, add = (functools.partial(reduce, axis=0, keepdims=True) for reduce in (jnp.max, jnp.sum))
    return jax.tree.map(lambda x: x[0], merge(pair, largest, add))


def merged(running: Running, axes: Axes) -> Running:
    """One online softmax from those of the devices along `axes`."""
    return merge(running, lambda x: lax.pmax(x, axes), lambda x: lax.psum(x, axes)) if axes else running


def lowered(mean: Array, impossible: Array, axes: Axes) -> Array:
    """The mean of logits, -inf where a logit of any device along `axes` is; NaN stays NaN."""
    found = impossible.astype(jnp.int32)
    found = lax.pmax(found, axes) if axes else found
    return mean + jnp.where(found > 0, -jnp.inf, 0.0).astype(mean.dtype)


def _finished(
    device: Device, running: Running, inputs: HeadInputs, outputs: tuple[str, ...], axes: Axes
) -> tuple[TokenStats, Normaliser]:
    """Makes one softmax of the parts that stand along `axes`."""
    running = merged(running, axes)
    stats, normaliser = finish(running, inputs.targets < device.vocab, device.vocab, outputs)
    if stats.mean_logits is not None and inputs.bias is not None:
        # The passes have left -inf out of their sums, which here may mark a column of another block.
        ids = index(device.sharding.vocab_axes) * device.width + jnp.arange(device.width, dtype=jnp.int32)
        impossible = jnp.any((inputs.bias == -jnp.inf) & (ids < device.vocab))
        stats = stats._replace(mean_logits=lowered(stats.mean_logits, impossible, device.sharding.vocab_axes))
    if (mask := inputs.mask) is not None:
        stats = jax.tree.map(lambda x: jnp.where(mask, x, 0.0), stats)
    return stats, normaliser


def gradients_of(device: Device, residuals: HeadResiduals, d_stats: TokenStats, active: Bool[Array, " n"]) -> Gradients:
    """Of the device's tokens and columns, each summed over the devices that add to it and cast once."""
    if device.gather == "gather_tokens":
        return _gradients_of_chunks(device, residuals, d_stats, active)
    inputs, wanted = residuals.inputs, residuals.wanted
    sharding, v_axis, dtype = device.sharding, device.v_axis, _sums_dtype(inputs)
    summed = bool(device.adds_head) and (wanted.lm_head or wanted.bias)
    cut = _cut_columns(device, inputs, alone=device.sharers == 1 and not summed)

    def leave(total: Array | None, block: _Block, part: Array | None, axis: int) -> Array | None:
        if total is None or part is None:
            return None
        part = _sum_over(_scatter(part, sharding.shared, axis), device.adds_head).astype(total.dtype)
        if cut.blocks == 1:
            return part
        old = lax.dynamic_slice_in_dim(total, block.start, block.size, axis)
        fresh = jnp.arange(block.size, dtype=jnp.int32) >= block.stale
        fresh = fresh if part.ndim == 1 else jnp.expand_dims(fresh, 1 - axis)
        return lax.dynamic_update_slice_in_dim(total, jnp.where(fresh, part, old), block.start, axis)

    def step(i: Any, fetched: Any, total: Gradients) -> Gradients:
        block = cut.block(device, fetched, i)
        found = _gradients_of(device, residuals, block, d_stats, active)
        d_hidden = found.hidden if total.hidden is None or found.hidden is None else total.hidden + found.hidden
        return Gradients(
            d_hidden,
            leave(total.lm_head, block, found.lm_head, v_axis),
            leave(total.bias, block, found.bias, 0),
        )

    total = Gradients(
        jnp.zeros(inputs.hidden.shape, dtype) if wanted.hidden and cut.blocks > 1 else None,
        jnp.zeros_like(inputs.lm_head) if wanted.lm_head else None,
        jnp.zeros_like(inputs.bias) if wanted.bias and inputs.bias is not None else None,
    )
    total = _walk(cut.blocks, functools.partial(cut.fetch, device, inputs), step, total)
    if total.hidden is not None:
        d_hidden = _sum_over(total.hidden, device.adds_hidden).astype(inputs.hidden.dtype)
        total = total._replace(hidden=d_hidden)
    return total


def _gradients_of(
    device: Device,
    residuals: HeadResiduals,
    block: _Block,
    d_stats: TokenStats,
    active: Bool[Array, " n"],
    onto: Array | None = None,
) -> Gradients:
    """What a block of columns gives to each gradient, in the dtype of the sums; that of the head added to `onto`."""
    head, options = _as_head(device, residuals.inputs, block)
    if d_stats.mean_logits is not None:
        # The passes take the mean over the columns that they see.
        share = head.lm_head.shape[device.v_axis] / device.vocab
        d_stats = d_stats._replace(mean_logits=d_stats.mean_logits * share)
    return device.passes.gradients(residuals._replace(inputs=head), d_stats, active, options, onto)


def _gather(x: Array, axes: Axes, axis: int) -> Array:
    """Of every device along `axes`, one behind the other."""
    return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _sum_over(x: Array, axes: Axes) -> Array:
    return lax.psum(x, axes) if axes else x


def _scatter(x: Array, axes: Axes, axis: int) -> Array:
    """The sum over devices, of which each keeps its own part."""
    return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x


class _Chunks(NamedTuple):
    """The device's tokens in `chunks` chunks of `size`, the last filled up with tokens that do not count."""

    chunks: int
    size: int

    def fetch(self, device: Device, rows: Any, i: Any) -> Any:
        """A chunk of every array, of all who share: the only place where tokens are gathered."""
        first = jnp.asarray(i, jnp.int32) * self.size

        def piece(x: Array) -> Array:
            x = lax.dynamic_slice_in_dim(x, first, self.size, 0) if self.chunks > 1 else x
            return _gather(x, device.sharding.shared, 0)

        return jax.tree.map(piece, rows)

    def own(self, device: Device, x: Array) -> Array:
        """This device's rows of a gathered chunk."""
        return lax.dynamic_slice_in_dim(x, index(device.sharding.shared) * self.size, self.size, 0)

    def put(self, total: Array, x: Array, i: Any) -> Array:
        return lax.dynamic_update_slice_in_dim(total, x, jnp.asarray(i, jnp.int32) * self.size, 0)

    def fill(self, rows: Any, count: int) -> Any:
        """Every array with zeros behind, which are False in a mask."""
        more = self.chunks * self.size - count
        return jax.tree.map(lambda x: jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)), rows) if more else rows


def _chunks(device: Device, inputs: HeadInputs) -> _Chunks:
    count, width = inputs.hidden.shape
    most = GATHERED_BYTES // (inputs.hidden.dtype.itemsize * width * device.sharers)
    chunks = -(-count // max(1, most))
    return _Chunks(chunks, -(-count // chunks))


def _stats_of_chunks(device: Device, inputs: HeadInputs, outputs: tuple[str, ...]) -> tuple[TokenStats, Normaliser]:
    count, dtype, chunks = inputs.targets.size, _sums_dtype(inputs), _chunks(device, inputs)
    mask = jnp.ones(count, bool) if inputs.mask is None else inputs.mask
    rows = chunks.fill((inputs.hidden, inputs.targets, mask), count)
    own = _own_columns(device, inputs)

    def step(i: Any, chunk: Any, total: Any) -> Any:
        here = inputs._replace(hidden=chunk[0], targets=chunk[1], mask=chunk[2])
        head, options = _as_head(device, here, own)
        running = device.passes.sums(head, options, outputs)
        found = _finished(device, running, here, outputs, device.sharding.vocab_axes)
        return jax.tree.map(lambda all_, x: chunks.put(all_, chunks.own(device, x), i), total, found)

    empty = jnp.zeros(chunks.chunks * chunks.size, dtype)
    total = TokenStats(**dict.fromkeys(outputs, empty)), Normaliser(empty, empty)
    found = _walk(chunks.chunks, functools.partial(chunks.fetch, device, rows), step, total)
    return jax.tree.map(lambda x: x[:count], found)


def _gradients_of_chunks(
    device: Device, residuals: HeadResiduals, d_stats: TokenStats, active: Bool[Array, " n"]
) -> Gradients:
    inputs, wanted, sharding = residuals.inputs, residuals.wanted, device.sharding
    count, dtype, chunks = inputs.targets.size, _sums_dtype(inputs), _chunks(device, inputs)
    rows = (inputs.hidden, inputs.targets, residuals.stats, residuals.normaliser, d_stats, active)
    # A row without a token is not active: what its zeros would make is never read.
    filled = chunks.fill(rows, count)
    own = _own_columns(device, inputs)

    def step(i: Any, chunk: Any, total: Gradients) -> Gradients:
        hidden, targets, stats, normaliser, d_stats, active = chunk
        here = residuals._replace(
            inputs=inputs._replace(hidden=hidden, targets=targets, mask=active), stats=stats, normaliser=normaliser
        )
        found, d_hidden = _gradients_of(device, here, own, d_stats, active, total.lm_head), total.hidden
        if d_hidden is not None and found.hidden is not None:
            part = _sum_over(_scatter(found.hidden, sharding.shared, 0), device.adds_hidden)
            d_hidden = chunks.put(d_hidden, part.astype(d_hidden.dtype), i)
        d_bias = None if total.bias is None or found.bias is None else total.bias + found.bias
        return Gradients(d_hidden, found.lm_head, d_bias)

    total = Gradients(
        jnp.zeros_like(filled[0]) if wanted.hidden else None,
        jnp.zeros(inputs.lm_head.shape, dtype) if wanted.lm_head else None,
        jnp.zeros(inputs.bias.shape, dtype) if wanted.bias and inputs.bias is not None else None,
    )
    total = _walk(chunks.chunks, functools.partial(chunks.fetch, device, filled), step, total)

    def leave(x: Array | None, like: Array | None) -> Array | None:
        return None if x is None or like is None else _sum_over(x, device.adds_head).astype(like.dtype)

    d_hidden = None if total.hidden is None else total.hidden[:count]
    return Gradients(d_hidden, leave(total.lm_head, inputs.lm_head), leave(total.bias, inputs.bias))
