"""Rewards: the last number, written in any way, and the asked form."""

import pytest

from logitless.train.rewards import canonical, last_number, reward_format, reward_last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("so 5 + 7 = 12.", "12"),
        ("#### 1,204", "1204"),
        ("it is -3", "-3"),
        ("3.50 coins", "3.5"),
        ("007", "7"),
        ("-0", "0"),
        ("0.0", "0"),
        ("none at all", None),
        ("", None),
        ("10-3", "-3"),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(("written", "plain"), [("1,000.0", "1000"), ("-2.50", "-2.5"), ("000", "0"), ("-0.00", "0")])
def test_numbers_are_compared_in_one_way_of_writing(written, plain):
    assert canonical(written) == plain


def test_the_reward_is_1_for_the_answer_and_0_else():
    texts = ["#### 12", "12 or 13", "", "12.0"]
    assert reward_last_number(["?"] * 4, texts, answer=["12"] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_the_form_is_worth_a_tenth_at_the_end_alone():
    assert reward_format(["?"] * 3, ["a\n#### 5", "#### 5 or so", "5"]) == [0.1, 0.0, 0.0]


def test_a_batch_of_other_length_is_no_batch():
    with pytest.raises(ValueError, match="shorter|longer"):
        reward_last_number(["?"], ["1"], answer=["1", "2"])
