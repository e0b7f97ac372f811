"""Simulated acceptance: times are those of real passes, what they accept is set."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tswift.decoding.tree import DraftTree

_SLACK = 1e-9  # of a product that should be whole and is a last bit less


class SimulatedWalk:
    """Accepts a set share of the drafted tokens, whatever was drawn; a walk for ``Decoding``.

    After any step the accepted tokens are the share of all that could have been accepted, rounded down, so that alpha
    is ``alpha`` in the end. Where a tree is too shallow for that, later steps make up for it as far as theirs go.

    Args:
        alpha: the share, above 0 and at most 1.
        depth: most tokens drafted along a path, by which alpha is divided.
    """

    def __init__(self, alpha: float, depth: int) -> None:
        self._per_step, self._steps, self._accepted = alpha * depth, 0, 0

    def __call__(self, tree: DraftTree, drawn: Sequence[int]) -> list[int]:
        """The nodes accepted, root first: the path to the first node deep enough. ``drawn`` is not looked at."""
        self._steps += 1
        owed = math.floor(self._per_step * self._steps + _SLACK) - self._accepted
        depth = min(owed, max(tree.depths))
        self._accepted += depth
        path = [tree.depths.index(depth)]
        while path[-1]:
            path.append(tree.parents[path[-1]])
        return path[::-1]
