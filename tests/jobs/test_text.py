"""Streamed text: whole characters only, and in the end exactly the tokenizer's decoding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from recipes.corpus import train_tokenizer
from tests.fuzzing import many
from tswift.decoding.text import TextRules, TextStream

EVERYTHING = TextRules(skip_special=False, include_end=True)  # every token is shown, and none ends


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes alone, nearly: every character beyond ASCII takes several tokens."""
    return train_tokenizer(["hello world"], 262)


def _pieces(tokenizer, tokens: list[int], step: int) -> list[str]:
    stream = TextStream(tokenizer, EVERYTHING)
    return [
        *(stream.add(tokens[i : i + step]) for i in range(0, len(tokens), step)),
        stream.finish(),
    ]


class Plain:
    """A tokenizer as transformers wraps it."""

    def __init__(self, backend: Tokenizer):
        self.backend_tokenizer = backend


@pytest.fixture(scope="module")
def merging():
    """Bytes, and many tokens that are pieces of characters, or end in the middle of one."""
    return train_tokenizer(["日本語の文字、絵文字😀😁😂🤣と größer ÄÖÜ — ψυχή"] * 5, 420)


def text_of(tokenizer, tokens: list[int]) -> str:
    return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)


@many
@given(st.data())
def test_random_tokens_decode_as_a_whole(tokenizer, merging, data):
    used = data.draw(st.sampled_from([tokenizer, merging]))
    # the first are bytes: all of them, ASCII apart, or none
    least = data.draw(st.sampled_from([0, 100, 262]))
    tokens = data.draw(
        st.lists(st.integers(min(least, len(used) - 9), len(used) - 1), max_size=150)
    )
    pieces = _pieces(used, tokens, data.draw(st.integers(1, 4)))
    assert "".join(pieces) == text_of(used, tokens)
    assert "".join(pieces) == "".join(_pieces(used, tokens, 1))


def first_stop(tokenizer, tokens: list[int], stop: list[str]) -> tuple[int, str, str | None]:
    """How many tokens, which text and which string, tried token by token on texts decoded whole;
    independent of :class:`TextStream`.
    """
    for count in range(1, len(tokens) + 1):
        text = text_of(tokenizer, tokens[:count]).rstrip("\ufffd")
        found = [
            (text.index(each) + len(each), text.index(each), each) for each in stop if each in text
        ]
        if found:
            _, begin, each = min(found)
            return count, text[:begin], each
    return len(tokens), text_of(tokenizer, tokens), None


@many
@given(st.data())
def test_the_text_ends_before_the_first_stop_string(tokenizer, merging, data):
    """Across tokens, in the middle of one, where one begins a character;
    whatever is added together.
    """
    used = data.draw(st.sampled_from([tokenizer, merging]))
    if data.draw(st.booleans()):
        tokens = used(data.draw(st.text("ab 日本語größe\n", max_size=30)))["input_ids"]
    else:
        tokens = data.draw(st.lists(st.integers(0, len(used) - 9), max_size=40))
    whole = text_of(used, tokens)
    at = data.draw(st.integers(0, len(whole)))
    stop = [
        *data.draw(st.lists(st.text("ab日語 \n", min_size=1, max_size=3), max_size=2)),
        whole[at : at + 3],
        "abab",
    ]
    stop = [each for each in stop if each and "\ufffd" not in each]
    count, text, each = first_stop(used, tokens, stop)
    stream = TextStream(used, TextRules(tuple(stop), skip_special=False))
    pieces = []
    step = data.draw(st.integers(1, 4))
    for begin in range(0, len(tokens), step):
        assert stream.stopped is None or begin >= count
        pieces.append(stream.add(tokens[begin : begin + step]))
        assert text.startswith("".join(pieces))  # nothing that is given is ever taken back
    assert stream.stopped == each
    assert "".join(pieces) + stream.finish() == text


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    def pieces(text, *stop):
        stream = TextStream(tokenizer, TextRules(stop))
        return [*(stream.add(tokenizer(each)["input_ids"]) for each in text), stream.finish()]

    assert pieces("aabaac", "aab", "aac") == ["", "", "", "", "", "", ""]
    assert pieces("xaabaad", "aac") == ["x", "", "", "aab", "", "", "aad", ""]
    assert pieces("xaa", "aac") == ["x", "", "", "aa"]  # the text ends otherwise
    assert pieces("ab", "b", "ab") == ["", "", ""]  # of those that end together, the longest
    assert pieces("abcd", "abcde", "bc") == ["", "", "a", "", ""]


def test_what_is_kept_does_not_grow(tokenizer, merging):
    rng = random.Random(2)
    byte = tokenizer("é")["input_ids"]
    assert len(byte) == 2
    for used, draw in (
        (tokenizer, lambda: rng.randrange(len(tokenizer))),
        (tokenizer, lambda: rng.choice(byte)),
        (tokenizer, lambda: byte[1]),
        (tokenizer, lambda: byte[0]),
        (merging, lambda: rng.randrange(len(merging))),
    ):
        stream = TextStream(used, EVERYTHING)
        longest = 0
        for _ in range(3000):
            stream.add([draw()])
            longest = max(longest, len(stream._before) + len(stream._held))
        assert longest <= 40


def test_a_tokenizer_that_falls_back_to_bytes():
    """As Llama 2's: a space is put before the text and stripped,
    characters it does not know are bytes.
    """
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,",
    ]
    vocab = {word: at for at, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    rng = random.Random(3)
    for _ in range(100):
        text = "".join(
            rng.choice(["the", "▁the", "▁", "a", ".", "é", "😀", "語", "▁x"]) for _ in range(60)
        )
        tokens = backend.encode(f"▁{text}").ids
        pieces = _pieces(Plain(backend), tokens, rng.randint(1, 4))
        assert "".join(pieces) == backend.decode(tokens) == text.replace("▁", " ")
        assert "\ufffd" not in "".join(pieces)
