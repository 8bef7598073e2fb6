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
        mark = {True: jnp.zeros((), jnp.bool_), False: jnp.zeros((), jnp.int8)}
        return cls((mark[hidden.perturbed], mark[lm_head.perturbed], mark[bias is not None and bias.perturbed]))

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
