"""Several drafters of one decode, of which each step takes the one that has been the fastest of late.

What drafts fastest depends on how long the text is, how much it repeats itself, and on the machine. The text is the
same whoever drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.drafting.dynamic_tree import DynamicTreeDrafter
from tswift.models.passes import Forwarded, PassCosts

_TRIED = 16  # steps of each at first
_MEMORY = 1 / 96  # of what is known of a rival, forgotten when it takes a step
_WAIT, _PATIENCE = 8, 3  # steps after which one that is as fast is tried again; half as fast, 2^3 times as many
_LONGEST = 1024  # steps after which any is
_FAR = 8  # times its usual seconds that a step counts for at most: the process may have been stopped meanwhile


@dataclass
class Arm:
    """One of the drafters.

    Attributes:
        name: what it is called.
        drafter: how it drafts.
        levels: of heads that it asks in every step, if it does not choose how many.
    """

    name: str
    drafter: Drafter
    levels: int = 0
    steps: int = 0
    waited: int = 0  # steps since its last one
    _count: float = 0.0  # steps of late
    _tokens: float = 0.0
    _seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of late."""
        return self._tokens / self._seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """It took a step. The first does not count: what is used for the first time takes longer."""
        self.steps, self.waited = self.steps + 1, 0
        if self.steps == 1:
            return
        if self._count:
            seconds = min(seconds, _FAR * self._seconds / self._count)
        self._count += 1 - _MEMORY * self._count
        self._tokens += tokens - _MEMORY * self._tokens
        self._seconds += max(seconds, 1e-9) - _MEMORY * self._seconds


@dataclass
class AdaptiveDrafter(Drafter):
    """Takes the fastest of its rivals, and now and then another one, the more seldom the slower that was.

    Attributes:
        rivals: at least one.
        costs: by which seconds are told, so that choices are the same everywhere; None for those of the clock.
    """

    rivals: Sequence[Arm] = ()
    costs: PassCosts | None = None
    _chosen: Arm | None = None
    _started: tuple[int, float] = field(default=(0, 0.0))  # the text's length, and the time
    _nodes: int = 0

    @property
    def choice(self) -> str:
        """As :attr:`Drafter.choice`."""
        return self._chosen.name if self._chosen else ""

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        self._chosen = self._choose()
        self._started = len(context.text), time.perf_counter()
        tree = self._chosen.drafter.propose(context, wanted)
        self._nodes = len(tree)
        return tree

    def _choose(self) -> Arm:
        for rival in self.rivals:
            if rival.steps < _TRIED:
                return rival
        best = max(self.rivals, key=lambda rival: rival.rate)
        for rival in self.rivals:
            rival.waited += 1
            wait = min(_WAIT * (best.rate / rival.rate) ** _PATIENCE, _LONGEST)
            if rival is not best and rival.waited > wait:
                return rival
        return best

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        if self._chosen is None:
            return
        length, since = self._started
        self._chosen.drafter.learn(context)
        seconds = time.perf_counter() - since if self.costs is None else self._priced(self._chosen, length - 1)
        self._chosen.learn(len(context.text) - length, seconds)

    def _priced(self, rival: Arm, held: int) -> float:
        """Seconds of the rival's step over ``held`` keys by the costs."""
        assert self.costs is not None
        drafter = rival.drafter
        spent = drafter.spent if isinstance(drafter, DynamicTreeDrafter) else rival.levels * self.costs.level
        return spent + self.costs.seconds(self._nodes, held)

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """As :meth:`Drafter.prefilled`."""
        super().prefilled(context, forwarded)
        for rival in self.rivals:
            rival.drafter.prefilled(context, forwarded)

    def keep_up(self, context: Context, most: int) -> None:
        """As :meth:`Drafter.keep_up`."""
        super().keep_up(context, most)
        for rival in self.rivals:
            rival.drafter.keep_up(context, most)
