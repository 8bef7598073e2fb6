"""Advantages from rewards, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from logitless import group_advantages

REWARDS = np.array([[1.0, 0.0, 0.5], [0.1, 0.7, 0.1]])


def test_groups_are_centred_and_scaled_by_their_own_spread(x64):
    expected = (REWARDS - REWARDS.mean(1, keepdims=True)) / (REWARDS.std(1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS), expected, rtol=1e-12)


def test_batch_scale_and_no_scale(x64):
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(REWARDS, scale="none"), centred, atol=1e-12)
    expected = centred / (REWARDS.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS, scale="batch"), expected, rtol=1e-12)


def test_leave_one_out_takes_the_mean_of_the_others(x64):
    others = (REWARDS.sum(1, keepdims=True) - REWARDS) / 2
    out = group_advantages(REWARDS, scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(out, REWARDS - others, atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("epsilon", [1e-4, 0.0])
@pytest.mark.parametrize("rewards", [[[1.0]], [[0.1, 0.1, 0.1]], np.zeros((0, 4)), np.zeros((2, 0))])
def test_66_a_group_without_variance_gives_zero_never_nan(rewards, scale, baseline, epsilon):
    rewards = jnp.asarray(rewards, jnp.float32)
    out = group_advantages(rewards, scale=scale, baseline=baseline, epsilon=epsilon)
    np.testing.assert_array_equal(out, np.zeros(rewards.shape))


def test_refusals():
    with pytest.raises(ValueError, match=r"rewards of shape \(3,\).*\[groups, members\]"):
        group_advantages(jnp.ones(3))
    with pytest.raises(ValueError, match="did you mean 'group'"):
        group_advantages(REWARDS, scale="groups")
    with pytest.raises(ValueError, match="epsilon=-1"):
        group_advantages(REWARDS, epsilon=-1.0)
