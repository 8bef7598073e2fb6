"""Completions that depend on seed and step alone, kept or read again: the same for every arm and after a restart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports] - of the train extra
    CacheConfig,
    RolloutOutput,
)
from tunix.rl.rollout.vanilla_rollout import VanillaRollout  # pyright: ignore[reportMissingImports]

from logitless._files import replace_file
from logitless.train.errors import TrainError


class StepRollout(VanillaRollout):
    """Tunix's sampler with a seed of its own in each step; 0.1.7 would use the same one in all.

    Args:
        seed: of the run.
        step: gives the number of the batch that is sampled next.
        record: a folder to write every batch to, or None.
        replay: a folder to read every batch from, or None.
        rollout_actor: as Tunix gives it, and so the rest.
    """

    def __init__(
        self,
        *,
        seed: int,
        step: Callable[[], int],
        record: Path | None,
        replay: Path | None,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: Any,
    ) -> None:
        self._seed, self._step, self._record, self._replay = seed, step, record, replay
        config = rollout_actor.config
        cache = CacheConfig(
            cache_size=rollout_config.kv_cache_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        super().__init__(rollout_actor, tokenizer, cache)

    def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Completions of the prompts of this step."""
        prompts = [str(prompt) for prompt in prompts]
        self._check_lengths(prompts, rollout_config.max_prompt_length)
        step = self._step()
        if self._replay is not None:
            return read_batch(self._replay, step, prompts, self._sampler.tokenizer, rollout_config.max_prompt_length)
        from dataclasses import replace

        key = jax.random.fold_in(jax.random.key(self._seed), step)
        # Tunix carries the seed through a while loop as the two raw words of an old-style key.
        seeded = replace(rollout_config, seed=jax.random.key_data(key))
        output = super().generate(prompts, seeded, **kwargs)
        if self._record is not None:
            write_batch(self._record, step, prompts, output.tokens)
        return output

    def _check_lengths(self, prompts: Sequence[str], longest: int) -> None:
        for prompt in prompts:
            tokens = len(self._sampler.tokenizer.encode(prompt))
            if tokens > longest:
                raise TrainError(
                    f"rollout.max_prompt_tokens={longest} is less than the {tokens} tokens of the prompt "
                    f"{prompt[:60]!r}"
                )


def batch_path(folder: Path, step: int) -> Path:
    """The file of one batch."""
    return folder / f"step_{step:06d}.npz"


def write_batch(folder: Path, step: int, prompts: Sequence[str], tokens: Sequence[np.ndarray]) -> None:
    """Keeps the completions of a step: all of it or nothing."""
    import io

    folder.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(row) for row in tokens], np.int32)
    flat = np.concatenate([np.asarray(row, np.int32) for row in tokens]) if len(tokens) else np.zeros(0, np.int32)
    content = io.BytesIO()
    np.savez(content, prompts=np.array(prompts), lengths=lengths, tokens=flat)
    replace_file(batch_path(folder, step), content.getvalue())


def read_batch(folder: Path, step: int, prompts: Sequence[str], tokenizer: Any, width: int) -> Any:
    """The kept completions of a step, as Tunix's sampler returns them.

    Raises:
        TrainError: none are kept, or they belong to other prompts.
    """
    path = batch_path(folder, step)
    try:
        # Opened here: of a cut archive numpy leaves the file open.
        with path.open("rb") as file, np.load(file) as arrays:
            kept, lengths, flat = arrays["prompts"].tolist(), arrays["lengths"], arrays["tokens"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise TrainError(f"replay_rollouts: cannot read {path}: {error}") from error
    if kept != list(prompts):
        raise TrainError(
            f"replay_rollouts: {path.name} was recorded for other prompts ({kept[0]!r}, not {prompts[0]!r}); seed, "
            "data and prompts_per_step must be those of the recorded run"
        )
    tokens = np.split(flat, np.cumsum(lengths)[:-1])
    padded = np.full((len(prompts), width), tokenizer.pad_id(), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        ids = tokenizer.encode(prompt)
        row[width - len(ids) :] = ids
    texts = [tokenizer.decode(row.tolist()) for row in tokens]
    # Tunix's own sampler gives None for what it was not asked for.
    nothing: Any = None
    return RolloutOutput(text=texts, logits=nothing, tokens=tokens, left_padded_prompt_tokens=padded, logprobs=None)
