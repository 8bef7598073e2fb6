"""Configs that mean nothing are refused in one line."""

import pytest

from logitless.train.config import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TinyModel,
    TrainConfig,
    WarmStartConfig,
)
from logitless.train.errors import TrainError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0; it must be at least 1"),
        ({"rollout": RolloutConfig(generations=1)}, "rollout.generations=1; it must be at least 2"),
        ({"rollout": RolloutConfig(temperature=0.0)}, "rollout.temperature=0.0; it must be above 0"),
        ({"optimizer": OptimizerConfig(learning_rate=float("nan"))}, "learning_rate=nan; it must be above 0"),
        ({"steps": 5, "rollout": RolloutConfig(updates_per_rollout=2)}, "steps=5 is no multiple"),
        ({"rollout": RolloutConfig(updates_per_rollout=4), "checkpoint_every": 10}, "checkpoint_every=10 must be 0 or"),
        ({"rewards": []}, "rewards is empty"),
        ({"loss": LossConfig(level="stock", name="dapo")}, "level=stock has grpo and gspo alone"),
        ({"record_rollouts": "a", "replay_rollouts": "a"}, "exclude each other"),
        ({"mesh": {"data": 2}}, "must map fsdp and tp"),
        ({"model": ModelConfig(tiny=TinyModel(hidden_size=20, num_heads=4))}, "times an even number"),
        ({"data": DataConfig(terms=0)}, "data.terms=0"),
        ({"warm_start": WarmStartConfig(steps=0)}, "warm_start.steps=0"),
        ({"warm_start": WarmStartConfig(steps=1, batch_size=0)}, "warm_start.batch_size=0"),
        ({"warm_start": WarmStartConfig(steps=1, learning_rate=0.0)}, "warm_start.learning_rate=0.0"),
        ({"model": ModelConfig(tiny=TinyModel(num_heads=0))}, "num_heads=0"),
        ({"loss": LossConfig(level="stock", implementation="chunked")}, "loss.implementation has no meaning"),
        ({"loss": LossConfig(level="logits", head="gather_head")}, "loss.head has no meaning for loss.level=logits"),
        ({"loss": LossConfig(name="cispo", clip_low=0.1)}, "loss.clip_low has no meaning for loss.name=cispo"),
        (
            {"loss": LossConfig(name="sapo", options={"tau": 1.0})},
            "loss.options.tau is no option of sapo",
        ),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(TrainError, match=message) as raised:
        TrainConfig(**changes)
    assert "\n" not in str(raised.value)


def test_clip_ranges_are_the_presets_own_unless_given():
    pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")
    from logitless.train.loss import grpo_config

    def ranges(**loss):
        made = grpo_config(TrainConfig(loss=LossConfig(**loss)))
        return made.epsilon, vars(made)["epsilon_high"]

    assert ranges(name="grpo") == (0.2, 0.2)
    assert ranges(name="gspo") == ranges(name="gspo", level="stock") == (3e-4, 4e-4)
    assert ranges(name="grpo", clip_low=0.3) == (0.3, 0.2)
    assert ranges(name="gspo", clip_high=0.1) == (3e-4, 0.1)
