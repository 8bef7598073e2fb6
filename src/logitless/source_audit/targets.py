"""From what the user names to a folder of source: a path, a git URL, or a requirement of a package registry."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from logitless._files import cache_dir
from logitless.source_audit.archives import ARCHIVES, unpack

GIT = re.compile(r"^(?:git\+|git@|ssh://|git://|https?://|file://)")
REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:\[[^\]]*\])?\s*(?P<spec>(?:[=<>!~].*)?)$"
)
REVISION = re.compile(r"^(?P<url>.+/[^/@]+?)@(?P<revision>[\w./-]+)$")
COMMIT = re.compile(r"^[0-9a-f]{7,40}$")


@dataclass(frozen=True)
class Target:
    """A tree of source, and what it is a copy of.

    Attributes:
        given: by the user.
        kind: path, archive, git or package.
        name: of the project.
        root: where its files lie.
        version: of the package; empty otherwise.
        revision: short commit, where there is one; `+changes` where files differ from it.
        sha256: of the archive; empty otherwise.
    """

    given: str
    kind: str
    name: str
    root: Path
    version: str = ""
    revision: str = ""
    sha256: str = ""

    def title(self) -> str:
        """Name and what pins it, in words."""
        pins = [self.version, f"commit {self.revision}" if self.revision else ""]
        pins.append(f"sha256 {self.sha256[:16]}" if self.sha256 else "")
        return ", ".join([self.name, *(pin for pin in pins if pin)])


def resolve(given: str, cache: Path | None = None) -> Target:
    """The tree that the user names, fetched if need be; nothing of it is run.

    Args:
        given: a path, a git URL (`...@revision` at will) or a requirement (`name==version`).
        cache: where copies are kept; `$LOGITLESS_CACHE` unless given.

    Returns:
        The tree.

    Raises:
        ValueError: it does not exist, cannot be fetched or unpacked, or holds no Python source; one line says which.
    """
    cache = cache or cache_dir() / "inspect"
    path = Path(given).expanduser()
    if path.exists():
        return _local(given, path, cache)
    if GIT.match(given):
        return _git(given, cache)
    match = REQUIREMENT.match(given)
    if match is None or "/" in given or given.startswith(".") or path.suffix in (".py", ".whl", ".zip", ".gz", ".tgz"):
        raise ValueError(f"{given}: no such file or folder; give a path, a git URL or a requirement like name==1.2")
    return _package(given, match["name"], match["spec"].replace(" ", ""), cache)


def _local(given: str, path: Path, cache: Path) -> Target:
    if path.is_file() and path.name.endswith(ARCHIVES):
        return _archive(given, path, cache, "archive", path.name, "")
    if path.is_file() and path.suffix != ".py":
        raise ValueError(f"{given}: neither a folder, nor a .py file, nor an archive ({', '.join(ARCHIVES)})")
    whole = path.resolve()
    return Target(given, "path", whole.name, whole, revision=_revision(whole if whole.is_dir() else whole.parent))


def _revision(folder: Path) -> str:
    head = _command(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"])
    if head.returncode != 0:
        return ""
    changed = _command(["git", "-C", str(folder), "status", "--porcelain", "--", "."])
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _command(words: list[str], timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Runs a command that asks nothing and takes no settings from the tree it works on."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
    try:
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", env=environment, timeout=timeout, check=False
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]} is not installed")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"no answer within {timeout:.0f} s")


def _git(given: str, cache: Path) -> Target:
    url = given.removeprefix("git+")
    match = REVISION.match(url)
    wanted = match["revision"] if match else ""
    url = match["url"] if match else url
    folder = cache / "git" / hashlib.sha256(f"{url}@{wanted}".encode()).hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = Path(scratch) / "tree"
        _clone(given, url, wanted, fresh)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(fresh, folder)
    head = _command(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"])
    name = url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
    return Target(given, "git", name, folder, revision=head.stdout.strip())


def _clone(given: str, url: str, wanted: str, folder: Path) -> None:
    """A shallow copy; hooks, submodules, symbolic links and helpers that run commands are off."""
    safe = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.symlinks=false", "-c", "protocol.ext.allow=never"]
    if COMMIT.match(wanted):
        steps = [
            [*safe, "init", "--quiet", str(folder)],
            [*safe, "-C", str(folder), "fetch", "--quiet", "--depth", "1", "--", url, wanted],
            [*safe, "-C", str(folder), "checkout", "--quiet", "FETCH_HEAD"],
        ]
    else:
        branch = ["--branch", wanted] if wanted else []
        steps = [[*safe, "clone", "--quiet", "--depth", "1", *branch, "--", url, str(folder)]]
    for step in steps:
        done = _command(step)
        if done.returncode != 0 and "fetch" in step:
            # A server may refuse a commit by its hash: then the whole history is asked for.
            done = _command([*safe, "-C", str(folder), "fetch", "--quiet", "--", url])
            steps[-1][-1] = wanted
        if done.returncode != 0:
            raise ValueError(f"{given}: git cannot fetch it: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = [line for line in lines if line.lower().startswith(("fatal", "error"))]
    return (fatal or lines or ["no reason given"])[-1]


def _package(given: str, name: str, spec: str, cache: Path) -> Target:
    folder = cache / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    known = _known_wheel(folder, name, spec)
    if known is None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _download(given, f"{name}{spec}", Path(scratch))
            wheel = next(Path(scratch).iterdir())
            known = folder / wheel.name
            os.replace(wheel, known)
    version = known.name.split("-")[1]
    return _archive(given, known, cache, "package", name, version)


def _known_wheel(folder: Path, name: str, spec: str) -> Path | None:
    """A wheel of that very version which is here already."""
    match = re.match(r"^==([\w.!+]+)$", spec)
    if match is None:
        return None
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{match[1]}-".lower()
    found = [path for path in folder.glob("*.whl") if re.sub(r"[.]", "_", path.name.split("-")[0]).lower() in stem]
    return next((path for path in found if path.name.lower().startswith(stem)), None)


def _download(given: str, requirement: str, folder: Path) -> None:
    """Only wheels: for a source archive pip would have to run the project's own setup."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--ignore-requires-python"]
    words += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder), "--", requirement]
    done = _command(words)
    if done.returncode == 0 and any(folder.iterdir()):
        return
    reason = _last_line(done.stderr)
    if "No module named pip" in done.stderr:
        reason = "pip is not installed beside this Python"
    elif "No matching distribution" in done.stderr or "not find a version" in done.stderr:
        reason = (
            "the registry cannot be reached, or has no wheel of it for this machine; "
            "unpack its source yourself and give the folder"
        )
    raise ValueError(f"{given}: cannot be downloaded: {reason}")


def _archive(given: str, path: Path, cache: Path, kind: str, name: str, version: str) -> Target:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{given}: cannot be read: {error.strerror or error}") from error
    folder = cache / "unpacked" / f"{path.name}-{digest[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fresh = Path(scratch) / "tree"
            unpack(given, path, fresh)
            if not folder.is_dir():
                shutil.move(fresh, folder)
    if not any(folder.rglob("*.py")):
        raise ValueError(f"{given}: the package holds no Python source; there is nothing to read")
    return Target(given, kind, name, folder, version=version, sha256=digest)
