"""Runs `logitless bench tune`: the best of the few block sizes that fit, for the table that the TPU kernels read."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from logitless._files import replace_file
from logitless.bench.cases import known_head
from logitless.bench.errors import BenchError
from logitless.heads import HEADS, Head
from logitless.ops.derivatives import Differentiated, HeadInputs, HeadResiduals
from logitless.ops.pallas_tpu import gradients_by, linear_token_stats_pallas_tpu
from logitless.ops.pallas_tpu_blocks import (
    TABLE,
    Blocks,
    fastest_first,
    fits,
    ranked_blocks,
    share_with_targets,
    takes_sweep,
)
from logitless.ops.pallas_tpu_vmem import HeadProblem, chip_of, leaves_in_pieces
from logitless.ops.softmax import Normaliser
from logitless.ops.types import HeadOptions, Layout, LogitScalars, TokenStats
from logitless.plan import Chip, plan_function, topology
from logitless.plan.calibration import expected_kernel_ms
from logitless.plan.compiler import versions

Kernel = Literal["forward", "backward", "d_lm_head", "d_hidden", "sweep"]
WRITES = {"backward": (True, True), "d_lm_head": (False, True), "d_hidden": (True, False)}
"""Whether a kernel makes the gradient of hidden states, and of the head."""


@dataclass(frozen=True)
class TuneConfig:
    """Which rows of the table of block sizes to make.

    Args:
        chips: TPUs, as `plan` names them. Where this machine has one it is timed, and can only be that one.
        heads: models such as `qwen2.5-7b`; every known head unless given. Heads of one size make one row.
        kernels: `forward`, `backward` (both gradients), `d_lm_head` and `d_hidden` (each alone), or `sweep` (a frozen
            head: forward and the gradient of hidden states).
        tokens: N.
        dtype: of hidden states and head.
        candidates: how many block sizes are tried, the best by the model first.
        extra: sizes [block_n, block_v] that are tried as well where they fit.
        runs: of each candidate where a TPU is timed, in turns.
        timeout_s: seconds that one compile may take.
        out: the table, whose other rows stay; the one that ships, in a checkout, unless given.
    """

    chips: tuple[str, ...] = ("v6e",)
    heads: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ("forward", "backward")
    tokens: int = 8192
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    candidates: int = 2
    extra: tuple[tuple[int, int], ...] = ()
    runs: int = 20
    timeout_s: float = 600.0
    out: str | None = None

    def __post_init__(self) -> None:
        for key in ("tokens", "candidates", "runs"):
            if getattr(self, key) < 1:
                raise BenchError(f"bench tune config: {key} is {getattr(self, key)}; it must be above 0")
        for chip in self.chips:
            if topology(chip).shape is not None or topology(chip).chip.platform != "tpu":
                raise BenchError(f"bench tune config: chip {chip!r}; give single TPUs, such as v6e")
        for name in self.heads:
            known_head(name)
        if self.out is not None and not Path(self.out).parent.is_dir():
            raise BenchError(f"bench tune config: out is {self.out}; there is no folder {Path(self.out).parent}")


def run_tune(config: TuneConfig) -> int:
    """Makes a row for each chip, head and kernel, and writes the table after each.

    Returns:
        The exit code: 0 done, 1 where no candidate of a row compiled.

    Raises:
        BenchError: a config without meaning, a chip that is not the one here.
        CompilerMissing: no TPU is here, and no compiler for one.
    """
    here = jax.devices()[0]
    timed = here.platform == "tpu"
    out, console, failed = Path(config.out or TABLE), Console(stderr=True), 0
    found = {"jax": jax.__version__} if timed else versions("tpu", sys.executable)
    for name in config.chips:
        chip = topology(name).chip
        if timed and chip_of(here.device_kind).name != chip.name:
            raise BenchError(f"bench tune: this machine has a {here.device_kind}, the config asks for {name}")
        for head in _heads(config):
            for kernel in config.kernels:
                what = f"{name} {kernel} D={head.hidden_size} V={head.vocab_size}"
                if not _has_kernel(kernel, *_problem(config, chip, head)):
                    console.print(f"{what}: no row; forward and d_hidden do it here", highlight=False)
                    continue
                row, tried = _row(config, chip, head, kernel, timed)
                console.print(f"{what}: {tried}", highlight=False)
                failed += row is None
                if row is not None:
                    _write(out, row | {"versions": found})
    print(f"{failed} rows failed; the table is {out}")
    return 1 if failed else 0


def _heads(config: TuneConfig) -> list[Head]:
    """One head of each size."""
    models = [known_head(name) for name in config.heads] or list(HEADS.values())
    return list({(x.hidden_size, x.vocab_size): x for x in reversed(models)}.values())[::-1]


def _problem(config: TuneConfig, chip: Chip, head: Head) -> tuple[HeadProblem, HeadOptions]:
    dtype = jnp.dtype(config.dtype)
    options = HeadOptions("VD" if head.tied else "DV", platform="tpu", device_kind=chip.device_kind)
    in_pieces = leaves_in_pieces(head.vocab_size, options.layout)
    problem = HeadProblem(config.tokens, head.hidden_size, head.vocab_size, dtype, dtype, in_pieces=in_pieces)
    return problem, options


def _has_kernel(kernel: Kernel, problem: HeadProblem, options: HeadOptions) -> bool:
    """False where a frozen head takes two other kernels."""
    hidden, lm_head, *_ = _arguments(problem, options.layout)
    return kernel != "sweep" or takes_sweep(hidden, lm_head, options)


def _row(config: TuneConfig, chip: Chip, head: Head, kernel: Kernel, timed: bool) -> tuple[dict[str, Any] | None, str]:
    """The row of the table, None where nothing compiled, and what was tried."""
    problem, options = _problem(config, chip, head)
    kind = chip_of(chip.device_kind)
    fitting = [sizes for sizes in config.extra if fits(kernel, problem, kind, *sizes)]
    extra = [Blocks(n, v, kind.vmem_bytes, kind.cores) for n, v in fitting]
    blocks = list(dict.fromkeys([*ranked_blocks(kernel, problem, kind, options)[: config.candidates], *extra]))
    programs = {
        (x.block_n, x.block_v): kernel_program(kernel, problem, replace(options, block_n=x.block_n, block_v=x.block_v))
        for x in blocks
    }
    times = _time(programs, config.runs, head.vocab_size) if timed else _plan(programs, chip.name, config.timeout_s)
    said = ", ".join(f"{n} x {v}: {found['time_ms']:.2f} ms" for (n, v), found in times.items())
    said += "".join(f"; {n} x {v} does not fit" for n, v in config.extra if (n, v) not in fitting)
    if not times:
        return None, f"none of {len(blocks)} compiled"
    sizes_of = {(x.block_n, x.block_v): x for x in blocks}
    winner = fastest_first({sizes_of[sizes]: found["time_ms"] for sizes, found in times.items()})[0]
    best = winner.block_n, winner.block_v
    row = {"chip": chip.name, "kernel": kernel, "hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
    row |= {"dtype": config.dtype, "block_n": best[0], "block_v": best[1]} | times[best]
    return row | {"tokens": config.tokens, "tried": len(times), "by": "timing" if timed else "plan"}, said


Programs = dict[tuple[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]


def kernel_program(kernel: Kernel, problem: HeadProblem, options: HeadOptions) -> tuple[Callable[..., Any], Any]:
    """One kernel with what XLA does around it as a function, and the shapes of its arguments."""
    none = LogitScalars()

    def forward(hidden: Any, lm_head: Any, targets: Any, _: Any) -> TokenStats:
        return linear_token_stats_pallas_tpu(hidden, lm_head, None, targets, None, none, options)

    def sweep(hidden: Any, lm_head: Any, targets: Any, d_logprobs: Any) -> tuple[TokenStats, Any]:
        stats, pull = jax.vjp(lambda x: forward(x, lm_head, targets, None), hidden)
        return stats, pull(TokenStats(logprobs=d_logprobs))

    def backward(hidden: Any, lm_head: Any, targets: Any, d_logprobs: Any) -> Any:
        of_hidden, of_head = (jnp.zeros((), jnp.bool_ if wanted else jnp.int8) for wanted in WRITES[kernel])
        inputs = HeadInputs(hidden, lm_head, None, targets, None, none)
        stats, wanted = TokenStats(logprobs=d_logprobs), Differentiated((of_hidden, of_head, jnp.zeros((), jnp.int8)))
        residuals = HeadResiduals(inputs, stats, Normaliser(d_logprobs, d_logprobs), None, wanted)
        return gradients_by(kernel, residuals, TokenStats(logprobs=d_logprobs), d_logprobs != 0, options)

    return {"forward": forward, "sweep": sweep}.get(kernel, backward), _arguments(problem, options.layout)


def _arguments(problem: HeadProblem, layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of hidden states, head, targets and a cotangent of each token."""
    n, d, v, shape = problem.tokens, problem.hidden_size, problem.vocab, jax.ShapeDtypeStruct
    return (
        shape((n, d), problem.hidden_dtype),
        shape((d, v) if layout == "DV" else (v, d), problem.head_dtype),
        shape((n,), jnp.int32),
        shape((n,), jnp.float32),
    )


def _plan(programs: Programs, chip: str, timeout_s: float) -> dict[tuple[int, int], dict[str, float]]:
    """Time that a chip is expected to take, of the kernel alone, and its schedule; of those that compile."""
    found = {}
    for sizes, (fn, args) in programs.items():
        plan = plan_function(fn, args, chip, timeout_s=timeout_s, data_shares=share_with_targets)
        if plan.kernels:
            (kernel,) = plan.kernels
            expected = expected_kernel_ms(kernel.schedule_ms, kernel.dma_ms)
            found[sizes] = {"time_ms": round(expected, 3), "schedule_ms": round(kernel.schedule_ms, 3)}
    return found


def _time(programs: Programs, runs: int, vocab: int) -> dict[tuple[int, int], dict[str, float]]:
    """Median of each program, run in turns so that a drift of the clock falls on all of them."""
    compiled = {sizes: (jax.jit(fn), _inputs(args, vocab)) for sizes, (fn, args) in programs.items()}
    samples: dict[tuple[int, int], list[float]] = {sizes: [] for sizes in compiled}
    for turn in range(runs + 1):
        for sizes, (fn, arrays) in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(fn(*arrays))
            if turn:
                samples[sizes].append((time.perf_counter() - start) * 1e3)
    return {sizes: {"time_ms": round(statistics.median(x), 3)} for sizes, x in samples.items()}


def _inputs(args: Sequence[jax.ShapeDtypeStruct], vocab: int) -> tuple[jax.Array, ...]:
    """Numbers of the given shapes; targets over the whole vocabulary."""
    hidden, lm_head, targets, row = args
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], hidden.shape, hidden.dtype),
        jax.random.normal(keys[1], lm_head.shape, lm_head.dtype) * hidden.shape[1] ** -0.5,
        jax.random.randint(keys[2], targets.shape, 0, vocab, targets.dtype),
        jnp.ones(row.shape, row.dtype),
    )


def _write(out: Path, row: dict[str, Any]) -> None:
    """Puts a row in the table, in place of one for the same sizes."""
    key = ("chip", "kernel", "hidden_size", "vocab_size", "dtype")
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    rows = [x for x in rows if any(x[name] != row[name] for name in key)] + [row]
    rows.sort(key=lambda x: tuple(x[name] for name in key))
    replace_file(out, ("[\n" + ",\n".join(json.dumps(x) for x in rows) + "\n]\n").encode())
