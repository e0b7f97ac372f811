"""Token ids to text while they are made: whole characters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of a growing list of tokens, special tokens included.

    Args:
        tokenizer: a transformers tokenizer with a ``backend_tokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._given = 0  # characters returned so far

    def add(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete; a character begun is held back."""
        self._tokens += tokens
        pieces = [self._stream.step(self._tokenizer, token) for token in tokens]
        text = "".join(piece for piece in pieces if piece)
        self._given += len(text)
        return text

    def finish(self) -> str:
        """What was held back; bytes that are no character become U+FFFD."""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        rest: str = whole[self._given :]
        self._given = len(whole)
        return rest
