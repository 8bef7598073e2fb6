"""The cases of public reports that concern policy losses: each number as reported, in float64 and float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, fixture
from policy_inputs import AGGREGATIONS, POLICIES, as_jax, assert_same, case_f, full_f, loss_and_grad

from logitless import LossOutput, bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, policy_loss

# Numbers are given to eight digits after the point.
TOLERANCE: dict[str, dict[str, Any]] = {"float64": {"rtol": 0.0, "atol": 6e-9}, "float32": {"rtol": 2e-6, "atol": 3e-7}}
PRESETS = {"grpo": grpo_loss, "bnpo": bnpo_loss, "dapo": dapo_loss, "dr_grpo": dr_grpo_loss}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
GSPO = {"ratio_level": "sequence"}
LUSPO = {"ratio_level": "sequence", "aggregation": "sequence_sum"}
K3 = {"kl": "k3", "kl_coef": 0.1}


def _one_of_each_sign(gap: float) -> dict[str, np.ndarray]:
    """Three tokens that count, with A above, below and at 0; old_logprobs - logprobs is `gap` everywhere."""
    return {
        "logprobs": np.full((2, 3), -1.0),
        "old_logprobs": np.full((2, 3), -1.0 + gap),
        "advantages": np.array([[1.0, -1.0, 0.0], [1.0, -1.0, 0.0]]),
        "mask": np.array([[1, 1, 1], [0, 0, 0]]),
    }


def _ref() -> dict[str, np.ndarray]:
    return {"ref_logprobs": fixture()["ref_logprobs"]}


@pytest.mark.parametrize(
    ("preset", "options", "value", "gradient"),
    [
        ("grpo", {}, -0.1532531801, [[0, -0.22620935, 0], [0.37295617, 0, 0]]),
        ("bnpo", {}, -0.4529750231, None),
        ("dapo", {}, -0.4529750231, None),
        ("dr_grpo", {"max_completion_length": 4}, -0.1698656337, None),
        ("grpo", K3, -0.1489191990, [[-0.00553507, -0.21796736, 0], [0.38591526, 0, 0]]),
        # Case 48: the corrected divergence is differentiable in its ratio
        (
            "grpo",
            K3 | {"kl_bias_correction": True},
            -0.1478955258,
            [[-0.00674929, -0.21716098, 0], [0.39533354, 0, 0]],
        ),
        # Case 72: the caller owns the denominator
        ("dapo", {"total": 10}, -0.1358925069, [[0, -0.09048374, 0], [0.07459123, 0, 0]]),
    ],
)
def test_presets_on_fixture_f(dtype, preset, options, value, gradient):
    extra = _ref() if "kl_coef" in options else {}
    loss, grad, _ = loss_and_grad(case_f(**extra), CLIP | options, loss=PRESETS[preset], dtype=dtype)
    assert_close(loss, value, **TOLERANCE[dtype])
    if gradient is not None:
        assert_close(grad, gradient, what="gradient", **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("options", "value", "gradient"),
    [
        # Case 46
        (LUSPO | CLIP, -0.7322147437, [[-0.55258546, -0.55258546, 0], [0.37295617, 0, 0]]),
        (LUSPO | CLIP | K3, -0.7255876924, [[-0.5636556, -0.53610146, 0], [0.38591526, 0, 0]]),
        # Case 56
        (GSPO | CLIP, -0.1796292846, [[-0.27629273, -0.27629273, 0], [0.37295617, 0, 0]]),
        # their own defaults
        (GSPO | {"clip_low": 3e-4, "clip_high": 4e-4}, -0.12724383, None),
        (LUSPO | {"clip_low": 3e-4, "clip_high": 4e-4}, -0.62744383, None),
        ({"aggregation": "given_total", "clip_high": 0.28}, -0.47964169, None),
        # Case 60
        ({"surrogate": "sapo"}, -0.4663255744, [[-0.32734525, -0.22569799, 0], [0.34915554, 0, 0]]),
        # Case 62
        (
            {"surrogate": "vespo", "aggregation": "given_total"},
            0.5416180122,
            [[-0.25593787, -0.25593787, 0], [0.20692293, 0, 0]],
        ),
    ],
)
def test_family_on_fixture_f(dtype, options, value, gradient):
    extra = _ref() if "kl_coef" in options else {}
    loss, grad, _ = loss_and_grad(case_f(**extra), options, dtype=dtype)
    assert_close(loss, value, **TOLERANCE[dtype])
    if gradient is not None:
        assert_close(grad, gradient, what="gradient", **TOLERANCE[dtype])


def test_sequence_ratio_weighs_by_length_under_token_mean(x64):
    # Case 56: two tokens with exp(.1), one clipped from below at exp(.4) * -0.5
    loss, grad, _ = loss_and_grad(case_f(), GSPO | CLIP | {"aggregation": "token_mean"})
    assert_close(loss, -(2 * np.exp(0.1) - 0.5 * np.exp(0.4)) / 3)
    assert_close(grad, [[-np.exp(0.1) / 3] * 2 + [0], [0.5 * np.exp(0.4) / 3, 0, 0]], what="gradient")


def test_corrected_k3_has_gradient_ratio_times_log_gap(x64):
    # Case 48, also above delta and at ratio 1
    for gap in (0.0, 0.3, 2.0):
        arrays = case_f(advantages=np.zeros(2), **_ref())
        arrays["old_logprobs"] = arrays["logprobs"] - gap
        options = K3 | {"kl_coef": 1.0, "kl_bias_correction": True, "delta": 1.5, "aggregation": "sequence_sum"}
        _, grad, _ = loss_and_grad(arrays, options)
        expected = np.exp(gap) * (arrays["logprobs"] - arrays["ref_logprobs"]) * arrays["mask"] / 2
        assert_close(grad, expected, what=f"gradient at gap {gap}")


@pytest.mark.parametrize("delta", [None, 1.5])
def test_ratio_far_above_the_bounds_is_finite(dtype, delta):
    # Case 54
    arrays = {
        "logprobs": np.full((2, 3), -1.0),
        "old_logprobs": np.full((2, 3), -200.0),
        "advantages": np.full(2, -2.0),
        "mask": np.ones((2, 3)),
    }
    loss, grad, metrics = loss_and_grad(arrays, {"delta": delta}, dtype=dtype)
    assert_close(loss, 3.0 if delta else 2 * np.exp(80.0), rtol=1e-5)
    assert_close(grad, np.zeros((2, 3)), what="gradient")
    assert np.isfinite(metrics["ratio_max"])


@pytest.mark.parametrize("policy", ["sequence-clip", "sequence-none", "sequence-token-clip", "clip", "sapo", "vespo"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_log_ratio_of_200_never_gives_nan(policy, advantage, log_ratio):
    # Case 58
    arrays = full_f(advantages=np.full(2, advantage))
    arrays["old_logprobs"] = arrays["logprobs"] - log_ratio
    loss, grad, _ = loss_and_grad(arrays, POLICIES[policy], dtype="float32")
    assert np.isfinite(loss) and np.all(np.isfinite(grad)), (loss, grad)
    if advantage == 0:
        assert_close(loss, 0.0)
        assert_close(grad, np.zeros((2, 3)))


def test_vespo_with_a_rollout_weight_of_zero(dtype):
    # Case 62: exp(-400) is 0 in float32; the weight enters s at log 1e-8 and does not multiply the loss
    arrays = case_f(mask=np.array([[1, 1, 0], [0, 0, 0]]))
    rollout = arrays["old_logprobs"] + np.array([[400.0, 0, 0], [0, 0, 0]])
    options = {"surrogate": "vespo", "aggregation": "given_total", "rollout_logprobs": rollout}
    loss, grad, _ = loss_and_grad(arrays, options, dtype=dtype)
    # s = .3 - .1 + log 1e-8
    weight = np.exp(3 + 2 * 0.2) * 1e-16 * np.exp(-3 * np.exp(0.2) * 1e-8)
    assert weight > 0
    assert_close(loss, -weight * arrays["logprobs"][0, :2].sum() / 2, rtol=1e-4, atol=0.0)
    assert_close(grad, [[-weight / 2] * 2 + [0], [0, 0, 0]], rtol=1e-4, atol=0.0, what="gradient")


def test_groups_without_variance_stay_in_the_denominator(x64):
    # Case 68: rewards [[1, 1], [0, 1]]: advantages 0 0 -a a; 4 tokens of each row in the total of 16
    arrays = {
        "logprobs": np.full((4, 4), -1.0),
        "old_logprobs": None,
        "advantages": np.array([0.0, 0.0, -0.7, 0.7]),
        "mask": np.ones((4, 4), int),
    }
    _, grad, metrics = loss_and_grad(arrays, {"aggregation": "given_total"})
    assert_close(grad, -np.repeat(arrays["advantages"][:, None], 4, axis=1) / 16, what="gradient")
    assert_close(metrics["ratio_mean"][1], 16)


@pytest.mark.parametrize("aggregation", ["token_mean", "given_total"])
def test_truncated_tokens_leave_numerator_and_denominator(x64, aggregation):
    # Case 70
    mask = np.ones((3, 4), int)
    mask[2, 2:] = 0
    arrays = {
        "logprobs": -np.arange(12.0).reshape(3, 4) / 10,
        "old_logprobs": None,
        "advantages": np.array([1.0, 2.0, -3.0]),
        "mask": mask,
    }
    loss, _, _ = loss_and_grad(arrays, {"aggregation": aggregation})
    assert_close(loss, -(4 * 1.0 + 4 * 2.0 - 2 * 3.0) / 10)


def test_local_means_and_shared_total(x64):
    # Case 74
    def row(i: int) -> dict[str, np.ndarray]:
        return {name: x[i : i + 1] for name, x in case_f().items()}

    local = [loss_and_grad(row(i), CLIP, loss=bnpo_loss)[0] for i in range(2)]
    assert_close(local, [-1.0524187090, 0.7459123488], **TOLERANCE["float64"])
    shared = [loss_and_grad(row(i), CLIP | {"total": 3}, loss=dapo_loss)[0] for i in range(2)]
    assert_close(shared, [-0.7016124727, 0.2486374496], **TOLERANCE["float64"])
    assert_close(sum(float(x) for x in shared), -0.4529750231, **TOLERANCE["float64"])


def test_fully_masked_row_counts_in_the_mean_over_rows(dtype):
    # Case 78
    arrays = case_f(mask=np.array([[1, 1, 0], [0, 0, 0]]))
    loss, grad, _ = loss_and_grad(arrays, CLIP, loss=grpo_loss, dtype=dtype)
    assert_close(loss, -0.5262093545, **TOLERANCE[dtype])
    assert_close(grad, [[0, -0.22620935, 0], [0, 0, 0]], what="gradient", **TOLERANCE[dtype])


def test_sequence_weight_is_exp_of_the_sum(dtype):
    # Case 84: not the product over tokens of truncated weights, not the mean form
    arrays = {
        "logprobs": np.full((2, 3), -1.0),
        "old_logprobs": np.full((2, 3), -1.0),
        "advantages": np.array([1.0, 1.0]),
        "mask": np.array([[1, 1, 1], [0, 0, 0]]),
    }
    rollout = arrays["old_logprobs"] - np.array([[0.1, -0.2, 0.3], [9.0, 9.0, 9.0]])
    options = {"rollout_logprobs": rollout, "rollout_level": "sequence", "aggregation": "token_mean"}
    loss, grad, metrics = loss_and_grad(arrays, options, dtype=dtype)
    assert_close(loss, -1.2214027582, **TOLERANCE[dtype])
    assert_close(grad, [[-1.2214027582 / 3] * 3, [0] * 3], what="gradient", **TOLERANCE[dtype])
    assert_close(metrics["rollout_mismatch"], (0.6, 3), what="rollout_mismatch", **TOLERANCE[dtype])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_missing_rollout_logprob_weighs_one(dtype, level):
    # Case 86
    arrays = full_f(advantages=np.array([1.0, -0.5]))
    arrays["old_logprobs"] = arrays["logprobs"]
    gaps = np.array([[0.1, np.nan, 0.3], [np.nan, np.nan, np.nan]])
    options = {
        "rollout_logprobs": arrays["old_logprobs"] - gaps,
        "rollout_level": level,
        "aggregation": "sequence_sum",
    }
    loss, grad, metrics = loss_and_grad(arrays, options, dtype=dtype)
    weights = np.exp([[0.4] * 3, [0] * 3]) if level == "sequence" else np.exp([[0.1, 0, 0.3], [0] * 3])
    expected = -weights * arrays["advantages"][:, None] / 2
    assert_close(loss, expected.sum(), **TOLERANCE[dtype])
    assert_close(grad, expected, what="gradient", **TOLERANCE[dtype])
    assert_close(metrics["rollout_mismatch"][0], 0.4, **TOLERANCE[dtype])


@pytest.mark.parametrize("policy", ["clip", "clip-delta", "none", "sapo"])
def test_target_outside_the_support_gives_no_nan(dtype, policy):
    # Case 88: logprob -inf after top-p has ratio 0
    arrays = full_f(advantages=np.array([1.0, -0.5]))
    arrays["logprobs"] = arrays["logprobs"].copy()
    arrays["logprobs"][:, 0] = -np.inf
    loss, grad, metrics = loss_and_grad(arrays, POLICIES[policy], dtype=dtype)
    assert np.isfinite(loss) and np.all(np.isfinite(grad)), (loss, grad)
    assert_close(grad[:, 0], [0, 0], what="gradient")
    assert_close(metrics["ratio_min"], 0.0)


@pytest.mark.parametrize(("x", "value", "slope"), [(-25.0, 24.0, 1.0), (3.0, 16.08553692, -19.08553692)])
def test_k3_is_not_clamped(dtype, x, value, slope):
    # Case 92
    arrays = {
        "logprobs": np.full((2, 3), -26.0),
        "old_logprobs": None,
        "advantages": np.zeros(2),
        "mask": np.array([[1, 0, 0], [0, 0, 0]]),
        "ref_logprobs": np.full((2, 3), -26.0 + x),
    }
    options = {"kl": "k3", "kl_coef": 1.0, "aggregation": "token_mean"}
    loss, grad, metrics = loss_and_grad(arrays, options, dtype=dtype)
    assert_close(loss, value, rtol=1e-6)
    assert_close(grad, [[slope, 0, 0], [0, 0, 0]], rtol=1e-6, what="gradient")
    assert_close(metrics["kl"], (value, 1), rtol=1e-6, what="kl")
    loss, grad, _ = loss_and_grad(arrays, options | {"kl_clamp": 2.0}, dtype=dtype)
    assert_close(loss, {-25.0: 1 + np.exp(-2.0), 3.0: np.exp(2.0) - 3}[x], rtol=1e-6)
    assert_close(grad, np.zeros((2, 3)), what="clamped gradient")


def test_rollout_weights_old_ref_and_advantages_carry_no_gradient(x64):
    # Case 92 (second half)
    arrays = as_jax(full_f(rollout_logprobs=fixture()["old_logprobs"] - 0.1, **_ref()))
    moving = {name: x for name, x in arrays.items() if name not in ("logprobs", "mask")}

    def f(moving: dict[str, jax.Array]) -> LossOutput:
        rest: dict[str, Any] = {name: moving[name] for name in ("rollout_logprobs", "ref_logprobs")}
        old, advantages = moving["old_logprobs"], moving["advantages"]
        return policy_loss(arrays["logprobs"], old, advantages, arrays["mask"], **K3, **rest)

    gradients, _ = jax.grad(f, has_aux=True)(moving)
    assert_same(gradients, jax.tree.map(jnp.zeros_like, gradients))


@pytest.mark.parametrize(
    ("options", "high"),
    [
        ({"surrogate": "cispo", "cispo_max": 1.2}, 1),
        ({"surrogate": "sapo"}, 0),
        ({"surrogate": "vespo"}, 0),
        ({"surrogate": "none"}, 0),
        ({"surrogate": "clip"}, 1),
    ],
)
def test_clip_fraction_is_that_of_the_surrogate(x64, options, high):
    # Case 94: ratio 2; A > 0, A < 0 and A = 0
    arrays = _one_of_each_sign(-np.log(2.0))
    _, _, metrics = loss_and_grad(arrays, options)
    assert_close(metrics["clip_high"], (high, 3), what="clip_high")
    assert_close(metrics["clip_low"], (0, 3), what="clip_low")
    assert_close(metrics["clip_region"], (high, 3), what="clip_region")


def test_clip_low_counts_ratios_below_with_negative_advantage(x64):
    # Case 94: ratio one half
    arrays = _one_of_each_sign(np.log(2.0))
    _, _, metrics = loss_and_grad(arrays, CLIP)
    assert_close(metrics["clip_low"], (1, 3), what="clip_low")
    assert_close(metrics["clip_high"], (0, 3), what="clip_high")


def test_metrics_read_counted_places_only(dtype):
    # Case 96
    arrays = case_f(**_ref())
    arrays["old_logprobs"] = np.where(arrays["mask"], arrays["old_logprobs"], arrays["logprobs"] - 9)
    _, _, metrics = loss_and_grad(arrays, CLIP | K3 | {"entropy": fixture()["entropy"]}, dtype=dtype)
    expected = {
        "clip_high": (1, 3),
        "clip_low": (0, 3),
        "clip_region": (1, 3),
        "ratio_mean": (np.exp([0.3, -0.1, 0.4]).sum(), 3),
        "ratio_min": np.exp(-0.1),
        "ratio_max": np.exp(0.4),
        "approx_kl": (sum(np.exp(-x) + x - 1 for x in (0.3, -0.1, 0.4)), 3),
        "kl": (sum(np.exp(x) - x - 1 for x in (0.2, -0.4, -0.3)), 3),
        "entropy": (1.26144504 + 1.2884643 + 1.43671541, 3),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(metrics[name], value, rtol=1e-6, atol=1e-8, what=name)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mask_of_zeros_gives_zero(dtype, aggregation):
    # Case 76; every policy and every option in test_policy
    loss, grad, metrics = loss_and_grad(case_f(mask=np.zeros((2, 3))), AGGREGATIONS[aggregation], dtype=dtype)
    assert_close(loss, 0.0)
    assert_close(grad, np.zeros((2, 3)), what="gradient")
    assert grad.dtype == dtype
    assert_close(metrics["clip_high"], (0, 0))
    assert_close((metrics["ratio_min"], metrics["ratio_max"]), (np.inf, -np.inf), what="ratio_min and ratio_max")
