"""Offering what is recalled: below the likeliest nodes of a sketch, whoever offered those, as deep as it pays."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from tswift.decoding.drafter import Context
from tswift.drafting.plan import Plan
from tswift.drafting.recall import Guess, Recall
from tswift.drafting.sketch import Sketch

_WIDTH = 3  # candidates offered below a node
_ROUND = 8  # nodes asked about at a time
_LONG = 12  # a match from which on the text is followed
_AHEAD = 8  # tokens that it is followed at a time
_STEP, _FAR = 0.5, 4  # gaps between scores are told apart by this much, and up to so many times
# chances of the first guess by match and lead, and of the others by how far they are behind, measured on texts of the
# bundled model
_FIRST = {
    1: (0.28, 0.34, 0.42, 0.50, 0.56),
    2: (0.42, 0.53, 0.68, 0.73, 0.83),
    3: (0.44, 0.62, 0.77, 0.80, 0.88),
    4: (0.56, 0.76, 0.86, 0.90, 0.95),
    _LONG: (0.70, 0.90, 0.95, 0.97, 0.98),
}
_OTHERS = ((0.26, 0.17, 0.10, 0.07, 0.06), (0.13, 0.09, 0.05, 0.04, 0.02))
_OPINIONS = (0.3, 0.6, 0.85)  # chances that others give are told apart by these
_UNNAMED, _ALONE = -1, -2  # others name other tokens; there are no others
_DOUBT = 0.3  # what it does to the odds that others name other tokens
_SECONDS = 1e-4  # that a guess takes on the host
_GAIN = 0.4  # tokens that a guess gains if the text goes through its node


class RecallSource:
    """Guesses below the likeliest nodes of a sketch.

    It comes after the other sources, as it knows other things than they do: where it agrees with one of them both are
    right far more often (84% of such tokens were drawn, of the bundled model), and where not, far less.

    Args:
        recall: of the text; nothing yet.
        plan: says whether a guess pays.
        limit: most nodes of the tree.

    Attributes:
        follows: whether the text is followed where a long match stood before.
    """

    name = "reuse"

    def __init__(self, recall: Recall, plan: Plan, limit: int) -> None:
        self._recall, self._plan, self._limit = recall, plan, limit
        self.follows = True
        self.spent = 0.0

    def start(self, context: Context) -> None:
        """Nothing: which nodes are likely is not known yet."""

    def propose(self, sketch: Sketch, context: Context) -> None:
        """Guess below the likeliest nodes, and then below the likeliest of those that came of it."""
        self.spent = 0.0
        asked: set[int] = set()
        while nodes := self._pay(sketch, asked, context):
            guesses = self._guess(sketch, nodes, context)
            asked.update(nodes)
            for node, guess in zip(nodes, guesses, strict=True):
                self._offer(sketch, node, guess)
            for node, guess in zip(nodes, guesses, strict=True):
                if guess.match == _LONG and self.follows:
                    self._follow(sketch, node, guess, asked, context)

    def _pay(self, sketch: Sketch, asked: set[int], context: Context) -> list[int]:
        """The likeliest nodes to guess below, those left out that were asked or do not pay."""
        price = _SECONDS + self._plan.costs.node(context.kv.length)
        nodes: list[int] = []
        for node in sketch.likeliest(self._limit):
            if len(nodes) == _ROUND or not self._plan.worth(_GAIN * sketch.reach[node], price):
                break
            if node not in asked and sketch.depths[node] < sketch.depth:
                nodes.append(node)
        return nodes

    def _guess(
        self, sketch: Sketch, nodes: Sequence[int], context: Context, ends: Sequence[Sequence[int]] = ()
    ) -> list[Guess]:
        """What may be drawn below nodes, or below so many tokens more."""
        self.spent += _SECONDS * len(nodes)
        unknown = context.text[len(self._recall) :]  # the root, and what was drafted of a text that is itself a draft
        paths = [[*unknown, *sketch.path(node)] for node in nodes]
        if ends:
            paths = [[*path, *end] for path, end in zip(paths, ends, strict=True)]
        return self._recall.guess(paths, context.sampler, _WIDTH)

    def _offer(self, sketch: Sketch, node: int, guess: Guess) -> None:
        others = [child for child, parent in enumerate(sketch.parents) if parent == node]
        named = {sketch.tokens[child]: sketch.reach[child] / sketch.reach[node] for child in others}
        match = guess.match if guess.match == _LONG else min(guess.match, 4)
        for rank, (token, score) in enumerate(zip(guess.tokens, guess.scores, strict=True)):
            rival = guess.scores[0] if rank else guess.scores[1] if len(guess.scores) > 1 else -1e9
            step = round(min(abs(score - rival) / _STEP, _FAR))
            chance = _OTHERS[rank - 1][step] if rank else _FIRST[match][step]
            opinion = _ALONE
            if named:
                theirs = named.get(token)
                opinion = _UNNAMED if theirs is None else bisect(_OPINIONS, theirs)
                odds = chance / (1 - chance) * (_DOUBT if theirs is None else theirs / (1 - theirs))
                chance = odds / (1 + odds)
            sketch.offer(node, token, self.name, (match, rank, step, opinion), chance)

    def _follow(self, sketch: Sketch, node: int, guess: Guess, asked: set[int], context: Context) -> None:
        """Guess along what followed a long match, at once, as long as that is what is guessed."""
        ahead = context.text[guess.place + 1 : guess.place + 1 + min(_AHEAD, sketch.depth - sketch.depths[node] - 1)]
        ends = [ahead[:count] for count in range(1, len(ahead) + 1)]
        for token, further in zip(ahead, self._guess(sketch, [node] * len(ends), context, ends), strict=True):
            child = sketch.child(node, token) if guess.tokens[:1] == [token] else None
            if child is None or child in asked:
                return
            asked.add(child)
            self._offer(sketch, child, further)
            node, guess = child, further

    def committed(self, context: Context, most: int) -> None:
        """Nothing: whose memory it is takes in the text."""
