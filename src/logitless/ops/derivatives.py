"""What every hand-written derivative shares: whose gradient is wanted, and the refusals."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from logitless.ops.softmax import Normaliser
from logitless.ops.types import LogitScalars, TokenStats

P = ParamSpec("P")
R = TypeVar("R")


class Differentiated(NamedTuple):
    """Which inputs a gradient is wanted for: a static choice that travels with the residuals, in three dtypes.

    JAX keeps ONE tree of residuals for all derivatives of a traced call, that of the last one. Were the choice a part
    of that tree, a call with a frozen head would take the head's gradient from the same call without.
    """

    marks: tuple[Any, Any, Any]

    @classmethod
    def by(cls, hidden: CustomVJPPrimal, lm_head: CustomVJPPrimal, bias: CustomVJPPrimal | None) -> "Differentiated":
        """As a `symbolic_zeros` forward rule is told."""

        def mark(wanted: bool) -> jax.Array:
            return jnp.zeros((), jnp.bool_ if wanted else jnp.int8)

        return cls((mark(hidden.perturbed), mark(lm_head.perturbed), mark(bias is not None and bias.perturbed)))

    @property
    def hidden(self) -> bool:
        return self.marks[0].dtype == jnp.bool_

    @property
    def lm_head(self) -> bool:
        return self.marks[1].dtype == jnp.bool_

    @property
    def bias(self) -> bool:
        return self.marks[2].dtype == jnp.bool_


def values_of(name: str, primals: Any, scalars: Any, implementation: str = "chunked") -> Any:
    """Unwraps what a `symbolic_zeros` forward rule is handed; refuses a gradient of the logit scalars."""
    if any(scalar.perturbed for scalar in jax.tree.leaves(scalars)):
        raise NotImplementedError(
            f"{name}: implementation {implementation!r} does not differentiate temperature, softcap and logit_scale; "
            f"wrap them in jax.lax.stop_gradient, or use implementation='reference'{_alone(implementation)}"
        )
    return jax.tree.map(lambda primal: primal.value, primals)


def _alone(implementation: str) -> str:
    """The oracle itself comes here over a mesh only."""
    return " without sharding=" if implementation == "reference" else ""


def live(cotangents: TokenStats) -> TokenStats:
    """The cotangents, None where nothing flows back."""
    return TokenStats(*(None if d is None or isinstance(d, SymbolicZero) else d for d in cotangents))


def first_only(name: str, implementation: str = "chunked") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a pass refuse to be differentiated: it skips tokens by value, so its own derivative is wrong.

    Its third argument is the static one.
    """

    def decorate(backward: Callable[P, R]) -> Callable[P, R]:
        guarded = jax.custom_jvp(backward, nondiff_argnums=(2,))

        @guarded.defjvp
        def refuse(options, primals, tangents):
            raise NotImplementedError(
                f"{name}: implementation {implementation!r} has no second derivative; use "
                f"implementation='reference'{_alone(implementation)}"
            )

        @functools.wraps(backward)
        def once(*args: P.args, **kwargs: P.kwargs) -> R:
            return guarded(*args, **kwargs)

        return once

    return decorate


class HeadInputs(NamedTuple):
    """The arrays of an implementation of `linear_token_stats`, in its order."""

    hidden: Float[Array, "N D"]
    lm_head: Float[Array, "..."]
    bias: Float[Array, " V"] | None
    targets: Int[Array, " N"]
    mask: Bool[Array, " N"] | None
    scalars: LogitScalars


class HeadResiduals(NamedTuple):
    """The inputs as they came, and the few numbers per token that the backward pass starts from.

    Attributes:
        inputs: of the call.
        stats: those asked for, and the log-probabilities.
        normaliser: of the softmax.
        extra: whatever else the implementation's forward pass keeps, of one structure whoever is differentiated.
        wanted: whose gradients are.
    """

    inputs: HeadInputs
    stats: TokenStats
    normaliser: Normaliser
    extra: Any
    wanted: Differentiated


class Passes(NamedTuple):
    """An implementation's two passes over a part of the vocabulary, between which the parts are made one softmax.

    Attributes:
        sums: `(inputs, options, outputs)` to the online softmax of each token, a `logitless.ops.softmax.Running`; a
            target that is none of the columns is V. What it gives for masked tokens is not read.
        gradients: `(residuals, cotangents, active tokens, options)` to the gradients that this part makes. The
            residuals hold the statistics and the normaliser of the whole vocabulary; their `extra` is not read. With
            `onto`, in the dtype of the sums, the gradient of the head is added to it. That of logits takes the
            residuals as a tuple, which the mask is a part of, and no active tokens.
    """

    sums: Callable[..., Any]
    gradients: Callable[..., Any]


def head_vjp(
    implementation: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., TokenStats]:
    """An implementation of `linear_token_stats` with a derivative of its own.

    Args:
        implementation: its name.
        forward: `(inputs, options, outputs, wanted)` to statistics, normaliser and extra residuals; `outputs` are those
            to give, `wanted` is None where nothing is differentiated.
        backward: `(residuals, cotangents, active tokens, options)` to the gradients of hidden states, head and bias.
    """

    def primal(hidden, lm_head, bias, targets, mask, scalars, options):
        inputs = HeadInputs(hidden, lm_head, bias, targets, mask, scalars)
        return forward(inputs, options, options.outputs, None)[0]

    run = jax.custom_vjp(primal, nondiff_argnums=(6,))
    first = first_only("linear_token_stats", implementation)

    # The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
    def fwd(hidden, lm_head, bias, targets, mask, scalars, options):
        wanted = Differentiated.by(hidden, lm_head, bias)
        primals = (hidden, lm_head, bias, targets, mask, scalars)
        inputs = HeadInputs(*values_of("linear_token_stats", primals, scalars, implementation))
        # The backward pass starts from the log-probability, whatever the caller asked for.
        outputs = tuple(dict.fromkeys((*options.outputs, "logprobs")))
        stats, normaliser, extra = forward_once(inputs, wanted, (options, outputs))
        asked = TokenStats(**{name: getattr(stats, name) for name in options.outputs})
        return asked, HeadResiduals(inputs, stats, normaliser, extra, wanted)

    # A second derivative meets this pass first, in which a kernel has no derivative to be refused by.
    @first
    def forward_once(inputs: HeadInputs, wanted: Differentiated, static: tuple) -> tuple[TokenStats, Normaliser, Any]:
        return forward(inputs, *static, wanted)

    @first
    def backward_once(residuals, d_stats, options):
        flowing = [d != 0 for d in d_stats if d is not None]
        if not flowing:
            return None, None, None
        active, mask = functools.reduce(jnp.logical_or, flowing), residuals.inputs.mask
        return tuple(backward(residuals, d_stats, active if mask is None else active & mask, options))

    def bwd(options, residuals, cotangents):
        return *backward_once(residuals, live(cotangents), options), None, None, None

    run.defvjp(fwd, bwd, symbolic_zeros=True)
    return run


def logits_vjp(
    forward: Callable[..., tuple[TokenStats, Any]],
    backward: Callable[[tuple, TokenStats, Any], Any],
    implementation: str,
) -> Callable[..., TokenStats]:
    """`TokenStats` of logits with a gradient, from the two passes of an implementation.

    Args:
        forward: `(logits, targets, mask, scalars, options, also)` to the statistics of `options.outputs` and `also`,
            and the normaliser of the softmax.
        backward: `(residuals, cotangents, options)` to the gradient of the logits. Residuals are the four arrays that
            `forward` takes, its statistics and its normaliser; a cotangent is None where nothing flows back, but never
            all of them.
        implementation: the name to refuse by.

    Returns:
        A function of `(logits, targets, mask, scalars, options)`.
    """
    first = first_only("token_stats", implementation)
    backward_once = first(backward)

    # The backward pass starts from the log-probability, whatever the caller asked for. A second derivative meets this
    # pass first, in which a kernel has no derivative to be refused by.
    @first
    def forward_once(arrays: tuple, scalars: Any, options: Any) -> tuple[TokenStats, Any]:
        return forward(*arrays, scalars, options, also=("logprobs",))

    def primal(logits, targets, mask, scalars, options):
        return forward(logits, targets, mask, scalars, options)[0]

    # The two rules stay unannotated: with symbolic_zeros they are handed wrappers, not arrays.
    def fwd(logits, targets, mask, scalars, options):
        primals = values_of("token_stats", (logits, targets, mask, scalars), scalars, implementation)
        stats, normaliser = forward_once(primals[:3], primals[3], options)
        asked = TokenStats(**{name: getattr(stats, name) for name in options.outputs})
        return asked, (*primals, stats, normaliser)

    def bwd(options, residuals, cotangents):
        cotangents = live(cotangents)
        flows = any(d is not None for d in cotangents)
        return backward_once(residuals, cotangents, options) if flows else None, None, None, None

    token_stats: Any = jax.custom_vjp(primal, nondiff_argnums=(4,))
    token_stats.defvjp(fwd, bwd, symbolic_zeros=True)
    return token_stats
