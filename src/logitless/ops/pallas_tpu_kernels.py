"""Kernel bodies of the TPU: refs in, refs out.

A block of logits is made in sub-tiles of `SUB_COLUMNS` vocabulary columns, unrolled: the compiler then runs the softmax
of one beside the product of the next. The running maximum and sums are kept for each of the 128 lanes of a register and
merged once, outside: no step of the grid reduces across lanes.

The compiler's scheduler lets a softmax that is ready take the vector units whole, and the product beside it then waits
to add up its parts. The forward pass therefore makes a sub-tile by `Cut.row_parts`: less is ready at a time.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from logitless.ops.pallas_tpu_blocks import Cut
from logitless.ops.pallas_tpu_copies import HeadScratch, HiddenRing, Step
from logitless.ops.pallas_tpu_vmem import CHUNK_ROWS, LANES, SUB_COLUMNS, up
from logitless.ops.softmax import VANISHED, RowTerms, Running, d_logits, rescaled, softcap_slope, transform_logits
from logitless.ops.tiles import product
from logitless.ops.types import LogitScalars


class HeadRefs(NamedTuple):
    """What every kernel of the head reads: a block of each."""

    scalars: LogitScalars
    targets: Any
    hidden: Any
    lm_head: Any
    bias: Any | None

    def logits(self, start: int, cut: Cut, rows: slice = slice(None)) -> Float[Array, "n v"]:
        """A sub-tile, after softcap and temperature: `[rows, SUB_COLUMNS]` in both layouts."""
        w = self.lm_head[cut.of_vocab(start, SUB_COLUMNS)]
        z = product(self.hidden[rows], w, (1, 1 - cut.v_axis), cut.dtype, cut.options)
        if self.bias is not None:
            z += self.bias[:, start : start + SUB_COLUMNS].astype(cut.dtype)
        if cut.options.logits_dtype is not None:
            z = z.astype(cut.options.logits_dtype).astype(cut.dtype)
        return transform_logits(z, self.numbers())

    def ahead(self, j: Any, cut: Cut) -> Int[Array, "n lanes"]:
        """Each target's column within the block, less the lane."""
        return self.targets[...] - j * cut.block_v - lax.broadcasted_iota(jnp.int32, (cut.block_n, LANES), 1)

    def numbers(self) -> LogitScalars:
        return jax.tree.map(lambda ref: ref[0], self.scalars)


class Ranges(NamedTuple):
    """Smallest and largest target of each block of tokens, in SMEM."""

    first: Any
    last: Any

    def meet(self, token: Any, j: Any, cut: Cut) -> Any:
        """Whether a block of the vocabulary may hold a target of a block of tokens."""
        start = j * cut.block_v
        return (self.last[token] >= start) & (self.first[token] < start + cut.block_v)


def forward_kernel(head: HeadRefs, ranges: Ranges, running: Running, *, cut: Cut) -> None:
    """Online softmax of a block of tokens over the vocabulary.

    Grid: `(cores, token blocks of a core, vocabulary blocks)`. The outputs, each `[block_n, LANES]`, stay in VMEM from
    step to step and carry the sums. A target's column is none of those that are summed. The tokens come sorted by their
    targets, so that few steps meet any; the others need not look for them.
    """
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _start():
        start_sums(running, cut)

    def meet(columns: int, targets: bool) -> None:
        parts = [(rows, jax.tree.map(lambda ref, rows=rows: ref.at[rows], running)) for rows in cut.row_parts]
        states = [jax.tree.map(lambda ref: ref[...], refs) for _, refs in parts]
        ahead = head.ahead(j, cut) if targets else None
        for start in range(0, columns, SUB_COLUMNS):
            for k, (rows, _) in enumerate(parts):
                here = None if ahead is None else ahead[rows] - start
                states[k] = meet_lanes(states[k], head.logits(start, cut, rows), here, columns - start, cut)
        for (_, refs), state in zip(parts, states, strict=True):
            put_sums(refs, state)

    _on_each_block_with_targets(j, ranges, cut, meet)


def _token_block(cut: Cut) -> Any:
    """Which block of tokens a step of a grid with the tokens outside is at; the cores take turns."""
    return pl.program_id(1) * cut.cores + pl.program_id(0)


def _on_each_block_with_targets(j: Any, ranges: Ranges, cut: Cut, run: Callable[[int, bool], None]) -> None:
    """`on_each_block`, told whether the block may hold targets; the last one is taken to."""
    token = _token_block(cut)

    def either(columns: int) -> None:
        lax.cond(ranges.meet(token, j, cut), lambda: run(columns, True), lambda: run(columns, False))

    if cut.last == cut.block_v:
        either(cut.block_v)
    else:
        pl.when(j < cut.blocks - 1)(lambda: either(cut.block_v))
        pl.when(j == cut.blocks - 1)(lambda: run(cut.last, True))


def start_sums(running: Running, cut: Cut) -> None:
    """An online softmax that has met no column yet."""
    put_sums(running, (cut.lowest, 0.0, 0.0, 0.0, 0.0))


def put_sums(refs: Running, values: Sequence[Any]) -> None:
    for ref, x in zip(refs, values, strict=True):
        if ref is not None:
            ref[...] = jnp.full(ref.shape, x, ref.dtype) if isinstance(x, float) else x


def on_each_block(j: Int[Array, ""], cut: Cut, run: Any) -> None:
    """Runs with the columns of the block: the last one, where it is shorter, as a second copy of its own."""
    if cut.last == cut.block_v:
        run(cut.block_v)
        return
    pl.when(j < cut.blocks - 1)(lambda: run(cut.block_v))
    pl.when(j == cut.blocks - 1)(lambda: run(cut.last))


def meet_lanes(
    state: Running, z: Float[Array, "n v"], ahead: Int[Array, "n lanes"] | None, columns: int, cut: Cut
) -> Running:
    """Adds a sub-tile to each lane's online softmax.

    Args:
        state: the sums of each lane, `[n, LANES]`.
        z: logits.
        ahead: the target's column within the sub-tile, less the lane; None where no target is among them.
        columns: of the sub-tile that the vocabulary has; what stands behind them is anything.
        cut: the kernel's static side.
    """
    maximum, total, weighted, plain, target = state
    xs, plain, target = _meet_columns(z, ahead, columns, plain, target, cut)
    # A tree, not a chain: each step of a chain would wait for the one before.
    maximum, before = jnp.maximum(maximum, _tree(jnp.maximum, xs)), maximum
    shift = before - maximum
    if weighted is not None:
        # It is multiplied, and may be -inf.
        shift = jnp.maximum(shift, VANISHED)
    total, weighted = rescaled(total, weighted, shift)
    _, total, weighted = _add_exponentials([x - maximum for x in xs], total, weighted)
    return Running(maximum, total, weighted, plain, target)


def _meet_columns(
    z: Float[Array, "n v"],
    ahead: Int[Array, "n lanes"] | None,
    columns: int,
    plain: Array | None,
    target: Array,
    cut: Cut,
) -> tuple[list[Array], Array | None, Array]:
    """The sub-tile by lanes, -inf where a column takes no part; the plain sum, and the target's logit if it is here."""
    xs = []
    for k in range(0, min(columns, z.shape[1]), LANES):
        x, exists = z[:, k : k + LANES], None
        if k + LANES > columns:
            exists = lax.broadcasted_iota(jnp.int32, x.shape, 1) < columns - k
            x = jnp.where(exists, x, -jnp.inf)
        if plain is not None:
            counts = x > -jnp.inf if cut.options.padded else exists
            plain += x if counts is None else jnp.where(counts, x, 0.0)
        if ahead is not None:
            own = ahead == k
            target = jnp.where(own, x, target)
            x = jnp.where(own, -jnp.inf, x)
        xs.append(x)
    return xs, plain, target


def _add_exponentials(
    shifted: list[Array], total: Array, weighted: Array | None
) -> tuple[list[Array], Array, Array | None]:
    """`e^x` of each, added to the sums."""
    es = [jnp.exp(x) for x in shifted]
    if weighted is not None:
        weighted += _tree(jnp.add, [e * jnp.maximum(x, VANISHED) for e, x in zip(es, shifted, strict=True)])
    return es, total + _tree(jnp.add, es), weighted


def _tree(combine: Any, parts: list[Array]) -> Array:
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


class SweepRefs(NamedTuple):
    """What the sweep writes, beside the online softmax, for the gradient of a frozen head.

    Attributes:
        mean: softmax-weighted mean of the head's columns but the target's, `[block_n, D]`; 0 where there is no other.
        own: the target's column of the head, `[block_n, D]`; None where XLA can gather it without copying the head.
    """

    mean: Any
    own: Any | None


class SweepScratch(NamedTuple):
    """VMEM of the sweep: the weighted sum, a block of logits, and what it weighs the head's columns by."""

    sums: Any
    logits: Any
    weights: Any


def sweep_kernel(
    head: HeadRefs,
    ranges: Ranges,
    chunks: Ranges | None,
    running: Running,
    out: SweepRefs,
    scratch: SweepScratch,
    *,
    cut: Cut,
) -> None:
    """`forward_kernel` that also carries the softmax-weighted sum of the head's columns, but for the target's own.

    As flash attention does with queries `hidden` and keys and values `lm_head`: the maximum is one for all lanes, and
    the sum is rescaled where it grows.
    """
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _start():
        start_sums(running, cut)
        scratch.sums[...] = jnp.zeros(scratch.sums.shape, scratch.sums.dtype)
        if out.own is not None:
            out.own[...] = jnp.zeros(out.own.shape, out.own.dtype)

    if cut.last < cut.block_v:
        pl.when(j == cut.blocks - 1)(lambda: _clear(head.lm_head, cut.v_axis, cut.last))
    if out.own is not None:
        assert chunks is not None
        collect = functools.partial(_collect_targets, head, chunks, out.own, j, cut)
        pl.when(ranges.meet(_token_block(cut), j, cut))(collect)
    before = running.maximum[...]
    meet = functools.partial(_keep_logits, head, running, scratch.logits, j, cut)
    _on_each_block_with_targets(j, ranges, cut, meet)
    maximum = jnp.broadcast_to(jnp.max(running.maximum[...], axis=1, keepdims=True), before.shape)
    shift = jnp.maximum(before - maximum, VANISHED)
    running.maximum[...] = maximum

    def add(whole: int) -> None:
        _weigh(head, running, scratch, shift, whole)
        w = head.lm_head[cut.of_vocab(0, whole)].astype(scratch.weights.dtype)
        part = product(scratch.weights[:, :whole], w, (1, cut.v_axis), cut.dtype, cut.options)
        scratch.sums[...] = scratch.sums[...] * jnp.exp(shift[:, :1]) + part

    on_each_block(j, cut, lambda columns: add(up(columns, LANES)))

    @pl.when(j == cut.blocks - 1)
    def _leave():
        total = jnp.sum(running.total[...], axis=1, keepdims=True)
        out.mean[...] = jnp.where(total > 0, scratch.sums[...] / total, 0.0).astype(out.mean.dtype)


def chunk_rows(block_n: int) -> int:
    """Tokens whose targets are collected together: a power of 2 that divides the block."""
    return min(CHUNK_ROWS, block_n & -block_n)


def _collect_targets(head: HeadRefs, chunks: Ranges, own: Any, j: Any, cut: Cut) -> None:
    """Adds to each token the column of its target, where it stands in this block: an exact product with 0 and 1.

    The tokens are sorted by their targets: a chunk of them meets few sub-tiles, and each sub-tile few chunks.
    """
    rows = chunk_rows(cut.block_n)
    exact = replace(cut.options, precision=None)
    first_chunk = _token_block(cut) * (cut.block_n // rows)
    for k in range(cut.block_n // rows):
        place = slice(k * rows, (k + 1) * rows)
        column = head.targets[place] - j * cut.block_v
        lowest, highest = (x[first_chunk + k] - j * cut.block_v for x in (chunks.first, chunks.last))

        def collect(sub: Any, carry: None, place: slice = place, column: Array = column) -> None:
            start = pl.multiple_of(sub * SUB_COLUMNS, SUB_COLUMNS)
            columns = pl.ds(start, SUB_COLUMNS)
            w = head.lm_head[:, columns] if cut.v_axis else head.lm_head[columns, :]
            is_own = lax.broadcasted_iota(jnp.int32, (rows, SUB_COLUMNS), 1) == column - start
            part = product(is_own.astype(w.dtype), w, (1, cut.v_axis), cut.dtype, exact)
            own[place] += part.astype(own.dtype)

        begin = jnp.maximum(lowest, 0) // SUB_COLUMNS
        end = (jnp.clip(highest, -1, cut.block_v - 1) + SUB_COLUMNS) // SUB_COLUMNS
        lax.fori_loop(begin, end, collect, None)


def _keep_logits(head: HeadRefs, running: Running, logits: Any, j: Any, cut: Cut, columns: int, targets: bool) -> None:
    """Makes a block of logits, -inf where a column takes no part, and takes from it what needs no common maximum."""
    ahead = head.ahead(j, cut) if targets else None
    state = jax.tree.map(lambda ref: ref[...], running)
    maximum, plain, target = state.maximum, state.plain, state.target
    for start in range(0, columns, SUB_COLUMNS):
        here = None if ahead is None else ahead - start
        xs, plain, target = _meet_columns(head.logits(start, cut), here, columns - start, plain, target, cut)
        for k, x in enumerate(xs):
            logits[:, start + k * LANES : start + (k + 1) * LANES] = x
        maximum = jnp.maximum(maximum, _tree(jnp.maximum, xs))
    put_sums(running, (maximum, state.total, state.weighted, plain, target))


def _weigh(head: HeadRefs, running: Running, scratch: SweepScratch, shift: Array, whole: int) -> None:
    """The exponentials of a block: into the sums, and with the slope of each logit into what weighs the head's columns.

    Args:
        head: with the numbers of the softcap.
        running: sums about the maximum before, but for the maximum.
        scratch: has the logits, and takes the weights.
        shift: of the maximum.
        whole: columns of the block, in whole registers.
    """
    state, scalars = jax.tree.map(lambda ref: ref[...], running), head.numbers()
    total, weighted = rescaled(state.total, state.weighted, shift)
    for start in range(0, whole, SUB_COLUMNS):
        stop = min(start + SUB_COLUMNS, whole)
        places = [slice(k, k + LANES) for k in range(start, stop, LANES)]
        zs = [scratch.logits[:, place] for place in places]
        es, total, weighted = _add_exponentials([z - state.maximum for z in zs], total, weighted)
        # Cast together: of a single column of registers each would be packed, and stored, by itself.
        weights = jnp.concatenate(es, axis=1)
        if scalars.softcap is not None:
            weights *= softcap_slope(jnp.concatenate(zs, axis=1), scalars)
        scratch.weights[:, start:stop] = weights.astype(scratch.weights.dtype)
    put_sums(running, (state.maximum, total, weighted, state.plain, state.target))


class GradientRefs(NamedTuple):
    """What the backward kernel writes, None where nobody wants it.

    Attributes:
        hidden: `[cores, K, D]` in float32, in HBM.
        lm_head: in the head's dtype, or that of the sums: in HBM, or a block where it leaves whole.
        bias: `[1, block_v]` in float32.
    """

    hidden: Any
    lm_head: Any
    bias: Any


class BackwardScratch(NamedTuple):
    """VMEM of the backward kernel: the gradient of a block of logits, and what the wanted gradients need."""

    d_logits: Any
    ring: HiddenRing | None
    head: HeadScratch | None


def backward_kernel(
    head: HeadRefs, terms: RowTerms, onto: Any, out: GradientRefs, scratch: BackwardScratch, *, cut: Cut
) -> None:
    """Every gradient from one pass over the logits; grid `(cores, vocabulary blocks of a core, token blocks)`.

    Each core has its own blocks of the head and its own `d_hidden`: no two ever add to one array. `onto` is what the
    gradient of the head is added to, in the place of which it is written, or None.
    """
    core, i = pl.program_id(0), pl.program_id(2)
    first = core * cut.blocks_of_core
    j = first + pl.program_id(1)
    blocks = jnp.minimum(cut.blocks_of_core, cut.blocks - first) if cut.blocks % cut.cores else cut.blocks_of_core
    step = Step(token=i, tokens=pl.num_programs(2), block=pl.program_id(1), blocks=blocks)

    def run() -> None:
        _backward_step(head, terms, out, scratch, step, core, j, cut)

    if cut.blocks % cut.cores:
        pl.when(j < cut.blocks)(run)
    else:
        run()


def _backward_step(
    head: HeadRefs,
    terms: RowTerms,
    out: GradientRefs,
    scratch: BackwardScratch,
    step: Step,
    core: Any,
    j: Any,
    cut: Cut,
) -> None:
    i = step.token
    ring = None if scratch.ring is None else scratch.ring._replace(total=out.hidden.at[core])
    if ring is not None:
        ring.open(step)

    @pl.when(i == 0)
    def _start():
        if scratch.head is not None:
            scratch.head.sums[...] = jnp.zeros(scratch.head.sums.shape, scratch.head.sums.dtype)
        if out.bias is not None:
            out.bias[...] = jnp.zeros(out.bias.shape, out.bias.dtype)
        if cut.last < cut.block_v:
            # What stands behind the vocabulary may be NaN, and a NaN times 0 is one too.
            pl.when(j == cut.blocks - 1)(lambda: _clear(head.lm_head, cut.v_axis, cut.last))

    make_d_logits(head, terms, out.bias, scratch.d_logits, j, cut)
    if scratch.head is not None:
        d_x, h = scratch.d_logits[...], head.hidden[...].astype(scratch.d_logits.dtype)
        operands = (h, d_x) if cut.v_axis else (d_x, h)
        scratch.head.sums[...] += product(*operands, (0, 0), cut.dtype, cut.options)

        leave = functools.partial(scratch.head.leave, out.lm_head, j, cut)
        pl.when(i == step.tokens - 1)(lambda: on_each_block(j, cut, leave))
    if ring is not None:
        # No product before the wait: it would be kept, a block of float32, from one side of the branch to the other.
        d_hidden, w = ring.ready(step), head.lm_head[...].astype(scratch.d_logits.dtype)
        d_hidden[...] += product(scratch.d_logits[...], w, (1, cut.v_axis), cut.dtype, cut.options)
        ring.close(step)


def d_hidden_kernel(head: HeadRefs, terms: RowTerms, d_hidden: Any, d_x: Any, sums: Any, *, cut: Cut) -> None:
    """Gradient of the hidden states alone; grid `(cores, token blocks of a core, vocabulary blocks)`."""
    j = pl.program_id(2)

    @pl.when(j == 0)
    def _start():
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    if cut.last < cut.block_v:
        pl.when(j == cut.blocks - 1)(lambda: _clear(head.lm_head, cut.v_axis, cut.last))
    make_d_logits(head, terms, None, d_x, j, cut)
    w = head.lm_head[...].astype(d_x.dtype)
    sums[...] += product(d_x[...], w, (1, cut.v_axis), cut.dtype, cut.options)

    @pl.when(j == cut.blocks - 1)
    def _leave():
        d_hidden[...] = sums[...].astype(d_hidden.dtype)


def make_d_logits(head: HeadRefs, terms: RowTerms, d_bias: Any | None, d_x: Any, j: Any, cut: Cut) -> None:
    """The gradient of a block of `h W + b`, cast once, into `d_x`; its column sums are added to `d_bias`."""
    scalars = head.numbers()
    rows = jax.tree.map(lambda ref: ref[...], terms)
    column = head.targets[...] - j * cut.block_v
    for start in range(0, cut.block_v, SUB_COLUMNS):
        z = head.logits(start, cut)
        own = lax.broadcasted_iota(jnp.int32, z.shape, 1) == column - start
        tile = d_logits(z, own, rows, scalars, impossible=head.bias is not None)
        if d_bias is not None:
            d_bias[:, start : start + SUB_COLUMNS] += jnp.sum(tile, axis=0, keepdims=True)
        d_x[:, start : start + SUB_COLUMNS] = tile.astype(d_x.dtype)
    if cut.last < cut.block_v:
        pl.when(j == cut.blocks - 1)(lambda: _clear(d_x, 1, cut.last))


def _clear(ref: Any, axis: int, start: int) -> None:
    """Zeros from `start` on along an axis, by whole registers."""
    size, whole = ref.shape[axis], up(start, LANES)

    def part(first: int, end: int) -> tuple[slice, slice]:
        return (slice(None), slice(first, end)) if axis else (slice(first, end), slice(None))

    if start < whole:
        place = part(whole - LANES, whole)
        x = ref[place]
        kept = lax.broadcasted_iota(jnp.int32, x.shape, axis) < start - (whole - LANES)
        ref[place] = jnp.where(kept, x, jnp.zeros_like(x))
    if whole < size:
        place = part(whole, size)
        ref[place] = jnp.zeros_like(ref[place])
