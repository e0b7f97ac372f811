"""N-grams of the text so far, reused as drafts, by first token (paper, section 3.4).

On a device they are kept in a table whose rows the host updates while the device drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.drafter import REUSE, Context, DraftTree, Source


class NgramTable:
    """Counts of n-grams by first token, with the k most frequent continuations always at hand.

    When it is full it forgets the rarest, and of equally rare ones those not counted for longest,
    until half are left.

    Args:
        n: tokens of an n-gram, the first one included; at least 2.
        k: continuations kept ready for each first token. Of equally frequent ones the one counted
            last wins.
        most: n-grams that are counted at a time; at least 2. The default takes 45 to 56 MB, and 75
            while it forgets (measured, n-grams of four tokens).
    """

    def __init__(self, n: int = 4, k: int = 20, most: int = 1 << 18) -> None:
        self.n = n
        self.k = k
        self.most = most
        self._counts: dict[tuple[int, ...], int] = {}  # those counted last come last
        self._best: dict[int, list[tuple[int, ...]]] = {}
        # first tokens whose continuations changed since somebody cleared this
        self.changed: set[int] = set()

    def __len__(self) -> int:
        """How many n-grams are counted."""
        return len(self._counts)

    def count(self, ngram: Sequence[int]) -> None:
        """Count one n-gram once more."""
        gram = tuple(ngram)
        self.changed.add(gram[0])
        count = self._counts.pop(gram, 0) + 1
        self._counts[gram] = count
        best = self._best.setdefault(gram[0], [])
        if gram in best:
            best.remove(gram)
        # a count grows by one, so whatever is not among the best now can only enter by this call
        place = len(best)
        while place > 0 and self._counts[best[place - 1]] <= count:
            place -= 1
        best.insert(place, gram)
        del best[self.k :]
        if len(self._counts) > self.most:
            self._forget()

    def _forget(self) -> None:
        """Halve the table."""
        self.changed.update(self._best)
        # sorting keeps the order of equals. Whatever is not among the best ranks below them, and
        # goes before them
        rarest = sorted(self._counts, key=self._counts.__getitem__)
        for gram in rarest[: len(rarest) - self.most // 2]:
            del self._counts[gram]
        best = (
            (first, [gram for gram in grams if gram in self._counts])
            for first, grams in self._best.items()
        )
        self._best = {first: grams for first, grams in best if grams}

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        """The k most frequent continuations of a token, each of n - 1 tokens,
        most frequent first.
        """
        return [gram[1:] for gram in self._best.get(first, ())]


class ReuseSource(Source):
    """Continuations of a token the text has had before.

    Args:
        table: an empty table, filled from the text as it grows.
        below: depth of the nodes whose token is continued: 0 for the root, 1 for what another
            source put below it.
        recent: also reuse what is still in the penalty window (the reference does not).
    """

    name = REUSE

    def __init__(self, table: NgramTable, below: int, recent: bool) -> None:
        self.table = table
        self._below = below
        self._recent = recent
        self._counted = 0  # tokens whose n-grams are in the table

    def start(self, context: Context) -> None:
        """Count the n-grams that have become complete, or have left the penalty window."""
        sampler = context.sampler
        hidden = sampler.params.window if sampler.penalises and not self._recent else 0
        n = self.table.n
        for end in range(max(self._counted, n - 1) + 1, len(context.text) - hidden + 1):
            self.table.count(context.text[end - n : end])
            self._counted = end

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Hang the continuations below every node of the chosen depth."""
        for node in [n for n in range(len(tree.tokens)) if tree.depths[n] == self._below]:
            head = [tree.tokens[node]] if self._below else []
            for tail in self.table.continuations(tree.tokens[node]):
                tree.add([*head, *tail], self.name)


class NgramRows:
    """A device table of n-grams: one row of so many nodes per first token,
    with its most frequent continuations.

    Up to ``updates`` rows are updated in a step; more are copied apart from the block.

    Attributes:
        trees: ``[2, V + 1, nodes]`` int64; the last row stands for no token. Tokens: -1 where a row
            has fewer nodes. Parents: 0 for the first token, i + 1 for the row's node i.
    """

    def __init__(
        self, source: ReuseSource, vocab_size: int, nodes: int, updates: int, device: torch.device
    ) -> None:
        self._source = source
        self.nothing = vocab_size
        self._nodes = nodes
        self._updates = updates
        # its part of the block that the host sends
        self.sections = {"rows": updates, "trees": 2 * updates * nodes}
        self.trees = torch.zeros(2, vocab_size + 1, nodes, dtype=torch.int64, device=device)
        self.trees[0] = -1

    def prepare(self, context: Context, host: dict[str, np.ndarray]) -> None:
        """Count new n-grams, and put the rows that changed into the block."""
        self._source.start(context)
        table = self._source.table
        firsts = [*table.changed]
        table.changed = set()
        if len(firsts) > self._updates:  # a prompt, or the table has forgotten the rarest
            self.trees[:, firsts] = torch.from_numpy(self._made(firsts)).to(self.trees.device)
            firsts = []
        firsts += [self.nothing] * (self._updates - len(firsts))
        host["rows"][:] = firsts
        host["trees"][:] = self._made(firsts).reshape(-1)

    def _made(self, firsts: Sequence[int]) -> np.ndarray:
        """``[2, n, nodes]``: the rows of first tokens."""
        made = np.zeros((2, len(firsts), self._nodes), np.int64)
        made[0] = -1
        for row, first in enumerate(firsts):
            tree = DraftTree(first, self._nodes + 1)
            for tail in self._source.table.continuations(first):
                tree.add(tail, REUSE)
            made[:, row, : len(tree) - 1] = tree.tokens[1:], tree.parents[1:]
        return made

    def update(self, device: dict[str, Tensor]) -> None:
        """Take the changed rows from the block."""
        self.trees.index_copy_(
            1, device["rows"], device["trees"].view(2, self._updates, self._nodes)
        )
