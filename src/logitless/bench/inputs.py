"""The arrays of a case: made at random or read from the file that holds them, and put on the device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitless.bench.cases import ARGUMENTS, DIFFERENTIATED, Case
from logitless.bench.errors import BenchError

Logprobs = Callable[[np.ndarray, np.ndarray, np.ndarray, float | None], np.ndarray]
"""Log-probabilities [N] of `(hidden, lm_head, targets, softcap)`, the head [V, D]."""


def random_arrays(
    tokens: int,
    sequences: int,
    hidden_size: int,
    vocab_size: int,
    seed: int,
    *,
    softcap: float | None = None,
    noise: float = 1.0,
    logprobs_of: Logprobs | None = None,
) -> dict[str, np.ndarray]:
    """A peaked problem: half the vocabulary rows point along hidden states, so that errors in large logits show.

    Returns:
        The arrays of `ARGUMENTS`, in float32, `hidden` [B, T, D] and `lm_head` [V, D].
    """
    from logitless.bench.hidden_states import off_policy

    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, hidden_size), np.float32)
    # Logits of about N(0, 1) everywhere and of about 12 on a token's own rows.
    lm_head = rng.standard_normal((vocab_size, hidden_size), np.float32)
    lm_head /= np.float32(np.sqrt(hidden_size))
    copies = rng.permutation(vocab_size)[: vocab_size // 2]
    owners = np.arange(len(copies)) % tokens
    lm_head[copies] = hidden[owners] * np.float32(12 / hidden_size)
    targets = rng.integers(0, vocab_size, tokens)
    # Every second token is sure of its target, as most tokens of a trained model are.
    sure = np.arange(0, min(tokens, len(copies)), 2)
    targets[sure] = copies[sure]
    shape = (sequences, tokens // sequences)
    logprobs = (logprobs_of or numpy_logprobs)(hidden, lm_head, targets, softcap).reshape(shape)
    old = off_policy(logprobs, seed)
    return {
        "hidden": hidden.reshape(*shape, hidden_size),
        "lm_head": lm_head,
        "targets": targets.reshape(shape).astype(np.int32),
        "old_logprobs": old if noise == 1 else (logprobs + noise * (old - logprobs)).astype(np.float32),
        "advantages": rng.standard_normal(sequences).astype(np.float32),
        "mask": np.ones(shape, bool),
    }


def numpy_logprobs(hidden: np.ndarray, lm_head: np.ndarray, targets: np.ndarray, softcap: float | None) -> np.ndarray:
    """In blocks of tokens, for the process that makes the inputs must stay small."""
    parts = []
    for start in range(0, len(hidden), 128):
        logits = hidden[start : start + 128] @ lm_head.T
        if softcap is not None:
            logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
        top = logits.max(axis=1, keepdims=True)
        lse = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        parts.append(logits[np.arange(len(logits)), targets[start : start + 128]] - lse)
    return np.concatenate(parts)


def device_logprobs(hidden: np.ndarray, lm_head: np.ndarray, targets: np.ndarray, softcap: float | None) -> np.ndarray:
    """The same on JAX's device, for sizes whose products a CPU would spend minutes on."""
    import jax
    import jax.numpy as jnp

    from logitless.bench.oracle import plain_logprobs

    head = jnp.asarray(lm_head)
    block = jax.jit(lambda hidden, head, targets: plain_logprobs(hidden, head, targets, layout="VD", softcap=softcap))
    parts = [
        np.asarray(block(hidden[start : start + 1024], head, targets[start : start + 1024]))
        for start in range(0, len(hidden), 1024)
    ]
    return np.concatenate(parts)


def load_arrays(path: Path, case: Case) -> dict[str, np.ndarray]:
    """The arrays of `ARGUMENTS` for one case, out of a file that may hold more sequences.

    Raises:
        BenchError: the file holds fewer tokens than the case asks for, or N is no whole number of its sequences.
    """
    with np.load(path) as file:
        arrays = {name: file[name] for name in ARGUMENTS}
    rows = sequences_of(case.tokens, arrays["targets"].shape)
    arrays = {name: value if name == "lm_head" else value[:rows] for name, value in arrays.items()}
    if case.layout == "DV":
        arrays["lm_head"] = np.ascontiguousarray(arrays["lm_head"].T)
    drop = np.random.default_rng(case.seed).permutation(case.tokens)[: round(case.masked_fraction * case.tokens)]
    mask = arrays["mask"].reshape(-1).copy()
    mask[drop] = False
    idle = np.random.default_rng(case.seed).permutation(rows)[: round(case.zero_advantage_fraction * rows)]
    advantages = arrays["advantages"].copy()
    advantages[idle] = 0.0
    return arrays | {"mask": mask.reshape(arrays["targets"].shape), "advantages": advantages}


def sequences_of(tokens: int, available: tuple[int, ...]) -> int:
    """How many sequences make up `tokens`, of the `[B, T]` that there are."""
    sequences, length = available
    if tokens > sequences * length:
        raise BenchError(
            f"bench config: tokens holds {tokens}, but the inputs have {sequences * length}: {sequences} x {length}"
        )
    if tokens % length:
        raise BenchError(
            f"bench config: tokens holds {tokens}; these inputs come in sequences of {length}, give a multiple of it"
        )
    return tokens // length


def labels_of(targets: Any, mask: Any) -> np.ndarray:
    """The targets as labels, -100 where they do not count."""
    return np.where(mask, targets, -100).astype(np.int32)


def as_arrays(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, Any]:
    """On the device, hidden states and head in the case's dtype."""
    import jax.numpy as jnp

    return {
        name: jnp.asarray(value, jnp.dtype(dtype) if name in DIFFERENTIATED else None) for name, value in arrays.items()
    }
