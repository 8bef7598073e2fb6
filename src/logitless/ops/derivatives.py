"""What every hand-written derivative shares: whose gradient is wanted, and the refusals."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero

from logitless.ops.types import TokenStats

P = ParamSpec("P")
R = TypeVar("R")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Differentiated:
    """Which inputs a gradient is wanted for: travels with the residuals, and stays a static choice there."""

    hidden: bool
    lm_head: bool
    bias: bool


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
    """Makes a backward rule refuse to be differentiated: it skips tokens by value, so its own derivative is wrong."""

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
