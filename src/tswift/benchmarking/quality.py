"""How much texts repeat themselves: distinct n-grams, repetition rate, self-BLEU, compression; repetitions marked.

All figures depend on the text's length: compare texts of the same length only.
"""

from __future__ import annotations

import lzma
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tswift.decoding.stats import distinct

LONGEST = 4  # tokens of an n-gram
SEGMENT = 64  # tokens of a piece that self-BLEU compares with the others
REPEAT = 8  # tokens in a row that occurred before are marked as a repetition

_NO_MATCH = 0.1  # of an n-gram, where none matches: Chen and Cherry's first smoothing, or the product would be 0
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


def quality(tokens: Sequence[int], text: str) -> dict[str, float | None]:
    """Metrics of a text, given as tokens and decoded; None where it is too short.

    ``distinct_1`` to ``distinct_4`` are unique n-grams of tokens / n-grams (the paper's Distinct-n), ``distinct`` their
    mean, ``seq_rep_4`` the share of 4-grams that occurred before (Welleck et al., 2020).
    """
    shares = [distinct(tokens, n) for n in range(1, LONGEST + 1)]
    known = len(tokens) >= LONGEST
    return {
        **{f"distinct_{n}": share if len(tokens) >= n else None for n, share in enumerate(shares, 1)},
        "distinct": sum(shares) / LONGEST if known else None,
        "seq_rep_4": 1 - shares[-1] if known else None,
        "self_bleu": self_bleu(tokens),
        "compression": compression(text),
    }


def self_bleu(tokens: Sequence[int], segment: int = SEGMENT) -> float | None:
    """Mean BLEU-4 of each piece of a text against all of its other pieces (Zhu et al., 2018); higher repeats more.

    Pieces have ``segment`` tokens each, so brevity is never penalised; a shorter rest at the end is left out. None for
    a text of less than two pieces.
    """
    pieces = [tokens[start : start + segment] for start in range(0, len(tokens) - segment + 1, segment)]
    if len(pieces) < 2:
        return None
    logs = [0.0] * len(pieces)
    for n in range(1, LONGEST + 1):
        counts = [Counter(zip(*(piece[i:] for i in range(n)), strict=False)) for piece in pieces]
        for index, matches in enumerate(_matches(counts)):
            logs[index] += math.log((matches or _NO_MATCH) / (segment - n + 1)) / LONGEST
    return sum(map(math.exp, logs)) / len(logs)


def compression(text: str) -> float | None:
    """Bytes of a text / bytes that LZMA makes of it, headers apart; higher repeats more. None for no text."""
    data = text.encode(errors="backslashreplace")
    return len(data) / len(lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)) if data else None


def _matches(counts: Sequence[Counter[tuple[int, ...]]]) -> list[int]:
    """Of each piece, its n-grams found in another piece, each at most as often as in the piece with the most."""
    highest: dict[tuple[int, ...], tuple[int, int, int]] = {}  # the two highest counts, and which piece has the first
    for index, count in enumerate(counts):
        for gram, times in count.items():
            first, second, owner = highest.get(gram, (0, 0, -1))
            highest[gram] = (times, first, index) if times > first else (first, max(second, times), owner)
    return [
        sum(min(times, highest[gram][highest[gram][2] == index]) for gram, times in count.items())
        for index, count in enumerate(counts)
    ]


def repeated(tokens: Sequence[int], length: int = REPEAT) -> list[bool]:
    """Of each token, whether it is part of ``length`` tokens in a row that occurred before."""
    marks, seen = [False] * len(tokens), set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            marks[start : start + length] = [True] * length
        seen.add(gram)
    return marks


def spans(text: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """A text of ``suite.json`` as runs of characters, each with whether it is repeated."""
    parts: list[tuple[str, bool]] = []
    for piece, mark in zip(text["pieces"], repeated(text["tokens"]), strict=True):
        if parts and (parts[-1][1] == mark or not piece):
            parts[-1] = parts[-1][0] + piece, parts[-1][1]
        else:
            parts.append((piece, mark))
    return parts


def texts_html(record: Mapping[str, Any], about: str) -> str:
    """All texts of a ``suite.json`` as a self-contained page; ``about`` is a line on the model."""
    sections: dict[str, str] = defaultdict(str)
    for text in record["texts"]:
        where = f"{text['prompt']}, prefill {text['prefill']:,}, seed {text['seed']}, {len(text['tokens']):,} tokens"
        heading = f"{text['label']}: {sum(repeated(text['tokens'])) / len(text['tokens']):.0%} repeated"
        parts = (f"<mark>{escape(part)}</mark>" if mark else escape(part) for part, mark in spans(text))
        section = f"<section><h2>{escape(heading)}</h2><p>{''.join(parts)}</p></section>"
        sections[f"<h3>{escape(where)}</h3>\n"] += section
    title = escape(f"{record['suite']}: {record['title']}")
    return (
        f"<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"<h1>{title}</h1>\n<p class=about>{escape(about)}</p>\n"
        f"<p class=about><mark>Marked</mark>: {REPEAT} or more tokens that the text has had before, in order.</p>\n"
        f"{''.join(f'{where}<div>{texts}</div>' for where, texts in sections.items())}</html>\n"
    )


_STYLE = """
body { font: 16px/1.5 Georgia, serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #111; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em } h3 { font-size: 1em; font-weight: normal; color: #444 }
.about { font: 14px/1.5 system-ui, sans-serif; color: #333; margin: .3em 0 }
div { display: grid; grid-template-columns: repeat(auto-fit, minmax(20em, 1fr)); gap: 2em }
section p { white-space: pre-wrap; overflow-wrap: anywhere }
mark { background: #ffd54d; color: inherit }
"""
