"""Draft trees chosen anew in every step: sources offer candidates with chances, and those that pay become nodes.

What a node is worth is the chance that the text goes through it; what it costs is measured, as the time that a pass
over more nodes takes on this machine. Timings decide the tree and never the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.models.passes import NOMINAL, PassCosts

_WEIGHT = 8.0  # observations that the chance given at first counts for
_MEMORY = 2048.0  # observations after which older ones count for half: texts change


class AcceptanceEstimator:
    """Chances of offers by their kind, which is whatever their source knows of them beforehand.

    A source guesses a chance; what is learned replaces it as observations of the kind come in.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[float]] = {}  # of a kind: how many came true, and how many there were

    def chance(self, kind: Hashable, guess: float) -> float:
        """The chance of an offer, above 0 and below 1.

        Args:
            kind: of the offer.
            guess: what its source thinks, between 0 and 1; it counts as long as little is known of the kind.
        """
        true, count = self._seen.get(kind, (0.0, 0.0))
        chance = (true + _WEIGHT * guess) / (count + _WEIGHT)
        return min(max(chance, 1e-6), 1 - 1e-6)

    def learn(self, kind: Hashable, came_true: bool) -> None:
        """An offer of the kind was put to the test."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        seen[0] += came_true
        seen[1] += 1
        if seen[1] >= _MEMORY:
            seen[0] /= 2
            seen[1] /= 2


_STEADY = 0.05  # of what is known of late, forgotten in a step


class TreeBudget:
    """Decides by expected tokens per second. It may depend on timings; the text does not depend on it.

    Args:
        costs: what passes cost.

    Attributes:
        rate: tokens per second of late, by the costs; 0 before the first step.
    """

    def __init__(self, costs: PassCosts = NOMINAL) -> None:
        self.costs = costs
        self.rate = 0.0
        self._seconds = 0.0  # of the step under way
        self._tokens, self._time = 0.0, 0.0  # of late

    def size(self, reach: Sequence[float], context: int, spent: float) -> int:
        """How many nodes to verify.

        Args:
            reach: chances of the nodes, root first, falling.
            context: keys that each attends to.
            spent: seconds that drafting took.
        """
        best, size, expected = 0.0, 1, 0.0
        for count, chance in enumerate(reach, start=1):
            expected += chance
            seconds = spent + self.costs.seconds(count, context)
            if expected / seconds > best:
                best, size, self._seconds = expected / seconds, count, seconds
        return size

    def learn(self, tokens: int) -> None:
        """The tree whose size was asked for last brought so many tokens."""
        self._tokens += tokens - _STEADY * self._tokens
        self._time += self._seconds - _STEADY * self._time
        self.rate = self._tokens / self._time

    def worth(self, tokens: float, seconds: float) -> bool:
        """Whether so many more expected tokens are worth so many more seconds."""
        return tokens >= self.rate * seconds


_PLAIN = 0.5  # chance of a token whose source says nothing of it, until more is known


class CandidateTree:
    """A trie of offered tokens below the last token of the text.

    Node 0 is the root. An offer is put to the test when the text turns out to have gone through its parent.

    Args:
        root: the text's last token.
        depth: most tokens along a path below the root.
        calibration: what is known of the kinds of offers.

    Attributes:
        tokens, parents, depths: one entry per node; parents come before their children.
        sources: which source gave the node its chance, by name; empty for the root.
        reach: the chance that the text goes through the node.
    """

    def __init__(self, root: int, depth: int, calibration: AcceptanceEstimator) -> None:
        self.tokens, self.parents, self.depths, self.sources = [root], [-1], [0], [""]
        self.reach = [1.0]
        self.depth = depth
        self._calibration = calibration
        self._children: dict[tuple[int, int], int] = {}
        self._offers: dict[int, list[tuple[int, Hashable]]] = {}  # by parent: token, kind

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, if there is one."""
        return self._children.get((node, token))

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to the node."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def offer(self, node: int, token: int, source: str, about: Hashable, guess: float) -> int | None:
        """Say that ``token`` may follow ``node``. Of several sources' chances for it the highest counts.

        Args:
            node: below which.
            token: what may follow it.
            source: name of who says so.
            about: what the source knows of the offer, out of few values: its chance is learned by it.
            guess: its chance, given that the text goes through ``node``, until something is learned.

        Returns:
            The child; None if that is too deep.
        """
        if self.depths[node] >= self.depth:
            return None
        kind = (source, about)
        self._offers.setdefault(node, []).append((token, kind))
        reach = self.reach[node] * self._calibration.chance(kind, guess)
        known = self.child(node, token)
        if known is None:
            known = len(self.tokens)
            self._children[node, token] = known
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.sources.append(source)
            self.reach.append(reach)
        elif reach > self.reach[known]:
            self.sources[known] = source
            self._raise(known, reach)
        return known

    def add(self, path: Iterable[int], source: str) -> None:
        """Offer a path of tokens of which nothing is known but how deep they are."""
        node: int | None = 0
        for token in path:
            if node is None:
                return
            node = self.offer(node, token, source, self.depths[node], _PLAIN)

    def likeliest(self, limit: int) -> list[int]:
        """The root and the nodes with the highest chances, at most ``limit``, parents before their children."""
        # a child's chance is below its parent's, which has a smaller number, too
        return sorted(range(len(self)), key=lambda node: (-self.reach[node], node))[:limit]

    def cut(self, nodes: Sequence[int]) -> DraftTree:
        """The draft tree of some nodes, each of which comes after its parent; the root is the first."""
        tree = DraftTree(self.tokens[0], len(nodes), self.depth)
        places = {0: 0}
        for node in nodes[1:]:
            grown = tree.grow(places[self.parents[node]], self.tokens[node], self.sources[node])
            assert grown is not None
            places[node] = grown
        return tree

    def learn(self, came: Sequence[int]) -> None:
        """Learn from what the text went on with, whether it was in the draft tree or not."""
        node: int | None = 0
        for token in came:
            if node is None:
                return
            for offered, kind in self._offers.get(node, ()):
                self._calibration.learn(kind, offered == token)
            node = self.child(node, token)

    def _raise(self, node: int, reach: float) -> None:
        """Give a node a higher chance, and what is below it in proportion."""
        factors = {node: reach / self.reach[node]}
        for each in range(node, len(self)):
            factor = factors.get(each) or factors.get(self.parents[each])
            if factor is not None:
                factors[each] = factor
                self.reach[each] *= factor


class CostedSource(Protocol):
    """Something that offers how the text may go on, and says what that costs; else as a source.

    Attributes:
        spent: seconds that the last proposal took, by the plan's costs.
    """

    spent: float

    def start(self, context: Context) -> None:
        """As :meth:`Source.start`."""

    def propose(self, sketch: CandidateTree, context: Context) -> None:
        """Offer what may come."""

    def committed(self, context: Context, most: int) -> None:
        """As :meth:`Source.committed`."""


@dataclass
class DynamicTreeDrafter(Drafter):
    """What a method drafts from, and the plan by which a tree is cut from what that offers.

    Attributes:
        offering: its sources.
        plan: how large a tree pays.
        spent: seconds that drafting the last tree took, by the plan's costs.
    """

    offering: Sequence[CostedSource] = ()
    plan: TreeBudget = field(default_factory=TreeBudget)
    spent: float = 0.0
    _calibration: AcceptanceEstimator = field(default_factory=AcceptanceEstimator)
    _sketched: tuple[CandidateTree, int] | None = None  # and the text's length then

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        sketch = CandidateTree(context.text[-1], min(wanted - 1, self.depth), self._calibration)
        self._sketched = sketch, len(context.text)
        for source in self.offering:
            source.start(context)
        for source in self.offering:
            source.propose(sketch, context)
        self.spent = sum(source.spent for source in self.offering)
        nodes = sketch.likeliest(self.limit)
        size = self.plan.size([sketch.reach[node] for node in nodes], context.kv.length, self.spent)
        return sketch.cut(nodes[:size])

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        if self._sketched is not None:
            sketch, length = self._sketched
            sketch.learn(context.text[length:])
            self.plan.learn(len(context.text) - length)
            self._sketched = None

    def keep_up(self, context: Context, most: int) -> None:
        """As :meth:`Drafter.keep_up`."""
        super().keep_up(context, most)
        for source in self.offering:
            source.committed(context, most)
