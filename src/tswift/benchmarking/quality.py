"""How much a text repeats itself: distinct n-grams, repetition rate, self-BLEU, compression.

All depend on the text's length: compare texts of the same length only.
"""

from __future__ import annotations

import lzma
import math
from collections import Counter
from collections.abc import Sequence

from tswift.decoding.stats import distinct

LONGEST = 4  # tokens of an n-gram
SEGMENT = 64  # tokens of a piece that self-BLEU holds against the others
QUALITY = (*(f"distinct_{n}" for n in range(1, LONGEST + 1)), "distinct", "seq_rep_4", "self_bleu", "compression")

_NO_MATCH = 0.1  # of an n-gram, where none matches: Chen and Cherry's first smoothing, or the product would be 0
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


def quality(tokens: Sequence[int], text: str) -> dict[str, float | None]:
    """The figures of a text, by the names of ``QUALITY``.

    Args:
        tokens: the generated ones.
        text: the same, decoded.

    Returns:
        ``distinct_1`` to ``distinct_4``: unique n-grams of tokens / n-grams (the paper's Distinct-n), and ``distinct``,
        their mean. ``seq_rep_4``: the share of 4-grams that were there before (Welleck et al., 2020). ``self_bleu`` and
        ``compression``: see below. None where the text is too short to say.
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

    Args:
        tokens: cut into pieces; what is left at the end is not looked at.
        segment: tokens of a piece. All are of one length, so brevity is never penalised.

    Returns:
        0 to 1; None for a text of less than two pieces.
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
    """Of each piece, its n-grams that another piece has too, each counted as often as the one that has most of it."""
    most: dict[tuple[int, ...], tuple[int, int, int]] = {}  # the highest count, the next highest, who has the highest
    for index, count in enumerate(counts):
        for gram, times in count.items():
            first, second, owner = most.get(gram, (0, 0, -1))
            most[gram] = (times, first, index) if times > first else (first, max(second, times), owner)
    return [
        sum(min(times, most[gram][most[gram][2] == index]) for gram, times in count.items())
        for index, count in enumerate(counts)
    ]
