"""Shows what was found: a table on the terminal, JSON, a page in Markdown, and what changed between two trees."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from logitless.source_audit.audit import SourceAudit
from logitless.source_audit.classify import EntryPoint, Evidence
from logitless.source_audit.targets import Target

ALIKE = 3
"""So many entry points of one name and one answer are shown as one row."""
GRADIENTS = {"forward": "in the forward pass", "backward": "in the backward pass", "autodiff": "by autodiff", "": ""}
COLUMNS = ("entry point", "line", "loss", "verdict", "product with the head", "chunk loop or kernel", "gradient")


@dataclass(frozen=True)
class Audited:
    """A target and what its source says."""

    target: Target
    audit: SourceAudit


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; wide where there is none, so that no path is cut."""
    made = Console(stderr=stderr, soft_wrap=False)
    return made if made.is_terminal else Console(stderr=stderr, width=1000)


def rows_of(audit: SourceAudit) -> Iterator[tuple[EntryPoint, list[EntryPoint]]]:
    """Each entry point with those that share its name and its answer, where these are many."""
    groups: dict[tuple[str, ...], list[EntryPoint]] = {}
    for entry in audit.entries:
        groups.setdefault((entry.name, entry.family, entry.verdict, *_lines(entry, "product")), []).append(entry)
    for group in groups.values():
        if len(group) >= ALIKE:
            yield group[0], group[1:]
        else:
            for entry in group:
                yield entry, []


def _lines(entry: EntryPoint, *whats: str) -> list[str]:
    return list(dict.fromkeys(f"{one.path}:{one.line}" for one in entry.evidence if one.what in whats))


def cells(entry: EntryPoint, alike: list[EntryPoint]) -> tuple[str, ...]:
    """One row of the table, in words."""
    more = f" (and {len(alike)} more of this name)" if alike else ""
    around = [one for one in entry.evidence if one.what in ("loop", "kernel", "launch", "stage", "call")]
    loops = "\n".join(dict.fromkeys(_around(one) for one in around))
    gradient = GRADIENTS[entry.gradient]
    if entry.overwrites:
        gradient += "; d_logits overwrites the logits"
    elif entry.overwrites is False:
        gradient += "; no overwrite seen"
    return (
        f"{entry.name}{more}",
        f"{entry.path}:{entry.line}",
        entry.family,
        entry.verdict,
        "\n".join(_lines(entry, "product")) or "none on its path",
        loops,
        gradient,
    )


def _around(one: Evidence) -> str:
    if one.what == "loop" and one.note.startswith("no "):
        return "no loop"
    word = {"loop": one.note, "launch": "launch", "kernel": "kernel", "stage": "stage", "call": "call"}[one.what]
    return f"{word} {one.path}:{one.line}"


def table(audited: Audited, *, show: bool = False) -> RenderableType:
    """A project on the terminal."""
    made = Table(*COLUMNS, box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in made.columns:
        column.overflow = "fold"
    parts: list[RenderableType] = [Text(f"{heading(audited)}, in {audited.target.root}", style="bold")]
    for entry, alike in rows_of(audited.audit):
        made.add_row(*cells(entry, alike))
    parts.append(made if audited.audit.entries else Text("no loss was found in it"))
    for entry, _ in rows_of(audited.audit):
        if entry.notes:
            parts.append(Text(f"  {entry.path}:{entry.line} {entry.name}: {'; '.join(entry.notes)}"))
        if show:
            parts.append(Text(excerpts(entry)))
    parts += [Text(f"  left out: {one.path}: {one.reason}") for one in audited.audit.unread]
    return Group(*parts)


def heading(audited: Audited) -> str:
    audit = audited.audit
    left_out = f", {len(audit.unread)} left out" if audit.unread else ""
    return f"{audited.target.title()}: {audit.files:,} files{left_out}, {audit.lines:,} lines"


def excerpts(entry: EntryPoint) -> str:
    """The lines that an answer rests on."""
    lines = [f"{entry.path}:{entry.line} {entry.name}: {entry.verdict}"]
    lines += [f"    {one.what:<9} {one.path}:{one.line}: {one.text}" for one in entry.evidence]
    return "\n".join(lines)


def as_json(several: list[Audited]) -> str:
    """Everything that was found, for programs."""
    targets = []
    for one in several:
        target = {key: value for key, value in asdict(one.target).items() if key != "root"}
        audit = asdict(one.audit)
        targets.append({**target, **audit})
    return json.dumps({"targets": targets}, indent=2)


def markdown(several: list[Audited], *, show: bool = False) -> str:
    """A page that can be pasted into a report, with what was read at its top."""
    lines = ["# Is the LM head fused into the loss?", "", "Read, never run, by `logitless inspect`:", ""]
    lines += [
        f"* {heading(one)}" + (f" (`{one.target.given}`)" if one.target.kind != "path" else "") for one in several
    ]
    for one in several:
        lines += ["", f"## {one.target.title()}", ""]
        lines += _markdown_table(one)
        notes = [(entry, entry.notes) for entry, _ in rows_of(one.audit) if entry.notes]
        lines += ["", *(f"* `{entry.name}` ({entry.path}:{entry.line}): {'; '.join(note)}" for entry, note in notes)]
        lines += [f"* left out: {unread.path}: {unread.reason}" for unread in one.audit.unread]
        if show:
            lines += ["", "```text", *(excerpts(entry) for entry, _ in rows_of(one.audit)), "```"]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(one: Audited) -> list[str]:
    if not one.audit.entries:
        return ["No loss was found in it."]
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    for entry, alike in rows_of(one.audit):
        row = (cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells(entry, alike))
        lines.append(f"| {' | '.join(row)} |")
    return lines


@dataclass(frozen=True)
class Change:
    """An entry point that two trees answer differently.

    Attributes:
        what: added, removed or changed.
        name: of the entry point.
        path: of its file.
        before: its answer in the first tree; empty where it is not there.
        after: its answer in the second; likewise.
    """

    what: str
    name: str
    path: str
    before: str = ""
    after: str = ""


def compare(first: SourceAudit, second: SourceAudit) -> list[Change]:
    """What changed from one tree to another, by path and name; a line that only moved is no change."""
    before, after = _by_name(first), _by_name(second)
    changes = []
    for key in sorted({*before, *after}):
        path, name = key
        old, new = before.get(key, ""), after.get(key, "")
        if old != new:
            what = "changed" if old and new else "added" if new else "removed"
            changes.append(Change(what, name, path, old, new))
    return changes


def _by_name(audit: SourceAudit) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for entry in audit.entries:
        answer = ", gradient ".join(part for part in (entry.verdict, GRADIENTS[entry.gradient]) if part)
        answer += ", d_logits overwrites the logits" if entry.overwrites else ""
        key = (entry.path, entry.name)
        found[key] = f"{found[key]} / {answer}" if key in found and answer not in found[key] else found.get(key, answer)
    return found


def changes_table(changes: list[Change]) -> RenderableType:
    """The changes on the terminal."""
    if not changes:
        return Text("no answer changed")
    made = Table("what", "entry point", "file", "before", "after", box=box.SIMPLE_HEAD, header_style="bold")
    for one in changes:
        made.add_row(one.what, one.name, one.path, one.before, one.after)
    return made


def changes_markdown(several: list[Audited], changes: list[Change]) -> str:
    """The changes as a page."""
    first, second = several
    lines = ["# What changed", "", f"* before: {heading(first)}", f"* after: {heading(second)}", ""]
    if not changes:
        return "\n".join([*lines, "No answer changed."]) + "\n"
    lines += ["| what | entry point | file | before | after |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {one.what} | {one.name} | {one.path} | {one.before} | {one.after} |" for one in changes]
    return "\n".join(lines) + "\n"
