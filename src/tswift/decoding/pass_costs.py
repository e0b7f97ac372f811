"""What passes cost: measured beforehand, and corrected by the time that they take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

# spread of repeats up to which a machine counts as idle; it was 1.15 to 1.9 beside a busy process
STEADY = 1.18
LEAST, _LONGEST = 1e-9, 1e9  # seconds of a step
_MOST_NODES = 1 << 20
# share of plain decoding's time that drafts save at best, above which they are worth a trial
WORTH_A_TRIAL = 1 / 6


@dataclass(frozen=True)
class PassCosts:
    """Seconds of a step that drafts nothing: linear in the keys,
    and piecewise linear in the nodes it verifies.

    Where several texts share passes, of a pass over as many nodes of each: a text's part.
    """

    nodes: tuple[int, ...]  # measured numbers of nodes, rising; the first is 1
    base: tuple[float, ...]  # seconds of a step over each number of nodes without keys
    per_key: tuple[float, ...]  # seconds more for every key
    level: float  # seconds of drafting one level by heads
    # how many times the least of its repeats a figure usually took while these were measured
    spread: float = 1.0
    texts: int = 1  # that share a pass

    def share(self, texts: int) -> None:
        """Let so many texts share a pass from now on."""
        vars(self)["texts"] = texts

    @cached_property
    def alone(self) -> PassCosts:
        """Those of passes that are one text's, as drafts are."""
        return replace(self, texts=1)

    @property
    def sound(self) -> bool:
        """Whether these are possible costs."""
        return (
            len(self.nodes) == len(self.base) == len(self.per_key) > 1
            and self.nodes[0] == 1
            and list(self.nodes) == sorted(set(self.nodes))
            and all(type(size) is int and size <= _MOST_NODES for size in self.nodes)
            and all(0 <= figure <= _LONGEST for figure in (*self.per_key, self.level))
            and all(LEAST <= figure <= _LONGEST for figure in self.base)
            # or what they are extrapolated to would be no time
            and all([*each] == sorted(each) for each in (self.base, self.per_key))
        )

    @property
    def busy(self) -> bool:
        """Whether the machine did other work while these were measured."""
        return self.spread > STEADY

    def must_come_true(self, keys: int) -> float:
        """Share of drafted tokens, one in a step, from which on drafting is quicker than plain
        decoding; above 1 it never is.
        """
        return self.seconds(2, keys) / self.seconds(1, keys) - 1

    def saved(
        self, keys: int, chance: float, sizes: Iterable[int] = (), level: float = 0.0
    ) -> float:
        """Share of plain decoding's time that drafts save at best; below 0 where they lose.

        Args:
            keys: that each node attends to.
            chance: of a drafted token to come true after those before it, below 1.
            sizes: nodes of the chains that may be drafted; none for those that were measured.
            level: seconds of drafting a token.
        """
        return 1 - min(
            (self.seconds(nodes, keys) + (nodes - 1) * level)
            / (self.seconds(1, keys) * (1 - chance**nodes) / (1 - chance))
            for nodes in sizes or self.nodes[1:]
        )

    def seconds(self, nodes: int, keys: int) -> float:
        """Seconds of a step over ``nodes`` nodes that each attend to ``keys`` keys,
        extrapolated beyond the last.
        """
        base, per_key = self.line(nodes)
        return base + per_key * keys

    def line(self, nodes: int) -> tuple[float, float]:
        """Of a step over so many nodes: seconds without keys, and for every key."""
        known = self._lines.get((nodes, self.texts))
        if known is None:
            # every text has keys of its own
            base = self._between(self.base, nodes * self.texts) / self.texts
            known = base, self._between(self.per_key, nodes)
            self._lines[nodes, self.texts] = known
        return known

    def _between(self, figures: tuple[float, ...], nodes: int) -> float:
        right = min(max(bisect_left(self.nodes, nodes), 1), len(self.nodes) - 1)
        lower = self.nodes[right - 1]
        share = (nodes - lower) / (self.nodes[right] - lower)
        return figures[right - 1] + share * (figures[right] - figures[right - 1])

    @cached_property
    def _lines(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Those that were asked for: they are asked for in every step."""
        return {}

    def node(self, keys: int) -> float:
        """Seconds of one node more, in a tree of usual size."""
        return (self.seconds(16, keys) - self.seconds(8, keys)) / 8


# In seconds on 2 cores of an AMD EPYC, with the bundled model (results/demo-cpu-epyc), a level of
# heads as by the program of today (results/auto-cpu): for choices that are to be the same
# everywhere.
NOMINAL = PassCosts(
    nodes=(1, 5, 8, 16, 64),
    base=(2.1e-3, 2.7e-3, 2.8e-3, 3.2e-3, 6.8e-3),
    per_key=(8.6e-8, 9.5e-8, 9.5e-8, 12.9e-8, 39e-8),
    level=0.15e-3,
)
_PRIOR_PASSES = 4.0  # passes that those of all sizes count for, in what is known of one
_KEPT_PER_PASS = 1 - 1 / 200  # of what passes took, after each
_RESCALED_ABOVE = 1e9  # times the weight of an old pass, after which all are made lighter
# one counts as no less and no more of what was expected: the process may have been stopped
_RATIO_BOUNDS = 0.5, 2.0


class PassTimes:
    """What passes cost, as measured beforehand and corrected by the time that they take.

    Args:
        costs: as measured.
        timed: correct them; without it, choices are the same everywhere.
    """

    def __init__(self, costs: PassCosts = NOMINAL, timed: bool = False) -> None:
        self.costs = costs
        self._timed = timed
        # of late, by measured number of nodes: what passes over so many nodes or a few more took,
        # relative to the costs, added up, and how many there were; and all of them together
        self._took = [0.0] * len(costs.nodes)
        self._count = [0.0] * len(costs.nodes)
        self._all_took = self._all_count = 0.0
        # a newer pass weighs more, which is less work than to make all older ones weigh less
        self._weight = 1.0

    def place(self, nodes: int) -> int:
        """Which measured number is nearest below."""
        return bisect_right(self.costs.nodes, nodes) - 1

    def factor(self, place: int) -> float:
        """Of the costs of passes over the measured number of nodes at this place."""
        before = _PRIOR_PASSES * self._weight
        whole = before * (self._all_took + before) / (self._all_count + before)
        return (self._took[place] + whole) / (self._count[place] + before)

    def learn(self, nodes: int, expected: float, seconds: float, count: int = 1) -> None:
        """Some passes over so many nodes took so many seconds, where the costs say another number.

        Of sizes that few passes have had, all passes tell.
        """
        if not self._timed:
            return
        least, most = _RATIO_BOUNDS
        place = self.place(nodes)
        self._weight /= _KEPT_PER_PASS**count
        counted = count * self._weight
        took = counted * min(max(seconds / expected, least), most)
        self._took[place] += took
        self._all_took += took
        self._count[place] += counted
        self._all_count += counted
        if self._weight > _RESCALED_ABOVE:
            for sums in (self._took, self._count):
                sums[:] = [each / self._weight for each in sums]
            self._all_took /= self._weight
            self._all_count /= self._weight
            self._weight = 1.0
