"""What all sources think may come, with chances; the draft tree is cut from it, so that every node earns its place."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from tswift.decoding.tree import DraftTree
from tswift.drafting.calibration import Calibration

_PLAIN = 0.5  # chance of a token whose source says nothing of it, until more is known


class Sketch:
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

    def __init__(self, root: int, depth: int, calibration: Calibration) -> None:
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
