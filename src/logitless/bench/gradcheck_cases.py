"""`logitless gradcheck CONFIG`: the cases of a YAML file, each judged against its float64 oracle."""

import datetime
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from logitless import __version__
from logitless.bench.errors import BenchError
from logitless.bench.gradcheck_inputs import InputFacts, facts_of, make_arrays, reorder
from logitless.bench.gradcheck_sharded import ShardingCase, sharded_values
from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.bench.shardings import start_devices
from logitless.gradcheck import GradcheckReport, gradcheck, gradcheck_values
from logitless.heads import head as known_head
from logitless.losses.linear_presets import linear_grpo_loss
from logitless.losses.policy_presets import grpo_loss
from logitless.ops.api import linear_logprobs, token_logprobs
from logitless.ops.head_sharding import HeadSharding

ABSOLUTE = (
    "abs_diff_loss",
    "fwd/logp_max_abs",
    "dhidden_max_abs",
    "dlm_head_max_abs",
    "dbias_max_abs",
    "dlogits_max_abs",
)
"""The absolute errors of a record, by name."""


@dataclass(frozen=True)
class GradcheckCase:
    """One comparison of an implementation with the float64 oracle, on a peaked softmax with a masked GRPO loss.

    Attributes:
        name: names the case in the table and in the record.
        head: a model whose head gives hidden_size, vocab_size, softcap and logit_scale, such as qwen2.5-1.5b.
        hidden_size: D, where no head is named.
        vocab_size: V, where no head is named.
        tokens: N, the tokens of all sequences together.
        sequences: B; must divide tokens.
        dtype: of hidden, lm_head and bias, or of the logits.
        layout: DV for a head [D, V], VD for [V, D].
        level: hidden checks linear_logprobs, logits checks token_logprobs.
        implementation: the candidate, as linear_grpo_loss takes it (token_logprobs at the logits level).
        block_sizes: any of block_n, block_v, block_d, block_bytes.
        sharding: lays the candidate's arrays over a mesh of all `devices`; plain jnp and the oracle stay on one.
        temperature: divides the logits.
        softcap: final softcap; the head's own unless given.
        logit_scale: multiplies the logits; the head's own unless given.
        bias: adds a bias over the vocabulary and checks its gradient.
        kl_coef: coefficient of the KL term of the loss.
        mask_fraction: fraction of the tokens that do not count, 0 <= mask_fraction < 1.
        frozen_head: leaves the gradients of head and bias out, as for a head that is not trained.
        peak_logits: least and largest logit of the peaked tokens.
        advantages: least and largest magnitude of the advantages.
        peaked: refuses inputs that are not peaked enough: see `logitless.bench.gradcheck_inputs.InputFacts`.
        seeds: one run each; the record keeps the worst.
        oracle_dtype: float64, or float32 on a device without it.
        factor: how many times the error of plain jnp is allowed.
        orders: orders of its sums in which plain jnp makes the loss; the one with the largest error counts, for the
            rounding of a single number is a matter of luck.
        floors: what is allowed on top of the factor, by record name, such as dhidden_max_abs, in place of a few units
            in the last place.
        gates: absolute limits by record name, such as dhidden_max_rel, on top of the budget.
    """

    name: str
    head: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    tokens: int = 67
    sequences: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    layout: Literal["DV", "VD"] = "DV"
    level: Literal["hidden", "logits"] = "hidden"
    implementation: str = "auto"
    block_sizes: dict[str, int] = field(default_factory=dict)
    sharding: ShardingCase | None = None
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float | None = None
    bias: bool = False
    kl_coef: float = 0.0
    mask_fraction: float = 0.2
    frozen_head: bool = False
    peak_logits: tuple[float, float] = (25.0, 25.0)
    advantages: tuple[float, float] = (0.2, 2.0)
    peaked: bool = False
    seeds: list[int] = field(default_factory=lambda: [0])
    oracle_dtype: Literal["float64", "float32"] = "float64"
    factor: float = 2.0
    orders: int = 1
    floors: dict[str, float] = field(default_factory=dict)
    gates: dict[str, float] = field(default_factory=dict)

    @property
    def moving(self) -> tuple[str, ...]:
        """The arrays whose gradients are checked."""
        if self.level == "logits":
            return ("logits",)
        return ("hidden",) if self.frozen_head else ("hidden", "lm_head", *(("bias",) if self.bias else ()))


@dataclass(frozen=True)
class GradcheckConfig:
    """What `logitless gradcheck` runs.

    Attributes:
        cases: the comparisons, in order.
        devices: how many the run needs; on a CPU they are virtual.
        results_dir: folder to which gradcheck.jsonl is appended, one record a case.
        beside: figures to show beside the errors: by the column's title and then by record name.
    """

    cases: list[GradcheckCase]
    devices: int = 1
    results_dir: str = "results"
    beside: dict[str, dict[str, float]] = field(default_factory=dict)


def run_gradcheck(config: GradcheckConfig) -> int:
    """Runs every case, prints a table and appends one record a case to `results_dir/gradcheck.jsonl`.

    Args:
        config: the cases.

    Returns:
        The exit code: 0 when every case keeps its budget and its gates, 1 otherwise.

    Raises:
        BenchError: a case asks for what cannot be, which is raised before anything is computed, or its inputs are not
            as peaked as it promises. Nothing is written.
    """
    if not config.cases:
        raise BenchError("cases is empty: give at least one case")
    if config.devices < 1:
        raise BenchError(f"devices is {config.devices}; it must be at least 1")
    start_devices(config.devices)
    resolved = [resolve(case, config.devices) for case in config.cases]
    _check_keys("beside", [key for figures in config.beside.values() for key in figures], ABSOLUTE)
    path = results_folder(config.results_dir) / "gradcheck.jsonl"
    console = Console(soft_wrap=True)
    if config.beside and not console.is_terminal:
        # Into a file or a pipe: wide enough for a row on one line.
        console.width = 140
    error_console = Console(stderr=True, soft_wrap=True, highlight=False)
    records, failures = [], []
    origin = _origin()
    for case in resolved:
        with error_console.status(f"{case.case.name}: {case.describe()}"):
            worst_seed, worst, broken = _run_case(case)
        failures += [f"{case.case.name} (seed {seed}): {failure}" for seed, failure in broken]
        title = f"{case.case.name}, seed {worst_seed}"
        console.print(_table(title, worst.report, config.beside, ok=not broken))
        console.print(str(worst.facts), markup=False, highlight=False)
        record = origin | case.record() | worst.report.record() | worst.facts.record()
        records.append(record | {"seed": worst_seed, "ok": not broken, "failures": list(worst.failures)})
    for failure in failures:
        error_console.print(f"FAILED {failure}", markup=False)
    append_records(path, records)
    verdict = f"{len(failures)} failures" if failures else "every error is inside its budget"
    console.print(f"{len(records)} cases, {verdict}; records appended to {path}", markup=False)
    return 1 if failures else 0


@dataclass(frozen=True)
class ResolvedCase:
    """A case whose head is looked up and whose numbers are known to fit each other."""

    case: GradcheckCase
    hidden_size: int
    vocab_size: int
    softcap: float | None
    logit_scale: float
    sharding: HeadSharding | None = None

    def check_with_the_door(self) -> None:
        """Traces the candidate and its gradient without arrays, so that the door refuses before any work."""

        def total(moving: dict[str, Any], still: dict[str, Any]) -> Any:
            loss, logprobs = self.candidate(**moving, **still)
            return loss + jnp.sum(logprobs)

        shapes = self.shapes()
        moving = {name: shapes.pop(name) for name in self.case.moving}
        try:
            jax.eval_shape(jax.grad(total), moving, shapes)
        except (ValueError, NotImplementedError) as error:
            raise BenchError(f"case {self.case.name!r}: {error}") from error

    def describe(self) -> str:
        case = self.case
        return (
            f"{case.implementation}, {case.level} level, N={case.tokens} D={self.hidden_size} V={self.vocab_size}, "
            f"{case.dtype}{'' if case.sharding is None else f', over {case.sharding}'}"
        )

    def record(self) -> dict[str, Any]:
        case = self.case
        return {
            "case": case.name,
            "head": case.head,
            "shape/hidden": self.hidden_size if case.level == "hidden" else None,
            "dtype": case.dtype,
            "layout": case.layout,
            "level": case.level,
            "implementation": case.implementation,
            "temperature": case.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "bias": case.bias,
            "kl_coef": case.kl_coef,
            "mask_fraction": case.mask_fraction,
            "frozen_head": case.frozen_head,
            "sharding": None if case.sharding is None else str(case.sharding),
            "seeds": list(case.seeds),
            "factor": case.factor,
            "orders": case.orders,
        }

    @property
    def shape(self) -> tuple[int, int]:
        return self.case.sequences, self.case.tokens // self.case.sequences

    @property
    def width(self) -> int:
        """V of the candidate's arrays, with their padding."""
        padded = None if self.case.sharding is None else self.case.sharding.pad_vocab_to
        return self.vocab_size if padded is None else padded

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the candidate's loss, with the padding of its vocabulary."""
        case, dtype = self.case, jnp.dtype(self.case.dtype)
        rows = ("old_logprobs", "advantages", *(("ref_logprobs",) if case.kl_coef else ()))
        arrays = {
            "targets": jax.ShapeDtypeStruct(self.shape, jnp.int32),
            "mask": jax.ShapeDtypeStruct(self.shape, jnp.bool_),
            **{name: jax.ShapeDtypeStruct(self.shape, jnp.float32) for name in rows},
        }
        if case.level == "logits":
            return arrays | {"logits": jax.ShapeDtypeStruct((*self.shape, self.width), dtype)}
        sizes = {"D": self.hidden_size, "V": self.width}
        arrays["hidden"] = jax.ShapeDtypeStruct((*self.shape, self.hidden_size), dtype)
        arrays["lm_head"] = jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in case.layout), dtype)
        if case.bias:
            arrays["bias"] = jax.ShapeDtypeStruct((self.width,), dtype)
        return arrays

    def _options(self, implementation: str, sharding: HeadSharding | None) -> dict[str, Any]:
        case = self.case
        options: dict[str, Any] = {
            "temperature": case.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "implementation": implementation,
            "sharding": sharding,
            "block_sizes": (case.block_sizes or None) if implementation != "reference" else None,
        }
        return options if case.level == "logits" else options | {"layout": case.layout}

    def call(self, arrays: Mapping[str, Any], implementation: str, sharding: HeadSharding | None = None) -> Any:
        """Log-probabilities of the arrays by an implementation."""
        if self.case.level == "logits":
            options = self._options(implementation, sharding)
            return token_logprobs(arrays["logits"], arrays["targets"], mask=arrays["mask"], **options)
        # One pass alone has none: without a gradient it is the forward pass of chunked.
        options = self._options("chunked" if implementation == "one_pass" else implementation, sharding)
        head = (arrays["hidden"], arrays["lm_head"], arrays["targets"])
        return linear_logprobs(*head, bias=arrays.get("bias"), mask=arrays["mask"], **options)

    def loss(self, implementation: str, sharding: HeadSharding | None = None, /, **arrays: Any) -> tuple[Any, Any]:
        """The GRPO loss, as its caller would have it, and the log-probabilities."""
        logprobs = self.call(arrays, implementation, sharding)
        rest = (arrays["old_logprobs"], arrays["advantages"], arrays["mask"])
        kl: dict[str, Any] = {"kl_coef": self.case.kl_coef, "ref_logprobs": arrays.get("ref_logprobs")}
        if self.case.level == "logits":
            return grpo_loss(logprobs, *rest, **kl).loss, logprobs
        head = (arrays["hidden"], arrays["lm_head"], arrays["targets"])
        options: dict[str, Any] = self._options(implementation, sharding) | {"bias": arrays.get("bias")} | kl
        return linear_grpo_loss(*head, *rest, **options).loss, logprobs

    def candidate(self, **arrays: Any) -> tuple[Any, Any]:
        """The loss and the log-probabilities that are judged."""
        return self.loss(self.case.implementation, self.sharding, **arrays)

    def plain(self, **arrays: Any) -> tuple[Any, Any]:
        """Those that judge."""
        return self.loss("reference", **arrays)


def resolve(case: GradcheckCase, devices: int = 1) -> ResolvedCase:
    """The case with its numbers looked up, and its mesh made of the first `devices`.

    Raises:
        BenchError: they do not fit each other, or the implementation cannot run them.
    """
    _check(case)
    if case.head is None:
        hidden_size, vocab_size = case.hidden_size, case.vocab_size
        softcap, logit_scale = case.softcap, 1.0 if case.logit_scale is None else case.logit_scale
    else:
        try:
            model = known_head(case.head)
        except ValueError as error:
            raise BenchError(f"case {case.name!r}: {error}") from error
        hidden_size, vocab_size = model.hidden_size, model.vocab_size
        softcap = model.softcap if case.softcap is None else case.softcap
        logit_scale = model.logit_scale if case.logit_scale is None else case.logit_scale
    if hidden_size is None or vocab_size is None:
        raise BenchError(f"case {case.name!r}: give head, or both hidden_size and vocab_size")
    over = None
    if case.sharding is not None:
        shape = case.sequences, case.tokens // case.sequences
        over = case.sharding.resolve(f"case {case.name!r}: sharding", devices, shape, vocab_size)
    resolved = ResolvedCase(case, hidden_size, vocab_size, softcap, logit_scale, over)
    resolved.check_with_the_door()
    return resolved


def _check(case: GradcheckCase) -> None:
    sizes = (case.hidden_size, case.vocab_size)
    wrong = {
        "give head, or hidden_size and vocab_size, not both": case.head is not None and sizes != (None, None),
        f"tokens is {case.tokens} and sequences is {case.sequences}; both must be positive": min(
            case.tokens, case.sequences
        )
        < 1,
        f"hidden_size and vocab_size are {sizes}; both must be positive": any(n is not None and n < 1 for n in sizes),
        f"mask_fraction is {case.mask_fraction}; it must be at least 0 and below 1": not 0 <= case.mask_fraction < 1,
        f"factor is {case.factor}; it must be positive": not case.factor > 0,
        f"orders is {case.orders}; it must be positive": case.orders < 1,
        "seeds is empty; give at least one": not case.seeds,
        "a bias belongs to the head: level must be hidden": case.bias and case.level == "logits",
        "frozen_head needs a head: level must be hidden": case.frozen_head and case.level == "logits",
        f"peak_logits is {case.peak_logits}; give the least, above 0, then the largest": not (
            0 < case.peak_logits[0] <= case.peak_logits[1]
        ),
        f"advantages is {case.advantages}; give the least magnitude, above 0, then the largest": not (
            0 < case.advantages[0] <= case.advantages[1]
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise BenchError(f"case {case.name!r}: {message}")
    if case.tokens % case.sequences:
        raise BenchError(f"case {case.name!r}: {case.tokens} tokens do not divide into {case.sequences} sequences")
    _check_quantities(case)


def _check_quantities(case: GradcheckCase) -> None:
    absolute = ["abs_diff_loss", "fwd/logp_max_abs", *(f"d{name}_max_abs" for name in case.moving)]
    _check_keys(f"case {case.name!r}: floors", case.floors, absolute)
    _check_keys(f"case {case.name!r}: gates", case.gates, [*absolute, *(f"d{name}_max_rel" for name in case.moving)])


def _check_keys(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise BenchError(f"{what} has {key!r}, which is no quantity here; known: {', '.join(known)}")


@dataclass(frozen=True)
class _Outcome:
    """What a seed gave: how hard its inputs are, the report, and what is wrong with the gradient of padding."""

    facts: InputFacts
    report: GradcheckReport
    padding: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        return (*self.report.failures, *self.padding)


def _run_case(resolved: ResolvedCase) -> tuple[int, _Outcome, list[tuple[int, str]]]:
    """The worst seed with its outcome, and the failures of all seeds."""
    case = resolved.case
    outcomes: dict[int, _Outcome] = {}
    for seed in case.seeds:
        arrays = make_arrays(resolved, seed)
        facts = facts_of(resolved, arrays)
        if case.peaked and (why := facts.why_not_peaked()):
            raise BenchError(f"case {case.name!r}, seed {seed}: its inputs are not peaked: {why}")
        judged_by: dict[str, Any] = {
            "differentiate": case.moving,
            "oracle_dtype": case.oracle_dtype,
            "factor": case.factor,
            "floors": case.floors,
            "gates": case.gates,
            "block_sizes": case.block_sizes,
            "reordered": reorder(resolved, arrays, case.orders),
        }
        if resolved.sharding is None:
            outcomes[seed] = _Outcome(facts, gradcheck(resolved.candidate, resolved.plain, arrays, **judged_by))
        else:
            values, padding = sharded_values(resolved, resolved.sharding, arrays)
            outcomes[seed] = _Outcome(facts, gradcheck_values(values, resolved.plain, arrays, **judged_by), padding)
    worst = max(outcomes, key=lambda seed: (bool(outcomes[seed].failures), outcomes[seed].report.spent))
    return worst, outcomes[worst], [(seed, failure) for seed, one in outcomes.items() for failure in one.failures]


def _table(title: str, report: GradcheckReport, beside: Mapping[str, Mapping[str, float]], *, ok: bool) -> Table:
    verdict = "[green]inside the budget[/]" if ok else "[red]FAILED[/]"
    table = Table(title=f"{escape(title)}: {verdict}", title_justify="left")
    table.add_column("quantity", no_wrap=True)
    for column in ("error", "plain jnp", "error / plain", "allowed", "spent"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in beside:
        table.add_column(column, justify="right")
    for budget in report.budgets:
        numbers = (budget.candidate_error, budget.plain_error)
        ratio = budget.candidate_error / budget.plain_error if budget.plain_error else math.nan
        table.add_row(
            budget.key,
            *(f"{number:.2e}" for number in numbers),
            f"{ratio:.2f}" if math.isfinite(ratio) else "",
            f"{budget.allowed:.2e}",
            f"{budget.spent:.0%}" if math.isfinite(budget.spent) else "inf",
            *(f"{figures[budget.key]:.2e}" if budget.key in figures else "" for figures in beside.values()),
        )
    return table


def _origin() -> dict[str, Any]:
    """Where and when the numbers were made."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **commit_of_package(),
        "device": device.device_kind,
        "platform": device.platform,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "logitless": __version__,
    }
