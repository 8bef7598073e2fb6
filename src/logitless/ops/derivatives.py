"""What every hand-written derivative shares: whose gradient is wanted, and the refusals."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from logitless.ops.types import TokenStats

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
            "wrap them in jax.lax.stop_gradient, or use implementation='reference'"
        )
    return jax.tree.map(lambda primal: primal.value, primals)


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
                f"{name}: implementation {implementation!r} has no second derivative; use implementation='reference'"
            )

        @functools.wraps(backward)
        def once(*args: P.args, **kwargs: P.kwargs) -> R:
            return guarded(*args, **kwargs)

        return once

    return decorate


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
