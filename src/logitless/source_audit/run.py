"""`logitless inspect TARGET...`: fetches each target, reads it, and shows the answers."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from logitless.source_audit.audit import SourceAudit, source_audit
from logitless.source_audit.report import (
    Audited,
    as_json,
    changes_markdown,
    changes_table,
    compare,
    console,
    markdown,
    table,
)
from logitless.source_audit.targets import Target, resolve

BAD_INPUT = 2


@dataclass(frozen=True)
class InspectConfig:
    """What to inspect.

    Attributes:
        targets: paths, git URLs or requirements (`name==version`).
        format: table, json or markdown.
        show: print the source lines that each answer rests on.
        compare: of two targets, show what changed from the first to the second.
    """

    targets: tuple[str, ...]
    format: str = "table"
    show: bool = False
    compare: bool = False

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets is empty; name at least one path, git URL or requirement (name==version)")
        if self.format not in ("table", "json", "markdown"):
            raise ValueError(f"format is {self.format!r}; it must be table, json or markdown")
        if self.compare and len(self.targets) != 2:
            raise ValueError(f"compare needs two targets, before and after; there are {len(self.targets)}")


def parser(description: str, epilog: str) -> argparse.ArgumentParser:
    """The words after `logitless inspect`."""
    made = argparse.ArgumentParser(
        prog="logitless inspect",
        usage="logitless inspect CONFIG.yaml [--key value ...]\n"
        "       logitless inspect TARGET... [--json | --markdown] [--show] [--compare]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    made.add_argument("targets", nargs="*", metavar="TARGET", help="path, archive, git URL[@revision] or name==version")
    made.add_argument("--json", action="store_true", help="everything that was found, for programs")
    made.add_argument("--markdown", action="store_true", help="a page for a report, with the revisions at its top")
    made.add_argument("--show", action="store_true", help="the source lines that each answer rests on")
    made.add_argument("--compare", action="store_true", help="what changed from the first target to the second")
    return made


def config_of(words: Sequence[str], made: argparse.ArgumentParser) -> InspectConfig:
    """The config that the words make; raises ValueError where they make none."""
    try:
        options, unknown = made.parse_known_intermixed_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if unknown:
        raise ValueError(f"unknown option {unknown[0]}; see logitless inspect --help")
    if options.json and options.markdown:
        raise ValueError("--json and --markdown exclude each other; give one of them")
    style = "json" if options.json else "markdown" if options.markdown else "table"
    return InspectConfig(tuple(options.targets), style, options.show, options.compare)


def run_inspect(config: InspectConfig) -> int:
    """Inspects every target; one that cannot be had takes one line on stderr and does not stop the rest.

    Args:
        config: what to inspect and how to show it.

    Returns:
        0, or 2 where a target could not be had.
    """
    several: list[Audited] = []
    for given in config.targets:
        try:
            target = resolve(given)
            several.append(Audited(target, _audit(target)))
        except ValueError as error:
            print(f"logitless inspect: error: {' '.join(str(error).split())}", file=sys.stderr)
    failed = len(several) < len(config.targets)
    if several and not (config.compare and failed):
        _show(config, several)
    return BAD_INPUT if failed else 0


def _audit(target: Target) -> SourceAudit:
    with _progress(target.name) as progress:
        try:
            return source_audit(target.root, progress=progress)
        except ValueError as error:
            raise ValueError(str(error).replace(str(target.root), target.given, 1)) from error


@contextmanager
def _progress(name: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal, and nothing elsewhere."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda what, done, total: bar.update(task, description=f"{name}: {what}", completed=done, total=total)


def _show(config: InspectConfig, several: list[Audited]) -> None:
    changes = compare(several[0].audit, several[1].audit) if config.compare else None
    if config.format == "json":
        text = as_json(several)
        if changes is not None:
            text = json.dumps({**json.loads(text), "changes": [asdict(one) for one in changes]}, indent=2)
        print(text)
    elif config.format == "markdown":
        page = markdown(several, show=config.show) if changes is None else changes_markdown(several, changes)
        print(page, end="")
    else:
        screen = console()
        for one in several if changes is None else ():
            screen.print(table(one, show=config.show))
        if changes is not None:
            screen.print(changes_table(changes))


def is_config(words: Sequence[str]) -> bool:
    """True where the first word is a YAML file."""
    return bool(words) and Path(words[0]).suffix in (".yaml", ".yml")
