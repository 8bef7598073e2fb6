"""The public call: reads a folder and answers for each entry point."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from logitless.source_audit.classify import EntryPoint, Evidence, classify
from logitless.source_audit.entries import read_all
from logitless.source_audit.names import Program
from logitless.source_audit.tree import SourceTree, Unread, read_tree

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SourceAudit:
    """What the source of a project says about its losses.

    Attributes:
        entries: the answers, by file and line.
        unread: files that could not be read, and why.
        files: number of files that were read.
        lines: number of their lines.
    """

    entries: tuple[EntryPoint, ...]
    unread: tuple[Unread, ...]
    files: int
    lines: int


def source_audit(path: str | Path, *, progress: Progress | None = None) -> SourceAudit:
    r"""For each loss of a project: does it take hidden states and the LM head, or logits?

    Equal to reading every file below `path`, following the calls from each function that makes a loss or
    log-probabilities, and asking where the matrix product with the head is. Nothing of the project is imported or run.

    Args:
        path: of a folder, or of one `.py` file.
        progress: is called with what is being done, how much of it is done, and how much there is.

    Returns:
        The answers, each with the lines that show it.

    Raises:
        ValueError: the path does not exist or holds no Python file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> text = "import torch.nn.functional as F\ndef loss(h, w, y):\n    return F.cross_entropy(h @ w.T, y)\n"
        >>> _ = (folder / "model.py").write_text(text)
        >>> [(entry.name, entry.verdict) for entry in source_audit(folder).entries]
        [('loss', 'takes hidden states, holds all logits')]

    Reference:
        None.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"{root}: no such file or folder; give a path that exists")
    with _without_collector():
        tree = read_tree(root, None if progress is None else lambda done, total: progress("parsing", done, total))
        if not tree.files and not tree.unread:
            raise ValueError(f"{root}: holds no Python file; give the root of a project's source")
        readings = read_all(Program(tree), None if progress is None else lambda at, of: progress("reading", at, of))
        entries = tuple(_with_text(entry, tree) for entry in classify(readings))
    return SourceAudit(entries, tuple(tree.unread), len(tree.files), tree.line_count)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Syntax trees are millions of objects that live together: collecting garbage among them takes most of the time."""
    collecting, depth = gc.isenabled(), sys.getrecursionlimit()
    gc.disable()
    sys.setrecursionlimit(max(depth, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        if collecting:
            gc.enable()
            gc.collect()


def _with_text(entry: EntryPoint, tree: SourceTree) -> EntryPoint:
    return replace(entry, evidence=tuple(_with_line(one, tree) for one in entry.evidence))


def _with_line(evidence: Evidence, tree: SourceTree) -> Evidence:
    return replace(evidence, text=tree.excerpt(evidence.path, evidence.line))
