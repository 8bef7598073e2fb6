"""The LM head on a TPU as Pallas kernels: a softmax and its gradients, and no logits in HBM.

Forward: tokens outside, vocabulary inside; nothing but a few numbers per token leaves. Backward: vocabulary outside,
tokens inside; the logits are made again, and the gradients taken from them while they are in VMEM. Where the gradient
of the hidden states alone is wanted: tokens outside again, and nothing is read twice.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from logitless._arrays import accumulator, common_dtype
from logitless.ops.blocks import TokenCut, cut_tokens, sort_tokens, take
from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals, Passes, head_vjp
from logitless.ops.manual import shapes_of_kernel
from logitless.ops.pallas_tpu_blocks import Cut, backward_kernels, blocks_of, takes_sweep
from logitless.ops.pallas_tpu_copies import RING, STAGED_COLUMNS, HeadScratch, HiddenRing
from logitless.ops.pallas_tpu_kernels import (
    LANES,
    BackwardScratch,
    GradientRefs,
    HeadRefs,
    Ranges,
    SweepRefs,
    SweepScratch,
    backward_kernel,
    chunk_rows,
    d_hidden_kernel,
    forward_kernel,
    sweep_kernel,
)
from logitless.ops.pallas_tpu_vmem import leaves_in_pieces
from logitless.ops.softmax import Normaliser, RowTerms, Running, finish, merge, row_terms, softcap_slope
from logitless.ops.tiles import Gradients, terms_in_places
from logitless.ops.types import HeadOptions, LogitScalars, PrecisionLike, TokenStats


def linear_token_stats_pallas_tpu(
    hidden: Float[Array, "N D"],
    lm_head: Float[Array, "..."],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, " N"],
    mask: Bool[Array, " N"] | None,
    scalars: LogitScalars,
    options: HeadOptions,
) -> TokenStats:
    """`TokenStats` of N tokens; the contract is that of `logitless.ops.api.linear_token_stats`."""
    if hidden.shape[1] == 1:
        # Mosaic makes no product of one number of each: a second one, 0.
        hidden = jnp.pad(hidden, ((0, 0), (0, 1)))
        lm_head = jnp.pad(lm_head, [(0, 1) if axis == "D" else (0, 0) for axis in options.layout])
    return _token_stats(hidden, lm_head, bias, targets, mask, scalars, options)


def interpreted(run: Callable[..., TokenStats]) -> Callable[..., TokenStats]:
    """The same kernels in JAX's simulation of a TPU, on any device."""

    # With the signature of `run`, by which the door's jit finds its static options, of a head or of logits.
    @functools.wraps(run)
    def interpret(*args: Any) -> TokenStats:
        return run(*args[:-1], replace(args[-1], interpret=args[-1].interpret or pltpu.InterpretParams()))

    return interpret


class _Others(NamedTuple):
    """What the sweep leaves for the gradient of a frozen head, by places; no rows where none was made.

    Attributes:
        mean: softmax-weighted mean of the head's columns but the target's, `[K, D]`.
        own: the target's column, `[K, D]`; no rows where it is gathered in the backward pass.
        order: token in each place.
        slots: place of each token.
    """

    mean: Float[Array, "K D"]
    own: Float[Array, "L D"]
    order: Int[Array, " P"]
    slots: Int[Array, " N"]


def _forward(
    inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...], wanted: Differentiated | None
) -> tuple[TokenStats, Normaliser, _Others]:
    frozen = wanted is not None and wanted.hidden and not wanted.lm_head and not wanted.bias
    frozen = frozen and takes_sweep(inputs.hidden, inputs.lm_head, options)
    cut = _cut("sweep" if frozen else "forward", inputs, options)
    tokens, targets, refs = _sorted(inputs, cut)
    in_vocab = targets < cut.vocab
    if frozen:
        running, (mean, own) = _run_sweep(refs, targets, cut, tokens.blocks, outputs)
    else:
        running = _run_forward(refs, targets, cut, tokens.blocks, outputs)
        mean = own = jnp.zeros((0, refs.hidden.shape[1]), refs.hidden.dtype)
    results = finish(merge_lanes(running, in_vocab), in_vocab, cut.vocab, outputs)
    return *jax.tree.map(tokens.scatter, results), _Others(mean, own, tokens.order, tokens.slots)


def _sorted(inputs: HeadInputs, cut: Cut) -> tuple[TokenCut, Int[Array, " K"], HeadRefs]:
    """The tokens by their targets, which few blocks of the vocabulary then meet, and what the kernels read."""
    tokens = sort_tokens(inputs.targets, inputs.mask, cut.block_n, even=cut.cores)
    targets = tokens.gather(inputs.targets, cut.vocab)
    return tokens, targets, _refs(inputs, tokens.gather(inputs.hidden), targets, cut)


def _sums(inputs: HeadInputs, options: HeadOptions, outputs: tuple[str, ...]) -> Running:
    """The online softmax of each token over a part of the vocabulary."""
    cut = _cut("forward", inputs, options)
    tokens, targets, refs = _sorted(inputs, cut)
    running = _run_forward(refs, targets, cut, tokens.blocks, outputs)
    return jax.tree.map(tokens.scatter, merge_lanes(running, targets < cut.vocab))


def _backward(
    residuals: HeadResiduals, d_stats: TokenStats, active: Bool[Array, " N"], options: HeadOptions
) -> Gradients:
    if residuals.extra.mean.shape[0] and d_stats.entropy is None and d_stats.mean_logits is None:
        return Gradients(_d_hidden_of_sweep(residuals, d_stats, active, options), None, None)
    return _gradients(residuals, d_stats, active, options)


def _gradients(
    residuals: HeadResiduals,
    d_stats: TokenStats,
    active: Bool[Array, " N"],
    options: HeadOptions,
    onto: Float[Array, "..."] | None = None,
) -> Gradients:
    """By the kernels that make the logits again."""
    inputs, wanted = residuals.inputs, residuals.wanted
    if not wanted.lm_head and not wanted.bias:
        kernels = ("d_hidden",)
    elif not wanted.hidden:
        kernels = ("d_lm_head",)
    else:
        kernels = backward_kernels(inputs.hidden, inputs.lm_head, options)
    found = Gradients(None, None, None)
    for kernel in kernels:
        some = gradients_by(kernel, residuals, d_stats, active, options, onto)
        found = Gradients(*(new if old is None else old for old, new in zip(found, some, strict=True)))
    return found


def gradients_by(
    kernel: str,
    residuals: HeadResiduals,
    d_stats: TokenStats,
    active: Bool[Array, " N"],
    options: HeadOptions,
    onto: Float[Array, "..."] | None = None,
) -> Gradients:
    """The wanted gradients that a kernel makes, that of the head added to `onto`, whose place it takes."""
    inputs, wanted = residuals.inputs, residuals.wanted
    cut = _cut(kernel, inputs, options)
    tokens = cut_tokens(active, inputs.hidden.shape[0], cut.block_n, even=cut.cores)
    targets, terms = terms_in_places(residuals, d_stats, tokens, cut.vocab)
    refs = _refs(inputs, tokens.gather(inputs.hidden), targets, cut)
    terms = as_columns(terms)
    if kernel == "d_hidden":
        d_hidden = _run_d_hidden(refs, terms, cut, tokens.blocks)
        return Gradients(tokens.scatter(d_hidden), None, None)
    # At least one block, of zeros where no token is active: the head's gradient is written in any case.
    blocks = jnp.maximum(tokens.blocks, 1)
    in_place = leaves_in_pieces(cut.vocab, options.layout)
    ring, added_to = kernel == "backward", onto if in_place and wanted.lm_head else None
    d_hidden, d_lm_head, d_bias = _run_backward(refs, terms, cut, blocks, wanted, added_to, ring=ring)
    if onto is not None and d_lm_head is not None and not in_place:
        d_lm_head += onto
    return Gradients(
        None if d_hidden is None else tokens.scatter(d_hidden).astype(_leaving(inputs.hidden.dtype, cut)),
        d_lm_head,
        None if d_bias is None or inputs.bias is None else d_bias[0].astype(_leaving(inputs.bias.dtype, cut)),
    )


def _leaving(dtype: np.dtype, cut: Cut) -> np.dtype:
    """Of a gradient: that of its input, or of the sums."""
    return cut.dtype if cut.options.wide_gradients else dtype


_token_stats = head_vjp("pallas_tpu", _forward, _backward)
PASSES = Passes(_sums, _gradients)


def _d_hidden_of_sweep(
    residuals: HeadResiduals, d_stats: TokenStats, active: Bool[Array, " N"], options: HeadOptions
) -> Float[Array, "N D"]:
    """Gradient of the hidden states of a frozen head, elementwise from what the sweep has kept.

    `d logprob / d hidden` is `(1 - p) (f_target head[target] - sum_k q_k f_k head[k])` over the other columns k, where
    q is their softmax and f the slope of the logit: the target's column never cancels against a mean that contains it.
    The mean is rounded to the arrays' dtype on its way, as the weights are.
    """
    (_, lm_head, _, targets, _, scalars), stats, others = residuals.inputs, residuals.stats, residuals.extra
    vocab = lm_head.shape[options.layout.index("V")]
    terms = row_terms(stats, residuals.normaliser, d_stats, scalars, vocab)
    dtype = terms.target.dtype
    # A target without probability, or outside the vocabulary, is no column to speak of.
    given = jnp.isfinite(stats.logprobs)
    of_target = jnp.where(given, terms.target, 0.0)
    if scalars.softcap is not None:
        z_target = stats.logprobs + residuals.normaliser.maximum + jnp.log(residuals.normaliser.total)
        of_target *= jnp.where(given, softcap_slope(z_target, scalars), 0.0)
    of_others = terms.shared * residuals.normaliser.total * jnp.where(given, -jnp.expm1(stats.logprobs), 1.0)
    # Put together in the order of the places, so that one array of the hidden states' size is moved, and not two.
    of_target, of_others, active, targets = (take(x, others.order) for x in (of_target, of_others, active, targets))
    # XLA would transpose the whole head to gather columns.
    own = jnp.take(lm_head, targets, axis=0, mode="clip") if options.layout == "VD" else others.own
    d_hidden = of_target[:, None] * own.astype(dtype) + of_others[:, None] * others.mean.astype(dtype)
    d_hidden = jnp.where(active[:, None], d_hidden, 0.0).astype(residuals.inputs.hidden.dtype)
    return take(d_hidden, others.slots)


def _cut(kernel: str, inputs: HeadInputs, options: HeadOptions) -> Cut:
    """How the kernel cuts the problem; raises ValueError for block sizes that it cannot have."""
    hidden, lm_head = inputs.hidden, inputs.lm_head
    vocab = lm_head.shape[options.layout.index("V")]
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    blocks = blocks_of(kernel, hidden, lm_head, options)
    options = replace(options, precision=_precision(options.precision))
    cut = Cut(vocab, blocks.block_n, blocks.block_v, blocks.vmem_bytes, blocks.cores, dtype, options)
    if kernel in ("backward", "d_lm_head"):
        # The cores share the vocabulary: one without a block of its own would write another's.
        cut = replace(cut, cores=-(-cut.blocks // cut.blocks_of_core))
    return cut


def _precision(given: PrecisionLike) -> PrecisionLike:
    """None for the highest, which it means: Mosaic takes no word for bfloat16, whose products are exact in one pass."""
    x = given[0] if isinstance(given, tuple) else given
    return None if x is not None and lax.Precision(x) == lax.Precision.HIGHEST else given


def _refs(inputs: HeadInputs, hidden: Float[Array, "K D"], targets: Int[Array, " K"], cut: Cut) -> HeadRefs:
    """The arrays that the kernels read; numbers per token and per column as matrices, which is what a block can be."""
    return HeadRefs(
        scalars=jax.tree.map(lambda x: x.astype(cut.dtype).reshape(1), inputs.scalars),
        targets=targets[:, None],
        hidden=hidden,
        lm_head=inputs.lm_head,
        bias=None if inputs.bias is None else inputs.bias[None, :],
    )


def as_columns(terms: RowTerms) -> RowTerms:
    """Numbers per token as matrices."""
    return jax.tree.map(lambda x: x[:, None], terms)


def _ranges(targets: Int[Array, " K"], size: int, vocab: int) -> Ranges:
    """Smallest and largest target of each `size` places; one without a token has none."""
    blocks = targets.reshape(-1, size)
    return Ranges(jnp.min(blocks, axis=1), jnp.max(jnp.where(blocks < vocab, blocks, -1), axis=1))


def _call(
    kernel: Callable[..., None],
    name: str,
    blocks: Any,
    cut: Cut,
    in_specs: Any,
    out: tuple[list[Any], list[Any]],
    scratch: tuple[Any, ...] = (),
    *,
    by_tokens: bool,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """A `pallas_call` over trees of arrays.

    Args:
        kernel: its body.
        name: of it, as profiles show it.
        blocks: of tokens: a run-time number where some are skipped.
        cut: the kernel's static side.
        in_specs: a tree of blocks for each argument.
        out: a tree of blocks and one of shapes for each output.
        scratch: what else it holds.
        by_tokens: whether the grid has the blocks of tokens outside, or those of the vocabulary.
        aliases: flat arguments whose place a flat result takes.
    """
    specs, shapes = out

    def run(blocks: Any, *args: Any) -> Any:
        of_core = (-(-blocks // cut.cores), cut.blocks) if by_tokens else (cut.blocks_of_core, blocks)
        if by_tokens and cut.cores > 1 and not isinstance(blocks, int):
            # Never more than this many; said in the program, `logitless.plan` can read it there.
            of_core = (jnp.minimum(of_core[0], args[0].hidden.shape[0] // (cut.block_n * cut.cores)), cut.blocks)
        return pl.pallas_call(
            functools.partial(kernel, cut=cut),
            grid=(cut.cores, *of_core),
            in_specs=in_specs,
            out_specs=specs,
            out_shape=shapes_of_kernel(shapes, args),
            scratch_shapes=scratch,
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel" if cut.cores > 1 else "arbitrary", "arbitrary", "arbitrary"),
                vmem_limit_bytes=cut.vmem_bytes,
            ),
            name=f"logitless_{name}",
            interpret=cut.options.interpret or False,
        )(*args)

    # A batch runs one after the other: a batched grid would have an axis more than the kernels know of.
    if isinstance(blocks, int):
        return sequential_vmap(functools.partial(run, blocks))
    return functools.partial(sequential_vmap(run), blocks)


def _spec(
    cut: Cut, by_tokens: bool, shape: tuple[int, int], *axes: str | None, buffers: int | None = None
) -> pl.BlockSpec:
    """A block; `axes` says which index of the grid moves it along each: that of the tokens, of the vocabulary, none."""

    def place(core: Any, outer: Any, inner: Any) -> tuple[Any, ...]:
        if by_tokens:
            at = {"n": outer * cut.cores + core, "v": inner}
        else:
            # The last core may have a block less: it meets its last one twice, and does nothing then.
            at = {"n": inner, "v": jnp.minimum(core * cut.blocks_of_core + outer, cut.blocks - 1)}
        return tuple(0 if axis is None else at[axis] for axis in axes)

    return pl.BlockSpec(shape, place, pipeline_mode=None if buffers is None else pl.Buffered(buffers))


def _specs(refs: HeadRefs, cut: Cut, by_tokens: bool) -> HeadRefs:
    """Block of each array that a kernel reads."""
    spec, d = functools.partial(_spec, cut, by_tokens), refs.hidden.shape[1]
    return HeadRefs(
        scalars=_scalar_specs(refs.scalars),
        targets=spec((cut.block_n, 1), "n", None),
        hidden=spec((cut.block_n, d), "n", None),
        lm_head=spec((d, cut.block_v), None, "v") if cut.v_axis else spec((cut.block_v, d), "v", None),
        bias=None if refs.bias is None else spec((1, cut.block_v), None, "v"),
    )


def _term_specs(terms: RowTerms, specs: HeadRefs) -> RowTerms:
    return jax.tree.map(lambda _: specs.targets, terms)


def _lane_sums(refs: HeadRefs, cut: Cut, outputs: tuple[str, ...]) -> tuple[Running, Running]:
    """Block and shape of each sum of the online softmax, lane by lane: `[K, LANES]`."""
    shape = jax.ShapeDtypeStruct((refs.hidden.shape[0], LANES), cut.dtype)
    spec = _spec(cut, True, (cut.block_n, LANES), "n", None)
    return each_sum(spec, outputs), each_sum(shape, outputs)


def each_sum(x: Any, outputs: tuple[str, ...]) -> Running:
    """`x` for each sum that the outputs need."""
    return Running(x, x, x if "entropy" in outputs else None, x if "mean_logits" in outputs else None, x)


def _run_forward(refs: HeadRefs, targets: Int[Array, " K"], cut: Cut, blocks: Any, outputs: tuple[str, ...]) -> Running:
    """The online softmax of each token, lane by lane."""
    spec, shape = _lane_sums(refs, cut, outputs)
    ranges = _ranges(targets, cut.block_n, cut.vocab)
    in_specs = [_specs(refs, cut, True), _scalar_specs(ranges)]
    out = ([spec], [shape])
    return _call(forward_kernel, "forward", blocks, cut, in_specs, out, by_tokens=True)(refs, ranges)[0]


def _run_sweep(
    refs: HeadRefs, targets: Int[Array, " K"], cut: Cut, blocks: Any, outputs: tuple[str, ...]
) -> tuple[Running, tuple[Float[Array, "K D"], Float[Array, "L D"]]]:
    """The same, and for each token the mean of the head's other columns, and in the layout DV its target's column."""
    (places, d), specs = refs.hidden.shape, _specs(refs, cut, True)
    common = common_dtype(refs.hidden.dtype, refs.lm_head.dtype)
    spec, shape = _lane_sums(refs, cut, outputs)
    ranges, chunks, own = _ranges(targets, cut.block_n, cut.vocab), None, None
    if cut.v_axis:
        chunks = _ranges(targets, chunk_rows(cut.block_n), cut.vocab)
        own = jax.ShapeDtypeStruct((places, d), refs.lm_head.dtype)
    # One buffer each: they leave once for a block of tokens, and two would not fit.
    leaving = _spec(cut, True, (cut.block_n, d), "n", None, buffers=1)
    out = (
        [spec, SweepRefs(leaving, None if own is None else leaving)],
        [shape, SweepRefs(jax.ShapeDtypeStruct((places, d), common), own)],
    )
    tile, rows = (cut.block_n, cut.block_v), (cut.block_n, d)
    scratch = (SweepScratch(pltpu.VMEM(rows, cut.dtype), pltpu.VMEM(tile, cut.dtype), pltpu.VMEM(tile, common)),)
    in_specs = [specs, _scalar_specs(ranges), _scalar_specs(chunks)]
    run = _call(sweep_kernel, "sweep", blocks, cut, in_specs, out, scratch, by_tokens=True)
    running, (mean, collected) = run(refs, ranges, chunks)
    return running, (mean, jnp.zeros((0, d), mean.dtype) if collected is None else collected)


def _scalar_specs(numbers: Any) -> Any:
    """Of numbers that the scalar unit reads."""
    return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), numbers)


def merge_lanes(lanes: Running, in_vocab: Bool[Array, " K"]) -> Running:
    """The online softmax of each token from those of its lanes; a target that is no column was never met."""
    largest, add = (functools.partial(reduce, axis=1, keepdims=True) for reduce in (jnp.max, jnp.sum))
    merged = jax.tree.map(lambda x: x[:, 0], merge(lanes, largest, add))
    # A lane that has not met the target has 0 for it.
    target = jnp.where(in_vocab, jnp.sum(lanes.target, axis=1), -jnp.inf)
    return merged._replace(maximum=jnp.where(merged.total == 0, -jnp.inf, merged.maximum), target=target)


def _run_d_hidden(refs: HeadRefs, terms: RowTerms, cut: Cut, blocks: Any) -> Float[Array, "K D"]:
    """Gradient of the hidden states alone, in their dtype."""
    places, d = refs.hidden.shape
    specs = _specs(refs, cut, True)
    out = ([specs.hidden], [jax.ShapeDtypeStruct((places, d), _leaving(refs.hidden.dtype, cut))])
    common = common_dtype(refs.hidden.dtype, refs.lm_head.dtype)
    scratch = (pltpu.VMEM((cut.block_n, cut.block_v), common), pltpu.VMEM((cut.block_n, d), cut.dtype))
    in_specs = [specs, _term_specs(terms, specs)]
    return _call(d_hidden_kernel, "d_hidden", blocks, cut, in_specs, out, scratch, by_tokens=True)(refs, terms)[0]


def _run_backward(
    refs: HeadRefs, terms: RowTerms, cut: Cut, blocks: Any, wanted: Differentiated, onto: Any, *, ring: bool
) -> Gradients:
    """Gradient of hidden states `[K, D]` in float32, of the head as it leaves, and of the bias `[1, V]` in float32."""
    places, d = refs.hidden.shape
    specs = _specs(refs, cut, False)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    # A block that the pipeline writes may end anywhere.
    staged = leaves_in_pieces(cut.vocab, cut.options.layout)
    dma, common = pltpu.SemaphoreType.DMA, common_dtype(refs.hidden.dtype, refs.lm_head.dtype)
    slots = HiddenRing(None, pltpu.VMEM((RING, cut.block_n, d), cut.dtype), dma((RING,)), dma((RING,)))
    sums = pltpu.VMEM((d, cut.block_v) if cut.v_axis else (cut.block_v, d), cut.dtype)
    leaving = _leaving(refs.lm_head.dtype, cut)
    stage = pltpu.VMEM((2, d, STAGED_COLUMNS) if cut.v_axis else (2, STAGED_COLUMNS, d), leaving)
    reads = None if onto is None else dma((2,))
    head = HeadScratch(sums, stage, reads, dma((2,))) if staged else HeadScratch(sums, None, None, None)
    scratch = BackwardScratch(
        pltpu.VMEM((cut.block_n, cut.block_v), common),
        slots if ring else None,
        head if wanted.lm_head else None,
    )
    out_specs = GradientRefs(
        whole if ring else None,
        (whole if staged else specs.lm_head) if wanted.lm_head else None,
        _spec(cut, False, (1, cut.block_v), None, "v") if wanted.bias else None,
    )
    shapes = GradientRefs(
        jax.ShapeDtypeStruct((cut.cores, places, d), cut.dtype) if ring else None,
        jax.ShapeDtypeStruct(refs.lm_head.shape, leaving) if wanted.lm_head else None,
        jax.ShapeDtypeStruct((1, cut.vocab), cut.dtype) if wanted.bias else None,
    )
    in_specs = [specs, _term_specs(terms, specs), None if onto is None else whole]
    name, out = "backward" if ring else "d_lm_head", ([out_specs], [shapes])
    aliases = {} if onto is None else {len(jax.tree.leaves((refs, terms))): int(ring)}
    run = _call(backward_kernel, name, blocks, cut, in_specs, out, (scratch,), by_tokens=False, aliases=aliases)
    d_hidden, d_lm_head, d_bias = run(refs, terms, onto)[0]
    if d_hidden is not None:
        d_hidden = d_hidden[0] if cut.cores == 1 else jnp.sum(d_hidden, axis=0)
    return Gradients(d_hidden, d_lm_head, d_bias)
