"""What a pass over a model costs, by nodes and by the keys that each attends to."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a pass, linear in the keys, and between the numbers of nodes that are known.

    Attributes:
        nodes: numbers of nodes, rising; the first is 1.
        base: seconds of a pass over so many nodes and no keys.
        per_key: seconds more for every key.
        level: seconds of one level of heads, ranking included.
    """

    nodes: tuple[int, ...]
    base: tuple[float, ...]
    per_key: tuple[float, ...]
    level: float

    @property
    def sound(self) -> bool:
        """Whether these can be the costs of anything."""
        count = len(self.nodes)
        figures = (*self.base, *self.per_key, self.level)
        return (
            count == len(self.base) == len(self.per_key) > 1
            and self.nodes[0] == 1
            and list(self.nodes) == sorted(set(self.nodes))
            and all(0 <= figure < math.inf for figure in figures)
            and all(figure > 0 for figure in self.base)
        )

    def seconds(self, nodes: int, keys: int) -> float:
        """Of a pass over ``nodes`` nodes, each of which attends to ``keys`` keys; beyond the largest number it grows
        as between the last two."""
        right = min(max(bisect_left(self.nodes, nodes), 1), len(self.nodes) - 1)
        lower, upper = self.nodes[right - 1], self.nodes[right]
        share = (nodes - lower) / (upper - lower)
        first, second = (self.base[at] + self.per_key[at] * keys for at in (right - 1, right))
        return first + share * (second - first)

    def node(self, keys: int) -> float:
        """Of one node more, in a tree of usual size."""
        return (self.seconds(16, keys) - self.seconds(8, keys)) / 8


# In seconds on 2 cores of an AMD EPYC, with the bundled model (results/demo-cpu-epyc): for choices that are to be the
# same everywhere.
NOMINAL = PassCosts(
    nodes=(1, 5, 8, 16, 64),
    base=(3.3e-3, 4.0e-3, 4.2e-3, 4.8e-3, 9e-3),
    per_key=(9.3e-8, 18.4e-8, 19e-8, 24e-8, 60e-8),
    level=0.65e-3,
)
