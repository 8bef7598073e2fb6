"""The LM heads of models that people train: the shapes that benchmarks, plans and block tables speak of by name.

The figures are those of each model's published `config.json`. Embeddings padded by a training framework can be larger:
take the shape from your own weights where the two differ.
"""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """One LM head.

    Attributes:
        name: lower-case model name, as in `head("qwen2.5-1.5b")`.
        hidden_size: D, columns of the hidden states.
        vocab_size: V, rows of the head, padding rows of the published weights counted.
        tied: whether the head is the input embedding, stored `[V, D]` (`layout="VD"`).
        softcap: final logit softcap, or None.
        logit_scale: factor on the logits, after the product with the head.
    """

    name: str
    hidden_size: int
    vocab_size: int
    tied: bool
    softcap: float | None = None
    logit_scale: float = 1.0


HEADS: dict[str, Head] = {
    entry.name: entry
    for entry in (
        Head("gpt2", 768, 50_257, tied=True),
        Head("smollm2-135m", 576, 49_152, tied=True),
        Head("smollm2-360m", 960, 49_152, tied=True),
        Head("smollm2-1.7b", 2048, 49_152, tied=True),
        Head("qwen2.5-0.5b", 896, 151_936, tied=True),
        Head("qwen2.5-1.5b", 1536, 151_936, tied=True),
        Head("qwen2.5-3b", 2048, 151_936, tied=True),
        Head("qwen2.5-7b", 3584, 152_064, tied=False),
        Head("qwen2.5-14b", 5120, 152_064, tied=False),
        Head("qwen2.5-32b", 5120, 152_064, tied=False),
        Head("qwen2.5-72b", 8192, 152_064, tied=False),
        Head("qwen3-0.6b", 1024, 151_936, tied=True),
        Head("qwen3-1.7b", 2048, 151_936, tied=True),
        Head("qwen3-4b", 2560, 151_936, tied=True),
        Head("qwen3-8b", 4096, 151_936, tied=False),
        Head("qwen3-14b", 5120, 151_936, tied=False),
        Head("qwen3-32b", 5120, 151_936, tied=False),
        Head("qwen3-30b-a3b", 2048, 151_936, tied=False),
        Head("llama-3.2-1b", 2048, 128_256, tied=True),
        Head("llama-3.2-3b", 3072, 128_256, tied=True),
        Head("llama-3.1-8b", 4096, 128_256, tied=False),
        Head("llama-3.1-70b", 8192, 128_256, tied=False),
        Head("gemma-2-2b", 2304, 256_000, tied=True, softcap=30.0),
        Head("gemma-2-9b", 3584, 256_000, tied=True, softcap=30.0),
        Head("gemma-2-27b", 4608, 256_000, tied=True, softcap=30.0),
        Head("gemma-3-1b", 1152, 262_144, tied=True),
        Head("gemma-3-4b", 2560, 262_208, tied=True),
        Head("gemma-3-12b", 3840, 262_208, tied=True),
        Head("gemma-3-27b", 5376, 262_208, tied=True),
        Head("mistral-7b-v0.1", 4096, 32_000, tied=False),
        Head("mistral-7b-v0.3", 4096, 32_768, tied=False),
        Head("tinyllama-1.1b", 2048, 32_000, tied=False),
        Head("phi-3-mini", 3072, 32_064, tied=False),
        Head("phi-4", 5120, 100_352, tied=False),
        Head("phi-4-mini", 3072, 200_064, tied=True),
        Head("olmo-2-7b", 4096, 100_352, tied=False),
        Head("granite-3.1-2b", 2048, 49_155, tied=True, logit_scale=1 / 8),
        Head("granite-3.1-8b", 4096, 49_155, tied=True, logit_scale=1 / 16),
        Head("command-r-35b", 8192, 256_000, tied=True, logit_scale=1 / 16),
    )
}
"""Every known head by its name."""


def head(name: str) -> Head:
    """The head of a model, by name.

    Equal to::

        HEADS[name.lower()]

    Args:
        name: a model of `HEADS`; upper and lower case count the same, and the organisation (`Qwen/`) and the endings
            `-instruct`, `-it`, `-base` and `-chat` are left out, for they do not change the head.

    Returns:
        The `Head`: sizes in elements.

    Raises:
        ValueError: no such model is known; the message names the nearest ones.

    Example:
        >>> head("Qwen/Qwen2.5-1.5B-Instruct")
        Head(name='qwen2.5-1.5b', hidden_size=1536, vocab_size=151936, tied=True, softcap=None, logit_scale=1.0)

    Reference:
        The `config.json` that each model is published with. Departures: none.
    """
    key = name.lower().rsplit("/", 1)[-1]
    for ending in ("-instruct", "-it", "-base", "-chat"):
        key = key.removesuffix(ending)
    if key in HEADS:
        return HEADS[key]
    near = difflib.get_close_matches(key, HEADS, n=3, cutoff=0.4)
    hint = f"nearest known: {', '.join(near)}" if near else f"known: {', '.join(HEADS)}"
    raise ValueError(f"head: no model named {name!r}; {hint}. For any other model give hidden_size and vocab_size")
