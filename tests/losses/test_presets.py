"""Each preset is its paper's loss, by its own defaults and with each of its options, on fixture F."""

from typing import Any

import numpy as np
import pytest
from oracle import assert_close, fixture, policy_gradient, policy_loss
from policy_inputs import assert_same, case_f, full_f, loss_and_grad

import logitless

SEQUENCE = {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
PAPERS: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "bnpo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant", "max_completion_length": 4},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "given_total"},
    "gspo": SEQUENCE,
    "luspo": SEQUENCE | {"aggregation": "sequence_sum"},
    "cispo": {"surrogate": "cispo", "cispo_max": 5.0, "aggregation": "given_total"},
    "sapo": {"surrogate": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    "vespo": {
        "surrogate": "vespo",
        "aggregation": "given_total",
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    },
}
NEEDED = {"dr_grpo": {"max_completion_length": 4}}


def _loss(name: str) -> Any:
    return getattr(logitless, f"{name}_loss")


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_those_of_the_paper(x64, name):
    arrays = full_f()
    given = (arrays["logprobs"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
    loss, grad, _ = loss_and_grad(arrays, NEEDED.get(name, {}), loss=_loss(name))
    assert_close(loss, policy_loss(*given, **PAPERS[name]), rtol=1e-12)
    assert_close(grad, policy_gradient(*given, **PAPERS[name]), rtol=1e-8, atol=1e-9, what="gradient")


@pytest.mark.parametrize("name", PAPERS)
def test_a_divergence_is_k3_unless_named(x64, name):
    arrays = case_f(ref_logprobs=fixture()["ref_logprobs"])
    options = NEEDED.get(name, {}) | {"kl_coef": 0.1}
    by_default, named = (loss_and_grad(arrays, options | kl, loss=_loss(name)) for kl in ({}, {"kl": "k3"}))
    assert_same(by_default, named)
    given = (arrays["logprobs"], arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
    more = {"kl": "k3", "kl_coef": 0.1, "ref_logprobs": arrays["ref_logprobs"]}
    assert_close(by_default[0], policy_loss(*given, **PAPERS[name], **more), rtol=1e-12)


def test_token_form_of_gspo(x64):
    """The value of gspo; the gradient by each token's own advantage instead of the sequence's."""
    arrays = full_f(advantages=np.array([[1.0, 2.0, 0.5], [0.3, 0.1, 0.7]]))
    options = {"clip_low": 0.9, "clip_high": 9.0}
    loss, grad, _ = loss_and_grad(arrays, options, loss=logitless.gspo_loss)
    token_loss, token_grad, _ = loss_and_grad(arrays, options | {"token_level": True}, loss=logitless.gspo_loss)
    assert_close(token_loss, loss, rtol=1e-14)
    ratio = np.exp([[0.7 / 3], [0.0]])
    assert_close(token_grad, -ratio * arrays["advantages"] / 6, what="gradient, token form")
    means = np.mean(arrays["advantages"], axis=1, keepdims=True)
    assert_close(grad, np.broadcast_to(-ratio * means / 6, (2, 3)), what="gradient")


def test_cispo_keeps_the_gradient_of_a_token_beyond_the_bound(x64):
    arrays = full_f(advantages=np.array([1.0, -0.5]))
    _, grad, metrics = loss_and_grad(arrays, {"cispo_max": 1.2}, loss=logitless.cispo_loss)
    ratio = np.exp(arrays["logprobs"] - arrays["old_logprobs"])
    assert_close(grad, -np.minimum(ratio, 1.2) * np.array([[1.0], [-0.5]]) / 6, what="gradient")
    # Case 94: of the ratios above 1.2 only those with a positive advantage.
    assert_close(metrics["clip_high"], (np.sum(ratio[0] > 1.2), 6))


@pytest.mark.parametrize("name", ["sapo", "vespo"])
def test_a_soft_loss_clips_nothing(x64, name):
    _, _, metrics = loss_and_grad(full_f(), {}, loss=_loss(name))
    for metric in ("clip_low", "clip_high", "clip_region"):
        assert_close(metrics[metric], (0, 6), what=metric)


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo"])
def test_micro_batches_that_share_a_total_add_up(x64, name):
    # Case 72
    arrays = full_f(mask=np.array([[1, 1, 0], [1, 0, 1]]))
    whole, grad, _ = loss_and_grad(arrays, {"total": 4}, loss=_loss(name))
    rows = [
        loss_and_grad({key: x[i : i + 1] for key, x in arrays.items()}, {"total": 4}, loss=_loss(name))
        for i in range(2)
    ]
    assert_close(rows[0][0] + rows[1][0], whole, rtol=1e-13)
    assert_close(np.concatenate([rows[0][1], rows[1][1]]), grad, rtol=1e-13, what="gradient")
