"""The JSONL record of a bench: what ran, where, at which commit; appended whole or not at all."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logitless._files import read_json_lines, replace_file
from logitless.bench.errors import BenchError


def commit_of_package() -> dict[str, Any]:
    """`commit` and `dirty` of the checkout that this package runs from; `unknown` and None outside one."""
    folder = Path(__file__).resolve().parent.parent
    # Tracked, and not merely installed somewhere below another project's checkout.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": "unknown", "dirty": None}
    changed = _git(folder, "status", "--porcelain", "--", ".")
    return {
        "commit": _git(folder, "rev-parse", "HEAD") or "unknown",
        "dirty": None if changed is None else bool(changed),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def results_folder(results: str) -> Path:
    """The folder, made when missing, so that a bench that cannot record refuses before it runs."""
    folder = Path(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"bench config: cannot make results folder {results!r}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise BenchError(f"bench config: results folder {results!r} cannot be written")
    return folder


def append_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Appends one line for each record; a reader or an interruption finds all of them or none."""
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    replace_file(path, (before + lines).encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file.

    Raises:
        BenchError: no such file, or a line is no record.
    """
    return read_json_lines(path, BenchError)


def latest_run(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the last run in a file: those that share its date."""
    return [record for record in records if record["date"] == records[-1]["date"]]
