"""Runs `logitless plan compile`: the TPU kernels at every size on every chip, by the chips' own compiler."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console

from logitless._files import replace_file
from logitless.bench.errors import BenchError
from logitless.bench.records import commit_of_package, read_records, results_folder
from logitless.bench.units import duration, markdown, size
from logitless.ops.api import linear_logprobs
from logitless.ops.pallas_tpu_blocks import chosen_blocks, share_with_targets
from logitless.ops.types import HeadOptions
from logitless.plan import ProgramPlan, plan_function, topology
from logitless.plan.compiler import versions
from logitless.plan.report import ESTIMATE

Layout = Literal["DV", "VD"]
CHIPS = ("v6e", "v5e", "v5p", "7x", "v4")
MIB = 2**20


@dataclass(frozen=True)
class Cells:
    """Every chip with every size in every layout.

    Args:
        chips: topologies of one chip.
        hidden_sizes: D.
        vocab_sizes: V.
        layouts: of the head.
    """

    hidden_sizes: tuple[int, ...]
    vocab_sizes: tuple[int, ...]
    chips: tuple[str, ...] = CHIPS
    layouts: tuple[Layout, ...] = ("VD", "DV")


@dataclass(frozen=True)
class CompileConfig:
    """Which programs to compile: log-probabilities with the gradients of hidden states and head.

    Args:
        name: names the record `NAME.jsonl`.
        cells: in the order in which they are compiled; a cell that stands twice is compiled once.
        tokens: N.
        dtype: of hidden states and head.
        timeout_s: seconds that one compile may take.
        results: folder of the record.
    """

    name: str
    cells: tuple[Cells, ...]
    tokens: int = 8192
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    timeout_s: float = 600.0
    results: str = "results"

    def __post_init__(self) -> None:
        if not cells_of(self):
            raise BenchError("plan compile config: no cell; give chips, hidden_sizes, vocab_sizes and layouts")
        for chip, d, v, _ in cells_of(self):
            if min(d, v, self.tokens) < 1:
                raise BenchError(f"plan compile config: D={d}, V={v}, tokens={self.tokens}; each must be above 0")
            if topology(chip).shape is not None or topology(chip).chip.platform != "tpu":
                raise BenchError(f"plan compile config: chip {chip!r}; give single TPUs: {', '.join(CHIPS)}")


def cells_of(config: CompileConfig) -> list[tuple[str, int, int, Layout]]:
    """Chip, D, V and layout of each cell."""
    return list(
        dict.fromkeys(
            (chip, d, v, layout)
            for group in config.cells
            for chip in group.chips
            for d in group.hidden_sizes
            for v in group.vocab_sizes
            for layout in group.layouts
        )
    )


def run_compile(config: CompileConfig) -> int:
    """Compiles every cell and records it as soon as it is done.

    Returns:
        The exit code: 0 when every cell compiled or was refused with its bytes, 1 when a compiler failed.

    Raises:
        BenchError: a config without meaning.
        CompilerMissing: the compiler is not installed; says what to install.
    """
    path = results_folder(config.results) / f"{config.name}.jsonl"
    # The commit of the code that was imported: it may move on while cells compile.
    about = commit_of_package() | {"versions": versions("tpu", sys.executable)}
    cells, console = cells_of(config), Console(stderr=True)
    records = {_key(record): record for record in (read_records(path) if path.exists() else [])}
    failed = 0
    for at, cell in enumerate(cells, 1):
        record = compile_cell(config, cell) | about
        record["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        before = records.get(_key(record))
        if record.pop("cached") and before is not None and before["kernels"] == record["kernels"]:
            # The compiler took its time when the answer was kept.
            record["seconds"] = before["seconds"]
        records[_key(record)] = record
        replace_file(path, "".join(json.dumps(x, allow_nan=False) + "\n" for x in records.values()).encode())
        failed += record["verdict"] == "failed"
        words = f"{at}/{len(cells)} {cell_words(record)}"
        console.print(words, style="red" if record["verdict"] == "failed" else None, highlight=False, soft_wrap=True)
    print(f"{len(cells)} cells, {failed} failed; recorded in {path}")
    return 1 if failed else 0


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (record["hidden_size"], record["vocab_size"], record["layout"], record["tokens"], record["dtype"])
    return (record["chip"], *sizes, record["versions"]["jax"], record["versions"]["libtpu"])


def compile_cell(config: CompileConfig, cell: tuple[str, int, int, Layout]) -> dict[str, Any]:
    """The record of one cell: `compiled`, `refused` before the compiler sees it, or `failed` in the compiler."""
    chip, d, v, layout = cell
    about = {"chip": chip, "hidden_size": d, "vocab_size": v, "layout": layout}
    about |= {"tokens": config.tokens, "dtype": config.dtype}
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(config.dtype)
    hidden, lm_head = shape((config.tokens, d), dtype), shape((d, v) if layout == "DV" else (v, d), dtype)
    start = time.monotonic()
    empty = {"blocks": {}, "kernels": [], "temp_bytes": None, "expected_ms": None, "seconds": 0.0, "cached": False}
    options = HeadOptions(layout, platform="tpu", device_kind=topology(chip).chip.device_kind)
    try:
        # As the program itself will choose them.
        blocks = chosen_blocks(hidden, lm_head, options)
    except ValueError as error:
        return about | empty | {"verdict": "refused", "reason": str(error)}
    about["blocks"] = {kernel: [x.block_n, x.block_v] for kernel, x in blocks.items()}

    def loss(hidden: Any, lm_head: Any, targets: Any) -> Any:
        return linear_logprobs(hidden, lm_head, targets, layout=layout, implementation="pallas_tpu").sum()

    args = (hidden, lm_head, shape((config.tokens,), jnp.int32))
    plan = plan_function(
        jax.value_and_grad(loss, (0, 1)), args, chip, timeout_s=config.timeout_s, data_shares=share_with_targets
    )
    took = {"seconds": round(time.monotonic() - start, 1), "cached": plan.cached}
    verdict = "compiled" if plan.temp_bytes is not None else "failed"
    return empty | about | _figures(plan) | took | {"verdict": verdict, "reason": plan.reason}


def _figures(plan: ProgramPlan) -> dict[str, Any]:
    kernels = [
        {
            "name": kernel.name.removeprefix("logitless_").split(".")[0],
            "vmem_bytes": kernel.vmem_bytes,
            "schedule_ms": kernel.schedule_ms,
            "dma_ms": kernel.dma_ms,
            "mxu_use": kernel.mxu_use,
        }
        for kernel in plan.kernels
    ]
    return {"kernels": kernels, "temp_bytes": plan.temp_bytes, "expected_ms": plan.expected_ms}


def cell_words(record: dict[str, Any]) -> str:
    """A line about a cell."""
    name = (
        f"{record['chip']} D={record['hidden_size']} V={record['vocab_size']} {record['layout']}: {record['verdict']}"
    )
    if record["verdict"] != "compiled":
        return f"{name}: {record['reason']}"
    kernels = "; ".join(
        f"{x['name']} {x['vmem_bytes'] / MIB:.0f} MiB, {duration(x['schedule_ms'])}" for x in record["kernels"]
    )
    return f"{name}, blocks {_blocks(record)}; {kernels}; {record['seconds']:.0f} s"


def _blocks(record: dict[str, Any]) -> str:
    return ", ".join(f"{kernel} {n} x {v}" for kernel, (n, v) in record["blocks"].items())


HEADERS = ("chip", "D", "V and layout", "jax", "verdict", "blocks", "VMEM, MiB", "schedule", "whole program", "temp")


def compile_markdown(records: Sequence[dict[str, Any]]) -> str:
    """The table of every cell that was tried, its caption below; cells with the same blocks and jax share a row."""
    order = sorted(
        records, key=lambda x: (CHIPS.index(x["chip"]), x["hidden_size"], x["vocab_size"], x["layout"], _versions(x))
    )
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for x in order:
        rows.setdefault((x["chip"], x["hidden_size"], x["verdict"], _blocks(x), _versions(x)), []).append(x)
    counts = {word: sum(x["verdict"] == word for x in records) for word in ("compiled", "refused", "failed")}
    about = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    first = records[0]
    return (
        f"{markdown([HEADERS, *map(_cells, rows.values())])}\n\n{len(records)} cells: {about}. N = {first['tokens']}, "
        f"{first['dtype']}, log-probabilities and both gradients; VMEM, times and temporaries are those of the last V "
        f"of a row. VMEM, temporaries: exact. Times: {ESTIMATE}; see docs/planning.md.\n"
    )


def _versions(record: dict[str, Any]) -> str:
    return record["versions"]["jax"]


def _cells(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """A row: cells of one chip, D, verdict, blocks and jax."""
    x = records[-1]
    kernels, done = x["kernels"], x["verdict"] == "compiled"
    layouts: dict[int, list[str]] = {}
    for record in records:
        layouts.setdefault(record["vocab_size"], []).append(record["layout"])
    return (
        x["chip"],
        str(x["hidden_size"]),
        ", ".join(f"{v} {' '.join(dict.fromkeys(found))}" for v, found in layouts.items()),
        _versions(x),
        x["verdict"] if done else f"{x['verdict']}: {x['reason']}",
        _blocks(x),
        ", ".join(f"{k['name']} {k['vmem_bytes'] / MIB:.0f}" for k in kernels),
        " + ".join(duration(k["schedule_ms"]) for k in kernels),
        duration(x["expected_ms"]) if x["expected_ms"] is not None else "",
        size(x["temp_bytes"]) if done else "",
    )
