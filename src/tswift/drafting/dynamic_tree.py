"""Draft trees chosen anew in every step, of the candidates that pay.

What a node is worth is the probability that the text goes through it; what it costs is measured, as
the time that a pass over more nodes takes on this machine. Timings decide the tree and never the
text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.pass_costs import NOMINAL, PassCosts, PassTimes

_PRIOR_WEIGHT = 8.0  # observations that the probability guessed at first counts for
_HALF_LIFE = 2048.0  # observations after which older ones count for half: texts change


class AcceptanceEstimator:
    """Probabilities of candidates by their kind,
    which is whatever their source knows of them beforehand.

    A source guesses a probability; what is learned replaces it as observations of the kind come in.
    """

    def __init__(self) -> None:
        # of a kind: how many came true, and how many there were
        self._seen: dict[Hashable, list[float]] = {}

    def chance(self, kind: Hashable, guess: float) -> float:
        """The probability of a candidate, above 0 and below 1;
        ``guess`` counts as long as little is known.
        """
        true, count = self._seen.get(kind, (0.0, 0.0))
        return min(max((true + _PRIOR_WEIGHT * guess) / (count + _PRIOR_WEIGHT), 1e-6), 1 - 1e-6)

    def learn(self, kind: Hashable, came_true: bool) -> None:
        """A candidate of the kind was put to the test."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        seen[0] += came_true
        seen[1] += 1
        if seen[1] >= _HALF_LIFE:
            seen[:] = seen[0] / 2, seen[1] / 2


_FORGOTTEN_PER_STEP = 0.05  # of what is known of late, forgotten in a step


class TreeBudget:
    """Decides by expected tokens per second.

    It may depend on timings; the text does not depend on it.

    Args:
        costs: what steps cost.
        every: verify all nodes, as in a tree of a given shape.
        timed: correct the costs by the time that steps take; without it, choices are the same
            everywhere.

    Attributes:
        rate: tokens per second of late, by the costs; 0 before the first step.
        times: of passes; several budgets may share what they learn.
        learns: whether it is this one that tells them what a pass took.
    """

    def __init__(
        self, costs: PassCosts = NOMINAL, every: bool = False, timed: bool = False
    ) -> None:
        self.costs = costs
        self._every = every
        self.rate = 0.0
        self.times = PassTimes(costs, timed)
        self.learns = True
        # of 1, 2, ... nodes, as the times have it
        self._places: NDArray[np.int64] = np.zeros(0, np.int64)
        # the one under way: its nodes and keys, and seconds of its draft by the costs
        self._step = 1, 0, 0.0
        self._seconds = 0.0  # of the step under way
        # of late
        self._tokens = 0.0
        self._time = 0.0
        self._base = self._per_key = np.zeros(0)  # of passes over 1, 2, ... nodes
        self._texts = 1  # that share those

    def size(self, path_probs: Sequence[float], context: int, cost_s: float) -> int:
        """How many nodes to verify: of these, root first, over so many keys each,
        after so long a draft.
        """
        count = len(path_probs)
        if count > len(self._base) or self._texts != self.costs.texts:
            self._texts = self.costs.texts
            lines = [self.costs.line(n) for n in range(1, count + 1)]
            self._base, self._per_key = np.array(lines).T
            self._places = np.array([self.times.place(n) for n in range(1, count + 1)])
        passes = self._base[:count] + self._per_key[:count] * context
        factors = np.array([self.times.factor(place) for place in range(len(self.costs.nodes))])
        seconds = cost_s + passes * factors[self._places[:count]]
        best = count - 1 if self._every else int((np.cumsum(path_probs) / seconds).argmax())
        self._seconds = float(seconds[best])
        self._step = best + 1, context, cost_s
        return best + 1

    def learn(self, tokens: int, seconds: float) -> None:
        """The tree whose size was asked for last brought so many tokens in a step of so many
        seconds.
        """
        if self.learns:
            nodes, keys, drafting = self._step
            self.times.learn(nodes, self.costs.seconds(nodes, keys), seconds - drafting)
        self._tokens += tokens - _FORGOTTEN_PER_STEP * self._tokens
        self._time += self._seconds - _FORGOTTEN_PER_STEP * self._time
        self.rate = self._tokens / self._time

    def pays_off(self, tokens: float, seconds: float) -> bool:
        """Whether so many more expected tokens are worth so many more seconds."""
        return tokens >= self.rate * seconds


# gaps between scores are told apart by this much, and up to so many times
GAP = 0.5
FAR_GAP = 8
# chances by rank and gap, about those of the bundled heads over 2,500 tokens; what is learned soon
# replaces them
GUESSES = (
    (0.42, 0.62, 0.74, 0.83, 0.88),
    (0.27, 0.16, 0.07, 0.05, 0.03),
    (0.12, 0.08, 0.05, 0.03, 0.02),
    (0.06, 0.05, 0.03, 0.02, 0.01),
)
_UNBOUNDED = 1 << 31  # nodes
_UNKNOWN_CHANCE = 0.5  # probability of a token whose source says nothing of it, until more is known


class CandidateTree(DraftTree):
    """Proposed tokens, of which the likeliest are to be drafted.

    A candidate is put to the test when the text turns out to have gone through its parent.

    Args:
        root: the text's last token.
        depth: most tokens along a path below the root.
        acceptance: what is known of the kinds of candidates.

    Attributes:
        sources: which source gave the node its probability, by name; empty for the root.
        path_prob: the probability that the text goes through the node.
    """

    def __init__(self, root: int, depth: int, acceptance: AcceptanceEstimator) -> None:
        super().__init__(root, _UNBOUNDED, depth)
        self.path_prob = [1.0]
        self._acceptance = acceptance
        self._proposed: list[list[tuple[int, Hashable]]] = [[]]  # below each node: token, kind

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to the node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def propose(
        self, node: int, token: int, source: str, about: Hashable, guess: float
    ) -> int | None:
        """Say that ``token`` may follow ``node``.

        Of several sources' probabilities for it the highest counts.

        Args:
            source: name of who says so.
            about: what the source knows of the candidate, out of few values: its probability is
                learned by it.
            guess: its probability, given that the text goes through ``node``, until something is
                learned.

        Returns:
            The child; None if that is too deep.
        """
        child = self.grow(node, token, source)
        if child is None:
            return None
        kind = (source, about)
        self._proposed[node].append((token, kind))
        path_prob = self.path_prob[node] * self._acceptance.chance(kind, guess)
        if child == len(self.path_prob):
            self.path_prob.append(path_prob)
            self._proposed.append([])
        elif path_prob > self.path_prob[child]:
            self.sources[child] = source
            self._scale(child, path_prob / self.path_prob[child])
        return child

    def propose_ranked(
        self,
        node: int,
        tokens: Sequence[int],
        scores: Sequence[float],
        source: str,
        about: tuple[Hashable, ...],
    ) -> list[int]:
        """Propose tokens below a node that is not too deep, best first,
        with chances by their scores; their nodes.
        """
        children = []
        for rank, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            rival = scores[0] if rank else scores[1] if len(scores) > 1 else -inf
            step = round(min(abs(score - rival) / GAP, FAR_GAP))
            guesses = GUESSES[min(rank, len(GUESSES) - 1)]
            child = self.propose(
                node, token, source, (*about, rank, step), guesses[min(step, len(guesses) - 1)]
            )
            assert child is not None
            children.append(child)
        return children

    def add(self, path: Iterable[int], source: str) -> None:
        """Propose a path of tokens of which nothing is known but how deep they are."""
        node: int | None = 0
        for token in path:
            if node is None:
                return
            node = self.propose(node, token, source, self.depths[node], _UNKNOWN_CHANCE)

    def likeliest(self, limit: int) -> list[int]:
        """The root and the nodes with the highest probabilities, at most ``limit``,
        parents before their children.
        """
        # a child's is below its parent's, which has a smaller number, too; sorting keeps the order
        # of equals
        return sorted(range(len(self)), key=self.path_prob.__getitem__, reverse=True)[:limit]

    def prune(self, nodes: Sequence[int]) -> DraftTree:
        """The draft tree of some nodes, each of which comes after its parent;
        the root is the first.
        """
        tree = DraftTree(self.tokens[0], len(nodes), self.depth)
        places: dict[int, Any] = {0: 0}
        for node in nodes[1:]:
            places[node] = tree.grow(
                places[self.parents[node]], self.tokens[node], self.sources[node]
            )
        return tree

    def learn(self, came: Sequence[int]) -> None:
        """Learn from what the text went on with, whether it was in the draft tree or not."""
        node: int | None = 0
        for token in came:
            if node is None:
                return
            for proposed, kind in self._proposed[node]:
                self._acceptance.learn(kind, proposed == token)
            node = self.child(node, token)

    def _scale(self, node: int, factor: float) -> None:
        """Raise the probability of a node, and of what is below it in proportion."""
        self.path_prob[node] *= factor
        for child in self.children[node].values():
            self._scale(child, factor)


@dataclass
class DynamicTreeDrafter(Drafter):
    """A method's sources of candidates, and the budget by which their tree is pruned.

    Attributes:
        budget: how large a tree pays.
    """

    budget: TreeBudget = field(default_factory=TreeBudget)
    _acceptance: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    _drafted: tuple[CandidateTree, int] | None = None  # and the text's length then

    def propose(self, context: Context, max_new: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        tree = CandidateTree(context.text[-1], min(max_new - 1, self.depth), self._acceptance)
        self._drafted = tree, len(context.text)
        self.fill(tree, context)
        nodes = tree.likeliest(self.limit)
        spent = self.draft_seconds(self.budget.costs, context)
        return tree.prune(
            nodes[
                : self.budget.size(
                    [tree.path_prob[node] for node in nodes], context.kv.length, spent
                )
            ]
        )

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        self.budget.costs.share(context.texts)
        if self._drafted is not None:
            tree, length = self._drafted
            tree.learn(context.text[length:])
            self.budget.learn(len(context.text) - length, context.drafting + context.passing)
            self._drafted = None
