"""MaxText: a loss in place of its vocabulary tiling, and its Tunix adapter with hidden states."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from logitless.integrations.maxtext_model import after_norm, head_of
from logitless.integrations.meshes import require_sharding
from logitless.integrations.versions import require
from logitless.losses.linear import linear_cross_entropy
from logitless.ops.api import linear_token_stats

TRIED = ("0.2.5",)
"""Versions of maxtext that the tests run."""

TILING_LOSS, WITH_STATES = "vocab_tiling_loss", "with_hidden_states"
"""The functions by their names, for messages."""


def vocab_tiling_loss(
    *,
    implementation: str = "auto",
    sharding: Any = None,
    block_sizes: Mapping[str, int] | None = None,
    logits_dtype: str | None = None,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A loss with the signature of MaxText's `vocab_tiling_nnx_loss`. It imports nothing of MaxText.

    Equal to
        z = model.logits_from_hidden_states_for_vocab_tiling(hidden_states, ...); lse = logsumexp(z)
        sum over targets_segmentation != 0 of lse - z[targets] + z_loss_multiplier * lse**2

    MaxText's train step asks for it where `num_vocab_tiling` is above 1; how many tiles then changes nothing here.

    Args:
        implementation: as `linear_cross_entropy` takes it.
        sharding: a `HeadSharding` over `model.mesh`; needed where that has more than one device.
        block_sizes: as `linear_cross_entropy` takes them.
        logits_dtype: `"bfloat16"` rounds the logits, as MaxText with `dtype=bfloat16` does.

    Returns:
        `f(model, hidden_states, data, config, is_train) -> (total_loss, total_z_loss)`, float32, sums in nats; the
        z-loss is in the total, and on its own without a gradient.

    Raises:
        NotImplementedError: by the loss: a model without `decoder.decoder_norm`; a quantised or scaled head,
            `shard_mode=explicit`, `parameter_memory_host_offload`, `vocab_tiling_ag_once`.
        ValueError: by the loss: a mesh of several devices without `sharding`.

    Example:
        >>> def train(argv):  # the arguments of `python -m maxtext.trainers.pre_train.train`
        ...     from maxtext.trainers.pre_train import train
        ...     train.vocab_tiling_nnx_loss = vocab_tiling_loss()
        ...     train.main(argv)

    Reference: maxtext 0.2.5, `maxtext.utils.vocabulary_tiling.vocab_tiling_nnx_loss`. Departures: logits are float32
    unless `logits_dtype` says otherwise; a target outside the vocabulary gives NaN, where MaxText's one-hot gives 0.
    """
    options = {
        "implementation": implementation,
        "sharding": sharding,
        "block_sizes": block_sizes,
        "logits_dtype": logits_dtype,
    }

    def loss(
        model: Any, hidden_states: jax.Array, data: Mapping[str, jax.Array], config: Any, is_train: bool
    ) -> tuple[jax.Array, jax.Array]:
        if config.vocab_tiling_ag_once:
            raise NotImplementedError(
                f"{TILING_LOSS}: vocab_tiling_ag_once=True is not supported; "
                "HeadSharding(..., head='gather_head') gathers the head once"
            )
        require_sharding(model.mesh, sharding, asked_by=TILING_LOSS)
        deterministic = not (config.enable_dropout and is_train)
        hidden = after_norm(model, hidden_states, deterministic, asked_by=TILING_LOSS)
        lm_head, head = head_of(model, config, asked_by=TILING_LOSS)
        common = jnp.promote_types(hidden.dtype, lm_head.dtype) if head["layout"] == "VD" else lm_head.dtype
        arrays = hidden.astype(common), lm_head.astype(common)
        counts = data["targets_segmentation"] != 0
        if not config.z_loss_multiplier:
            labels = jnp.where(counts, data["targets"], -100)
            total = linear_cross_entropy(*arrays, labels, reduction="sum", **head, **options)
            return total, jnp.zeros_like(total)
        stats = linear_token_stats(
            *arrays, data["targets"], mask=counts, outputs=("logprobs", "lse"), **head, **options
        )
        assert stats.logprobs is not None
        assert stats.lse is not None
        z_losses = config.z_loss_multiplier * stats.lse**2
        return jnp.sum(z_losses - stats.logprobs), jax.lax.stop_gradient(jnp.sum(z_losses))

    return loss


def with_hidden_states(adapter: Any) -> Any:
    """Lets MaxText's Tunix adapter give hidden states and head, which `tunix.use_logitless` goes by.

    Equal to
        adapter(tokens, ..., output_hidden_states=True) sowing "all_hidden_states", as Tunix's own models do

    The adapter of MaxText takes `output_hidden_states` and ignores it. Called without it, this one still gives logits.

    Args:
        adapter: a `maxtext.integration.tunix.tunix_adapter.TunixMaxTextAdapter`, as its RL makes for policy and
            reference.

    Returns:
        The adapter, of a class of its own from now on.

    Raises:
        ImportError: MaxText is not installed.
        NotImplementedError: another version than was tried; a head as `vocab_tiling_loss` refuses it, one with a bias
            or of another dtype than the model (`logits_dot_in_fp32`).
        TypeError: another object.

    Example:
        >>> def use(learner, policy, reference):  # a GRPOLearner of Tunix, built with these two adapters
        ...     from logitless.integrations.tunix import use_logitless
        ...     return with_hidden_states(policy), with_hidden_states(reference), use_logitless(learner)

    Reference: maxtext 0.2.5, `maxtext.integration.tunix.tunix_adapter`. Departures: none.
    """
    require("maxtext", TRIED, module="maxtext", asked_by=WITH_STATES)
    from maxtext.integration.tunix.tunix_adapter import (  # pyright: ignore[reportMissingImports] - by its users
        TunixMaxTextAdapter,
    )

    if not isinstance(adapter, TunixMaxTextAdapter):
        raise TypeError(f"{WITH_STATES}: got {type(adapter).__name__}; needed is a TunixMaxTextAdapter")
    config = adapter.base.config
    lm_head, head = _head(adapter)
    if head["bias"] is not None:
        raise NotImplementedError(
            f"{WITH_STATES}: the head has a bias, which the heads of Tunix's models never have; train without it"
        )
    if head["layout"] == "DV" and lm_head.dtype != config.dtype:
        raise NotImplementedError(
            f"{WITH_STATES}: MaxText multiplies with a head of {lm_head.dtype.name} and the model has dtype="
            f"{config.dtype}, where Tunix's models have one dtype for both; set logits_dot_in_fp32=False"
        )
    adapter.__class__ = _adapter_class(TunixMaxTextAdapter)
    return adapter


def _head(adapter: Any) -> tuple[jax.Array, dict[str, Any]]:
    return head_of(adapter.base, adapter.base.config, asked_by=WITH_STATES)


@functools.cache
def _adapter_class(base: type) -> type:
    from flax import nnx  # pyright: ignore[reportMissingImports] - MaxText needs it

    class Part(nnx.Module):
        """Holds an array under the name that Tunix's models give it."""

        def __init__(self, **arrays: Any):
            for name, array in arrays.items():
                setattr(self, name, nnx.Param(array))

    class Shown:
        """What `tunix_model` reads of a model's configuration."""

        def __init__(self, config: Any, head: Mapping[str, Any]):
            self.dtype, self.final_logit_softcap = config.dtype, head["softcap"]

    class HiddenStatesAdapter(base):
        @property
        def config(self) -> Any:
            return Shown(self.base.config, _head(self)[1])

        @property
        def lm_head(self) -> Any:
            lm_head, options = _head(self)
            return Part(w=lm_head) if options["layout"] == "DV" else None

        @property
        def embedder(self) -> Any:
            lm_head, options = _head(self)
            return Part(input_embedding=lm_head) if options["layout"] == "VD" else None

        def __call__(self, *arrays: Any, output_hidden_states: bool = False, **inputs: Any) -> Any:
            if not output_hidden_states:
                return super().__call__(*arrays, **inputs)
            model, scale = self.base, _head(self)[1]["logit_scale"]

            def states(shared_embedding: Any, y: jax.Array, deterministic: bool, *_: Any, **__: Any) -> jax.Array:
                del shared_embedding
                return scale * after_norm(model, y, deterministic, asked_by=WITH_STATES)

            # For this call the decoder ends at its norm; an attribute of the object goes before the class's method.
            vars(model.decoder)["apply_output_head"] = states
            try:
                hidden, _ = super().__call__(*arrays, **inputs)
            finally:
                del vars(model.decoder)["apply_output_head"]
            self.sow(nnx.Intermediate, "all_hidden_states", hidden)
            return hidden, None

    return HiddenStatesAdapter
