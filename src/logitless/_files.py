"""Where files are kept, and how they are replaced whole."""

import json
import os
import threading
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where downloads and answers are kept: `$LOGITLESS_CACHE`, `$XDG_CACHE_HOME/logitless` or `~/.cache/logitless`."""
    if own := os.environ.get("LOGITLESS_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "logitless"
    return Path.home() / ".cache" / "logitless"


def replace_file(path: Path, content: bytes) -> None:
    """Writes under another name first, then renames."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_json_lines(path: Path, failed: type[ValueError], *, cut_end: bool = False) -> list[Any]:
    """One value for each line of a file.

    Args:
        path: the file.
        failed: what is raised where it cannot be read, or a line is no JSON.
        cut_end: a last line that is no JSON was cut by a crash, and does not count.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise failed(f"cannot read {path}: {error.strerror}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            if not (cut_end and number == len(lines)):
                raise failed(f"{path}, line {number}: no JSON ({error.msg})") from error
    return values
