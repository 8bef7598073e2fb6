"""`logitless train`: GRPO on Tunix with the losses of Logitless, from a YAML file, read top to bottom."""

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

from logitless._files import replace_file
from logitless.integrations.tunix import TRIED
from logitless.integrations.versions import require
from logitless.train.config import TrainConfig
from logitless.train.errors import TrainError


def run_train(config: TrainConfig) -> int:
    """Runs a training, or goes on with one that was stopped.

    Returns:
        0; 130 where Ctrl-C stopped it, with a checkpoint.

    Raises:
        TrainError: something the user can act on.
    """
    # Tunix's own bars would be drawn over ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("absl").setLevel(logging.ERROR)
    require_tunix("logitless train")
    folder = Path(config.output)
    claim_folder(config, folder)
    from logitless.train.session import Session

    with Session(config, folder) as session:
        session.train()
        return 130 if session.stopped else 0


def require_tunix(asked_by: str) -> None:
    """Raises TrainError where Tunix is missing, or another version of it there."""
    try:
        require("google-tunix", TRIED, module="tunix", asked_by=asked_by)
    except ImportError:
        raise TrainError(f"{asked_by}: tunix is not installed: pip install 'logitless[train]'") from None
    except NotImplementedError as error:
        raise TrainError(str(error)) from None


def claim_folder(config: TrainConfig, folder: Path) -> None:
    """Makes the run's folder, and keeps its config there; an older run of another config is refused.

    Raises:
        TrainError: the folder cannot be written, or holds another run.
    """
    ours = json.dumps(asdict(config), indent=1)
    kept = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if kept.exists():
            theirs = json.loads(kept.read_text(encoding="utf-8"))
            changed = [key for key, value in json.loads(ours).items() if theirs.get(key) != value and key != "log"]
            if changed:
                raise TrainError(
                    f"output={folder}: holds a run of another config (differs in {', '.join(changed)}); give another "
                    "output, or remove the folder"
                )
        replace_file(kept, ours.encode())
    except OSError as error:
        raise TrainError(f"output={folder}: cannot be written: {error.strerror}") from error
