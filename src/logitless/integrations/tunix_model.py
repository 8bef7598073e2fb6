"""What a Tunix model says about its head, and its hidden states instead of its logits."""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from logitless.ops.types import Layout


@dataclass(frozen=True)
class TunixHead:
    """The LM head of a model.

    Args:
        weight: `[V, D]` where the head is the embedding, else `[D, V]`, in the dtype in which the model multiplies.
        layout: which of the two.
        softcap: of the logits, or None.
    """

    weight: jax.Array
    layout: Layout
    softcap: float | None


def head_of(model: Any) -> TunixHead:
    """The head of a Tunix model (Qwen2, Qwen3, Llama 3, Gemma 1 to 3).

    Raises:
        NotImplementedError: no head where Tunix keeps it; adapters or quantised weights in it.
    """
    separate = getattr(model, "lm_head", None)
    module = separate if separate is not None else getattr(model, "embedder", None)
    variable = getattr(module, "w" if separate is not None else "input_embedding", None)
    what = f"{type(model).__module__}.{type(model).__name__}"
    if variable is None:
        raise NotImplementedError(
            f"use_logitless: {what} has neither lm_head.w nor embedder.input_embedding; supported are the models of "
            "Tunix that keep their head in one of them: Qwen2, Qwen3, Llama 3, Gemma"
        )
    _refuse_adapters(module, variable, what)
    weight = variable[...]
    if not hasattr(weight, "dtype") or not jnp.issubdtype(weight.dtype, jnp.floating):
        raise NotImplementedError(
            f"use_logitless: the head of {what} holds {type(weight).__name__}, not a floating-point array; a quantised "
            "head has to be left out of the quantisation"
        )
    config = getattr(model, "config", None)
    dtype = getattr(config, "dtype", None) or weight.dtype
    softcap = getattr(config, "final_logit_softcap", None)
    return TunixHead(weight.astype(dtype), "DV" if separate is not None else "VD", softcap)


def _refuse_adapters(module: Any, variable: Any, what: str) -> None:
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra

    extra = [type(value).__name__ for _, value in nnx.iter_graph(module) if isinstance(value, nnx.LoRAParam)]
    if extra:
        raise NotImplementedError(
            f"use_logitless: the head of {what} has LoRA parameters of its own, which the fused loss would leave out; "
            "keep the head out of the LoRA module path (a frozen head then costs no gradient)"
        )


def hidden_states(model: Any, tokens: jax.Array, **inputs: Any) -> jax.Array:
    """The states after the final norm, `[B, T, D]`, at all positions; the logits are left to the compiler to remove.

    Args:
        model: a Tunix model; a copy of it keeps the states, it stays as it is.
        tokens: `[B, T]`.
        **inputs: `positions`, `attention_mask`, `segment_ids` and whatever else the model takes.

    Raises:
        NotImplementedError: the model does not give its hidden states.
    """
    from flax import nnx  # pyright: ignore[reportMissingImports] - of the train extra

    if not takes(model, "output_hidden_states"):
        raise NotImplementedError(
            f"use_logitless: {type(model).__name__} takes no output_hidden_states=True; of Tunix's models Qwen2, "
            "Qwen3, Gemma and Gemma 3 do; use level='logits' for others"
        )
    copy = nnx.merge(*nnx.split(model))
    # Flax from 0.12.8 on warns of a sow outside of capture; versions without capture know no other way.
    if hasattr(nnx, "capture"):
        call = nnx.capture(copy, nnx.Intermediate)
        (logits, _), sown = call(tokens, cache=None, output_hidden_states=True, **inputs)
    else:
        logits, _ = copy(tokens, cache=None, output_hidden_states=True, **inputs)
        sown = nnx.pop(copy, nnx.Intermediate)
    states = jax.tree.leaves(sown["all_hidden_states"])[-1]
    return states.astype(getattr(getattr(model, "config", None), "dtype", None) or logits.dtype)


def takes(model: Any, argument: str) -> bool:
    """True where the model's call has this argument."""
    parameters = inspect.signature(type(model).__call__).parameters.values()
    return any(p.name == argument or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
