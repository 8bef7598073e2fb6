"""Metrics of several micro-batches or devices as those of one batch: sums and counts add, extremes meet."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from logitless.losses.aggregate import ratio_or_zero
from logitless.losses.policy import Metrics


def add_metrics(*metrics: Metrics) -> Metrics:
    """Metrics of micro-batches as those of the whole batch.

    Equal to
        {name: (sum of sums, sum of counts)}; the minimum of each `*_min`, the maximum of each `*_max`

    Args:
        *metrics: the `metrics` of one `LossOutput` each, all with the same names.

    Returns:
        Metrics of the same names.

    Raises:
        ValueError: none given, or names that differ.

    Example:
        >>> import jax.numpy as jnp
        >>> one = {"approx_kl": (jnp.array(3.0), jnp.array(2.0)), "ratio_max": jnp.array(1.5)}
        >>> both = add_metrics(one, {"approx_kl": (jnp.array(1.0), jnp.array(2.0)), "ratio_max": jnp.array(1.2)})
        >>> mean_metrics(both)
        {'approx_kl': 1.0, 'ratio_max': 1.5}

    Reference: none; departures: none.
    """
    if not metrics:
        raise ValueError("add_metrics: got no metrics; give those of at least one LossOutput")
    for other in metrics[1:]:
        if differ := sorted(set(metrics[0]) ^ set(other)):
            raise ValueError(f"add_metrics: {', '.join(differ)} is in one of the metrics and not in another")
    return {name: _combine(name, [m[name] for m in metrics]) for name in metrics[0]}


def sum_metrics_over(metrics: Metrics, axis_name: str | tuple[str, ...]) -> Metrics:
    """Metrics of all devices of a mesh axis, on each of them: for use within `shard_map` or `pmap`.

    Equal to
        psum of sums and counts, pmin of each `*_min`, pmax of each `*_max`

    Args:
        metrics: the `metrics` of the `LossOutput` of this device's tokens.
        axis_name: the axis, or axes, over which tokens are split.

    Returns:
        Metrics of the same names, equal on every device.

    Raises:
        NameError: an axis that is not there, by JAX.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> metrics = {"kl": (jnp.array([1.0, 3.0]), jnp.array([1.0, 1.0])), "ratio_min": jnp.array([0.5, 0.7])}
        >>> total = jax.vmap(lambda m: sum_metrics_over(m, "data"), axis_name="data")(metrics)
        >>> total["kl"][0].tolist(), [round(x, 1) for x in total["ratio_min"].tolist()]
        ([4.0, 4.0], [0.5, 0.5])

    Reference: none; departures: none.
    """

    def meet(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return jax.tree.map(lambda x: lax.psum(x, axis_name), value)
        return lax.pmin(value, axis_name) if _is_minimum(name) else lax.pmax(value, axis_name)

    return {name: meet(name, value) for name, value in metrics.items()}


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """The numbers to log: each sum by its count.

    Equal to
        {name: float(sum / count)}, and minima and maxima as they are

    Args:
        metrics: concrete, not traced.

    Returns:
        Python floats. A metric without a token to count is 0; an extreme without one is infinite.

    Raises:
        jax.errors.ConcretizationTypeError: traced metrics, by JAX: take the means outside of jit.

    Example:
        >>> import jax.numpy as jnp
        >>> mean_metrics({"clip_high": (jnp.array(1.0), jnp.array(4.0)), "ratio_min": jnp.array(0.5)})
        {'clip_high': 0.25, 'ratio_min': 0.5}

    Reference: none; departures: none.
    """
    return {name: float(ratio_or_zero(*m) if isinstance(m, tuple) else m) for name, m in metrics.items()}


def _combine(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], tuple):
        sums, counts = zip(*values, strict=True)
        return _sum(sums), _sum(counts)
    stacked = jnp.stack(values)
    return jnp.min(stacked) if _is_minimum(name) else jnp.max(stacked)


def _sum(values: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.sum(jnp.stack(values))


def _is_minimum(name: str) -> bool:
    if not name.endswith(("_min", "_max")):
        raise ValueError(f"metrics: {name} is one number and no extreme; a mean needs (sum, count) to be combined")
    return name.endswith("_min")
