"""What a bench runs: the YAML config as frozen dataclasses, the inputs of a case, and the function of an arm."""

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from logitless.bench.errors import BenchError

BASELINE = "reference"
"""The implementation that holds all logits on purpose, and so is shown its audit instead of being refused for it."""

ARGUMENTS = ("hidden", "lm_head", "targets", "old_logprobs", "advantages", "mask")
DIFFERENTIATED = ("hidden", "lm_head")


@dataclass(frozen=True)
class ArmConfig:
    """One contender.

    Args:
        implementation: a name that `linear_grpo_loss` takes (`reference`, `chunked`, ...), or `module:function` for one
            of your own: called as `function(hidden, lm_head, targets, old_logprobs, advantages, mask, *, layout)`, it
            gives the GRPO loss as a scalar or a LossOutput.
        name: what the tables call it; the implementation's name unless given.
        block_sizes: any of block_n, block_v, block_d, for a named implementation.
    """

    implementation: str
    name: str | None = None
    block_sizes: dict[str, int] | None = None

    @property
    def label(self) -> str:
        return self.name or self.implementation


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark: the GRPO loss and the gradients of hidden states and LM head, by every arm, at every size.

    Args:
        name: names the record `NAME.jsonl`, the plot `NAME.png` and the table's markers in the README.
        arms: the contenders; ratios are to the first one.
        tokens: sizes N to run, each the product of sequences and positions.
        inputs: `random`: peaked softmax problems of the sizes below; `smollm2`: real hidden states and head of
            SmolLM2-135M-Instruct over the project's word problems, fetched from PyPI once.
        hidden_size: D of random inputs.
        vocab_size: V of random inputs.
        sequences: B of random inputs; divides every N.
        dtype: of hidden states and head.
        layout: of the head: `VD` as a tied embedding, `DV` as a Flax kernel.
        masked_fractions: shares of the tokens that are masked on top of the padding, one case for each.
        repetitions: timed runs of each arm, taken in turns with the other arms.
        seed: of random inputs and of masks.
        timeout_s: longest wait for one answer of an arm (compiling, checking, or one run); then the arm is given up.
        results: folder of the record and the plot, relative to where the command runs.
        plot: whether to draw the plot.
    """

    name: str
    arms: tuple[ArmConfig, ...]
    tokens: tuple[int, ...]
    inputs: Literal["random", "smollm2"] = "random"
    hidden_size: int | None = None
    vocab_size: int | None = None
    sequences: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Literal["DV", "VD"] = "VD"
    masked_fractions: tuple[float, ...] = (0.0,)
    repetitions: int = 7
    seed: int = 0
    timeout_s: float = 300.0
    results: str = "results"
    plot: bool = True

    def __post_init__(self) -> None:
        _need(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name)),
            f"name is {self.name!r}; use letters, digits, _ and - only",
        )
        _need(bool(self.arms), "arms is empty; name at least one implementation")
        labels = [arm.label for arm in self.arms]
        _need(len(set(labels)) == len(labels), f"arms are named {', '.join(labels)}; give each its own name")
        _need(
            bool(self.tokens) and min(self.tokens) > 0,
            f"tokens is {list(self.tokens)}; give one or more positive sizes",
        )
        _need(self.repetitions > 0, f"repetitions is {self.repetitions}; give at least 1")
        _need(self.timeout_s > 0, f"timeout_s is {self.timeout_s}; give a positive number of seconds")
        _need(bool(self.masked_fractions), "masked_fractions is empty; [0.0] masks nothing")
        for fraction in self.masked_fractions:
            _need(0 <= fraction < 1, f"masked_fractions holds {fraction}; each is at least 0 and below 1")
        if self.inputs == "smollm2":
            _need(
                self.hidden_size is None and self.vocab_size is None,
                "hidden_size and vocab_size are SmolLM2's own with inputs: smollm2; leave them out",
            )
            return
        if self.hidden_size is None or self.vocab_size is None:
            raise BenchError("bench config: inputs: random needs hidden_size and vocab_size")
        _need(
            self.hidden_size > 0 and self.vocab_size > 1,
            f"hidden_size {self.hidden_size} and vocab_size {self.vocab_size} must be positive",
        )
        _need(self.sequences > 0, f"sequences is {self.sequences}; give at least 1")
        for tokens in self.tokens:
            _need(
                tokens % self.sequences == 0,
                f"tokens holds {tokens}, which sequences {self.sequences} does not divide; change either",
            )


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise BenchError(f"bench config: {message}")


@dataclass(frozen=True)
class Case:
    """One size at which every arm runs; travels to the arms' processes as JSON.

    Args:
        inputs: where the arrays come from.
        tokens: N.
        dtype: of hidden states and head.
        layout: of the head.
        masked_fraction: share of the tokens masked on top of the padding.
        seed: of the inputs and the mask.
    """

    inputs: str
    tokens: int
    dtype: str
    layout: str
    masked_fraction: float
    seed: int


def cases_of(config: BenchConfig, tokens: int) -> list[Case]:
    return [
        Case(config.inputs, tokens, config.dtype, config.layout, fraction, config.seed)
        for fraction in config.masked_fractions
    ]


def random_arrays(tokens: int, sequences: int, hidden_size: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """A peaked problem: half the vocabulary rows point along hidden states, so that errors in large logits show.

    Returns:
        The arrays of `ARGUMENTS`, in float32, `hidden` [B, T, D] and `lm_head` [V, D].
    """
    from logitless.bench.hidden_states import off_policy

    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, hidden_size), np.float32)
    # Logits of about N(0, 1) everywhere and of about 12 on a token's own rows.
    lm_head = rng.standard_normal((vocab_size, hidden_size), np.float32) / np.float32(np.sqrt(hidden_size))
    copies = rng.permutation(vocab_size)[: vocab_size // 2]
    owners = np.arange(len(copies)) % tokens
    lm_head[copies] = hidden[owners] * np.float32(12 / hidden_size)
    targets = rng.integers(0, vocab_size, tokens)
    # Every second token is sure of its target, as most tokens of a trained model are.
    sure = np.arange(0, min(tokens, len(copies)), 2)
    targets[sure] = copies[sure]
    shape = (sequences, tokens // sequences)
    logprobs = _numpy_logprobs(hidden, lm_head, targets).reshape(shape)
    return {
        "hidden": hidden.reshape(*shape, hidden_size),
        "lm_head": lm_head,
        "targets": targets.reshape(shape).astype(np.int32),
        "old_logprobs": off_policy(logprobs, seed),
        "advantages": rng.standard_normal(sequences).astype(np.float32),
        "mask": np.ones(shape, bool),
    }


def _numpy_logprobs(hidden: np.ndarray, lm_head: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """In blocks of tokens, for the process that makes the inputs must stay small."""
    parts = []
    for start in range(0, len(hidden), 128):
        logits = hidden[start : start + 128] @ lm_head.T
        top = logits.max(axis=1, keepdims=True)
        lse = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        parts.append(logits[np.arange(len(logits)), targets[start : start + 128]] - lse)
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
    return arrays | {"mask": mask.reshape(arrays["targets"].shape)}


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


def loss_of(arm: ArmConfig, layout: str) -> Callable[..., Any]:
    """The arm's loss as a function of the arrays of `ARGUMENTS`, which gives a scalar.

    Raises:
        BenchError: no such implementation, module or function.
    """
    if ":" in arm.implementation:
        own = _import(arm.implementation)
        if arm.block_sizes:
            raise BenchError(
                f"arm {arm.label}: block_sizes are for named implementations; set them inside {arm.implementation}"
            )
        return lambda *arrays: _scalar(own(*arrays, layout=layout))
    from logitless.losses.linear_presets import linear_grpo_loss
    from logitless.ops.api import IMPLEMENTATIONS

    if arm.implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise BenchError(
            f"arm {arm.label}: no implementation {arm.implementation!r}; known are {known}, or module:function"
        )
    options: dict[str, Any] = {"layout": layout, "implementation": arm.implementation, "block_sizes": arm.block_sizes}
    return lambda *arrays: _scalar(linear_grpo_loss(*arrays, **options))


def logprobs_of(arm: ArmConfig, layout: str) -> Callable[..., Any] | None:
    """The arm's log-probabilities, or None for one of the user's own, which gives only a loss."""
    if ":" in arm.implementation:
        return None
    from logitless.ops.api import linear_logprobs

    options: dict[str, Any] = {"layout": layout, "implementation": arm.implementation, "block_sizes": arm.block_sizes}
    return lambda hidden, lm_head, targets, mask: linear_logprobs(hidden, lm_head, targets, mask=mask, **options)


def _scalar(output: Any) -> Any:
    return getattr(output, "loss", output)


def _import(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise BenchError(
            f"arm {path}: cannot import {module!r} ({error}); it must lie on PYTHONPATH or be installed"
        ) from error
    function = vars(found).get(name)
    if not callable(function):
        raise BenchError(f"arm {path}: module {module!r} has no function {name!r}")
    return function


def plain_loss(
    hidden: Any, lm_head: Any, targets: Any, old_logprobs: Any, advantages: Any, mask: Any, *, layout: str
) -> tuple[Any, Any]:
    """GRPO's loss and the log-probabilities in plain jnp, with all logits.

    The oracle: it shares no code with what it judges.
    """
    import jax
    import jax.numpy as jnp

    from logitless._arrays import accumulator

    head = lm_head if layout == "DV" else lm_head.T
    wide = accumulator(hidden.dtype)
    logits = jnp.matmul(hidden, head, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    ratio = jnp.exp(logprobs - old_logprobs)
    advantage = advantages[:, None]
    token_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    kept = jnp.where(mask, token_loss, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1).astype(wide), 1)
    return kept.mean(), jnp.where(mask, logprobs, 0.0)


def as_arrays(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, Any]:
    """On the device, hidden states and head in the case's dtype."""
    import jax.numpy as jnp

    return {
        name: jnp.asarray(value, jnp.dtype(dtype) if name in DIFFERENTIATED else None) for name, value in arrays.items()
    }
