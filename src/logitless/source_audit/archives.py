"""Unpacks wheels and source archives, of which nothing may be written outside its folder."""

import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")
MAX_BYTES = 2_000_000_000
BROKEN = (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)


class Refused(Exception):
    """A member that must not be written."""


def unpack(given: str, archive: Path, folder: Path) -> None:
    """Writes the Python files of an archive below a folder; every member is checked before the first is written.

    Args:
        given: what the user named, for messages.
        archive: a wheel, a zip or a tar.
        folder: is made.

    Raises:
        ValueError: the archive is broken, or a member would be written outside the folder.
    """
    try:
        if archive.name.endswith((".whl", ".zip")):
            with zipfile.ZipFile(archive) as source:
                _check([(one.filename, one.file_size, _link_of_zip(source, one)) for one in source.infolist()])
                _write(folder, _members_of_zip(source))
        else:
            with tarfile.open(archive) as source:
                _check([(one.name, one.size, _link_of_tar(one)) for one in source.getmembers()])
                _write(folder, _members_of_tar(source))
    except Refused as error:
        raise ValueError(f"{given}: refused: {error}") from error
    except BROKEN as error:
        raise ValueError(f"{given}: the archive is broken: {error}") from error


def _link_of_zip(source: zipfile.ZipFile, member: zipfile.ZipInfo) -> str | None:
    if stat.S_ISLNK(member.external_attr >> 16):
        return source.read(member).decode("utf-8", "replace")
    return None


def _link_of_tar(member: tarfile.TarInfo) -> str | None:
    if member.isdev():
        raise Refused(f"its member {member.name!r} is a device")
    if member.islnk():
        # A hard link counts from the root of the archive, a symbolic one from its own folder.
        return "/".join([*[".."] * (len(PurePosixPath(member.name).parts) - 1), member.linkname])
    return member.linkname if member.issym() else None


def _check(members: list[tuple[str, int, str | None]]) -> None:
    total = 0
    for name, size, link in members:
        total += size
        if not _inside(name):
            raise Refused(f"its member {name!r} would be written outside its folder")
        if link is not None and not _inside(str(PurePosixPath(name).parent / link), link):
            raise Refused(f"its member {name!r} is a link to {link!r}, outside its folder")
    if total > MAX_BYTES:
        raise Refused(f"it unpacks to {total / 1e9:.1f} GB, more than {MAX_BYTES / 1e9:.0f} GB")


def _inside(name: str, link: str = "") -> bool:
    """No absolute path of any system, and no more steps up than down."""
    for text in (name, link):
        if text.startswith(("/", "\\")) or PureWindowsPath(text).drive:
            return False
    depth = 0
    for part in name.replace("\\", "/").split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return False
    return True


def _members_of_zip(source: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    for member in source.infolist():
        if member.filename.endswith(".py") and not stat.S_ISLNK(member.external_attr >> 16):
            yield member.filename, source.read(member)


def _members_of_tar(source: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in source.getmembers():
        if member.isreg() and member.name.endswith(".py"):
            file = source.extractfile(member)
            if file is not None:
                yield member.name, file.read()


def _write(folder: Path, members: Iterator[tuple[str, bytes]]) -> None:
    folder.mkdir(parents=True)
    for name, content in members:
        path = folder / name.replace("\\", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
