"""The door of the ops: docstrings, validation, the choice of an implementation. Implementations trust their inputs."""

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from logitless._arrays import (
    Array,
    BlockSizes,
    FloatArray,
    IntArray,
    MaskArray,
    Scalar,
    accumulator,
    as_mask,
    is_concrete,
    shape_error,
)
from logitless.ops.chunked import linear_token_stats_chunked
from logitless.ops.chunked_logits import token_stats_chunked
from logitless.ops.reference import linear_token_stats_reference, token_stats_reference
from logitless.ops.types import (
    OUTPUT_NAMES,
    HeadOptions,
    Layout,
    LogitScalars,
    OutputName,
    PrecisionLike,
    TokenStats,
)

IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": linear_token_stats_reference,
    "chunked": linear_token_stats_chunked,
}
"""Hidden states to `TokenStats`: one signature, `(hidden, lm_head, bias, targets, mask, scalars, options)`."""

LOGITS_IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": token_stats_reference,
    "chunked": token_stats_chunked,
}
"""Logits to `TokenStats`: one signature, `(logits, targets, mask, scalars, options)`."""


def linear_token_stats(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    *,
    outputs: Sequence[OutputName] = ("logprobs", "lse", "entropy"),
    layout: Layout = "DV",
    bias: FloatArray | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    logits_dtype: str | None = None,
    implementation: str = "auto",
    sharding: object = None,
    block_sizes: BlockSizes | None = None,
    precision: PrecisionLike = None,
) -> TokenStats:
    """Log-probability, log-sum-exp, entropy and mean logit of every token, without the `[tokens, vocab]` logits.

    Equal to
        z = softcap * tanh((hidden @ lm_head + bias) * logit_scale / softcap) / temperature
        lse = logsumexp(z); logprobs = z[targets] - lse; entropy = lse - sum(softmax(z) * z); mean_logits = mean(z)

    All outputs are differentiable together, through one backward pass that skips each token without a gradient (masked,
    or cotangents of zero) and makes no gradient for an input that is not differentiated (a frozen head). Sums and
    log-probabilities are float32 (float64 for float64 inputs); products of bfloat16 and float16 inputs accumulate in
    float32; the gradient of the logits is cast once to the inputs' dtype. Block sizes change no value beyond rounding.
    Second derivatives and forward mode raise, as they do for any custom VJP; `implementation="reference"` has both.

    Args:
        hidden: final hidden states, any leading axes, `[..., D]`.
        lm_head: head weight, `[D, V]` or `[V, D]` as `layout` says; never transposed or copied whole.
        targets: token ids, `[...]`.
        outputs: the fields wanted; the others come back as None and cost nothing.
        layout: `"DV"` (a Flax kernel) or `"VD"` (a tied embedding, a Hugging Face `lm_head.weight`).
        bias: `[V]`; -inf in it takes a column out of the vocabulary.
        temperature: divides the logits last; above 0. A traced value that is not gives NaN.
        softcap: bound c of `c tanh(x / c)`, above 0; None for no cap.
        logit_scale: multiplies the logits first; above 0. A traced value that is not gives NaN.
        mask: `[...]`, bool or numbers of which any but 0 counts. Tokens at 0 give 0, carry no gradient, may hold NaN in
            `hidden`, and cost nothing.
        logits_dtype: rounds `hidden @ lm_head + bias` to this dtype, to reproduce a model that does.
        implementation: `"auto"`, or a key of `IMPLEMENTATIONS`. Auto never picks one that holds all logits.
        sharding: None; sharded heads are not built yet.
        block_sizes: any of `block_n`, `block_v`, `block_d` to override an implementation's rule; it reads those it has.
        precision: of the products; None means HIGHEST for float32 inputs.

    Returns:
        `TokenStats` with fields of the shape of `targets`, in nats. A target outside the vocabulary gives a NaN
        log-probability for its token when traced; a target with logit -inf gives -inf; neither carries a
        log-probability gradient. A row without a finite logit gives NaN.

    Raises:
        ValueError: shapes that do not fit, an empty head, a target out of range (concrete arrays), an unknown name,
            temperature, softcap or logit_scale not above 0.
        TypeError: float targets, integer hidden states.
        NotImplementedError: a sharding; a gradient of temperature, softcap or logit_scale (implementation "chunked").

    Example:
        >>> import jax.numpy as jnp
        >>> stats = linear_token_stats(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, 3]), outputs=("entropy",))
        >>> print(stats.entropy.round(4))  # ln 4
        [1.3863 1.3863]

    Reference: https://arxiv.org/abs/2411.09009 (cut cross-entropy) for blocks instead of logits. Departures: no
    gradient filtering, all outputs differentiable, tokens without a gradient are skipped.
    """
    name = "linear_token_stats"
    hidden, lm_head, targets = jnp.asarray(hidden), jnp.asarray(lm_head), jnp.asarray(targets)
    bias = None if bias is None else jnp.asarray(bias)
    vocab = _check_head(name, hidden, lm_head, targets, bias, layout)
    mask = _check_tokens(name, targets, mask, vocab)
    scalars = _check_scalars(name, temperature, softcap, logit_scale)
    options = _check_options(name, outputs, layout, logits_dtype, block_sizes, precision)
    run = _choose(name, implementation, IMPLEMENTATIONS, sharding)
    if targets.size == 0:
        return _empty(targets.shape, accumulator(hidden.dtype, lm_head.dtype), options)
    flat_mask = None if mask is None else mask.reshape(-1)
    flat = (hidden.reshape(-1, hidden.shape[-1]), lm_head, bias, _in_vocab(targets, vocab), flat_mask, scalars)
    return jax.tree.map(lambda x: x.reshape(targets.shape), _compiled(run)(*flat, options))


def linear_logprobs(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    *,
    layout: Layout = "DV",
    bias: FloatArray | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    logits_dtype: str | None = None,
    implementation: str = "auto",
    sharding: object = None,
    block_sizes: BlockSizes | None = None,
    precision: PrecisionLike = None,
) -> Float[Array, "..."]:
    """Per-token log-probabilities of `targets`, without the `[tokens, vocab]` logits.

    Equal to
        z = softcap * tanh((hidden @ lm_head + bias) * logit_scale / softcap) / temperature
        log_softmax(z)[targets]

    Args:
        hidden: final hidden states, any leading axes, `[..., D]`.
        lm_head: head weight, `[D, V]` or `[V, D]` as `layout` says.
        targets: token ids, `[...]`.
        layout: see `linear_token_stats`, and so for every argument below.
        bias: `[V]`.
        temperature: divides the logits last.
        softcap: bound of the logits, or None.
        logit_scale: multiplies the logits first.
        mask: `[...]`; tokens at 0 give 0 and cost nothing.
        logits_dtype: dtype to round the raw logits to.
        implementation: `"auto"` or a key of `IMPLEMENTATIONS`.
        sharding: None.
        block_sizes: overrides of an implementation's rule.
        precision: of the products.

    Returns:
        Log-probabilities in nats, of the shape of `targets`, float32 (float64 for float64 inputs).

    Raises:
        ValueError: as `linear_token_stats`.
        TypeError: as `linear_token_stats`.
        NotImplementedError: as `linear_token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(linear_logprobs(jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, 3])).round(4))  # -ln 4
        [-1.3863 -1.3863]

    Reference: as `linear_token_stats`; departures: none.
    """
    stats = linear_token_stats(
        hidden,
        lm_head,
        targets,
        outputs=("logprobs",),
        layout=layout,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        logits_dtype=logits_dtype,
        implementation=implementation,
        sharding=sharding,
        block_sizes=block_sizes,
        precision=precision,
    )
    return stats.logprobs


def token_stats(
    logits: FloatArray,
    targets: IntArray,
    *,
    outputs: Sequence[OutputName] = ("logprobs", "lse", "entropy"),
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    implementation: str = "auto",
    sharding: object = None,
    block_sizes: BlockSizes | None = None,
) -> TokenStats:
    """Log-probability, log-sum-exp, entropy and mean logit of every token, from logits that exist already.

    Equal to
        z = softcap * tanh(logits * logit_scale / softcap) / temperature
        lse = logsumexp(z); logprobs = z[targets] - lse; entropy = lse - sum(softmax(z) * z); mean_logits = mean(z)

    Beside the logits nothing of their size is kept: no float32 copy, no softmax, no one-hot. The gradient comes back in
    the dtype of the logits.

    Args:
        logits: `[..., V]`; -inf takes a column out of a row's vocabulary.
        targets: token ids, `[...]`.
        outputs: the fields wanted.
        temperature: divides the logits last; above 0.
        softcap: bound of the logits, above 0, or None.
        logit_scale: multiplies the logits first; above 0.
        mask: `[...]`; tokens at 0 give 0, carry no gradient and may hold NaN.
        implementation: `"auto"` or a key of `LOGITS_IMPLEMENTATIONS`.
        sharding: None; sharded logits are not built yet.
        block_sizes: overrides of an implementation's rule; it reads those it has.

    Returns:
        `TokenStats` as from `linear_token_stats`.

    Raises:
        ValueError: as `linear_token_stats`.
        TypeError: float targets, integer logits.
        NotImplementedError: as `linear_token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = token_stats(jnp.array([[1.0, 2.0, -jnp.inf]]), jnp.array([1]), outputs=("entropy",))
        >>> print(stats.entropy.round(4))
        [0.5822]

    Reference: the formulas of https://arxiv.org/abs/2411.09009; departures: takes logits.
    """
    name = "token_stats"
    logits, targets = jnp.asarray(logits), jnp.asarray(targets)
    _check_dtypes(name, {"logits": logits}, targets)
    if logits.ndim == 0 or logits.shape[:-1] != targets.shape:
        raise shape_error(name, {"logits": logits, "targets": targets}, "logits must be [..., V] and targets [...]")
    vocab = logits.shape[-1]
    if vocab == 0:
        raise shape_error(name, {"logits": logits}, "an empty vocabulary has no softmax: V must be at least 1")
    mask = _check_tokens(name, targets, mask, vocab)
    scalars = _check_scalars(name, temperature, softcap, logit_scale)
    options = _check_options(name, outputs, "DV", None, block_sizes, None)
    run = _choose(name, implementation, LOGITS_IMPLEMENTATIONS, sharding)
    if targets.size == 0:
        return _empty(targets.shape, accumulator(logits.dtype), options)
    flat_mask = None if mask is None else mask.reshape(-1)
    flat = (logits.reshape(-1, vocab), _in_vocab(targets, vocab), flat_mask, scalars)
    return jax.tree.map(lambda x: x.reshape(targets.shape), _compiled(run)(*flat, options))


def token_logprobs(
    logits: FloatArray,
    targets: IntArray,
    *,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    implementation: str = "auto",
    sharding: object = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "..."]:
    """Per-token log-probabilities of `targets`, from logits that exist already.

    Equal to
        z = softcap * tanh(logits * logit_scale / softcap) / temperature
        log_softmax(z)[targets]

    Args:
        logits: `[..., V]`.
        targets: token ids, `[...]`.
        temperature: see `token_stats`, and so for every argument below.
        softcap: bound of the logits, or None.
        logit_scale: multiplies the logits first.
        mask: `[...]`; tokens at 0 give 0.
        implementation: `"auto"` or a key of `LOGITS_IMPLEMENTATIONS`.
        sharding: None.
        block_sizes: overrides of an implementation's rule.

    Returns:
        Log-probabilities in nats, of the shape of `targets`, float32 (float64 for float64 logits).

    Raises:
        ValueError: as `token_stats`.
        TypeError: as `token_stats`.
        NotImplementedError: as `token_stats`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(token_logprobs(jnp.zeros((2, 4)), jnp.array([0, 3])).round(4))
        [-1.3863 -1.3863]

    Reference: as `token_stats`; departures: none.
    """
    stats = token_stats(
        logits,
        targets,
        outputs=("logprobs",),
        temperature=temperature,
        softcap=softcap,
        logit_scale=logit_scale,
        mask=mask,
        implementation=implementation,
        sharding=sharding,
        block_sizes=block_sizes,
    )
    return stats.logprobs


@functools.cache
def _compiled(run: Callable[..., TokenStats]) -> Callable[..., TokenStats]:
    """One compiled program per implementation, so that an eager call is not run step by step."""
    return jax.jit(run, static_argnames=("options",))


def _in_vocab(targets: jax.Array, vocab: int) -> jax.Array:
    """Flat int32 targets; V, which no column has, for every target outside the vocabulary."""
    flat = targets.reshape(-1)
    return jnp.where((flat >= 0) & (flat < vocab), flat, vocab).astype(jnp.int32)


def _empty(shape: tuple[int, ...], dtype: Any, options: HeadOptions) -> TokenStats:
    zeros = jnp.zeros(shape, dtype)
    return TokenStats(**dict.fromkeys(options.outputs, zeros))


def _check_dtypes(name: str, floats: Mapping[str, jax.Array | None], targets: jax.Array) -> None:
    for argument, x in floats.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: {argument} is {x.dtype}; it must be a floating-point array: cast it")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"{name}: targets is {targets.dtype}; token ids must be integers: cast with .astype(jnp.int32)")


def _check_head(
    name: str, hidden: jax.Array, lm_head: jax.Array, targets: jax.Array, bias: jax.Array | None, layout: str
) -> int:
    """Returns V."""
    _check_dtypes(name, {"hidden": hidden, "lm_head": lm_head, "bias": bias}, targets)
    _check_name(name, "layout", layout, ("DV", "VD"))
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


def _check_tokens(name: str, targets: jax.Array, mask: MaskArray | None, vocab: int) -> jax.Array | None:
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


def _check_scalars(name: str, temperature: Scalar, softcap: Scalar | None, logit_scale: Scalar) -> LogitScalars:
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


def _check_options(
    name: str,
    outputs: Sequence[OutputName],
    layout: Layout,
    logits_dtype: str | None,
    block_sizes: BlockSizes | None,
    precision: PrecisionLike,
) -> HeadOptions:
    if isinstance(outputs, str) or not outputs:
        raise ValueError(f"{name}: outputs={outputs!r}; give a tuple of one or more of {', '.join(OUTPUT_NAMES)}")
    for output in outputs:
        _check_name(name, "outputs", output, OUTPUT_NAMES)
    sizes = dict(block_sizes or {})
    for key, size in sizes.items():
        _check_name(name, "block_sizes", key, ("block_n", "block_v", "block_d"))
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}: block_sizes[{key!r}] is {size!r}; it must be an integer of at least 1")
    if logits_dtype is not None:
        dtype = jnp.dtype(logits_dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"{name}: logits_dtype={logits_dtype!r}; it must be a floating-point dtype such as 'bfloat16'"
            )
        logits_dtype = dtype.name
    ordered: tuple[OutputName, ...] = tuple(output for output in OUTPUT_NAMES if output in outputs)
    return HeadOptions(layout, ordered, logits_dtype, precision, **{key: int(size) for key, size in sizes.items()})


def _choose(
    name: str, implementation: str, known: Mapping[str, Callable[..., TokenStats]], sharding: object
) -> Callable[..., TokenStats]:
    if sharding is not None:
        raise NotImplementedError(
            f"{name}: sharding={sharding!r} is not built yet; leave it None (under a mesh, 'chunked' works by GSPMD)"
        )
    _check_name(name, "implementation", implementation, ("auto", *known))
    return known["chunked" if implementation == "auto" else implementation]


def _check_name(name: str, argument: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        near = difflib.get_close_matches(str(given), known, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: {argument}={given!r} is unknown; known: {', '.join(known)}{hint}")
