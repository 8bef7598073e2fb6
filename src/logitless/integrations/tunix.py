"""Tunix: its trainers with the losses of Logitless, so that no step of theirs holds the logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from logitless._arrays import check_name
from logitless.integrations.tunix_loss import (
    METRICS,
    PRESETS,
    divergence_of_tunix,
    entropy_of_tunix,
    masked_mean,
    options_of_tunix,
    per_filled_row,
    tunix_metrics,
)
from logitless.integrations.tunix_model import head_of, hidden_states, takes
from logitless.integrations.versions import require
from logitless.losses.linear import cross_entropy, linear_cross_entropy
from logitless.losses.policy import policy_loss
from logitless.ops.api import linear_token_stats, token_stats
from logitless.ops.types import TokenStats

if TYPE_CHECKING:
    Level = Literal["hidden", "logits"]
else:
    # The door refuses an unknown name, and names the nearest one.
    Level = str
LEVELS = ("hidden", "logits")

TRIED = ("0.1.7",)
"""Versions of google-tunix that the tests run."""


@dataclass(frozen=True)
class TokenOptions:
    """How the log-probabilities of a Tunix model are computed.

    Args:
        level: `"hidden"` from the hidden states and the head; `"logits"` from the model's logits.
        options: those of `linear_token_stats`, or of `token_stats` at the level of logits.
    """

    level: Level = "hidden"
    options: Mapping[str, Any] = field(default_factory=dict)


def use_logitless(
    target: Any,
    *,
    loss: str | None = None,
    loss_options: Mapping[str, Any] | None = None,
    level: Level = "hidden",
    implementation: str = "auto",
    sharding: Any = None,
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
    entropy: bool = True,
) -> Any:
    """Lets a Tunix trainer compute its losses by Logitless, without `[tokens, vocab]` logits.

    Equal to
        trainer.with_loss_fn(the same loss of the same log-probabilities, by linear_token_stats)
        cluster.get_ref_per_token_logps, .rollout.get_per_token_logps = the same, by linear_logprobs

    Of a GRPO learner it replaces the policy loss, the log-probabilities of the reference and of the old policy, and
    the entropy, which Tunix computes from all logits. Of a `PeftTrainer` it replaces the cross-entropy. LoRA and a
    frozen head need nothing: what is not trained costs no gradient.

    Args:
        target: a `GRPOLearner`; or its `RLCluster` (`RLEngine` of later versions) once the learner is built; or a
            `PeftTrainer`.
        loss: None for the loss that the learner's `GRPOConfig` describes (`loss_agg_mode`, `loss_algo`, `epsilon`,
            `epsilon_high`, `epsilon_c`, `beta`, `kl_loss_mode`, `kl_clamp_value`), as Tunix computes it; or `"grpo"`,
            `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"gspo"`, `"luspo"`, `"cispo"`, `"sapo"`, `"vespo"`, `"policy"`: the
            Logitless loss of that name, with the divergence of `beta`.
        loss_options: options of the named loss, such as `clip_high`.
        level: `"hidden"`: from hidden states and head; `"logits"`: from the model's logits, which then exist, in one
            pass over them.
        implementation: as `linear_token_stats` (`token_stats` at the level of logits) takes it.
        sharding: a `HeadSharding`, for a model on several devices.
        block_sizes: as `linear_token_stats` takes them.
        logits_dtype: `"bfloat16"` rounds the logits as a bfloat16 model does, to reproduce its numbers; of the level
            `"hidden"` only.
        entropy: whether the metric `entropy` is computed, in the same pass.

    Returns:
        The target.

    Raises:
        NotImplementedError: another version of Tunix than is known, another trainer, a model whose head or hidden
            states cannot be reached, a head with adapters.
        ValueError: an unknown loss or level, a cluster without a learner.
        ImportError: Tunix is not installed.

    Example:
        >>> def train(learner, dataset):  # a tunix.rl.grpo.grpo_learner.GRPOLearner
        ...     use_logitless(learner, implementation="chunked").train(dataset)

    Reference: google-tunix 0.1.7, `tunix.rl.algo_core.grpo_loss_fn`, `tunix.rl.common.compute_per_token_logps`.
    Departures: log ratios are bounded at 80, not at +-20; the old policy's log-probabilities take the rollout's
    temperature, which 0.1.7 leaves out; log-probabilities of padding are 0.
    """
    require("google-tunix", TRIED, module="tunix", asked_by="use_logitless")
    from tunix.sft.peft_trainer import PeftTrainer  # pyright: ignore[reportMissingImports] - of the train extra

    check_name("use_logitless", "level", level, LEVELS)
    if loss is not None:
        check_name("use_logitless", "loss", loss, tuple(PRESETS))
    elif loss_options:
        raise ValueError("use_logitless: loss_options need loss=, the name of the loss that they belong to")
    options: dict[str, Any] = {"implementation": implementation, "sharding": sharding, "block_sizes": block_sizes}
    if level == "hidden":
        options["logits_dtype"] = logits_dtype
    elif logits_dtype is not None:
        raise ValueError("use_logitless: logits_dtype has no meaning with level='logits': the model made the logits")
    tokens = TokenOptions(level, options)
    if isinstance(target, PeftTrainer):
        if loss is not None:
            raise ValueError(f"use_logitless: loss={loss!r} has no meaning for a PeftTrainer, which trains on labels")
        return target.with_loss_fn(_labelled(tokens))
    cluster = _cluster_of(target)
    learner_config = getattr(target, "algo_config", None)
    _replace_logprobs(cluster, tokens)
    ids = cluster.rollout.pad_id(), cluster.rollout.eos_id()
    trainer = cluster.actor_trainer

    def policy(model: Any, train_example: Any, algo_config: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        config = learner_config or algo_config
        return _policy_loss(tokens, loss, loss_options or {}, entropy, ids, model, train_example, config)

    trainer.with_loss_fn(policy, has_aux=True)
    logged = dict(trainer.rl_metrics_to_log)
    trainer.with_rl_metrics_to_log(logged | ({"entropy": logged["kl"]} if entropy else {}))
    return target


def _cluster_of(target: Any) -> Any:
    cluster = next(
        (c for name in ("rl_cluster", "rl_engine") if (c := getattr(target, name, None)) is not None), target
    )
    if not all(hasattr(cluster, name) for name in ("actor_trainer", "rollout", "inference_worker")):
        raise NotImplementedError(
            f"use_logitless: got {type(target).__module__}.{type(target).__name__}; needed is a GRPOLearner, its "
            "RLCluster or a PeftTrainer of Tunix"
        )
    if not getattr(cluster.actor_trainer, "rl_metrics_to_log", None):
        raise ValueError(
            "use_logitless: this RLCluster has no learner yet, which would replace the loss again; build the "
            "GRPOLearner first, then call use_logitless with it"
        )
    logged = set(cluster.actor_trainer.rl_metrics_to_log)
    if "kl" not in logged:
        raise NotImplementedError("use_logitless: only GRPO learners are supported; this cluster's learner logs no kl")
    if logged - set(METRICS):
        raise NotImplementedError(
            "use_logitless: this learner logs what the loss does not give "
            f"({', '.join(sorted(logged - set(METRICS)))}); supported is tunix.rl.grpo.grpo_learner.GRPOLearner"
        )
    return cluster


def token_statistics(
    tokens: TokenOptions,
    model: Any,
    example: Any,
    ids: tuple[int, int],
    *,
    temperature: float,
    outputs: tuple[str, ...] = ("logprobs",),
    mask: jax.Array | None = None,
) -> TokenStats:
    """Statistics of the completion tokens of a Tunix train example, `[B, T]`; of a packed one, of all its tokens.

    Args:
        tokens: how.
        model: a Tunix model.
        example: has `prompt_ids`, `completion_ids` and, where rows are packed, `segment_ids`, `segment_positions`.
        ids: pad and end of sequence.
        temperature: of the rollout.
        outputs: as `linear_token_stats` takes them.
        mask: `[B, T]`; tokens with 0 are skipped.
    """
    from tunix.rl import common  # pyright: ignore[reportMissingImports] - of the train extra

    segments = getattr(example, "segment_ids", None)
    ids_of_all, positions, attention_mask, own = common.process_ids(
        example.prompt_ids,
        example.completion_ids,
        *ids,
        segments,
        getattr(example, "segment_positions", None),
    )
    inputs = {"positions": positions, "attention_mask": attention_mask}
    known = segments if segments is not None else own
    if known is not None and takes(model, "segment_ids"):
        inputs["segment_ids"] = known
    kept = ids_of_all.shape[1] - 1 if segments is not None else example.completion_ids.shape[1]
    if mask is not None:
        mask = mask[:, -kept:]
    call = {"mask": mask, "outputs": outputs, "temperature": temperature or 1.0, **tokens.options}
    targets = ids_of_all[:, -kept:]
    if tokens.level == "hidden":
        head = head_of(model)
        states = hidden_states(model, ids_of_all, **inputs)[:, -kept - 1 : -1]
        stats = linear_token_stats(states, head.weight, targets, layout=head.layout, softcap=head.softcap, **call)
    else:
        logits, _ = model(ids_of_all, cache=None, **inputs)
        stats = token_stats(logits[:, -kept - 1 : -1], targets, **call)
    if segments is None:
        return stats
    # The first token of a packed row is predicted by nothing: 0, so that arrays and tokens have the same places.
    return TokenStats(*(None if x is None else jnp.pad(x, ((0, 0), (1, 0))) for x in stats))


def _policy_loss(
    tokens: TokenOptions,
    loss: str | None,
    loss_options: Mapping[str, Any],
    entropy: bool,
    ids: tuple[int, int],
    model: Any,
    example: Any,
    config: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    if getattr(example, "sampler_is_weights", None) is not None:
        raise NotImplementedError(
            "use_logitless: ready-made sampler_is_weights are not supported; losses of logitless take "
            "rollout_logprobs, of which they make the weights themselves"
        )
    mask = example.completion_mask
    outputs = ("logprobs", "entropy") if entropy else ("logprobs",)
    stats = token_statistics(tokens, model, example, ids, temperature=config.temperature, outputs=outputs, mask=mask)
    assert stats.logprobs is not None
    references = example.ref_per_token_logps
    arrays = (stats.logprobs, example.old_per_token_logps, example.advantages.astype(jnp.float32), mask)
    if loss is None:
        options = options_of_tunix(config, mask.shape[1], references is not None)
        out = policy_loss(*arrays, ref_logprobs=references, **options)
        value = per_filled_row(out.loss, mask, options["aggregation"])
    else:
        options = dict(divergence_of_tunix(config)) if references is not None else {}
        options |= loss_options
        segments = getattr(example, "segment_ids", None)
        out = PRESETS[loss](*arrays, ref_logprobs=references, segment_ids=segments, **options)
        value = out.loss
    metrics = tunix_metrics(out, stats.logprobs, example.old_per_token_logps, mask)
    if stats.entropy is not None:
        of_tokens = jax.lax.stop_gradient(stats.entropy)
        metrics["entropy"] = (
            entropy_of_tunix(of_tokens, mask, options) if loss is None else masked_mean(of_tokens, mask)
        )
    return value, metrics


def _labelled(tokens: TokenOptions) -> Callable[..., jax.Array]:
    # A plain function, for Flax gives the loss its keyword arguments by position.
    def labelled(
        model: Any,
        input_tokens: jax.Array,
        input_mask: jax.Array,
        positions: jax.Array,
        attention_mask: jax.Array,
        images: jax.Array | None = None,
    ) -> jax.Array:
        inputs = {"positions": positions, "attention_mask": attention_mask}
        inputs |= {} if images is None else {"images": images}
        return _labelled_loss(tokens, model, input_tokens, input_mask, inputs)

    return labelled


def _labelled_loss(
    tokens: TokenOptions,
    model: Any,
    input_tokens: jax.Array,
    input_mask: jax.Array,
    inputs: Mapping[str, Any],
) -> jax.Array:
    """Mean cross-entropy of the next token where `input_mask` counts it, as `PeftTrainer` has it."""
    labels = jnp.where(input_mask[:, 1:] != 0, input_tokens[:, 1:], -100)
    if tokens.level == "hidden":
        head = head_of(model)
        states = hidden_states(model, input_tokens, **inputs)[:, :-1]
        return linear_cross_entropy(
            states, head.weight, labels, layout=head.layout, softcap=head.softcap, **tokens.options
        )
    logits, _ = model(input_tokens, cache=None, **inputs)
    return cross_entropy(logits[:, :-1], labels, **tokens.options)


@dataclass(frozen=True)
class _Completions:
    """What `token_statistics` reads of a train example."""

    prompt_ids: jax.Array
    completion_ids: jax.Array


def _replace_logprobs(cluster: Any, tokens: TokenOptions) -> None:
    """The log-probabilities of the reference and of the old policy, of this cluster alone."""
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra

    @partial(jax.jit, static_argnames=("ids", "temperature"))
    def logprobs(
        graph: Any, state: Any, prompts: jax.Array, completions: jax.Array, *, ids: tuple[int, int], temperature: float
    ) -> jax.Array:
        example = _Completions(prompts, completions)
        stats = token_statistics(
            tokens, nnx.merge(graph, state), example, ids, temperature=temperature, mask=completions != ids[0]
        )
        assert stats.logprobs is not None
        return jax.lax.stop_gradient(stats.logprobs)

    def of_reference(
        prompt_tokens: jax.Array, completion_tokens: jax.Array, pad_id: int, eos_id: int, temperature: float = 1.0
    ) -> jax.Array:
        graph, state = nnx.split(cluster.inference_worker.get_model("reference"))
        return logprobs(graph, state, prompt_tokens, completion_tokens, ids=(pad_id, eos_id), temperature=temperature)

    def of_old_policy(prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        graph, state = nnx.split(cluster.rollout.model())
        ids = cluster.rollout.pad_id(), cluster.rollout.eos_id()
        temperature = cluster.get_rollout_config(_train_mode()).temperature
        return logprobs(graph, state, prompt_tokens, completion_tokens, ids=ids, temperature=temperature)

    cluster.inference_worker.get_ref_per_token_logps = of_reference
    cluster.rollout.get_per_token_logps = of_old_policy


def _train_mode() -> Any:
    from tunix.rl.rl_cluster import Mode  # pyright: ignore[reportMissingImports] - of the train extra

    return Mode.TRAIN
