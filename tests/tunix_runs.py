"""Small models, clusters and learners of Tunix for the tests of its adapter and of training."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tunix", reason="google-tunix is not installed (pip install '.[train]')")

with warnings.catch_warnings():
    # Tunix 0.1.7 imports a deprecated shard_map.
    warnings.simplefilter("ignore", DeprecationWarning)
    import optax
    from flax import nnx
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
    from tunix.rl.rollout.base_rollout import RolloutConfig
    from tunix.sft import peft_trainer

import jax.numpy as jnp

from logitless.train.config import ModelConfig, TinyModel
from logitless.train.models import Policy, load_policy
from logitless.train.session import make_mesh

V = 211
TINY = TinyModel(vocab_size=V, hidden_size=16, num_layers=2, num_heads=2, mlp_size=24)
PROMPT, COMPLETION = 4, 5


def tiny_policy(seed=0, **changes) -> Policy:
    """A Qwen2 of a few thousand weights, whose softmax is peaked enough to tell losses apart."""
    policy = load_policy(ModelConfig(tiny=TinyModel(**{**vars(TINY), **changes})), seed)
    embedding = policy.model.embedder.input_embedding
    embedding[...] = embedding[...] * 20
    return policy


def learner(policy, *, reward=None, steps=20, seed=0, mesh=None, temperature=1.0, **options):
    """A GRPO learner of Tunix over a policy; prompts of sums, rewards of any kind."""
    mesh = mesh or make_mesh({"fsdp": 1, "tp": 1})
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = GRPOConfig(**{"num_generations": 4, "beta": 0.1, "kl_loss_mode": "low_var_kl", **options})
    cluster = rl_cluster.RLCluster(
        actor=policy.model,
        reference=nnx.clone(policy.model) if config.beta else None,
        tokenizer=policy.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(3e-3), eval_every_n_steps=steps + 1, max_steps=steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=COMPLETION,
                temperature=temperature,
                top_p=1.0,
                max_prompt_length=PROMPT,
                kv_cache_size=PROMPT + COMPLETION + 1,
                seed=seed,  # pyright: ignore[reportArgumentType] - Tunix makes a key of it
            ),
        ),
    )
    return GRPOLearner(cluster, config, [reward or spread_rewards])


def spread_rewards(prompts, completions, **_):
    """Rewards that differ inside every group, and depend on the texts alone."""
    return [float(sum(map(ord, text)) % 7) / 7 + 0.01 * len(text) for text in completions]


def batches(count, size=2) -> Iterator[Any]:
    """Prompts as Tunix takes them."""
    for step in range(count):
        texts = [f"{(step + i) % 10}+{(3 * step + i) % 10}=" for i in range(size)]
        yield {"prompts": np.array(texts, object)}


class Recorder:
    """Loss and metrics of every update of a learner, as its trainer buffers them."""

    def __init__(self, made):
        self.lines = []
        trainer = made.rl_cluster.actor_trainer
        keep, manager = self.lines, trainer.checkpoint_manager
        save = manager.save

        def recorded(step, *arguments, **options):
            # Once more at the end, when nothing is new.
            if not keep or keep[-1]["step"] != step:
                buffered = trainer._prev_buffered_train_metrics
                metrics = {name: float(np.mean(np.asarray(v))) for name, (v, _) in buffered.additional_metrics.items()}
                keep.append({"step": step, "loss": float(buffered.loss)} | metrics)
            return save(step, *arguments, **options)

        manager.save = recorded

    def series(self, name):
        return np.array([line[name] for line in self.lines])


def example(seed=0, rows=6, *, old=True, ref=True, empty_row=None, logprobs=None) -> Any:
    """A batch as the learner would make one, with lengths of every kind.

    `logprobs` are those of the policy for the batch without them: old and reference policy are then near to it, with
    ratios on both sides of every clip.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(3, 90, (rows, PROMPT)).astype(np.int32)
    prompts[0, :2] = 0
    completions = rng.integers(3, 90, (rows, COMPLETION)).astype(np.int32)
    for row in range(rows):
        completions[row, 1 + row % COMPLETION :] = 0
    completions[-1] = rng.integers(3, 90, COMPLETION)
    if empty_row is not None:
        completions[empty_row] = 0
    noise = rng.normal(-3.0, 0.6, (2, rows, COMPLETION)).astype(np.float32)
    if logprobs is not None:
        noise = (noise + 3.0) * 0.6 + np.asarray(logprobs)[None]
    fields = dict(
        prompt_ids=jnp.asarray(prompts),
        prompt_mask=jnp.asarray(prompts != 0),
        completion_ids=jnp.asarray(completions),
        completion_mask=jnp.asarray(completions != 0),
        advantages=jnp.asarray(rng.normal(size=rows).astype(np.float32)),
        ref_per_token_logps=jnp.asarray(noise[0]) if ref else None,
        old_per_token_logps=jnp.asarray(noise[1]) if old else None,
    )
    return TrainExample(**fields)


def sft_trainer(policy, steps=5):
    """Tunix's supervised trainer."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    return peft_trainer.PeftTrainer(policy.model, optax.adamw(3e-3), config)
