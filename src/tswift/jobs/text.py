"""Token ids to text while they are made: whole characters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_HELD = 16  # after so many tokens without a whole character, broken bytes are let go
_LAST = 4  # tokens that a character may still need: it has four bytes at most
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of a growing list of tokens, special tokens included.

    It knows the last few tokens only, however long the text: how a token decodes may depend on the one before it, and
    a character begun on the tokens to come. The text is that of all tokens decoded together. (Where a tokenizer falls
    back to bytes, and they are no characters, what was given before them stays given.)

    Args:
        tokenizer: a transformers tokenizer with a ``backend_tokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._before: list[int] = []  # the last tokens whose text was given
        self._held: list[int] = []  # those after them

    def add(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete; a character begun is held back."""
        pieces = []
        for token in tokens:
            self._held.append(token)
            text = self._after(self._before, self._held)
            if text and not text.endswith(_BROKEN):
                pieces.append(self._give(len(self._held), text))
            elif len(self._held) % _HELD == 0:
                pieces.append(self._let_go(text))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back; bytes that are no character become U+FFFD."""
        return self._give(len(self._held), self._after(self._before, self._held))

    def _let_go(self, text: str) -> str:
        """What of broken bytes no token to come can mend: those before a place where the text falls apart in two."""
        for count in range(len(self._held) - _LAST, 0, -1):
            first, rest = self._held[:count], self._held[count:]
            given = self._after(self._before, first)
            if given + self._after(first, rest) == text:
                return self._give(count, given)
        return ""

    def _give(self, count: int, text: str) -> str:
        self._before, self._held = self._held[:count], self._held[count:]
        return text

    def _after(self, before: list[int], tokens: list[int]) -> str:
        """The text of tokens that follow others."""
        return self._decode([*before, *tokens])[len(self._decode(before)) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
