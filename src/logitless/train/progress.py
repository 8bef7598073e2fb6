"""The live line of a run: a bar with reward, divergence, loss and step time; plain lines where no one looks."""

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

EVERY = 10
"""Updates between lines where the output is no terminal."""


class Progress:
    """What a run shows.

    Args:
        name: of the run.
        steps: of the whole run.
    """

    def __init__(self, name: str, steps: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._steps = steps
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
        )
        self._bar = Bar(*columns, TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal)
        self._bar.start()
        self._task = self._bar.add_task(name, total=steps, line="")

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)

    def show(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """The numbers of an update."""
        words = {"reward/mean": "reward", "loss": "loss", "kl": "kl", "time/train/step_avg_last10_s": "s/step"}
        shown = ((name, numbers[key]) for key, name in words.items())
        line = "  ".join(f"{name} {value:.4g}" for name, value in shown if value is not None)
        self._bar.update(self._task, completed=step, line=line)
        if not self._console.is_terminal and (step % EVERY == 0 or step in (1, self._steps)):
            self._console.print(f"update {step}/{self._steps}  {line}", markup=False)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._bar.stop()
