"""Prompts: an order that seed and step decide, files that are cut, rows without an answer."""

import json
from pathlib import Path

import numpy as np
import pytest

from logitless.train.config import DataConfig
from logitless.train.data import Problems, parse_rows, read_rows
from logitless.train.errors import TrainError

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def test_sums_are_right_and_as_long_as_asked():
    for terms, digits in ((2, 1), (3, 2), (5, 4)):
        for row in Problems(DataConfig(terms=terms, digits=digits), 0).batch(3, 50):
            numbers = row.question.removesuffix("=").split("+")
            assert len(numbers) == terms and sum(map(int, numbers)) == int(row.answer)
            assert all(len(number) == digits for number in numbers)


def test_a_step_has_the_same_problems_whatever_came_before():
    first, second = Problems(DataConfig(), 7), Problems(DataConfig(), 7)
    first.batch(0, 8)
    assert first.batch(5, 8) == second.batch(5, 8)
    assert first.batch(5, 8) != first.batch(6, 8)
    assert Problems(DataConfig(), 8).batch(5, 8) != second.batch(5, 8)
    assert first.batch(5, 8, purpose=1) != first.batch(5, 8)


def test_every_row_comes_once_in_an_epoch_and_then_in_another_order():
    config = DataConfig(task="words")
    rows = read_rows(config)
    problems = Problems(config, 0)
    epochs = [[problems.batch(e * len(rows) + i, 1)[0].question for i in range(len(rows))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(row.question for row in rows) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_batch_may_reach_over_the_end_of_an_epoch():
    assert len(Problems(DataConfig(task="words"), 0).batch(0, 100)) == 100


@pytest.mark.skipif(not GSM8K.exists(), reason="the shared folder with GSM8K is not here")
def test_gsm8k_is_read_from_a_file():
    rows = read_rows(DataConfig(task="gsm8k", path=str(GSM8K)))
    assert len(rows) == 1319 and rows[0].answer == "18"
    assert all(np.isfinite(float(row.answer)) for row in rows)


def line(**changes):
    return json.dumps({"question": "1 + 1?", "answer": "two\n#### 2"} | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line() + "\n" + line()[:20], r"file\.jsonl, line 2: no JSON .*is the file cut"),
        (line(answer="two"), r"line 1: the answer has no number after ####: 'two'"),
        (line(answer=""), "needs the texts question and answer"),
        (json.dumps({"question": "?"}), "needs the texts question and answer"),
        ("[1]", "needs the texts question and answer"),
    ],
)
def test_bad_rows_are_named_with_their_line(text, message):
    with pytest.raises(TrainError, match=message):
        parse_rows(text, "file.jsonl")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "sums"}, "data.task='sums' is not known; known are chain_sum"),
        ({"task": "gsm8k"}, "needs data.path"),
        ({"task": "gsm8k", "path": "./missing.jsonl"}, "cannot read missing.jsonl: No such file"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(TrainError, match=message):
        read_rows(DataConfig(**config))


def test_a_separator_inside_a_text_does_not_end_a_row():
    row = {"question": "One\u2028and two?\x85", "answer": "1 + 2\n#### 3"}
    (problem,) = parse_rows(json.dumps(row, ensure_ascii=False) + "\n", "file.jsonl")
    assert problem.question == row["question"]


def test_a_file_of_no_rows(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TrainError, match="no rows"):
        read_rows(DataConfig(task="gsm8k", path=str(tmp_path / "empty.jsonl")))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainError, match="is not UTF-8"):
        read_rows(DataConfig(task="gsm8k", path=str(tmp_path / "bytes.jsonl")))
