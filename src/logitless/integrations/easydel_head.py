"""What an EasyDeL model does between hidden states and logits, as arguments of an op."""

from typing import Any

import jax
import jax.numpy as jnp

PLAIN = ("EasyDeLBaseModule", "BaseTaskModule")
SOFTCAP = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
SCALE = ("CohereForCausalLM", "Cohere2ForCausalLM")
TIED = ("tie_word_embeddings", "use_lm_head", "share_input_output_layers")
"""The names under which configurations say that the head is the embedding; the first that is there counts."""


def head_arguments(model: Any, hidden: jax.Array | None, *, asked_by: str) -> Any:
    """Hidden states and head in the dtype in which the model multiplies, and the options of the head.

    Args:
        model: an EasyDeL causal language model.
        hidden: `[B, T, D]`; None to look at the model only.
        asked_by: the function that needs it, for messages.

    Raises:
        NotImplementedError: a model that turns hidden states to logits in a way that is not known.
    """
    what = type(model).__name__
    made_by = next((c.__name__ for c in type(model).__mro__ if "make_lm_head_fn" in vars(c)), None)
    if made_by not in (*PLAIN, *SOFTCAP, *SCALE):
        raise NotImplementedError(
            f"{asked_by}: {what} makes its logits by {made_by or 'a way'} of its own; known are the models of "
            f"EasyDeL that take the common way, and {', '.join((*SOFTCAP, *SCALE))}"
        )
    if model._logit_cap_feature is not None:
        raise NotImplementedError(
            f"{asked_by}: {what} clips its logits at {model._logit_cap_feature.cap_value}, which no option of "
            "Logitless does; only a smooth softcap is known"
        )
    head = model.get_lm_head()
    if type(head).__name__ not in ("ParallelLinear", "ColumnParallelLinear", "RowParallelLinear"):
        raise NotImplementedError(
            f"{asked_by}: the head of {what} is a {type(head).__name__}; known is a plain linear layer: leave the "
            "head out of the quantisation and out of the LoRA module path"
        )
    if head._scale_operator(1.0) != 1.0:
        raise NotImplementedError(f"{asked_by}: the head of {what} has a scale of its own, which is not known")
    tied = next((getattr(model.config, name) for name in TIED if hasattr(model.config, name)), False)
    options: dict[str, Any] = {
        "layout": "VD" if tied else "DV",
        "softcap": model.config.final_logit_softcapping if made_by in SOFTCAP else None,
        "logit_scale": model.logit_scale if made_by in SCALE else 1.0,
        "precision": head.precision,
    }
    if hidden is None:
        return None
    lm_head = model.get_embedding().embedding.value if tied else head.kernel.value
    dtype = head.dtype or jnp.promote_types(hidden.dtype, lm_head.dtype)
    if head.use_bias and head.bias is not None:
        options["bias"] = head.bias.value.astype(dtype)
    return model.prepare_lm_head_inputs(hidden).astype(dtype), lm_head.astype(dtype), options
