"""Supervised steps before GRPO, by Tunix's trainer and our cross-entropy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # pyright: ignore[reportMissingImports] - of the train extra
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports] - of the train extra
from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask  # pyright: ignore[reportMissingImports]

from logitless.integrations.tunix import use_logitless
from logitless.train.config import LossConfig, TrainConfig, WarmStartConfig
from logitless.train.data import Problem, Problems
from logitless.train.errors import TrainError
from logitless.train.loss import sharding_of
from logitless.train.models import Policy


def warm_start(
    config: TrainConfig,
    warm: WarmStartConfig,
    policy: Policy,
    problems: Problems,
    template: str,
    mesh: jax.sharding.Mesh,
    folder: Path,
) -> Policy:
    """The policy after `warm.steps` updates on worked examples; kept in the run's folder, and read from there again."""
    import optax  # pyright: ignore[reportMissingImports] - of the train extra

    trainer = peft_trainer.PeftTrainer(
        policy.model,
        optax.adamw(warm.learning_rate, weight_decay=0.0),
        peft_trainer.TrainingConfig(
            eval_every_n_steps=warm.steps + 1,
            max_steps=warm.steps,
            checkpoint_root_directory=str((folder / "warm_start").absolute()),
            checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=warm.steps, max_to_keep=1),
            data_sharding_axis=("fsdp",),
            pbar_description=None,
        ),
    )
    implementation = config.loss.implementation if config.loss.level == "hidden" else "auto"
    sharding = sharding_of(LossConfig(head=config.loss.head), mesh)
    use_logitless(trainer, implementation=implementation, sharding=sharding)
    trainer.with_gen_model_input_fn(model_inputs)
    width = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens

    def batches() -> Iterator[peft_trainer.TrainingInput]:
        for step in range(warm.steps):
            yield labelled_rows(problems.batch(step, warm.batch_size, purpose=1), template, policy.tokenizer, width)

    if trainer.train_steps < warm.steps:
        with mesh:
            trainer.train(batches())
    return policy


def model_inputs(batch: Any) -> dict[str, Any]:
    """What the loss of a `PeftTrainer` takes, from tokens and the mask of those that are learnt."""
    attended = batch.input_tokens >= 0
    tokens = jax.numpy.where(attended, batch.input_tokens, 0)
    return {
        "input_tokens": tokens,
        "input_mask": batch.input_mask,
        "positions": build_positions_from_mask(attended),
        "attention_mask": make_causal_attn_mask(attended),
    }


def labelled_rows(rows: list[Problem], template: str, tokenizer: Any, width: int) -> Any:
    """Prompts and worked answers, padded on the right with -1; the answers and their end are learnt.

    Raises:
        TrainError: an example is longer than prompt and completion may be.
    """
    tokens = np.full((len(rows), width), -1, np.int32)
    learnt = np.zeros((len(rows), width), np.int32)
    for place, row in enumerate(rows):
        prompt = tokenizer.encode(template.replace("{question}", row.question))
        answer = [*tokenizer.encode(row.worked), tokenizer.eos_id()]
        length = len(prompt) + len(answer)
        if length > width:
            raise TrainError(
                f"warm_start: an example takes {length} tokens; rollout.max_prompt_tokens and max_new_tokens allow "
                f"{width}"
            )
        tokens[place, :length] = prompt + answer
        learnt[place, len(prompt) : length] = 1
    return peft_trainer.TrainingInput(**{"input_tokens": tokens, "input_mask": learnt})
