"""Where in a growing text the last few tokens stood before: chains of equal hashes, as in LZ77 compressors.

A suffix automaton would know the longest match of any length, for about a kilobyte of Python objects a token, but not
which of its occurrences are the last ones. Chains are arrays: 56 to 80 bytes a token, and the last ones come first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice, repeat
from operator import mul

import numpy as np

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_LEAST = 1 << 10  # places of an empty table
_ORDERS = (1, 2, 3, 4, 6, 12)


class Contexts:
    """The positions of a text by the tokens up to them.

    Args:
        orders: lengths of context that are looked up, ascending. What a match has beyond one of them is counted up to
            the largest.
        reach: links of one chain that are followed at most, so that a context met a thousand times costs no more than
            one met sixteen times.
    """

    def __init__(self, orders: Sequence[int] = _ORDERS, reach: int = 16) -> None:
        self._orders, self._reach, self._longest = tuple(orders), reach, orders[-1]
        # one factor for each place of a context, counted from its end
        self._factors = list(
            islice(accumulate(repeat(_FACTOR), lambda power, factor: power * factor & _MASK), self._longest)
        )
        self._text: list[int] = []
        self._bits = _LEAST.bit_length() - 1
        self._allocate()

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._text)

    @staticmethod
    def bytes_for(tokens: int) -> int:
        """What a text of so many tokens takes: by order a link for each and a table, and pointers to the tokens."""
        places = max(_LEAST, 1 << tokens.bit_length())
        return len(_ORDERS) * array("i").itemsize * (tokens + places) + 8 * tokens

    def last(self) -> list[int]:
        """The text's last tokens, as many as count."""
        return self._text[-self._longest :]

    def _allocate(self) -> None:
        empty = array("i", [-1]) * (1 << self._bits)
        self._last = [array("i", empty) for _ in self._orders]  # the last position of a hash
        self._before = [array("i") for _ in self._orders]  # for each position the one before it of the same hash

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text: amortised constant time for each."""
        if len(self._text) + len(tokens) > 1 << self._bits:
            self._text += tokens
            self._bits = len(self._text).bit_length()
            self._rebuild()
            return
        for token in tokens:
            self._text.append(token)
            at = len(self._text) - 1
            places = self._places(self._text[-self._longest :])
            for last, before, place in zip(self._last, self._before, places, strict=True):
                before.append(last[place] if place >= 0 else -1)
                if place >= 0:
                    last[place] = at

    def _places(self, context: Sequence[int]) -> list[int]:
        """Where each order's hash of a context's end stands in its table; -1 for an order longer than the context."""
        values = list(accumulate(map(mul, reversed(context), self._factors)))
        shift, count = 64 - self._bits, len(values)
        return [(values[order - 1] & _MASK) >> shift if order <= count else -1 for order in self._orders]

    def _rebuild(self) -> None:
        """Fill larger tables from the whole text, as one token at a time would have filled them."""
        self._allocate()
        count = len(self._text)
        tokens = np.array(self._text, np.uint64)
        value, done = np.zeros(count, np.uint64), 0
        for index, order in enumerate(self._orders):
            for back in range(done, min(order, count)):
                value[back:] += tokens[: count - back] * np.uint64(self._factors[back])
            done = order
            places = (value >> np.uint64(64 - self._bits)).astype(np.int64)
            whole = np.argsort(places[order - 1 :], kind="stable") + order - 1  # positions by place, then in order
            before = np.full(count, -1, np.int32)
            same = places[whole[1:]] == places[whole[:-1]]
            before[whole[1:][same]] = whole[:-1][same]
            last = np.frombuffer(self._last[index], np.int32)
            last[places[whole]] = whole  # of equal places the last one counts
            self._before[index] = array("i", before.tobytes())

    def find(self, context: Sequence[int], most: int) -> list[tuple[int, int]]:
        """The positions whose tokens up to there end as a context does, those of the longest match first.

        Args:
            context: at least one token; its last ones count.
            most: positions wanted.

        Returns:
            Up to ``most`` pairs (position of the match's last token, length of the match, at most the longest order);
            of equal lengths the later first. Where no chain is longer than ``reach``, none is better.
        """
        text, context = self._text, list(context[-self._longest :])
        found: dict[int, int] = {}
        orders = range(len(self._orders))
        places = self._places(context)
        for index in reversed(orders):
            if places[index] < 0:
                continue
            order, before = self._orders[index], self._before[index]
            tail, at = context[-order:], self._last[index][places[index]]
            for _ in range(self._reach):
                if at < 0:
                    break
                if at not in found and text[at - order + 1 : at + 1] == tail:
                    length = order
                    while length < len(context) and length <= at and text[at - length] == context[-1 - length]:
                        length += 1
                    found[at] = length
                at = before[at]
            if len(found) >= most:
                break
        ranked = sorted(found.items(), key=lambda match: (match[1], match[0]), reverse=True)
        return ranked[:most]
