"""The door of the ops: docstrings, validation, the choice of an implementation. Implementations trust their inputs."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from logitless._arrays import (
    Array,
    BlockSizes,
    FloatArray,
    IntArray,
    MaskArray,
    Scalar,
    accumulator,
    shape_error,
)
from logitless.ops import chunked, chunked_logits, pallas_tpu, pallas_tpu_logits, reference_passes
from logitless.ops.checks import check_dtypes, check_head, check_options, check_scalars, check_token_loss, check_tokens
from logitless.ops.choice import auto_token_loss, auto_token_stats, check_bytes, check_choice
from logitless.ops.chunked import linear_token_stats_chunked
from logitless.ops.chunked_logits import token_stats_chunked
from logitless.ops.head_sharding import Sharding, lay_out, lay_out_head, lay_out_logits
from logitless.ops.one_pass import TokenLoss, linear_token_loss_one_pass, linear_token_loss_two_pass
from logitless.ops.pallas_tpu import interpreted, linear_token_stats_pallas_tpu
from logitless.ops.pallas_tpu_logits import token_stats_pallas_tpu
from logitless.ops.reference import linear_token_stats_reference, token_stats_reference
from logitless.ops.sharded import on_any_mesh, sharded_head, sharded_logits
from logitless.ops.types import (
    HeadOptions,
    Layout,
    OutputName,
    PrecisionLike,
    TokenStats,
)

T = TypeVar("T")

_pallas_tpu = on_any_mesh(linear_token_stats_pallas_tpu, sharded_head("pallas_tpu", pallas_tpu.PASSES))
IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": on_any_mesh(linear_token_stats_reference, sharded_head("reference", reference_passes.PASSES)),
    "chunked": on_any_mesh(linear_token_stats_chunked, sharded_head("chunked", chunked.PASSES)),
    "pallas_tpu": _pallas_tpu,
    "pallas_tpu_interpret": interpreted(_pallas_tpu),
}
"""Hidden states to `TokenStats`: one signature, `(hidden, lm_head, bias, targets, mask, scalars, options)`."""

_logits_pallas_tpu = on_any_mesh(token_stats_pallas_tpu, sharded_logits("pallas_tpu", pallas_tpu_logits.PASSES))
LOGITS_IMPLEMENTATIONS: dict[str, Callable[..., TokenStats]] = {
    "reference": on_any_mesh(token_stats_reference, sharded_logits("reference", reference_passes.LOGITS_PASSES)),
    "chunked": on_any_mesh(token_stats_chunked, sharded_logits("chunked", chunked_logits.PASSES)),
    "pallas_tpu": _logits_pallas_tpu,
    "pallas_tpu_interpret": interpreted(_logits_pallas_tpu),
}
"""Logits to `TokenStats`: one signature, `(logits, targets, mask, scalars, options)`."""

TOKEN_LOSS_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "one_pass": linear_token_loss_one_pass,
    **{name: functools.partial(linear_token_loss_two_pass, run) for name, run in IMPLEMENTATIONS.items()},
}
"""Hidden states to loss and log-probabilities: `(hidden, lm_head, bias, targets, mask, token_args, scalars, options,
token_loss)`."""


def linear_token_stats(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    *,
    outputs: Iterable[OutputName] = ("logprobs", "lse", "entropy"),
    layout: Layout = "DV",
    bias: FloatArray | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    logits_dtype: str | None = None,
    implementation: str = "auto",
    sharding: Sharding = None,
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
    Second derivatives and forward mode raise, as they do for any custom VJP; `implementation="reference"` has both on
    one device.

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
        implementation: `"auto"`, or a key of `IMPLEMENTATIONS`. Auto never picks one that holds all logits: it is
            `"pallas_tpu"` on a TPU where the arrays are bfloat16 or float32 and stand on one device or as `sharding`
            says, else `"chunked"`.
            `"pallas_tpu_interpret"` runs the TPU kernels in JAX's simulation of a TPU: to check them, and slow.
        sharding: a `logitless.HeadSharding`: how tokens and vocabulary are split over a mesh, None on one device. The
            statistics come back split as the targets are, each gradient as its input is.
        block_sizes: any of `block_n`, `block_v`, `block_d` to override an implementation's rule, or `block_bytes`, the
            most bytes of float32 logits at one time, for the rule to choose the others by; an implementation reads
            those it has.
        precision: of the products; None means HIGHEST for float32 inputs.

    Returns:
        `TokenStats` with fields of the shape of `targets`, in nats. A target outside the vocabulary gives a NaN
        log-probability for its token when traced; a target with logit -inf gives -inf; neither carries a
        log-probability gradient. A row without a finite logit gives NaN.

    Raises:
        ValueError: shapes that do not fit, an empty head, a target out of range (concrete arrays), an unknown name,
            temperature, softcap or logit_scale not above 0; tokens that the axes of a sharding do not divide, arrays
            that lie otherwise than it says.
        TypeError: float targets, integer hidden states, a sharding that is no `HeadSharding`.
        NotImplementedError: a gradient of temperature, softcap or logit_scale (but for "reference" on one device);
            "pallas_tpu" where it cannot run, with what would.

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
    vocab = check_head(name, hidden, lm_head, targets, bias, layout)
    arrays = (hidden, lm_head, bias, targets)
    over, (hidden, lm_head, bias, targets), vocab = lay_out_head(name, sharding, arrays, layout, vocab)
    mask = check_tokens(name, targets, mask, vocab)
    scalars = check_scalars(name, temperature, softcap, logit_scale)
    options = check_options(name, outputs, layout, logits_dtype, block_sizes, precision, over)
    chosen = auto_token_stats((hidden, lm_head, bias), options) if implementation == "auto" else implementation
    check_choice(name, chosen, IMPLEMENTATIONS, (hidden, lm_head, bias, targets), options)
    if targets.size == 0:
        return _empty(targets.shape, accumulator(hidden.dtype, lm_head.dtype), options)
    ids, rows = _in_vocab(targets, vocab), functools.partial(_rows, name, options)
    stats = _compiled(IMPLEMENTATIONS[chosen])(rows(hidden, 1), lm_head, bias, rows(ids), rows(mask), scalars, options)
    return jax.tree.map(lambda x: x.reshape(targets.shape), stats)


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
    sharding: Sharding = None,
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
        sharding: of tokens and vocabulary over a mesh.
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


def linear_token_loss(
    hidden: FloatArray,
    lm_head: FloatArray,
    targets: IntArray,
    token_loss: TokenLoss,
    token_args: Sequence[Array | Scalar] = (),
    *,
    layout: Layout = "DV",
    bias: FloatArray | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    logits_dtype: str | None = None,
    implementation: str = "auto",
    sharding: Sharding = None,
    block_sizes: BlockSizes | None = None,
    precision: PrecisionLike = None,
) -> tuple[Float[Array, ""], Float[Array, "..."]]:
    """Sum of a token-local loss of the log-probabilities, with its gradient made in the same pass over the head.

    Equal to
        logprobs = linear_logprobs(hidden, lm_head, targets)
        sum(token_loss(logprobs, *token_args) over tokens with mask), stop_gradient(logprobs)

    With `"one_pass"` three head-sized products instead of the four of `"chunked"`, two instead of three where the head
    is frozen: the gradient is finished while the logits of a block of tokens are alive, and scaled by the incoming
    cotangent in the backward pass. It costs memory: the logits of one block of tokens, `[block_n, V]`, and the
    gradient of the head in float32 until it is cast. Blocks of masked tokens never run; blocks of tokens without a
    slope (tokens that seem so are put together beforehand) cost one product. Where nothing is differentiated it is the
    forward pass of `"chunked"` and no more. Under `jax.checkpoint` the pass would run twice: leave it outside.

    Args:
        hidden: final hidden states, any leading axes, `[..., D]`.
        lm_head: head weight, `[D, V]` or `[V, D]` as `layout` says.
        targets: token ids, `[...]`.
        token_loss: `(log-probability, *token_args)` of ONE token, all scalars, to a scalar; it is mapped over the
            tokens, so that none can see another. Denominators go in as arguments. One compiled program is kept for each
            function: outside `jax.jit` give the same function again, not a new lambda.
        token_args: arrays of the shape of `targets`, or single numbers; never differentiated.
        layout: see `linear_token_stats`, and so for every argument below.
        bias: `[V]`.
        temperature: divides the logits last.
        softcap: bound of the logits, or None.
        logit_scale: multiplies the logits first.
        mask: `[...]`; tokens at 0 never reach the sum, whatever `token_loss` gives there.
        logits_dtype: dtype to round the raw logits to.
        implementation: `"auto"` or a key of `TOKEN_LOSS_IMPLEMENTATIONS`. Auto is that of
            `linear_token_stats` on a TPU and where `block_bytes` hold the logits of fewer than 64 tokens, else
            `"one_pass"`; it is that too where a mesh splits the vocabulary, for which `"one_pass"` needs all columns.
        sharding: of tokens and vocabulary over a mesh; the loss is the sum over all of it.
        block_sizes: overrides of an implementation's rule.
        precision: of the products.

    Returns:
        The loss, and the log-probabilities of the shape of `targets` without a gradient, float32 (float64 for float64
        inputs). A target outside the vocabulary has a NaN log-probability, which its loss sees.

    Raises:
        ValueError: as `linear_token_stats`; a token argument of another shape; a `token_loss` that gives no scalar, or
            reads a traced value that is no argument.
        TypeError: as `linear_token_stats`.
        NotImplementedError: as `linear_token_stats`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> hidden, lm_head, targets = jnp.ones((2, 3)), jnp.zeros((3, 4)), jnp.array([0, 3])
        >>> weighted = lambda logprob, weight: -weight * logprob
        >>> loss = lambda h, w: linear_token_loss(h, w, targets, weighted, (jnp.array([0.5, 1.5]),))
        >>> (value, logprobs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, lm_head)
        >>> round(value.item(), 4), gradients[1].shape  # 2 ln 4
        (2.7726, (3, 4))

    Reference: a gradient made in the forward pass, https://arxiv.org/abs/2410.10989 (Liger). Departures: any
    token-local loss, float32 sums over all blocks, tokens without a gradient are skipped.
    """
    name = "linear_token_loss"
    hidden, lm_head, targets = jnp.asarray(hidden), jnp.asarray(lm_head), jnp.asarray(targets)
    bias = None if bias is None else jnp.asarray(bias)
    vocab = check_head(name, hidden, lm_head, targets, bias, layout)
    arrays = (hidden, lm_head, bias, targets)
    over, (hidden, lm_head, bias, targets), vocab = lay_out_head(name, sharding, arrays, layout, vocab)
    mask = check_tokens(name, targets, mask, vocab)
    scalars = check_scalars(name, temperature, softcap, logit_scale)
    options = check_options(name, ("logprobs",), layout, logits_dtype, block_sizes, precision, over)
    heads = (hidden, lm_head, bias)
    chosen = auto_token_loss(heads, targets.size, vocab, options) if implementation == "auto" else implementation
    check_choice(name, chosen, TOKEN_LOSS_IMPLEMENTATIONS, (*heads, targets), options)
    if chosen == "one_pass":
        check_bytes(name, vocab, options)
    dtype = accumulator(hidden.dtype, lm_head.dtype)
    args = check_token_loss(name, token_loss, token_args, targets, dtype)
    if targets.size == 0:
        return jnp.zeros((), dtype), jnp.zeros(targets.shape, dtype)
    ids, rows = _in_vocab(targets, vocab), functools.partial(_rows, name, options)
    args = tuple(jax.lax.stop_gradient(rows(x) if x.ndim else x) for x in args)
    loss, logprobs = _compiled(TOKEN_LOSS_IMPLEMENTATIONS[chosen], "token_loss")(
        rows(hidden, 1), lm_head, bias, rows(ids), rows(mask), args, scalars, options, token_loss
    )
    return loss, jax.lax.stop_gradient(logprobs.reshape(targets.shape))


def token_stats(
    logits: FloatArray,
    targets: IntArray,
    *,
    outputs: Iterable[OutputName] = ("logprobs", "lse", "entropy"),
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    implementation: str = "auto",
    sharding: Sharding = None,
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
        sharding: a `logitless.HeadSharding` whose tokens and vocabulary share no axis, None on one device.
        block_sizes: overrides of an implementation's rule: `block_v`; `block_n`, which only the TPU kernels have; or
            `block_bytes`, of which a block of `chunked` takes at least one column of all tokens.

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
    check_dtypes(name, {"logits": logits}, targets)
    if logits.ndim == 0 or logits.shape[:-1] != targets.shape:
        raise shape_error(name, {"logits": logits, "targets": targets}, "logits must be [..., V] and targets [...]")
    vocab = logits.shape[-1]
    if vocab == 0:
        raise shape_error(name, {"logits": logits}, "an empty vocabulary has no softmax: V must be at least 1")
    over, logits, targets, vocab = lay_out_logits(name, sharding, logits, targets)
    mask = check_tokens(name, targets, mask, vocab)
    scalars = check_scalars(name, temperature, softcap, logit_scale)
    options = check_options(name, outputs, "DV", None, block_sizes, None, over)
    chosen = auto_token_stats((logits,), options) if implementation == "auto" else implementation
    check_choice(name, chosen, LOGITS_IMPLEMENTATIONS, (logits, targets), options)
    if targets.size == 0:
        return _empty(targets.shape, accumulator(logits.dtype), options)
    ids, rows = _in_vocab(targets, vocab), functools.partial(_rows, name, options)
    stats = _compiled(LOGITS_IMPLEMENTATIONS[chosen])(rows(logits, 1), rows(ids), rows(mask), scalars, options)
    return jax.tree.map(lambda x: x.reshape(targets.shape), stats)


def token_logprobs(
    logits: FloatArray,
    targets: IntArray,
    *,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    mask: MaskArray | None = None,
    implementation: str = "auto",
    sharding: Sharding = None,
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
        sharding: of tokens and vocabulary over a mesh.
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
def _compiled(run: Callable[..., T], *static: str) -> Callable[..., T]:
    """One compiled program per implementation, so that an eager call is not run step by step."""
    return jax.jit(run, static_argnames=("options", *static))


def _in_vocab(targets: jax.Array, vocab: int) -> jax.Array:
    """Targets in int32; V, which no column has, for every target outside the vocabulary."""
    # V itself need not fit into a narrow dtype of ids.
    ids = targets.astype(jnp.int32) if targets.dtype.itemsize < 4 else targets
    return jnp.where((ids >= 0) & (ids < vocab), ids, vocab).astype(jnp.int32)


def _rows(name: str, options: HeadOptions, x: jax.Array | None, more: int = 0) -> jax.Array | None:
    """With one axis of tokens, and `more` behind; over a mesh with those that it has, laid out as the sharding says."""
    if x is None:
        return None
    if options.sharding is None:
        return x.reshape(-1, *x.shape[x.ndim - more :])
    return x if more else lay_out(name, "an array of tokens", x, options.sharding.of_rows(), options.sharding)


def _empty(shape: tuple[int, ...], dtype: Any, options: HeadOptions) -> TokenStats:
    zeros = jnp.zeros(shape, dtype)
    return TokenStats(**dict.fromkeys(options.outputs, zeros))
