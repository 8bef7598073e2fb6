"""The loss section of a run, as Tunix's options and as the adapter's."""

from inspect import signature
from typing import Any

import jax

from logitless.integrations.tunix import use_logitless
from logitless.integrations.tunix_loss import KL_OF_TUNIX, PRESETS
from logitless.ops.head_sharding import HeadSharding
from logitless.train.config import LossConfig, TrainConfig

TUNIX_CLIP = 0.2
"""What Tunix clips at unless told."""


def grpo_config(config: TrainConfig) -> Any:
    """Tunix's GRPO options of a run."""
    from tunix.rl.grpo.grpo_learner import GRPOConfig  # pyright: ignore[reportMissingImports] - of the train extra

    loss = config.loss
    clip_low, clip_high = clips_of(loss)
    names = {ours: theirs for theirs, ours in KL_OF_TUNIX.items()}
    made = GRPOConfig(
        num_generations=config.rollout.generations,
        num_iterations=config.rollout.updates_per_rollout,
        beta=loss.kl_coef,
        kl_loss_mode=names[loss.kl],
        epsilon=clip_low,
        loss_algo="gspo-token" if loss.name == "gspo" else "grpo",
    )
    # Tunix reads it where a config has it, and declares it nowhere.
    vars(made)["epsilon_high"] = clip_high
    return made


def clips_of(loss: LossConfig) -> tuple[float, float]:
    """The clip ranges of a loss: the config's, else the preset's; Tunix's own where the preset has none."""
    defaults = signature(PRESETS[loss.name]).parameters

    def chosen(name: str, given: float | None) -> float:
        own = defaults[name].default if name in defaults else TUNIX_CLIP
        return own if given is None else given

    return chosen("clip_low", loss.clip_low), chosen("clip_high", loss.clip_high)


def install_loss(learner: Any, loss: LossConfig, mesh: Any) -> None:
    """Gives the loss of a config to a learner of Tunix; stock Tunix keeps its own."""
    if loss.level == "stock":
        return
    clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    given = {name: value for name, value in clips.items() if value is not None}
    # Tunix's own two losses are described by its config, and then divide as Tunix does.
    as_tunix = loss.name in ("grpo", "gspo") and not loss.options
    use_logitless(
        learner,
        loss=None if as_tunix else loss.name,
        loss_options=None if as_tunix else dict(loss.options) | given,
        level="logits" if loss.level == "logits" else "hidden",
        implementation=loss.implementation,
        block_sizes=loss.block_sizes,
        sharding=sharding_of(loss, mesh),
    )


def sharding_of(loss: LossConfig, mesh: Any) -> HeadSharding | None:
    """How tokens and head lie over a mesh of Tunix.

    Tunix keeps D over `fsdp` and V over `tp`; the loss takes V over both, for which each device sends all but its part
    of what it has of the head, and none ever holds all of it.
    """
    size = mesh.size if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices.size
    if size == 1 or loss.level != "hidden":
        return None
    return HeadSharding(mesh, tokens=("fsdp",), vocab=("tp", "fsdp"), head=loss.head)
