"""Inputs that several tests share: fixture F of the public cases, and peaked random problems."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from logitless.ops.api import IMPLEMENTATIONS, LOGITS_IMPLEMENTATIONS, TOKEN_LOSS_IMPLEMENTATIONS
from logitless.ops.choice import INTERPRETED, PALLAS

# Those that run on any device at full speed.
HERE = [name for name in IMPLEMENTATIONS if name not in (PALLAS, INTERPRETED)]
LOGITS_HERE = [name for name in LOGITS_IMPLEMENTATIONS if name not in (PALLAS, INTERPRETED)]
TOKEN_LOSS_HERE = [name for name in TOKEN_LOSS_IMPLEMENTATIONS if name not in (PALLAS, INTERPRETED)]
# With the simulated TPU, which takes seconds a program.
EVERYWHERE = [*HERE, INTERPRETED]


def sizes_for(implementation: str, sizes: dict[str, int] | None) -> dict[str, int] | None:
    """`sizes`, but for the simulated TPU the smallest blocks that its kernels have, whose programs compile fastest."""
    return {"block_n": 16, "block_v": 256} if implementation == INTERPRETED else sizes


# N, D, V, each named for the regime it covers.
SIZES = {
    "nothing divides": (37, 24, 301),
    "everything divides": (64, 16, 512),
    "smaller than any block": (5, 3, 7),
    "one token": (1, 8, 130),
}


class Problem(NamedTuple):
    """Arguments of `linear_token_stats`, head as `[V, D]`."""

    hidden: jax.Array
    lm_head: jax.Array
    targets: jax.Array
    bias: jax.Array
    mask: jax.Array


def fixture_f() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, head `[V, D]` and targets of fixture F: B, T, D, V = 2, 3, 3, 5."""
    b, t, d = np.meshgrid(range(2), range(3), range(3), indexing="ij")
    hidden = np.sin(1.0 + 7 * b + 3 * t + d)
    lm_head = np.cos(0.5 * np.arange(5)[:, None] + np.arange(3)[None, :])
    return hidden, lm_head, (2 * np.arange(2)[:, None] + np.arange(3)[None, :]) % 5


def peaked(n: int, d: int, v: int, dtype: str, seed: int = 0) -> Problem:
    """A peaked softmax: half the tokens' targets own a head row along their hidden row, logits up to about 40."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(n, d))
    lm_head = rng.normal(size=(v, d)) / np.sqrt(d)
    targets = rng.integers(0, v, n)
    for i in range(0, n, 2):
        norm = np.linalg.norm(hidden[i])
        lm_head[targets[i]] = hidden[i] / norm * rng.uniform(4.0, 40.0) / norm
    mask = rng.random(n) < 0.7
    mask[0] = True
    return Problem(
        jnp.asarray(hidden, dtype),
        jnp.asarray(lm_head, dtype),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(rng.normal(size=v), dtype),
        jnp.asarray(mask),
    )


def in_layout(lm_head: jax.Array, layout: str) -> jax.Array:
    """The head `[V, D]` as `layout` wants it."""
    return lm_head if layout == "VD" else lm_head.T


def equations(jaxpr) -> Iterator[Any]:
    """Every equation of a jaxpr, those of its loops and calls included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def dynamic_loops(fn: Callable[..., Any], *args) -> int:
    """Loops whose length is a run-time number: those over blocks that may be skipped."""
    return sum(eqn.primitive.name == "while" for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr))


def assert_near(x: Any, expected: Any) -> None:
    """For what was worked out by hand, in float64: to the digits that it is written with."""
    np.testing.assert_allclose(x, expected, atol=1e-8, rtol=0)


def worst(name: str, ours: np.ndarray, plain: np.ndarray, oracle: np.ndarray, allowed: float) -> str:
    """What a failed budget prints: the element furthest out, with every value of it."""
    error = np.abs(ours - oracle)
    place = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    return (
        f"{name}{list(map(int, place))}: ours {ours[place]!r}, plain jnp {plain[place]!r}, oracle {oracle[place]!r}; "
        f"error {error[place]:.3g}, allowed {allowed:.3g}"
    )


def assert_in_budget(
    name: str, ours, plain, oracle, *, factor: float = 2.0, ulps: float = 4.0, by_row: bool = True, carried: Any = 0.0
) -> None:
    """err(ours) <= factor * err(plain jnp in the same dtypes) + a few units in the last place of the largest value.

    `carried` is what of each row's length the rounding of an input may move it by: plain jnp is at times right by luck.
    """
    eps = float(jnp.finfo(ours.dtype).eps)
    if eps > 1e-4:
        # One cast to 16 bits at the end is half a unit, and the cast of d_logits is in the error of plain jnp.
        ulps = 1.0
    ours, plain, oracle = (np.asarray(jnp.asarray(x), np.float64) for x in (ours, plain, oracle))
    assert ours.shape == oracle.shape, f"{name}: shape {ours.shape}, oracle {oracle.shape}"
    np.testing.assert_array_equal(
        np.isfinite(ours), np.isfinite(oracle), err_msg=f"{name}: finite where the oracle is not"
    )
    if not ours.size:
        return
    finite = np.isfinite(oracle)
    ours, plain, oracle = (np.where(finite, x, 0.0) for x in (ours, plain, oracle))
    allowed = factor * np.abs(plain - oracle).max() + ulps * eps * np.abs(oracle).max()
    assert np.abs(ours - oracle).max() <= allowed, worst(name, ours, plain, oracle, allowed)
    if by_row and oracle.ndim > 1:
        # A logit of 20 carries a rounding of 20 units into its probability; in 16 bits the cast of a row says more.
        row_ulps = 2.0 if eps > 1e-4 else 16 * ulps
        _assert_rows_in_budget(name, ours, plain, oracle, factor=1.5 * factor, floor=row_ulps * eps + carried)


def _assert_rows_in_budget(name: str, ours, plain, oracle, *, factor: float, floor: Any) -> None:
    """Row by row, by their length: on a peaked softmax one large row would pay for all small ones."""
    ours, plain, oracle = (x.reshape(-1, x.shape[-1]) for x in (ours, plain, oracle))
    error, plain_error = (np.linalg.norm(x - oracle, axis=1) for x in (ours, plain))
    size = np.linalg.norm(oracle, axis=1)
    # Rows that underflow have no digits to keep.
    allowed = factor * plain_error + floor * size + 1e-30
    row = int(np.argmax(error / allowed))
    assert error[row] <= allowed[row], (
        f"{name}: row {row} of length {size[row]:.3g} is off by {error[row]:.3g}; plain jnp by {plain_error[row]:.3g}, "
        f"allowed {allowed[row]:.3g}"
    )
