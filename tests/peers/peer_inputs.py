"""Inputs for the comparison with installed peers: float32 numbers from numpy, the same for ours and for theirs."""

from typing import NamedTuple

import numpy as np

B, T, D, V = 4, 12, 16, 64


class Batch(NamedTuple):
    """One batch of completions; `rollout` is None where the sampling engine plays no part."""

    hidden: np.ndarray
    lm_head: np.ndarray
    targets: np.ndarray
    old: np.ndarray | None
    ref: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def make_batch(name: str = "ragged", temperature: float = 1.0) -> Batch:
    """Four ragged sequences, one with a hole; old log-probabilities far enough away that every clip bound bites.

    Args:
        name: `"ragged"`, or that with one change: `"masked_row"`, `"all_masked"`, `"zero_advantage"`,
            `"token_advantages"`, `"on_policy"` (no old log-probabilities), `"nan_outside"` (old and ref NaN outside the
            mask), `"wild_positive"` and `"wild_negative"` (one token's log-ratio is 100, where A is 1.2 or -0.7),
            `"rollout_outside"` (the rollout differs outside the mask too).
        temperature: of the logits behind the log-probabilities.
    """
    rng = np.random.default_rng(7)
    hidden = rng.standard_normal((B, T, D)).astype(np.float32)
    lm_head = (0.5 * rng.standard_normal((D, V))).astype(np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    logprobs = logprobs_of(hidden, lm_head, targets, temperature)
    old = logprobs + 0.3 * rng.standard_normal((B, T))
    ref = logprobs + 0.5 * rng.standard_normal((B, T))
    rollout = old + 0.5 * rng.standard_normal((B, T))
    advantages = np.array([1.2, -0.7, 0.5, -1.5])
    mask = np.arange(T)[None, :] < np.array([12, 7, 3, 9])[:, None]
    mask[0, 4:6] = False
    if name == "masked_row":
        mask[2] = False
    elif name == "all_masked":
        mask[:] = False
    elif name == "zero_advantage":
        advantages[2] = 0.0
    elif name == "token_advantages":
        advantages = rng.standard_normal((B, T))
    elif name == "nan_outside":
        old, ref = np.where(mask, old, np.nan), np.where(mask, ref, np.nan)
    elif name == "wild_positive":
        old[0, 1] = logprobs[0, 1] - 100.0
    elif name == "wild_negative":
        old[1, 1] = logprobs[1, 1] - 100.0
    else:
        assert name in ("ragged", "on_policy", "rollout_outside"), name
    if name != "rollout_outside":
        rollout = np.where(mask, rollout, old)
    return Batch(
        hidden,
        lm_head,
        targets,
        None if name == "on_policy" else old.astype(np.float32),
        ref.astype(np.float32),
        rollout.astype(np.float32),
        advantages.astype(np.float32),
        mask.astype(np.int32),
    )


def logprobs_of(hidden: np.ndarray, lm_head: np.ndarray, targets: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the targets in float64."""
    logits = hidden.astype(np.float64) @ lm_head.astype(np.float64) / temperature
    top = logits.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return np.take_along_axis(logits, targets[..., None].astype(np.int64), -1)[..., 0] - lse


def rollout_weights(batch: Batch, level: str = "token", mode: str = "truncate") -> np.ndarray:
    """What TRL's sampler hands to both peers: exp(old - rollout), truncated at 2 or 0 outside [0.5, 2]."""
    assert batch.old is not None
    gap = batch.old.astype(np.float64) - batch.rollout
    if level == "sequence":
        gap = (gap * batch.mask).sum(-1, keepdims=True)
    weights = np.exp(gap)
    if mode == "truncate":
        return np.minimum(weights, 2.0).astype(np.float32)
    return np.where((weights < 0.5) | (weights > 2.0), 0.0, weights).astype(np.float32)


class Pairs(NamedTuple):
    """Completions for preference losses: the first half chosen, the second half rejected; good ones for KTO.

    `attention` covers the prompt's tokens too.
    """

    hidden: np.ndarray
    lm_head: np.ndarray
    ref_hidden: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    attention: np.ndarray
    desirable: np.ndarray


def make_pairs(name: str = "ragged") -> Pairs:
    """Four pairs of completions.

    Args:
        name: `"ragged"`, or that with one change: `"empty_row"`: a rejected completion without tokens; `"certain"`:
            chosen ones of probability 1; `"prompt"`: the first token is of the prompt.
    """
    rng = np.random.default_rng(11)
    hidden = rng.standard_normal((2 * B, T, D)).astype(np.float32)
    lm_head = (0.5 * rng.standard_normal((D, V))).astype(np.float32)
    ref_hidden = (hidden + 0.1 * rng.standard_normal(hidden.shape)).astype(np.float32)
    targets = rng.integers(0, V, (2 * B, T)).astype(np.int32)
    mask = np.arange(T)[None, :] < np.array([12, 7, 3, 9, 5, 12, 8, 2])[:, None]
    attention = mask.copy()
    if name == "empty_row":
        mask[5] = False
    elif name == "prompt":
        mask[:, 0] = False
    elif name == "certain":
        # The column of the target stands 60 above all others.
        hidden[:B] = 0.0
        hidden[:B, :, 0] = 60.0
        lm_head[0] = 0.0
        lm_head[0, 5] = 1.0
        targets[:B] = 5
    else:
        assert name == "ragged", name
    desirable = np.array([1, 0, 1, 1, 0, 0, 1, 0])
    return Pairs(hidden, lm_head, ref_hidden, targets, mask.astype(np.int32), attention.astype(np.int32), desirable)


def make_labels(name: str = "some_ignored") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states `[N, D]`, head and labels for cross-entropy; -100 is ignored."""
    batch = make_batch()
    labels = np.where(batch.mask != 0, batch.targets, -100).reshape(-1)
    if name == "all_ignored":
        labels[:] = -100
    return batch.hidden.reshape(-1, D), batch.lm_head, labels.astype(np.int32)


def make_teacher(hidden: np.ndarray, lm_head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and head of a teacher not far from the student."""
    rng = np.random.default_rng(13)
    near = hidden + 0.3 * rng.standard_normal(hidden.shape)
    return near.astype(np.float32), (lm_head + 0.1 * rng.standard_normal(lm_head.shape)).astype(np.float32)
