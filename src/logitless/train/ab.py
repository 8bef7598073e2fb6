"""`logitless ab`: the same training with several losses, each in a process of its own, and what differs."""

import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from logitless._files import replace_file
from logitless.bench.records import append_records, results_folder
from logitless.train.ab_config import AbConfig
from logitless.train.ab_report import print_table, write_report
from logitless.train.compare import Run, compare
from logitless.train.config import LossConfig, TrainConfig
from logitless.train.errors import TrainError
from logitless.train.sinks import read_metrics


def run_ab(config: AbConfig) -> int:
    """Runs all arms with all seeds, writes the report and the record.

    Returns:
        0 where all arms have parity and every bound of the config holds, else 1.

    Raises:
        TrainError: a run cannot start or died.
    """
    results = results_folder(config.results)
    folder = Path(config.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"ab config: output={folder}: cannot be written: {error.strerror}") from error
    runs = [run_arm(config, folder, arm, seed) for seed in config.seeds for arm in config.arms]
    verdict = compare(config, runs)
    commits = [commit for run in runs for commit in run.summary["commits"]]
    record = {
        "name": config.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **commits[-1],
        "config": json.loads(json.dumps(asdict(config))),
        "runs": [{"arm": run.arm, "seed": run.seed, "summary": run.summary, "metrics": run.metrics} for run in runs],
        "verdict": verdict.as_record(),
    }
    record = strict_json(record)
    append_records(results / f"{config.name}.jsonl", [record])
    report = write_report(record, folder / "report.html")
    print_table(record)
    print(f"report: {report}")
    return 0 if verdict.passed else 1


def run_arm(config: AbConfig, folder: Path, arm: LossConfig, seed: int) -> Run:
    """One run in a process of its own; what an interrupted A/B finished is not run again."""
    place = folder / f"{file_name(arm.title)}_seed{seed}"
    first = arm == config.arms[0]
    rollouts = str(folder / f"rollouts_seed{seed}") if config.rollouts == "shared" else None
    train = replace(
        config.train,
        name=f"{config.name}-{arm.title}-seed{seed}",
        output=str(place),
        loss=arm,
        seed=seed,
        record_rollouts=rollouts if first else None,
        replay_rollouts=None if first else rollouts,
    )
    if not first:
        share_warm_start(folder / f"{file_name(config.arms[0].title)}_seed{seed}", place)
    print(f"arm {arm.title}, seed {seed}", file=sys.stderr)
    run_process(train, place, config.timeout_s)
    summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
    metrics = read_metrics(place / "metrics.jsonl")
    if len(metrics) != train.steps:
        raise TrainError(f"ab: arm {arm.title}, seed {seed} has {len(metrics)} updates, needed {train.steps}: {place}")
    return Run(arm.title, seed, summary, metrics)


def strict_json(tree: Any) -> Any:
    """The tree with `"nan"`, `"inf"` and `"-inf"` for the floats that JSON has no numbers for."""
    if isinstance(tree, dict):
        return {key: strict_json(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [strict_json(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree


def share_warm_start(first: Path, place: Path) -> None:
    """All arms go on from the very weights that the first one's warm start left."""
    source, target = first / "warm_start", place / "warm_start"
    if source.is_dir() and not target.exists():
        part = place / "warm_start.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        part.rename(target)


def run_process(train: TrainConfig, place: Path, timeout_s: float) -> None:
    """Runs `logitless train` and waits for it; Ctrl-C is handed on, so that it leaves a checkpoint.

    Raises:
        TrainError: it died, refused or ran out of time.
        KeyboardInterrupt: Ctrl-C, after the run has ended.
    """
    place.mkdir(parents=True, exist_ok=True)
    path = place / "train.yaml"
    replace_file(path, yaml.safe_dump(json.loads(json.dumps(asdict(train))), sort_keys=False).encode())
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "logitless", "train", str(path)]
    # In a session of its own, so that a terminal's Ctrl-C reaches it once, from here.
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = _Deadline(process, timeout_s)
        before = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
        try:
            last = ""
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last = line.strip() or last
        finally:
            signal.signal(signal.SIGINT, before)
            timer.cancel()
    if timer.passed:
        raise TrainError(f"ab: {train.name}: not done within timeout_s={timeout_s:g}")
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode:
        raise TrainError(f"ab: {train.name}: its process ended with exit code {process.returncode}: {last[:300]}")


class _Deadline:
    """Ends a process that runs over its time."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        import threading

        self.passed = False
        self._process = process
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self.passed = True
        self._process.kill()

    def cancel(self) -> None:
        self._timer.cancel()


def file_name(title: str) -> str:
    """A title as a part of a path."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in title)
