"""Matches of contexts against a search through the whole text."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tswift.drafting.history import SuffixIndex

texts = st.lists(st.integers(0, 3), min_size=1, max_size=200)
EVERYWHERE = 1 << 20


def search(text: list[int], context: list[int], most: int, longest: int) -> list[tuple[int, int]]:
    """The same by looking everywhere."""
    found = []
    for end in range(len(text)):
        length = 0
        while length < min(longest, len(context), end + 1) and text[end - length] == context[-1 - length]:
            length += 1
        if length:
            found.append((end, length))
    return sorted(found, key=lambda match: (match[1], match[0]), reverse=True)[:most]


@settings(max_examples=200, deadline=None)
@given(texts, texts, st.lists(st.integers(1, 40), max_size=20), st.integers(1, 6))
def test_the_longest_and_then_the_latest_matches_are_found(text, context, pieces, most) -> None:
    """Whatever the pieces in which the text came."""
    contexts = SuffixIndex((1, 2, 4, 7), reach=EVERYWHERE)
    done = 0
    for piece in [*pieces, len(text)]:
        contexts.extend(text[done : done + piece])
        done = min(len(text), done + piece)
        assert len(contexts) == done
        assert contexts.find(context, most) == search(text[:done], context, most, 7)


@pytest.mark.parametrize("vocab", [3, 50, 5000])
def test_a_table_that_grows_finds_what_it_found(vocab: int) -> None:
    """Tables are filled one token at a time, and anew from the whole text when they grow."""
    text = [(number * number + number // 7) % vocab for number in range(5000)]
    one, whole = SuffixIndex(reach=EVERYWHERE), SuffixIndex(reach=EVERYWHERE)
    for token in text:
        one.extend([token])
    whole.extend(text)
    for start in range(0, 4900, 97):
        context = text[start : start + 14]
        expected = search(text, context, 4, 12)
        assert one.find(context, 4) == whole.find(context, 4) == expected


def test_a_short_reach_finds_true_matches_and_the_latest_of_the_longest_order() -> None:
    text = [1, 2, 3] * 500 + [7, 2, 3] + [9, 2, 3] * 100
    contexts = SuffixIndex((1, 2, 4), reach=4)
    contexts.extend(text)
    for context in ([3, 1, 2, 3], [5, 2, 3], [9, 2, 3]):
        found = contexts.find(context, 3)
        everywhere = dict(search(text, context, EVERYWHERE, 4))
        assert len(found) == 3
        assert all(everywhere[end] == length for end, length in found)
    assert contexts.find([3, 1, 2, 3], 3) == [(1499, 4), (1496, 4), (1493, 4)]


def test_what_never_was_is_not_found() -> None:
    contexts = SuffixIndex()
    assert contexts.find([1, 2], 4) == []
    contexts.extend([1, 2, 3])
    assert contexts.find([4], 4) == []
    assert contexts.find([4, 3], 4) == [(2, 1)]


@pytest.mark.parametrize("count", [1, 1000, 1023, 1024, 1025, 5000])
def test_a_text_takes_what_is_said(count: int) -> None:
    contexts, random = SuffixIndex(), Random(count)
    for _ in range(count):
        contexts.extend([random.randrange(500)])
    arrays = [*contexts._last, *contexts._before]
    held = sum(len(each) * each.itemsize for each in arrays) + 8 * len(contexts._text)
    assert SuffixIndex.bytes_for(count - 1) <= held <= SuffixIndex.bytes_for(count)
