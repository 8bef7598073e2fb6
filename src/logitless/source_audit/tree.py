"""The files of a target: read as Python would read them, parsed, and never imported."""

import ast
import codecs
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from logitless.source_audit.operations import may_hold_a_loss

WORD = re.compile(r"[A-Za-z_]\w*")
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}
LOSS_NAMED = re.compile(r"def \w*(?:loss|cross_?entropy|log_?probs?)\w*\(", re.IGNORECASE)
HANDED_ON = re.compile(r"getattr\(|\]\(|\.get\(|\.launch\(")
MAX_BYTES = 20_000_000


@dataclass(frozen=True)
class Unread:
    """A file that was left out.

    Attributes:
        path: of the file, from the root of the target.
        reason: why, in one line.
    """

    path: str
    reason: str


@dataclass
class SourceFile:
    """One file of the target.

    Attributes:
        path: from the root of the target, with slashes.
        words: every identifier in its text, also of comments and strings.
        tree: its syntax tree; dropped where nothing in it is of interest, and made again when asked for.
    """

    path: str
    full: Path
    words: frozenset[str]
    tree: ast.Module | None = field(default=None, repr=False)

    def parsed(self) -> ast.Module:
        """The syntax tree of a file that is known to have one."""
        if self.tree is None:
            self.tree = parse(read_text(self.full))
        return self.tree

    def lines(self) -> list[str]:
        return read_text(self.full).removesuffix("\n").split("\n")


@dataclass
class SourceTree:
    """All Python files of a target, and those that could not be read."""

    root: Path
    files: dict[str, SourceFile] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    line_count: int = 0

    def excerpt(self, path: str, line: int) -> str:
        """The text of one line, without its indentation."""
        lines = self.files[path].lines() if path in self.files else []
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def read_text(path: Path) -> str:
    """The text of a Python file in the encoding that it declares (PEP 263, byte-order mark), line ends made one."""
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16").replace("\r\n", "\n").replace("\r", "\n")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding)
    # A form feed or another exotic separator is no line end for Python, nor for an editor that shows line numbers.
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", " ").replace("\v", " ").replace("\x1c", " ")


def parse(text: str) -> ast.Module:
    """The syntax tree; warnings about the target's escapes are not ours to show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def python_files(root: Path) -> Iterator[Path]:
    """Every `.py` file below a folder, or the one that is given; hidden folders and caches are left out."""
    if root.is_file():
        yield root
        return
    for folder in sorted(root.iterdir()):
        if folder.is_symlink():
            continue
        if folder.is_dir():
            if not folder.name.startswith(".") and folder.name not in SKIPPED_FOLDERS:
                yield from python_files(folder)
        elif folder.suffix == ".py":
            yield folder


def is_test(path: str) -> bool:
    """Tests call losses; they are none."""
    *folders, name = path.split("/")
    return name.startswith(("test_", "conftest")) or name.endswith("_test.py") or bool({"tests", "test"} & set(folders))


def read_tree(root: Path, progress: Callable[[int, int], None] | None = None) -> SourceTree:
    """Reads and parses every file below `root`; what cannot be read is recorded and left out."""
    base = root.parent if root.is_file() else root
    tree = SourceTree(base)
    paths = list(python_files(root))
    for done, path in enumerate(paths):
        if progress is not None:
            progress(done, len(paths))
        name = path.relative_to(base).as_posix()
        try:
            file, lines = _read_file(name, path)
        except (OSError, SyntaxError, UnicodeError, ValueError, RecursionError, MemoryError) as error:
            tree.unread.append(Unread(name, _why(error)))
            continue
        tree.files[name] = file
        tree.line_count += lines
    return tree


def _read_file(name: str, path: Path) -> tuple[SourceFile, int]:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES // 1_000_000} MB")
    text = read_text(path)
    parsed = parse(text)
    words = frozenset(WORD.findall(text))
    keep = may_hold_a_loss(text) or LOSS_NAMED.search(text) is not None and HANDED_ON.search(text) is not None
    return SourceFile(name, path, words, parsed if keep else None), text.count("\n") + 1


def _why(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        where = f" in line {error.lineno}" if error.lineno else ""
        return f"no valid Python{where}: {error.msg}"
    if isinstance(error, UnicodeError):
        return f"not in the encoding that it declares: {error}"
    return f"cannot be read: {error or type(error).__name__}"
