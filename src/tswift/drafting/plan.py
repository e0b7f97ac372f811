"""How large a draft tree pays: what its nodes promise, against what a pass over them costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tswift.models.costs import NOMINAL, PassCosts

_STEADY = 0.05  # of what is known of late, forgotten in a step


class Plan:
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
