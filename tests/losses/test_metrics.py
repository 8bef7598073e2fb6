"""Metrics of parts add up to those of the whole: micro-batches by `add_metrics`, devices by `sum_metrics_over`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_inputs import as_jax, assert_same, everything, random_case

from logitless import add_metrics, grpo_loss, mean_metrics, policy_loss, sum_metrics_over


def _arrays(seed: int) -> dict[str, Any]:
    arrays = as_jax(random_case(np.random.default_rng(seed), (4, 5)))
    # A micro-batch in which nothing counts must not disturb the extremes.
    arrays["mask"] = np.where(np.arange(4)[:, None] == 2, False, arrays["mask"])
    return arrays


def _metrics(arrays: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arrays)
    args = [rest.pop(name) for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    return policy_loss(*args, **rest, **everything("clip", "given_total")).metrics


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches(x64, parts):
    arrays = _arrays(0)
    size = 4 // parts
    split = [{name: x[i : i + size] for name, x in arrays.items()} for i in range(0, 4, size)]
    assert_same(add_metrics(*(_metrics(part) for part in split)), _metrics(arrays), rtol=1e-13, atol=1e-13)


def test_devices(x64):
    arrays = _arrays(1)
    whole = _metrics(arrays)

    def part(arrays: dict[str, Any]) -> Any:
        return sum_metrics_over(_metrics(arrays), "data")

    one_row = {name: jnp.asarray(x)[:, None] for name, x in arrays.items()}
    every = jax.vmap(part, axis_name="data")(one_row)
    for i in range(4):
        assert_same(jax.tree.map(lambda x, i=i: x[i], every), whole, rtol=1e-13, atol=1e-13)


def test_means():
    metrics = {"kl": (jnp.array(3.0), jnp.array(4.0)), "entropy": (jnp.array(0.0), jnp.array(0.0))}
    means = mean_metrics(metrics | {"ratio_max": jnp.array(1.5)})
    assert means == {"kl": 0.75, "entropy": 0.0, "ratio_max": 1.5}
    assert all(isinstance(x, float) for x in means.values())


def test_names_that_differ():
    ones = jnp.ones((1, 2))
    one = grpo_loss(-ones, None, jnp.ones(1), ones).metrics
    two = grpo_loss(-ones, None, jnp.ones(1), ones, ref_logprobs=-ones, kl_coef=0.1).metrics
    with pytest.raises(ValueError, match="kl is in one of the metrics and not in another"):
        add_metrics(one, two)
    with pytest.raises(ValueError, match="no metrics"):
        add_metrics()


def test_a_mean_without_its_count():
    with pytest.raises(ValueError, match=r"entropy is one number and no extreme; .* \(sum, count\)"):
        add_metrics({"entropy": jnp.array(1.0)}, {"entropy": jnp.array(2.0)})
    with pytest.raises(ValueError, match="entropy is one number and no extreme"):
        sum_metrics_over({"entropy": jnp.array(1.0)}, "data")
