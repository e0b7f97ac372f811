"""Drafting by reuse: n-grams of the text so far, the most frequent for each first token (paper, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

from tswift.decoding.tree import DraftTree
from tswift.drafting.source import Context


class NgramTable:
    """Counts of n-grams by first token, with the k most frequent continuations always at hand.

    Args:
        n: tokens of an n-gram, the first one included; at least 2.
        k: continuations kept ready for each first token. Of equally frequent ones the one counted last wins.
    """

    def __init__(self, n: int = 4, k: int = 20) -> None:
        self.n, self.k = n, k
        self._counts: dict[tuple[int, ...], int] = {}
        self._best: dict[int, list[tuple[int, ...]]] = {}

    def count(self, ngram: Sequence[int]) -> None:
        """Count one n-gram once more."""
        gram = tuple(ngram)
        count = self._counts.get(gram, 0) + 1
        self._counts[gram] = count
        best = self._best.setdefault(gram[0], [])
        tail = gram[1:]
        if tail in best:
            best.remove(tail)
        # a count grows by one, so whatever is not among the best now can only enter by this call
        place = len(best)
        while place > 0 and self._counts[gram[:1] + best[place - 1]] <= count:
            place -= 1
        if place < self.k:
            best.insert(place, tail)
            del best[self.k :]

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        """The k most frequent continuations of a token, each of n - 1 tokens, most frequent first."""
        return self._best.get(first, [])


class ReuseSource:
    """Continuations of a token the text has had before.

    Args:
        table: an empty table, filled from the text as it grows.
        below: depth of the nodes whose token is continued: 0 for the root, 1 for what another source put below it.
        recent: also reuse what is still in the penalty window (the reference does not).
    """

    name = "reuse"

    def __init__(self, table: NgramTable, below: int, recent: bool) -> None:
        self._table, self._below, self._recent = table, below, recent
        self._counted = 0  # tokens whose n-grams are in the table

    def start(self, context: Context) -> None:
        """Count the n-grams that have become complete, or have left the penalty window."""
        params = context.sampler.params
        hidden = params.window if params.penalises and not self._recent else 0
        n = self._table.n
        for end in range(max(self._counted, n - 1) + 1, len(context.text) - hidden + 1):
            self._table.count(context.text[end - n : end])
            self._counted = end

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Hang the continuations below every node of the chosen depth."""
        for node in [n for n in range(len(tree)) if tree.depths[n] == self._below]:
            head = [tree.tokens[node]] if self._below else []
            for tail in self._table.continuations(tree.tokens[node]):
                tree.add([*head, *tail], self.name)

    def committed(self, context: Context, most: int) -> None:
        """Nothing yet: counting can wait until the device has something to do."""
