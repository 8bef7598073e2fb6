"""Runs that take seconds: a model of a few thousand weights on sums."""

import time
from dataclasses import replace
from pathlib import Path

from logitless.train.config import (
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TinyModel,
    TrainConfig,
    WarmStartConfig,
)

SRC = Path(__file__).parents[2] / "src"
SMALL = TinyModel(vocab_size=128, hidden_size=16, num_layers=1, num_heads=2, mlp_size=16)
STOCK = LossConfig(level="stock", kl_coef=0.5)
FUSED = LossConfig(level="hidden", kl_coef=0.5)


def small_run(output, **changes) -> TrainConfig:
    """Six updates of two prompts with four completions each."""
    config = TrainConfig(
        name="small",
        output=str(output),
        model=ModelConfig(tiny=SMALL),
        rollout=RolloutConfig(prompts_per_step=2, generations=4, max_prompt_tokens=4, max_new_tokens=3),
        rewards=["last_number"],
        # Far enough to give some answers right and others wrong: without a reward nothing is put to the test.
        warm_start=WarmStartConfig(steps=60, batch_size=32, learning_rate=1e-2),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        steps=6,
        checkpoint_every=2,
    )
    return replace(config, **changes)


def wait_for_updates(process, folder, count, seconds=300):
    """Until the run has written so many updates."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + seconds
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)
