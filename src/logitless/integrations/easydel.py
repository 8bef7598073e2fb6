"""EasyDeL: its causal language models with the losses and log-probabilities of Logitless."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax

from logitless.integrations.easydel_head import head_arguments
from logitless.integrations.easydel_loss import causal_loss
from logitless.integrations.meshes import require_sharding
from logitless.integrations.versions import require
from logitless.ops.api import linear_token_stats

TRIED = ("0.3.0",)
"""Versions of easydel that the tests run."""

SCORING = "compute_per_token_logps_and_entropies_from_hidden_states"
SCORED_BY = (
    "easydel.trainers._logprob_utils",
    "easydel.trainers.group_relative_policy_optimization._fn",
    "easydel.trainers.proximal_policy_optimization_trainer._fn",
    "easydel.trainers.proximal_policy_optimization_trainer.ppo_trainer",
)
"""The modules of EasyDeL that hold that function under its name."""


def use_logitless(
    model: Any,
    *,
    implementation: str = "auto",
    sharding: Any = None,
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
) -> Any:
    """Lets an EasyDeL causal language model compute its loss from hidden states, without `[tokens, vocab]` logits.

    Equal to
        model.compute_loss(..., loss_config with chunk_token_size), whatever that size

    It sets the `loss_strategy` of this model, which `compute_loss` asks, and with it EasyDeL's `Trainer` and
    `SFTTrainer`. Call it before the trainer makes its state of the model.

    Args:
        model: one whose head is a plain linear layer or the embedding: the head's bias, the softcap of Gemma 2 and 3
            and the logit scale of Cohere are kept.
        implementation: as `linear_token_stats` takes it.
        sharding: a `HeadSharding` over `model.mesh`; needed where that has more than one device.
        block_sizes: as `linear_token_stats` takes them; EasyDeL's own chunk sizes have no meaning.
        logits_dtype: `"bfloat16"` rounds the logits, as a bfloat16 model of EasyDeL does.

    Returns:
        The model.

    Raises:
        ImportError: EasyDeL is not installed.
        NotImplementedError: another version than was tried; a model whose way from hidden states to logits is not
            known, a quantised head, one with LoRA; when the loss is computed: `reduction`, `divide_weight_sum`,
            `compute_dtype="bf16"`, a normalising factor that EasyDeL's chunked loss does not take either.
        ValueError: a mesh of several devices without `sharding`.

    Example:
        >>> def train(trainer_class, model, **arguments):  # easydel.SFTTrainer, a LlamaForCausalLM
        ...     return trainer_class(model=use_logitless(model), **arguments).train()

    Reference: easydel 0.3.0, `easydel.infra.loss_utils.causal_lm_loss_chunked_lm_head`. Departures: `accuracy` is None,
    for no argmax is computed; a batch without a token that counts gives 0, not NaN; the softmax is float32; a label
    outside the vocabulary whose weight is not 0 has the loss 0, as there, and no gradient, where EasyDeL's backward
    pass gives it one.
    """
    require("easydel", TRIED, module="easydel", asked_by="use_logitless")
    from easydel.infra.loss_utils import (  # pyright: ignore[reportMissingImports] - installed by those who use it
        BaseLossStrategy,
        LossForwardPlan,
    )

    options = _options(model, "use_logitless", implementation, sharding, block_sizes, logits_dtype)

    class LogitlessLoss(BaseLossStrategy):
        __name__ = "ForCausalLMLoss"

        def plan_forward(self, **asked: Any) -> Any:
            return LossForwardPlan(forward_kwargs={"apply_lm_head": False})

        def compute(self, *, module, outputs, labels, loss_config, batch, loss_kwargs, paxis, forward_plan) -> Any:
            return causal_loss(module, outputs.last_hidden_state, labels, loss_config, batch, loss_kwargs, options)

    model.loss_strategy = LogitlessLoss()
    return model


@contextmanager
def logitless_scoring(
    model: Any,
    *,
    implementation: str = "auto",
    sharding: Any = None,
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
) -> Iterator[None]:
    """Within it, EasyDeL's GRPO and PPO trainers compute log-probabilities and entropies by Logitless.

    Equal to
        logprobs = log_softmax(head(hidden))[targets]; entropies = -sum(softmax * log_softmax)

    Policy, old policy and reference alike. These trainers go by hidden states where `model.config.lmhead_chunksize` is
    set, so it has to be; its value changes nothing more. What counts is where a step is traced: enter before
    `trainer.train()`. Nash-MD, XPO and SDPO score by the same function, through GRPO's; they were not tried.

    Args:
        model: as `use_logitless` takes it, and so for every argument below.
        implementation: as there.
        sharding: as there.
        block_sizes: as there.
        logits_dtype: as there.

    Yields:
        Nothing.

    Raises:
        ImportError: as `use_logitless`.
        NotImplementedError: as `use_logitless`.
        ValueError: `lmhead_chunksize` is not set; a mesh of several devices without `sharding`.

    Example:
        >>> def train(trainer):  # an easydel.GRPOTrainer
        ...     with logitless_scoring(trainer.model):
        ...         return trainer.train()

    Reference: easydel 0.3.0, `easydel.trainers._logprob_utils`. Departures: the softmax is float32.
    """
    name = "logitless_scoring"
    require("easydel", TRIED, module="easydel", asked_by=name)
    if not (model.config.lmhead_chunksize or 0) > 0:
        raise ValueError(
            f"{name}: config.lmhead_chunksize is {model.config.lmhead_chunksize}: EasyDeL's trainers would compute all "
            "logits and never ask for log-probabilities from hidden states; set it to any number above 0"
        )
    options = _options(model, name, implementation, sharding, block_sizes, logits_dtype)

    def scores(
        model: Any,
        hidden_states: jax.Array,
        targets: jax.Array,
        *,
        token_chunk_size: int,
        vocab_chunk_size: int | None,
        return_entropy: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        outputs = ("logprobs", "entropy") if return_entropy else ("logprobs",)
        hidden, lm_head, head = head_arguments(model, hidden_states, asked_by=name)
        stats = linear_token_stats(hidden, lm_head, targets, outputs=outputs, **head, **options)
        assert stats.logprobs is not None
        return stats.logprobs, stats.entropy

    modules = [import_module(one) for one in SCORED_BY]
    theirs = getattr(modules[0], SCORING)
    for module in modules:
        setattr(module, SCORING, scores)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, SCORING, theirs)


def _options(model: Any, name: str, implementation: Any, sharding: Any, block_sizes: Any, logits_dtype: Any) -> Any:
    """The options of `linear_token_stats`; refuses now what the first step would refuse."""
    head_arguments(model, None, asked_by=name)
    require_sharding(model.mesh, sharding, asked_by=name)
    return {
        "implementation": implementation,
        "sharding": sharding,
        "block_sizes": block_sizes,
        "logits_dtype": logits_dtype,
    }
