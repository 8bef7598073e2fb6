"""Case 104: no option vanishes. Each one, switched on alone, changes the loss, a gradient or a metric."""

import inspect
from typing import Any

import numpy as np
import pytest
from oracle import fixture
from policy_inputs import full_f, loss_and_grad

import logitless
from logitless import policy_loss
from logitless.losses.policy_options import CommonOptions

F = fixture()
REF = {"ref_logprobs": F["ref_logprobs"]}
KL = {"kl": "k3", "kl_coef": 0.1} | REF
ROLLOUT = {"rollout_logprobs": F["old_logprobs"] - np.array([[0.1, -0.2, 0.4], [-0.3, 0.2, 1.0]])}
ENTROPY = {"entropy": F["entropy"]}
VESPO = {"surrogate": "vespo"}

# option: what must be there for it to have a meaning, and its other value
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "ratio_level": ({}, "sequence"),
    "surrogate": ({}, "none"),
    "clip_low": ({}, 0.05),
    "clip_high": ({}, 0.4),
    "delta": ({"clip_high": 1.0}, 1.1),
    "cispo_max": ({"surrogate": "cispo"}, 1.1),
    "tau_positive": ({"surrogate": "sapo"}, 2.0),
    "tau_negative": ({"surrogate": "sapo"}, 2.0),
    "kl": (KL, "k2"),
    "kl_coef": (KL, 0.2),
    "ref_logprobs": (KL, F["ref_logprobs"] + 0.1),
    "kl_bias_correction": (KL, True),
    "aggregation": ({}, "sequence_sum"),
    "total": ({"aggregation": "given_total"}, 10),
    "max_completion_length": ({"aggregation": "constant", "max_completion_length": 4}, 5),
    "rollout_logprobs": ({}, ROLLOUT["rollout_logprobs"]),
    "rollout_level": (ROLLOUT, "sequence"),
    "rollout_mode": (ROLLOUT, "mask"),
    "rollout_max": (ROLLOUT, 1.2),
    "rollout_min": (ROLLOUT | {"rollout_mode": "mask"}, 0.9),
    "entropy": ({}, F["entropy"]),
    "entropy_coef": (ENTROPY, 0.1),
    "top_entropy_quantile": (ENTROPY, 0.5),
    "kl_clamp": (KL, 0.1),
    "vespo_k_pos": (VESPO, 1.5),
    "vespo_lambda_pos": (VESPO, 1.5),
    "vespo_k_neg": (VESPO, 1.5),
    "vespo_lambda_neg": (VESPO, 1.5),
    "segment_ids": ({}, np.array([[1, 1, 2], [1, 2, 0]])),
}
NEEDED = {"dr_grpo": {"max_completion_length": 4}}
PRESETS = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo")
# What the presets read beside `policy_loss`'s own argument: they fix the composition.
FIXED = {"ratio_level", "surrogate", "aggregation"}


def _own_options(loss: Any) -> set[str]:
    return {name for name, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY}


def assert_differs(
    loss: Any, base: dict[str, Any], option: str, value: Any, arrays: dict[str, Any] | None = None
) -> None:
    arrays = arrays or full_f() | {"advantages": np.array([[1.0, -0.7, 0.4], [-0.5, 0.3, -0.9]])}
    before = loss_and_grad(arrays, base, loss=loss)
    after = loss_and_grad(arrays, base | {option: value}, loss=loss)
    same_loss = np.array_equal(before[0], after[0]) and np.array_equal(before[1], after[1])
    new_metrics = after[2].keys() - before[2].keys()
    assert not same_loss or new_metrics, f"{option}={value!r} changed nothing: {after}"
    if option != "entropy":
        assert not same_loss, f"{option}={value!r} changed neither loss nor gradient: {after}"


def test_every_option_is_in_the_table():
    assert CHANGES.keys() == _own_options(policy_loss)


@pytest.mark.parametrize("option", CHANGES)
def test_option_alone_changes_the_result(x64, option):
    base, value = CHANGES[option]
    assert_differs(policy_loss, base, option, value)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("option", sorted(CHANGES))
def test_option_alone_changes_the_preset_or_raises(x64, preset, option):
    loss, needed = getattr(logitless, f"{preset}_loss"), NEEDED.get(preset, {})
    base, value = CHANGES[option]
    if option not in _own_options(loss) | CommonOptions.__annotations__.keys():
        with pytest.raises(TypeError, match=f"{preset}_loss: got an unexpected .*{option}.*{preset}_loss fixes it"):
            loss_and_grad(full_f(), needed | {option: value}, loss=loss)
        return
    base = {name: x for name, x in base.items() if name not in FIXED} | needed
    arrays = None
    if "delta" in _own_options(loss) and preset in ("gspo", "luspo"):
        # One sequence with a ratio of exp(.1), one of exp(-.1), so that every bound is reached from both sides.
        arrays = full_f(advantages=np.array([[1.0, -0.4, 0.7], [-0.5, -0.2, 0.9]]))
        arrays["old_logprobs"] = arrays["logprobs"] - np.array([[0.3, -0.1, 0.1], [-0.1, 0.2, -0.4]])
        value = {"delta": 1.001, "clip_high": 0.2}.get(option, value)
        base.pop("clip_high", None)
    if preset == "vespo" and option == "rollout_level":
        with pytest.raises(ValueError, match="rollout_level='sequence' has no meaning with surrogate='vespo'"):
            loss_and_grad(full_f(), base | {option: value}, loss=loss)
        return
    assert_differs(loss, base, option, value, arrays)


def test_an_unknown_option_of_a_preset_comes_with_the_nearest():
    with pytest.raises(TypeError, match=r"grpo_loss: .*'entropy_koef'; did you mean 'entropy_coef'\?"):
        loss_and_grad(full_f(), {"entropy_koef": 0.1}, loss=logitless.grpo_loss, dtype="float32")
