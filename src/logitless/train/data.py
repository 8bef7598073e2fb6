"""Prompts with answers that can be verified, in an order that the seed and the step alone decide."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from logitless.train.config import DataConfig
from logitless.train.errors import TrainError
from logitless.train.rewards import NUMBER, canonical


@dataclass(frozen=True)
class Problem:
    """A question, the number that answers it, and a worked answer for a warm start."""

    question: str
    answer: str
    worked: str


class Problems:
    """All problems of a task, as batches: step t of a seed always holds the same ones.

    Args:
        config: which task.
        seed: of the order, or of the sums.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._seed = seed
        self._config = config
        self._rows = None if config.task == "chain_sum" else read_rows(config)

    def batch(self, step: int, size: int, *, purpose: int = 0) -> list[Problem]:
        """The problems of a step.

        Args:
            step: from 0.
            size: how many.
            purpose: 0 for training, 1 for the warm start: each has its own order.
        """
        if self._rows is None:
            rng = np.random.default_rng((self._seed, purpose, step))
            return [_sum(rng, self._config) for _ in range(size)]
        count = len(self._rows)
        places = range(step * size, (step + 1) * size)
        orders = {
            epoch: np.random.default_rng((self._seed, purpose, epoch)).permutation(count)
            for epoch in {place // count for place in places}
        }
        return [self._rows[orders[place // count][place % count]] for place in places]


def _sum(rng: np.random.Generator, config: DataConfig) -> Problem:
    low = 0 if config.digits == 1 else 10 ** (config.digits - 1)
    numbers = [int(n) for n in rng.integers(low, 10**config.digits, config.terms)]
    answer = str(sum(numbers))
    return Problem("+".join(map(str, numbers)) + "=", answer, answer)


def read_rows(config: DataConfig) -> list[Problem]:
    """All problems of a task that is read and not generated.

    Raises:
        TrainError: an unknown task, a file that is missing, cut or has a row without an answer.
    """
    if config.task == "gsm8k":
        if config.path is None:
            raise TrainError(
                "train config: data.task=gsm8k needs data.path: a JSON-lines file, or the hub id openai/gsm8k"
            )
        rows = (
            _rows_of_file(Path(config.path)) if _is_file_name(config.path) else _rows_of_hub(config.path, config.split)
        )
    elif config.task == "words":
        text = resources.files("logitless").joinpath("data/word_problems.jsonl").read_text(encoding="utf-8")
        rows = parse_rows(text, "word_problems.jsonl")
    elif config.task.startswith("reasoning_gym:"):
        rows = _rows_of_gym(config.task.partition(":")[2])
    else:
        raise TrainError(
            f"train config: data.task={config.task!r} is not known; known are chain_sum, gsm8k, words, "
            "reasoning_gym:NAME"
        )
    if not rows:
        raise TrainError(f"train config: data.task={config.task}: no rows")
    return rows


def _is_file_name(path: str) -> bool:
    return Path(path).exists() or path.endswith((".jsonl", ".json")) or path.startswith((".", "/", "~"))


def _rows_of_file(path: Path) -> list[Problem]:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise TrainError(f"data.path: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"data.path: {path} is not UTF-8 text: {error}") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> list[Problem]:
    """Problems of JSON lines with `question` and `answer`, in which the number follows `####`.

    Raises:
        TrainError: a line that is no JSON (a cut file ends in one), or a row without question or answer.
    """
    # Other separators of lines may stand inside a text.
    lines = text.split("\n")
    return [_row(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, place: str) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainError(f"{place}: no JSON ({error.msg}); is the file cut?") from error
    return _problem(row, place)


def _problem(row: Any, place: str) -> Problem:
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) and row[key] for key in ("question", "answer")
    ):
        raise TrainError(f"{place}: a row needs the texts question and answer")
    number = NUMBER.fullmatch(row["answer"].rpartition("####")[2].strip())
    if number is None:
        raise TrainError(f"{place}: the answer has no number after ####: {row['answer'][-40:]!r}")
    return Problem(row["question"], canonical(number[0]), row["answer"])


def _rows_of_hub(path: str, split: str) -> list[Problem]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports] - of the train extra
    except ModuleNotFoundError as error:
        raise TrainError(f"data.path={path}: {error.name} is not installed: pip install 'logitless[train]'") from error
    try:
        rows = load_dataset(path, "main", split=split)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise TrainError(
            f"data.path={path}: cannot be loaded from the hub ({first}); offline, give a local JSON-lines file"
        ) from error
    return [_problem(dict(row), f"{path}, row {i}") for i, row in enumerate(rows)]


def _rows_of_gym(name: str, size: int = 2000) -> list[Problem]:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports] - an extra of its own
    except ModuleNotFoundError as error:
        raise TrainError(
            f"data.task=reasoning_gym:{name}: {error.name} is not installed: pip install reasoning-gym"
        ) from error
    try:
        rows = reasoning_gym.create_dataset(name, size=size, seed=0)
    except ValueError as error:
        raise TrainError(f"data.task=reasoning_gym:{name}: {error}") from error
    problems = []
    for row in rows:
        number = NUMBER.fullmatch(str(row["answer"]).strip())
        if number is None:
            raise TrainError(f"data.task=reasoning_gym:{name}: its answers are no numbers ({row['answer']!r})")
        problems.append(Problem(row["question"], canonical(number[0]), f"#### {number[0]}"))
    return problems
