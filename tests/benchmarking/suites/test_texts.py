"""Repetitions are marked where they are, and the page holds the texts as they are."""

from __future__ import annotations

import random
import re
from html import unescape
from typing import Any

from rich.console import Console

from tswift.benchmarking.suites.texts import page, pairs_of, plain, repeated, share, side_by_side, spans


def kept(tokens: list[int], label: str = "with penalty", seed: int = 0) -> dict[str, Any]:
    """A text whose tokens are words; some of them look like HTML."""
    pieces = [f" <w{token}&>" if token % 3 else f" w{token}" for token in tokens]
    return {"label": label, "prompt": "p", "prefill": 8, "seed": seed, "tokens": tokens, "pieces": pieces}


def test_repetitions_are_where_a_plain_search_finds_them() -> None:
    chance = random.Random(3)
    tokens = chance.choices(range(3), k=120)
    for length in (3, 5):
        marks = [False] * len(tokens)
        for start in range(len(tokens) - length + 1):
            gram = tokens[start : start + length]
            if any(tokens[before : before + length] == gram for before in range(start)):
                for index in range(start, start + length):
                    marks[index] = True
        assert repeated(tokens, length) == marks
        assert any(marks)
    assert repeated([1, 2], 8) == [False, False]


def test_a_page_holds_both_texts_with_what_they_repeat_marked() -> None:
    stale, fresh = kept([*range(10), 50, *range(9)], "without"), kept(list(range(20)))
    assert share(fresh) == 0
    assert share(stale) == 9 / 20
    assert [span.repeated for span in spans(stale)] == [False, True]
    assert "".join(span.text for span in spans(stale)) == "".join(stale["pieces"])
    assert len(spans(stale, last=9)) == 1
    record = {"suite": "case-study", "title": "A & B", "texts": [fresh, stale], "conclusion": {"lines": ["So."]}}
    html = page(record, "demo <x>")
    columns = re.findall(r"<section><h2>(.*?)</h2><p>(.*?)</p></section>", html, re.DOTALL)
    assert [heading for heading, _ in columns] == ["with penalty: 0% repeated", "without: 45% repeated"]
    for text, (_, body) in zip((fresh, stale), columns, strict=True):
        assert unescape(re.sub(r"</?mark>", "", body)) == "".join(text["pieces"])
    assert re.findall("<mark>(.*?)</mark>", columns[1][1]) == [
        spans(stale)[1].text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    ]
    assert "demo &lt;x&gt;" in html
    assert "<script" not in html


def test_texts_that_began_alike_stand_side_by_side() -> None:
    texts = [kept([1], label, seed) for label in ("with", "without") for seed in (0, 1)]
    assert [[(text["label"], text["seed"]) for text in pair] for pair in pairs_of(texts)] == [
        [("with", 0), ("without", 0)],
        [("with", 1), ("without", 1)],
    ]


def test_a_terminal_shows_the_ends_marked_without_colours(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("NO_COLOR", "1")
    pair = [kept(list(range(300))), kept([*range(10), 50, *range(9)], "without")]
    told = plain(pair)
    assert "« w0 <w1&>" in told
    assert " w9 " not in told.split("without")[0]  # the first ones of a long text are left out
    assert told.startswith("The last 240 of ")
    assert "The last" not in plain(pair[1:])  # all of it
    console = Console(force_terminal=True, width=100, record=True)
    with console.capture() as captured:
        console.print(side_by_side(pair))
    assert "\x1b[7m" in captured.get()
    assert "with penalty: 0% repeated" in captured.get()
