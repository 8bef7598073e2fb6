"""What `logitless plan` plans: the YAML config, and the loss and gradients of an LM head as functions with shapes."""

import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.bench.cases import DIFFERENTIATED, Loss, known_head
from logitless.bench.errors import BenchError
from logitless.bench.plain import plain_loss
from logitless.bench.shardings import MeshSharding
from logitless.losses.linear import cross_entropy, linear_cross_entropy
from logitless.losses.linear_presets import linear_grpo_loss
from logitless.losses.policy_presets import grpo_loss
from logitless.ops.api import TOKEN_LOSS_IMPLEMENTATIONS, token_logprobs
from logitless.ops.head_sharding import HeadSharding, HeadStrategy, head_strategy
from logitless.ops.pallas_tpu_vmem import ROWS
from logitless.plan import Topology, topology

PLAIN = "plain_jnp"
"""The loss as it is written without a library: logits in the model's dtype, cast to float32, log_softmax."""

TOKENS_AXIS = "tokens"

INPUTS = {"hidden": DIFFERENTIATED, "logits": ("logits",)}
"""What a program of each level starts from, and can be differentiated by."""


@dataclass(frozen=True)
class PlanVariant:
    """A way to run the loss, of which each head is planned once.

    Args:
        name: as the table shows it.
        differentiate: whose gradients are computed, at the level `hidden`; `[hidden]` for a frozen head.
        level: `hidden` starts from hidden states; `logits` from logits in the dtype, which are donated.
        masked: share of the tokens that the mask leaves out. It is a run-time number: kernels that skip them are
            counted for it, all else in full.
        flat: share of the rest that has no cotangent, such as a group without advantage.
        heads: models that it is planned for; all of the config unless given.
        sharding: how tokens and head lie over the chips of a topology such as `v6e:2x4`; without it the tokens are
            split over all of them and the head is on each.
    """

    name: str = ""
    differentiate: tuple[Literal["hidden", "lm_head"], ...] = DIFFERENTIATED
    level: Literal["hidden", "logits"] = "hidden"
    masked: float = 0.0
    flat: float = 0.0
    heads: tuple[str, ...] = ()
    sharding: MeshSharding | None = None

    def __post_init__(self) -> None:
        for key in ("masked", "flat"):
            _need(0 <= getattr(self, key) < 1, f"variant {self.name!r}: {key} must be at least 0 and below 1")

    @property
    def axis_shares(self) -> dict[str, float]:
        """Of the blocks of tokens that a kernel could have, those that it visits."""
        kept = 1.0 - self.masked
        both = {name: kept * (1.0 - self.flat) for name in ("_backward", "_d_hidden")}
        shares = {**both, "logitless": kept}
        return {name: share for name, share in shares.items() if share != 1.0}


@dataclass(frozen=True)
class PlanConfig:
    """Memory and speed of the loss and its gradients at an LM head, on chips that are not here.

    Args:
        name: names the record `NAME.jsonl` and the plot `NAME.png`.
        topologies: chips: `v6e`, `v5e`, `v5p`, `v4`, `7x` for one chip, `v6e:2x4` for eight; or a card: `h100`, `a100`,
            `b200`. On several chips the tokens are split over all of them and the head is on each, unless a variant
            says otherwise by its `sharding`.
        implementations: `plain_jnp` (the loss as it is written without a library), and names that `linear_grpo_loss`
            takes. Gains are to the first one.
        heads: models such as `qwen2.5-7b`, which give D, V, layout and softcap; in place of the next two keys.
        hidden_size: D.
        vocab_size: V.
        layout: of the head: `VD` or `DV`; unless given that of the model, `VD` where it is tied.
        tokens: N on each device, in `sequences` sequences; not read with `solve: tokens`. A `v4` and a `7x` have two
            devices each.
        sequences: B on each device; divides every N. With `solve` it is what is solved for.
        dtype: of hidden states and head.
        loss: `grpo` or `cross_entropy`.
        differentiate: whose gradients are computed; `[hidden]` for a frozen head.
        variants: in place of `differentiate`: several ways to run the loss.
        solve: `tokens` finds the most tokens on a device that fit, in steps of `step`; `batch` the most sequences of
            `tokens` tokens each. In place of a plan of each size.
        step: of the tokens that `solve` tries; `batch` goes in steps of one sequence.
        most: the most tokens that `solve` tries.
        reserve_gb: GB of HBM for what else a device holds, such as the rest of the model and its optimizer.
        timeout_s: seconds that one compile may take.
        python: interpreter of the environment that has the compiler; this one unless given.
        cache: keep the compiler's answers, and take them from there.
        results: folder of record and plot.
        plot: whether to draw the plot.
    """

    name: str
    topologies: tuple[str, ...]
    implementations: tuple[str, ...] = (PLAIN, "reference", "chunked", "one_pass")
    heads: tuple[str, ...] = ()
    hidden_size: int | None = None
    vocab_size: int | None = None
    layout: Literal["DV", "VD"] | None = None
    tokens: tuple[int, ...] = (8192,)
    sequences: int = 8
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    loss: Loss = "grpo"
    differentiate: tuple[Literal["hidden", "lm_head"], ...] = DIFFERENTIATED
    variants: tuple[PlanVariant, ...] = ()
    solve: Literal["tokens", "batch"] | None = None
    step: int = 1024
    most: int = 2**20
    reserve_gb: float = 0.0
    timeout_s: float = 600.0
    python: str | None = None
    cache: bool = True
    results: str = "results"
    plot: bool = False

    def __post_init__(self) -> None:
        _need(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name)),
            f"name is {self.name!r}; use letters, digits, _ and - only",
        )
        for key in ("topologies", "implementations", "tokens", "differentiate"):
            _need(bool(getattr(self, key)), f"{key} is empty; give one or more")
        for name in self.topologies:
            devices = topology(name).devices
            for variant in self.variants:
                if variant.sharding is not None:
                    variant.sharding.check(f"plan config: variant {variant.name!r} on {name}", devices)
        known = (PLAIN, "auto", *TOKEN_LOSS_IMPLEMENTATIONS)
        for name in self.implementations:
            _need(name in known, f"implementation {name!r} is unknown; known: {', '.join(known)}")
        sized = (self.hidden_size is not None, self.vocab_size is not None)
        _need(not (any(sized) and self.heads), "give heads, or hidden_size and vocab_size, not both")
        _need(all(sized) or bool(self.heads), "give heads, or hidden_size and vocab_size")
        _need(
            self.solve != "tokens" or self.step <= self.most,
            f"most is {self.most} and step {self.step}; give a step that is not above most",
        )
        for key in ("hidden_size", "vocab_size", "sequences", "step", "most", "timeout_s"):
            value = getattr(self, key)
            _need(value is None or value > 0, f"{key} is {value}; it must be above 0")
        _need(self.reserve_gb >= 0, f"reserve_gb is {self.reserve_gb}; it must not be below 0")
        for tokens in self.tokens:
            _need(tokens > 0, f"tokens is {tokens}; it must be above 0")
            _need(
                self.solve is not None or tokens % self.sequences == 0,
                f"{tokens} tokens do not divide into {self.sequences} sequences",
            )


@dataclass(frozen=True)
class PlanCase:
    """One program to plan, but for its implementation and, with `solve`, its size."""

    where: Topology
    head: str | None
    hidden_size: int
    vocab_size: int
    layout: Literal["DV", "VD"]
    softcap: float | None
    logit_scale: float
    dtype: str
    loss: Loss
    differentiate: tuple[str, ...]
    variant: PlanVariant


def cases_of(config: PlanConfig) -> list[PlanCase]:
    """A case for each chip, way to run the loss, and head."""
    cases = []
    variants = config.variants or (PlanVariant(differentiate=config.differentiate),)
    for name, variant in itertools.product(config.topologies, variants):
        for model in [known_head(head) for head in variant.heads or config.heads] or [None]:
            tied = model is not None and model.tied
            cases.append(
                PlanCase(
                    where=topology(name),
                    head=None if model is None else model.name,
                    hidden_size=config.hidden_size or 0 if model is None else model.hidden_size,
                    vocab_size=config.vocab_size or 0 if model is None else model.vocab_size,
                    layout=config.layout or ("VD" if tied else "DV"),
                    softcap=None if model is None else model.softcap,
                    logit_scale=1.0 if model is None else model.logit_scale,
                    dtype=config.dtype,
                    loss=config.loss,
                    differentiate=variant.differentiate if variant.level == "hidden" else ("logits",),
                    variant=variant,
                )
            )
    return cases


def program(
    case: PlanCase, implementation: str, sequences: int, positions: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss and its gradients on every chip of the case, and the shapes of its arguments.

    Args:
        case: chip and head.
        implementation: `plain_jnp` or a name that `linear_grpo_loss` takes.
        sequences: on each device.
        positions: T.
    """
    laid = _laid(case)
    mesh = None if laid is None else laid.abstract_mesh()
    vocab = _padded_vocab(case, laid)
    over = None if laid is None or mesh is None else laid.head_sharding(mesh, case.vocab_size)
    batch = sequences * (1 if laid is None else laid.parts(laid.tokens))
    dtype, wide = jnp.dtype(case.dtype), jnp.float32

    def shape(dims: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))

    split = P() if over is None else over.token_spec
    head_spec = P() if over is None else over.head_spec(case.layout)
    weight = (case.hidden_size, vocab) if case.layout == "DV" else (vocab, case.hidden_size)
    inputs = (shape((batch, positions, case.hidden_size), dtype, split), shape(weight, dtype, head_spec))
    if case.variant.level == "logits":
        logits_spec = P() if over is None else over.of_rows(over.vocab_axes, 2)
        inputs = (shape((batch, positions, vocab), dtype, logits_spec),)
    args = (
        *inputs,
        shape((batch, positions), jnp.int32, split),
        shape((batch, positions), wide, split),  # old_logprobs
        shape((batch,), wide, split),  # advantages
        shape((batch, positions), jnp.bool_, split),  # mask
    )
    argnums = tuple(INPUTS[case.variant.level].index(name) for name in case.differentiate)
    step = jax.value_and_grad(_loss(case, implementation, over), argnums)
    if mesh is None:
        return step, args

    def laid_out(*args: Any) -> Any:
        value, gradients = step(*args)
        # As the optimizer has them, whatever else XLA would like.
        each = zip(gradients, argnums, strict=True)
        return value, tuple(jax.lax.with_sharding_constraint(x, inputs[i].sharding) for x, i in each)

    return laid_out, args


def _laid(case: PlanCase) -> MeshSharding | None:
    """How tokens and head lie on several chips: as the variant says, else all of the head on each."""
    if case.where.shape is None:
        return None
    return case.variant.sharding or MeshSharding({TOKENS_AXIS: case.where.devices}, (TOKENS_AXIS,))


def _padded_vocab(case: PlanCase, laid: MeshSharding | None) -> int:
    """V, in whole registers of each part where they do not divide it, as trainers pad it."""
    parts = 1 if laid is None else laid.parts(laid.vocab)
    return case.vocab_size if case.vocab_size % parts == 0 else -(-case.vocab_size // (parts * ROWS)) * parts * ROWS


def strategy_of(case: PlanCase, tokens: int) -> HeadStrategy | None:
    """What travels between chips where tokens and vocabulary share axes, None where nothing does.

    Args:
        case: chips and head.
        tokens: on each device.
    """
    laid = _laid(case)
    if laid is None or case.variant.level == "logits":
        return None
    mesh = laid.abstract_mesh()
    trained = tuple(name in case.differentiate for name in DIFFERENTIATED)
    found = head_strategy(
        laid.head_sharding(mesh),
        tokens * laid.parts(laid.tokens),
        case.hidden_size,
        _padded_vocab(case, laid),
        hidden_dtype=case.dtype,
        head_dtype=case.dtype,
        trained=(trained[0], trained[1]),
    )
    return found if found.name else None


def donated(case: PlanCase) -> tuple[int, ...]:
    """Arguments whose place a result may take: logits, of which nothing else is left to do."""
    return (0,) if case.variant.level == "logits" else ()


def _loss(case: PlanCase, implementation: str, over: HeadSharding | None) -> Callable[..., Any]:
    """The loss of the case's inputs and what every loss takes."""
    is_plain = implementation == PLAIN
    plain = functools.partial(plain_loss, case.loss, softcap=case.softcap, logit_scale=case.logit_scale)

    def of_hidden(hidden, lm_head, targets, old_logprobs, advantages, mask):
        if is_plain:
            logits = hidden @ (lm_head if case.layout == "DV" else lm_head.T)
            return plain(logits, targets, old_logprobs, advantages, mask)
        options: Any = {
            "layout": case.layout,
            "softcap": case.softcap,
            "logit_scale": case.logit_scale,
            "implementation": implementation,
            "sharding": over,
        }
        if case.loss == "cross_entropy":
            return linear_cross_entropy(hidden, lm_head, jnp.where(mask, targets, -100), **options)
        return linear_grpo_loss(hidden, lm_head, targets, old_logprobs, advantages, mask, **options).loss

    def of_logits(logits, targets, old_logprobs, advantages, mask):
        if is_plain:
            return plain(logits, targets, old_logprobs, advantages, mask)
        options: Any = {
            "softcap": case.softcap,
            "logit_scale": case.logit_scale,
            "implementation": implementation,
            "sharding": over,
        }
        if case.loss == "cross_entropy":
            return cross_entropy(logits, jnp.where(mask, targets, -100), **options)
        logprobs = token_logprobs(logits, targets, mask=mask, **options)
        return grpo_loss(logprobs, old_logprobs, advantages, mask).loss

    return of_hidden if case.variant.level == "hidden" else of_logits


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise BenchError(f"plan config: {message}")
