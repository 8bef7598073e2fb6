"""Where the numbers of a run go: JSON lines always, wandb and trackio where the config asks."""

import json
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from logitless._files import read_json_lines, replace_file
from logitless.train.config import LogConfig
from logitless.train.errors import TrainError

Numbers = Mapping[str, float | None]


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of one step after the other."""

    def write(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one line a step, on disk before the step's checkpoint.

    Args:
        path: the file.
        keep_until: lines of later steps are dropped: a run that resumes writes them again.
    """

    def __init__(self, path: Path, keep_until: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= keep_until] if path.exists() else []
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, numbers: Numbers) -> None:
        self._file.write(json.dumps({"step": step} | dict(numbers)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last one that was cut by a crash does not count.

    Raises:
        TrainError: no such file, or a line in its middle is no JSON.
    """
    return read_json_lines(path, TrainError, cut_end=True)


class Wandb:
    """A wandb run in the run's folder, continued when the run resumes."""

    def __init__(
        self, config: LogConfig, name: str, folder: Path, settings: Mapping[str, Any], say: Callable[[str], None]
    ):
        # Else wandb reports its own errors to a server, in offline mode too.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an extra
            from wandb.errors import CommError  # pyright: ignore[reportMissingImports] - an extra
        except ModuleNotFoundError as error:
            raise TrainError(
                f"log.wandb={config.wandb}: {error.name} is not installed: pip install 'logitless[wandb]'"
            ) from error

        mode = config.wandb
        if mode == "online" and not has_wandb_key():
            say("wandb: no API key (WANDB_API_KEY, wandb login): logging offline; wandb sync uploads it later")
            mode = "offline"
        identity = folder / "wandb_id"
        if not identity.exists():
            replace_file(identity, secrets.token_hex(4).encode())
        options = {
            "project": config.project,
            "name": name,
            "id": identity.read_text(encoding="utf-8"),
            "resume": "allow",
            "dir": str(folder),
            "config": dict(settings),
        }
        try:
            self._run = wandb.init(mode=mode, **options)
        except CommError as error:
            say(
                f"wandb: the server cannot be reached ({str(error).splitlines()[0]}): logging offline, training goes on"
            )
            self._run = wandb.init(mode="offline", **options)

    def write(self, step: int, numbers: Numbers) -> None:
        self._run.log({name: value for name, value in numbers.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


def has_wandb_key() -> bool:
    """Whether there is a key to log in with: in `WANDB_API_KEY`, or where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Trackio:
    """A local trackio run."""

    def __init__(self, config: LogConfig, name: str, settings: Mapping[str, Any]):
        try:
            import trackio  # pyright: ignore[reportMissingImports] - an extra
        except ModuleNotFoundError as error:
            raise TrainError(f"log.trackio: {error.name} is not installed: pip install 'logitless[trackio]'") from error
        self._trackio = trackio
        trackio.init(project=config.project, name=name, config=dict(settings), resume="allow", embed=False)

    def write(self, step: int, numbers: Numbers) -> None:
        self._trackio.log({name: value for name, value in numbers.items() if value is not None}, step=step)

    def close(self) -> None:
        self._trackio.finish()


def open_sinks(
    config: LogConfig,
    name: str,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    keep_until: int,
    say: Callable[[str], None] = print,
) -> list[Sink]:
    """All sinks of a run.

    Args:
        config: which.
        name: of the run.
        folder: of the run.
        settings: the run's config, for the trackers to show.
        keep_until: the step at which the run resumes, 0 for a new one.
        say: takes a line for the user.
    """
    # The lines last: a tracker that is not installed is said before a file is opened.
    sinks: list[Sink] = []
    if config.wandb != "disabled":
        sinks.append(Wandb(config, name, folder, settings, say))
    if config.trackio:
        sinks.append(Trackio(config, name, settings))
    return [JsonLines(folder / "metrics.jsonl", keep_until), *sinks]
