"""Every meaningful combination of `policy_loss` on fixture F against the oracle: values and gradients in float64."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from oracle import assert_close, fixture, policy_gradient, policy_loss
from policy_inputs import AGGREGATIONS, KLS, POLICIES, ROLLOUT_GAPS, ROLLOUTS, case_f, full_f, loss_and_grad

NAMES = ("token_mean", "sequence_sum")


def assert_as_oracle(
    arrays: dict[str, Any], options: dict[str, Any], extra: dict[str, Any], names: Iterable[str] = AGGREGATIONS
) -> None:
    for name in names:
        aggregation = AGGREGATIONS[name]
        given = (arrays["logprobs"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
        settings = options | aggregation | extra
        loss, grad, _ = loss_and_grad(arrays, settings)
        assert_close(loss, policy_loss(*given, **settings), rtol=1e-12, atol=1e-13, what=f"loss, {name}")
        # Central differences keep about ten digits.
        assert_close(grad, policy_gradient(*given, **settings), rtol=1e-8, atol=1e-9, what=f"gradient, {name}")


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_term_and_divergence(x64, policy, kl):
    extra = {"ref_logprobs": fixture()["ref_logprobs"]} if kl != "no-kl" else {}
    # An aggregation sees token losses and not what they are made of: all of them with two divergences only.
    names = AGGREGATIONS if kl in ("no-kl", "k3-corrected") else ("sequence_mean", "given_total-10")
    assert_as_oracle(case_f(), POLICIES[policy] | KLS[kl], extra, names)


@pytest.mark.parametrize(
    ("policy", "rollout"),
    # vespo takes no sequence weight: test_policy_bad_input
    [(p, r) for p in POLICIES for r in ROLLOUTS if p != "vespo" or r.startswith("token")],
)
def test_policy_term_and_rollout_weights(x64, policy, rollout):
    f = fixture()
    arrays = full_f()
    rollout_logprobs = arrays["old_logprobs"] - ROLLOUT_GAPS
    # The divergence shows that the weights touch the policy term only.
    options = POLICIES[policy] | KLS["k3-corrected"] | ROLLOUTS[rollout]
    assert_as_oracle(arrays, options, {"ref_logprobs": f["ref_logprobs"], "rollout_logprobs": rollout_logprobs}, NAMES)


@pytest.mark.parametrize("policy", POLICIES)
def test_entropy_bonus(x64, policy):
    arrays = full_f(entropy=fixture()["entropy"])
    for name in ("sequence_mean", "constant", "given_total-10") if policy == "clip" else ("sequence_sum",):
        settings: dict[str, Any] = POLICIES[policy] | AGGREGATIONS[name] | {"entropy_coef": 0.03}
        given = (arrays["logprobs"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
        loss, grads, _ = loss_and_grad(arrays, settings, with_entropy=True)
        expected = policy_loss(*given, entropy=arrays["entropy"], **settings)
        assert_close(loss, expected, rtol=1e-12, what=f"loss, {name}")
        expected = policy_gradient(*given, entropy=arrays["entropy"], **settings)
        assert_close(grads["logprobs"], expected, rtol=1e-8, atol=1e-9, what=f"gradient, {name}")
        lengths = {"sequence_mean": 6, "sequence_sum": 2, "constant": 8, "given_total-10": 10}
        by_entropy = np.full((2, 3), -0.03 / lengths.get(name, 6))
        assert_close(grads["entropy"], by_entropy, what=f"gradient by entropy, {name}")


@pytest.mark.parametrize("policy", POLICIES)
def test_top_entropy_keeps_the_policy_term_of_those_tokens(x64, policy):
    # Entropies by rank: 1.44 1.36 1.31 1.29 1.26 1.24; half of them is three tokens.
    f = fixture()
    keep = np.array([[0, 0, 0], [1, 1, 1]])
    arrays = full_f()
    given = (arrays["logprobs"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
    settings: dict[str, Any] = POLICIES[policy] | KLS["k3"] | {"ref_logprobs": f["ref_logprobs"]}
    loss, grad, _ = loss_and_grad(arrays, settings | {"entropy": f["entropy"], "top_entropy_quantile": 0.5})
    assert_close(loss, policy_loss(*given, keep=keep, **settings), rtol=1e-12)
    assert_close(grad, policy_gradient(*given, keep=keep, **settings), rtol=1e-8, atol=1e-9, what="gradient")


@pytest.mark.parametrize("policy", POLICIES)
def test_on_policy_by_none(x64, policy):
    arrays = full_f(old_logprobs=None)
    given = (arrays["logprobs"], None, arrays["advantages"], arrays["mask"])
    loss, grad, _ = loss_and_grad(arrays, POLICIES[policy])
    assert_close(loss, policy_loss(*given, **POLICIES[policy]), rtol=1e-12)
    assert_close(grad, policy_gradient(*given, **POLICIES[policy]), rtol=1e-8, atol=1e-9, what="gradient")
