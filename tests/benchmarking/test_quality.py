"""How much a text repeats itself, against the plainest way of counting."""

from __future__ import annotations

import random
import re
from html import unescape

import pytest

from tests.benchmarking.helpers import make_measurement, typed
from tswift.benchmarking.record import Group, SuiteRecord, SuiteText
from tswift.benchmarking.suite_run import quality, repeated, spans, texts_html
from tswift.benchmarking.summary import QUALITY, from_source


def grams(tokens, n):
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


@pytest.mark.parametrize("length", [1, 3, 4, 150, 700])
def test_figures_are_what_their_definitions_say(length):
    tokens = random.Random(length).choices(range(9), k=length)
    figures = quality(tokens)
    assert tuple(figures) == tuple(from_source(QUALITY))
    for n in range(1, 5):
        every = grams(tokens, n)
        assert figures[f"distinct_{n}"] == (len(set(every)) / len(every) if every else None)
    if length < 4:
        assert figures["distinct"] is figures["seq_rep_4"] is None
        return
    before = sum(gram in grams(tokens, 4)[:i] for i, gram in enumerate(grams(tokens, 4)))
    assert figures["seq_rep_4"] == pytest.approx(before / (length - 3))
    assert figures["distinct"] == pytest.approx(
        sum(figures[f"distinct_{n}"] for n in range(1, 5)) / 4
    )


def kept(tokens: list[int], label: str = "with penalty", seed: int = 0) -> SuiteText:
    """A text whose tokens are words; some of them look like HTML."""
    pieces = [f" <w{token}&>" if token % 3 else f" w{token}" for token in tokens]
    return SuiteText(label=label, prompt="p", prefill=8, seed=seed, tokens=tokens, pieces=pieces)


def shown(*texts: SuiteText) -> str:
    """The page of a suite with these texts."""
    times = {"started": "2026-11-23T14:00:00", "ended": "2026-11-23T14:10:00", "state": "finished"}
    groups = [Group("", typed(make_measurement()))]
    record = SuiteRecord(
        suite="case-study",
        title="A & B",
        **times,
        command=["x"],
        missing=[],
        groups=groups,
        texts=list(texts),
    )
    return texts_html(record, "demo <x>")


def test_repetitions_are_where_a_plain_search_finds_them():
    tokens = random.Random(3).choices(range(3), k=120)
    marks = [False] * len(tokens)
    for start in range(len(tokens) - 4):
        if any(tokens[before : before + 5] == tokens[start : start + 5] for before in range(start)):
            marks[start : start + 5] = [True] * 5
    assert repeated(tokens, 5) == marks
    assert any(marks)
    assert repeated([1, 2], 8) == [False, False]


def test_a_page_holds_both_texts_with_what_they_repeat_marked():
    stale, fresh = kept([*range(10), 50, *range(9)], "without"), kept(list(range(20)))
    assert [mark for _, mark in spans(stale)] == [False, True]
    assert "".join(part for part, _ in spans(stale)) == "".join(stale.pieces)
    html = shown(fresh, stale)
    columns = re.findall(r"<section><h2>(.*?)</h2><p>(.*?)</p></section>", html, re.DOTALL)
    assert [heading for heading, _ in columns] == [
        "with penalty: 0% repeated",
        "without: 45% repeated",
    ]
    for text, (_, body) in zip((fresh, stale), columns, strict=True):
        assert unescape(re.sub(r"</?mark>", "", body)) == "".join(text.pieces)
    assert re.findall("<mark>(.*?)</mark>", columns[1][1]) == [
        spans(stale)[1][0].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    ]
    assert "demo &lt;x&gt;" in html
    assert "<script" not in html
    seeds = shown(*(kept([1], label, seed) for label in ("with", "without") for seed in (0, 1)))
    assert [part.count("<section>") for part in seeds.split("<h3>")] == [0, 2, 2]
