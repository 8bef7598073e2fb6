"""Tokenizers as Tunix asks for them: characters for tiny models, and byte-level BPE for real ones."""

from collections.abc import Sequence
from typing import Any

CHARACTERS = "0123456789+-*/=.,:;?!()#$% \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'\"<>|&_[]"
"""What a tiny model reads and writes, one token each; ids 0 to 2 are padding, end and unknown."""

SPECIAL = ("<pad>", "<end>", "<unknown>")


class CharacterTokenizer:
    """One token a character, for models that learn from nothing.

    Example:
        >>> tokenizer = CharacterTokenizer()
        >>> tokenizer.decode(tokenizer.encode("3+4="))
        '3+4='
    """

    def __init__(self) -> None:
        self._ids = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
        self._texts = ["", "", "?", *CHARACTERS]

    @property
    def vocab_size(self) -> int:
        """Ids that mean something."""
        return len(self._texts)

    def encode(self, text: str, **_: object) -> list[int]:
        return [self._ids.get(character, 2) for character in str(text)]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        # A head has more rows than there are characters; what an untrained model samples there is unknown, not lost.
        return "".join(self._texts[i] if i < len(self._texts) else "?" for i in ids)

    def pad_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 1

    def bos_id(self) -> int:
        # None is prepended: Tunix prepends what is not 0.
        return 0


class BpeTokenizer:
    """A `tokenizers.Tokenizer` with its control tokens.

    Args:
        tokenizer: text to ids and back.
        end: the id that ends a completion.
        pad: the id that fills; must not be `end`, which counts.
        vocab_size: ids that it may give.
    """

    def __init__(self, tokenizer: Any, *, end: int, pad: int, vocab_size: int) -> None:
        self._tokenizer, self._end, self._pad = tokenizer, end, pad
        self.vocab_size = vocab_size

    def encode(self, text: str, **_: object) -> list[int]:
        return self._tokenizer.encode(str(text)).ids

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def pad_id(self) -> int:
        return self._pad

    def eos_id(self) -> int:
        return self._end

    def bos_id(self) -> int:
        return 0
