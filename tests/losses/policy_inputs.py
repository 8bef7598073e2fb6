"""Arguments for the tests of policy losses: fixture F, random batches, and every policy term with a meaning."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import assert_close, fixture

from logitless import LossOutput, policy_loss

POLICIES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip-asymmetric": {"clip_low": 0.05, "clip_high": 0.45},
    "clip-delta": {"delta": 1.3},
    "none": {"surrogate": "none"},
    "cispo": {"surrogate": "cispo", "cispo_max": 1.4},
    "sapo": {"surrogate": "sapo"},
    "vespo": {"surrogate": "vespo"},
    "sequence-clip": {"ratio_level": "sequence", "clip_low": 0.02, "clip_high": 0.3},
    "sequence-clip-delta": {"ratio_level": "sequence", "delta": 1.3},
    "sequence-none": {"ratio_level": "sequence", "surrogate": "none"},
    "sequence-token-clip": {"ratio_level": "sequence_token"},
}
KLS: dict[str, dict[str, Any]] = {
    "no-kl": {},
    **{kl: {"kl": kl, "kl_coef": 0.1} for kl in ("k1", "k2", "k3")},
    **{f"{kl}-corrected": {"kl": kl, "kl_coef": 0.1, "kl_bias_correction": True} for kl in ("k1", "k2", "k3")},
    "k3-clamped": {"kl": "k3", "kl_coef": 0.1, "kl_clamp": 0.35},
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {"aggregation": "sequence_mean"},
    "token_mean": {"aggregation": "token_mean"},
    "constant": {"aggregation": "constant", "max_completion_length": 4},
    "given_total": {"aggregation": "given_total"},
    "given_total-10": {"aggregation": "given_total", "total": 10},
    "sequence_sum": {"aggregation": "sequence_sum"},
}
ROLLOUTS: dict[str, dict[str, Any]] = {
    f"{level}-{mode}": {"rollout_level": level, "rollout_mode": mode, "rollout_max": 1.3}
    | ({"rollout_min": 0.85} if mode == "mask" else {})
    for level in ("token", "sequence")
    for mode in ("truncate", "mask")
}
# Both sides of every bound of ROLLOUTS, and one that is missing.
ROLLOUT_GAPS = np.array([[0.1, -0.2, 0.4], [-0.3, np.nan, 0.2]])


def as_jax(arrays: Mapping[str, Any], dtype: str = "float64") -> dict[str, Any]:
    """Floats in `dtype`, everything else as it is."""
    out = {}
    for name, x in arrays.items():
        floats = isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)
        out[name] = jnp.asarray(x, dtype) if floats else x
    return out


def case_f(**changes: Any) -> dict[str, Any]:
    """The four arrays of `policy_loss` on fixture F, in numpy float64."""
    f = fixture()
    return {name: f[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")} | changes


def full_f(**changes: Any) -> dict[str, Any]:
    """Fixture F without masked places and with an advantage a token: every bound is reached from both sides."""
    return case_f(mask=np.ones((2, 3), int), advantages=np.array([[1.0, -0.7, 0.4], [-0.5, 0.0, -0.9]])) | changes


def random_case(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, Any]:
    """A random batch with every optional array."""
    logprobs = -rng.exponential(1.5, shape)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + rng.normal(0, 0.4, shape),
        "advantages": rng.normal(size=shape),
        "mask": rng.random(shape) < 0.7,
        "ref_logprobs": logprobs + rng.normal(0, 0.4, shape),
        "rollout_logprobs": logprobs + rng.normal(0, 0.4, shape),
        "entropy": rng.exponential(1.0, shape),
    }


def everything(policy: str, aggregation: str = "sequence_mean") -> dict[str, Any]:
    """Options that use every array of `random_case`."""
    options = POLICIES[policy] | KLS["k3-corrected"] | AGGREGATIONS[aggregation]
    return options | {"rollout_max": 1.3, "entropy_coef": 0.02}


def loss_and_grad(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    loss: Callable[..., LossOutput] = policy_loss,
    dtype: str = "float64",
    with_entropy: bool = False,
) -> tuple[Any, Any, dict[str, Any]]:
    """Loss, gradient by the log-probabilities (and the entropies), metrics."""
    given = as_jax(arrays, dtype)
    settings = as_jax(options, dtype)
    old, advantages, mask = given.pop("old_logprobs"), given.pop("advantages"), given.pop("mask")
    moving = {name: given.pop(name) for name in ("logprobs", *(["entropy"] if with_entropy else []))}

    def f(moving: dict[str, Any]) -> LossOutput:
        rest = given | settings | {name: x for name, x in moving.items() if name != "logprobs"}
        return loss(moving["logprobs"], old, advantages, mask, **rest)

    (value, metrics), gradient = jax.value_and_grad(f, has_aux=True)(moving)
    return value, gradient if with_entropy else gradient["logprobs"], metrics


def assert_same(one: Any, two: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Every leaf of two results; exact unless told otherwise."""
    paths, tree = jax.tree_util.tree_flatten_with_path(one)
    others, other_tree = jax.tree_util.tree_flatten_with_path(two)
    assert tree == other_tree, f"{tree} != {other_tree}"
    for (path, x), (_, y) in zip(paths, others, strict=True):
        assert_close(x, y, rtol=rtol, atol=atol, what=jax.tree_util.keystr(path))
