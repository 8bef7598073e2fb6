"""What `gradcheck` computes on whole arrays, block by block, and reduces to a few numbers."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LossAndLogprobs = Callable[..., tuple[Any, Any]]
"""Takes the arrays by name and gives `(loss, logprobs)`."""

# A row is one token's or one vocabulary entry's vector, judged by its length: one large row must not pay for the rest.
ROW_ULPS_16_BIT = 2.0
ROW_FACTOR = 1.5
SHORTEST_ROW = 1e-4  # of the longest: what is shorter has no digits to keep in 16 bits
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


def against_oracle(plain, args, names, pairs, oracle_dtype, factor) -> dict[str, Any]:
    """Runs the oracle and reduces every difference to a few numbers on the device."""
    context = jax.enable_x64(True) if oracle_dtype == "float64" else contextlib.nullcontext()
    with context:
        truth = values_and_grads(plain, args, names, oracle_dtype)
        found = {name: jax.jit(_compare)(truth[name], *pair) for name, pair in pairs.items()}
        rows = {
            name: jax.jit(_worst_row, static_argnums=(3, 4))(truth[name], *pair, _row_axis(name, args), factor)
            for name, pair in pairs.items()
            if name.startswith("d_") and jnp.finfo(pair[1].dtype).bits == 16 and truth[name].ndim > 1
        }
        return jax.device_get({"oracle loss": truth["loss"], "rows": rows, **found})


def _row_axis(name: str, args: Mapping[str, jax.Array]) -> int:
    """The axis along which a row lies: that of D for a head `[D, V]`, the last one otherwise."""
    if name != "d_lm_head" or "hidden" not in args:
        return -1
    return 0 if args["lm_head"].shape[0] == args["hidden"].shape[-1] else 1


def _worst_row(oracle: jax.Array, candidate: jax.Array, plain: jax.Array, axis: int, factor: float) -> dict[str, Any]:
    """The fields of `logitless.gradcheck.Row`, of the row whose error is the largest part of what it may be."""
    eps = float(jnp.finfo(plain.dtype).eps)
    arrays = [x if x.ndim == 2 else x.reshape(-1, x.shape[-1]) for x in (oracle, candidate, plain)]
    count, width = arrays[0].shape if axis else arrays[0].shape[::-1]
    if not arrays[0].size:
        return dict.fromkeys(("place", "candidate_error", "plain_error", "allowed", "length"), 0)
    block = min(count, max(1, COMPARED_AT_ONCE // width))

    def lengths(start):
        o, c, p = (lax.dynamic_slice_in_dim(x, start, block, 0 if axis else 1).astype(oracle.dtype) for x in arrays)
        wrong = jnp.isfinite(o) & ~jnp.isfinite(c)
        o, c, p = (jnp.where(jnp.isfinite(o) & jnp.isfinite(x), x, 0.0) for x in (o, c, p))
        error = jnp.where(jnp.any(wrong, axis=axis), jnp.inf, jnp.linalg.norm(c - o, axis=axis))
        return error, jnp.linalg.norm(p - o, axis=axis), jnp.linalg.norm(o, axis=axis)

    def step(i, found):
        # The last block starts early and meets some rows twice, with the same lengths.
        start = jnp.minimum(i * block, count - block)
        return tuple(lax.dynamic_update_slice(x, y, (start,)) for x, y in zip(found, lengths(start), strict=True))

    zeros = jnp.zeros(count, oracle.dtype)
    error, plain_error, length = lax.fori_loop(0, -(-count // block), step, (zeros, zeros, zeros))
    # Below the smallest normal number there are no digits to keep either.
    shortest = jnp.maximum(SHORTEST_ROW * jnp.max(length), float(jnp.finfo(plain.dtype).tiny) * width**0.5)
    floor = ROW_ULPS_16_BIT * eps * jnp.maximum(length, shortest)
    allowed = ROW_FACTOR * factor * plain_error + floor
    place = jnp.argmax(jnp.where(allowed > 0, error / jnp.where(allowed > 0, allowed, 1.0), 0.0))
    return {
        "place": place,
        "candidate_error": error[place],
        "plain_error": plain_error[place],
        "allowed": allowed[place],
        "length": length[place],
    }


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
