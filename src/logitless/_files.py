"""Where files are kept, and how they are replaced whole."""

import os
import threading
from pathlib import Path


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
