"""What `gradcheck` computes on whole arrays, block by block, and reduces to a few numbers."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LossAndLogprobs = Callable[..., tuple[Any, Any]]
"""Takes the arrays by name and gives `(loss, logprobs)`."""

COMPARED_AT_ONCE = 1 << 22  # elements; a block of float64 is 32 MiB


def values_and_grads(
    function: LossAndLogprobs, args: Mapping[str, jax.Array], names: Sequence[str], dtype: str | None = None
) -> dict[str, jax.Array]:
    """Loss, log-probabilities and gradients of one program, which casts the floating arrays up to `dtype` first.

    Cast inside the program, a head costs its float64 size once: the gradient takes the place of the cast.
    """

    def up(value: jax.Array) -> jax.Array:
        return value.astype(dtype) if dtype and jnp.issubdtype(value.dtype, jnp.floating) else value

    @jax.jit
    def run(args):
        args = {name: up(value) for name, value in args.items()}

        def loss_of(moving):
            loss, logprobs = function(**args | moving)
            return loss, (loss, logprobs)

        grads, (loss, logprobs) = jax.grad(loss_of, has_aux=True)({name: args[name] for name in names})
        return {"loss": loss, "logprobs": logprobs} | {f"d_{name}": grads[name] for name in names}

    return run(dict(args))


def losses_of(function: LossAndLogprobs, several: Iterable[Mapping[str, jax.Array]]) -> list[jax.Array]:
    """The loss alone of each."""
    run = jax.jit(lambda args: function(**args)[0])
    return [run(dict(args)) for args in several]


def against_oracle(plain, args, names, pairs, losses, oracle_dtype) -> dict[str, Any]:
    """Runs the oracle and reduces every difference to a few numbers on the device.

    `losses` are more of plain jnp's, whose largest error counts.
    """
    context = jax.enable_x64(True) if oracle_dtype == "float64" else contextlib.nullcontext()
    with context:
        truth = values_and_grads(plain, args, names, oracle_dtype)
        found = {name: jax.jit(_compare)(truth[name], *pair) for name, pair in pairs.items()}
        for loss in losses:
            error = jnp.abs(jnp.asarray(loss, truth["loss"].dtype) - truth["loss"])
            found["loss"] = found["loss"]._replace(plain_error=jnp.maximum(found["loss"].plain_error, error))
        return jax.device_get({"oracle loss": truth["loss"], **found})


class Comparison(NamedTuple):
    candidate_error: Any
    plain_error: Any
    magnitude: Any
    place: Any  # of the worst element, in the flattened array
    candidate: Any
    oracle: Any
    plain: Any


def _compare(oracle: jax.Array, candidate: jax.Array, plain: jax.Array) -> Comparison | None:
    """The largest errors, block by block: XLA on a CPU would write each difference of whole arrays to memory."""
    size = oracle.size
    if size == 0:
        return None
    block = min(size, COMPARED_AT_ONCE)
    dtype = oracle.dtype
    flat = [x.reshape(size) for x in (candidate, oracle, plain)]

    zero = jnp.zeros((), dtype)

    def step(i, best: Comparison) -> Comparison:
        # The last block starts early and meets some elements twice, which changes no maximum.
        start = jnp.minimum(i * block, size - block)
        c, o, p = (lax.dynamic_slice(x, (start,), (block,)).astype(dtype) for x in flat)
        same = (c == o) | (jnp.isnan(c) & jnp.isnan(o))
        error = jnp.where(jnp.isfinite(o) & jnp.isfinite(c), jnp.abs(c - o), jnp.where(same, 0.0, jnp.inf))
        plain_error = jnp.where(jnp.isfinite(o) & jnp.isfinite(p), jnp.abs(p - o), 0.0)
        magnitude = jnp.where(jnp.isfinite(o), jnp.abs(o), 0.0)
        at = jnp.argmax(error)
        worse = error[at] > best.candidate_error
        here = Comparison(error[at], zero, zero, start + at, c[at], o[at], p[at])
        kept = jax.tree.map(lambda new, old: jnp.where(worse, new, old), here, best)
        return kept._replace(
            plain_error=jnp.maximum(best.plain_error, jnp.max(plain_error)),
            magnitude=jnp.maximum(best.magnitude, jnp.max(magnitude)),
        )

    first = Comparison(zero, zero, zero, jnp.zeros_like(jnp.argmax(flat[1][:1])), *(x[0].astype(dtype) for x in flat))
    return lax.fori_loop(0, -(-size // block), step, first)
