"""Rewards that can be verified: is the last number the answer, and is it given in the asked form?"""

import re
from collections.abc import Callable, Iterable, Sequence

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
FORMAT = re.compile(r"####\s*-?\d[\d,]*(?:\.\d+)?\s*\Z")
FORMAT_REWARD = 0.1


def last_number(text: str) -> str | None:
    """The last number of a text without separators, `-3` or `1204.5`; None where there is none.

    Example:
        >>> last_number("5 and 7 make 12, so 1,204.50"), last_number("none")
        ('1204.5', None)
    """
    found = NUMBER.findall(text)
    return canonical(found[-1]) if found else None


def canonical(number: str) -> str:
    """A decimal number in one way of writing: no separators, no trailing zeros, no minus at zero."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, _, part = digits.replace(",", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    text = whole + (f".{part}" if part else "")
    return text if text == "0" else sign + text


def reward_last_number(
    prompts: Sequence[str], completions: Sequence[str], answer: Iterable[object], **_: object
) -> list[float]:
    """1 where the last number of the completion is the answer, else 0; as Tunix calls a reward."""
    return [
        1.0 if last_number(text) == canonical(str(right)) else 0.0
        for text, right in zip(completions, answer, strict=True)
    ]


def reward_format(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """A tenth for a completion that ends in `#### ` and a number."""
    return [FORMAT_REWARD if FORMAT.search(text) else 0.0 for text in completions]


REWARDS: dict[str, Callable[..., list[float]]] = {"last_number": reward_last_number, "format": reward_format}
