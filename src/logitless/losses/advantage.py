"""Advantages from rewards."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from logitless._arrays import FloatArray, Scalar, accumulator, check_name, is_concrete, shape_error


def group_advantages(
    rewards: FloatArray, *, scale: str = "group", epsilon: Scalar = 1e-4, baseline: str = "mean"
) -> Float[Array, "groups members"]:
    """Advantages of completions that share a prompt.

    Equal to
        (rewards - rewards.mean(1)) / (rewards.std(1, ddof=1) + epsilon)

    Args:
        rewards: `[groups, members]`, one row a prompt.
        scale: `"group"` divides by each group's standard deviation, `"batch"` by that of all rewards (both with
            ddof 1), `"none"` by nothing (Dr. GRPO).
        epsilon: added to the standard deviation.
        baseline: `"mean"` of the group, or `"leave_one_out"`: the mean of the other members (RLOO).

    Returns:
        `[groups, members]`, float32 (float64 for float64 rewards). A group of
        one, or whose rewards are all equal, gives 0.

    Raises:
        ValueError: rewards that are not two-dimensional, an unknown name, a negative epsilon.

    Example:
        >>> import jax.numpy as jnp
        >>> print(group_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]]), scale="none"))
        [[ 0.5 -0.5]
         [ 0.   0. ]]

    Reference: https://arxiv.org/abs/2402.03300; leave-one-out https://arxiv.org/abs/2402.14740. Departures: none.
    """
    name = "group_advantages"
    check_name(name, "scale", scale, ("group", "batch", "none"))
    check_name(name, "baseline", baseline, ("mean", "leave_one_out"))
    if is_concrete(epsilon) and not epsilon >= 0:
        raise ValueError(f"{name}: epsilon={epsilon}; it must be at least 0")
    rewards = jnp.asarray(rewards)
    if rewards.ndim != 2:
        raise shape_error(name, {"rewards": rewards}, "it must be [groups, members]: one row a prompt")
    rewards = rewards.astype(accumulator(rewards.dtype) if jnp.issubdtype(rewards.dtype, jnp.floating) else jnp.float32)
    members = rewards.shape[1]
    centred = rewards - _mean(rewards, 1)
    # Equal rewards leave no rounding behind: their difference from their own mean is 0, not 1e-8.
    centred = jnp.where(jnp.all(rewards == rewards[:, :1], axis=1, keepdims=True), 0.0, centred)
    # r - mean of the others = (r - mean) m / (m - 1).
    advantages = centred * (members / max(members - 1, 1)) if baseline == "leave_one_out" else centred
    if scale == "none":
        return advantages
    spread = jnp.sqrt(_variance(rewards, 1)) if scale == "group" else jnp.sqrt(_variance(rewards.reshape(1, -1), 1))
    divisor = spread + epsilon
    return jnp.where(divisor == 0, 0.0, advantages) / jnp.where(divisor == 0, 1.0, divisor)


def _mean(x: Float[Array, "a b"], axis: int) -> Float[Array, "a 1"]:
    return jnp.sum(x, axis=axis, keepdims=True) / max(x.shape[axis], 1)


def _variance(x: Float[Array, "a b"], axis: int) -> Float[Array, "a 1"]:
    """Sample variance; 0 for one member, where numpy's is NaN."""
    return jnp.sum(jnp.square(x - _mean(x, axis)), axis=axis, keepdims=True) / max(x.shape[axis] - 1, 1)
