"""Streamed text: whole characters only, and in the end exactly the tokenizer's decoding."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tswift.jobs.text import TextStream
from tswift.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes alone, nearly: every character beyond ASCII takes several tokens."""
    return train_tokenizer(["hello world"], 262)


def _pieces(tokenizer: Any, tokens: list[int], step: int) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(tokens[i : i + step]) for i in range(0, len(tokens), step)), stream.finish()]


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_characters_are_never_split(tokenizer: Any, step: int) -> None:
    text = "naïve 😀 größer — 日本語\n"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) > len(text)
    pieces = _pieces(tokenizer, tokens, step)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_broken_bytes_become_replacement_characters(tokenizer: Any) -> None:
    tokens = tokenizer("ab😀")["input_ids"][:-1]
    pieces = _pieces(tokenizer, tokens, 1)
    assert "".join(pieces[:-1]) == "ab"
    assert pieces[-1] == "\ufffd"


def test_random_tokens_decode_as_a_whole(tokenizer: Any) -> None:
    rng = random.Random(1)
    for _ in range(50):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(100)]
        whole = tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)
        assert "".join(_pieces(tokenizer, tokens, rng.randint(1, 4))) == whole
