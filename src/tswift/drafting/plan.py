"""How large a draft tree pays: what its nodes promise, against what a pass over them costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tswift.models.costs import NOMINAL, PassCosts

_STEADY = 0.05  # weight of the newest step in the running rate


class Plan:
    """Decides by expected tokens per second. It may depend on timings; the text does not depend on it.

    Args:
        costs: what passes cost.

    Attributes:
        rate: expected tokens per second of late; 0 before the first step.
    """

    def __init__(self, costs: PassCosts = NOMINAL) -> None:
        self.costs = costs
        self.rate = 0.0

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
            rate = expected / (spent + self.costs.seconds(count, context))
            if rate > best:
                best, size = rate, count
        self.rate = best if not self.rate else (1 - _STEADY) * self.rate + _STEADY * best
        return size

    def worth(self, tokens: float, seconds: float) -> bool:
        """Whether so many more expected tokens are worth so many more seconds."""
        return tokens >= self.rate * seconds
