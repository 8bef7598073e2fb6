"""What a MaxText model does between the hidden states that it keeps and its logits."""

from typing import Any

import jax
import jax.numpy as jnp


def after_norm(model: Any, hidden: jax.Array, deterministic: bool, *, asked_by: str) -> jax.Array:
    """What MaxText multiplies with the head: the states after the final norm and its dropout.

    Raises:
        NotImplementedError: a model without them.
    """
    decoder = _decoder(model, asked_by)
    return decoder.dropout(decoder.decoder_norm(hidden), deterministic=deterministic)


def head_of(model: Any, config: Any, *, asked_by: str) -> tuple[jax.Array, dict[str, Any]]:
    """The head in the dtype in which MaxText multiplies, and its options.

    Raises:
        NotImplementedError: a model without one, a quantised or scaled head, adapters in it, explicit sharding, a head
            in host memory.
    """
    decoder, tied = _decoder(model, asked_by), config.logits_via_embedding
    module = model.token_embedder if tied else decoder.logits_dense
    scaled = () if tied else (module.quant, module.kernel_scale, module.weight_quant)
    weight = (module.embedding if tied else module.kernel)[...]
    refused = {
        "shard_mode=explicit": config.shard_mode.value == "explicit",
        "parameter_memory_host_offload=True": config.parameter_memory_host_offload,
        "a quantised or scaled head": any(x is not None for x in scaled)
        or not jnp.issubdtype(getattr(weight, "dtype", jnp.int8), jnp.floating),
        "a head with LoRA": any("lora" in name for name in vars(module)),
    }
    for what in (name for name, is_refused in refused.items() if is_refused):
        raise NotImplementedError(f"{asked_by}: {what} is not supported; unset it, or train without {asked_by}")
    if tied:
        # MaxText multiplies with an embedding of bfloat16, whatever the dtypes of model and weights.
        options = {
            "layout": "VD",
            "softcap": config.final_logits_soft_cap or None,
            "logit_scale": weight.shape[1] ** -0.5 if config.normalize_embedding_logits else 1.0,
            "bias": None,
            "precision": "default",
        }
        return weight.astype(jnp.bfloat16), options
    # Only with the embedding does MaxText cap the logits.
    options = {"layout": "DV", "softcap": None, "logit_scale": 1.0, "precision": module.matmul_precision}
    options["bias"] = None if module.bias is None else module.bias[...].astype(module.dtype)
    return weight.astype(module.dtype), options


def _decoder(model: Any, asked_by: str) -> Any:
    decoder = getattr(model, "decoder", None)
    if not (hasattr(decoder, "decoder_norm") and hasattr(decoder, "dropout")):
        raise NotImplementedError(
            f"{asked_by}: {type(model).__name__} has no decoder.decoder_norm and decoder.dropout; known are the "
            "models of maxtext.models.models.Transformer"
        )
    return decoder
