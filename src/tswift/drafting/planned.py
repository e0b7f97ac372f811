"""A drafter whose sources have one budget: what each of them offers has to earn its place in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.tree import DraftTree
from tswift.drafting.calibration import Calibration
from tswift.drafting.plan import Plan
from tswift.drafting.sketch import Sketch


class PricedSource(Protocol):
    """Something that offers how the text may go on, and says what that costs; else as a source.

    Attributes:
        spent: seconds that the last proposal took, by the plan's costs.
    """

    spent: float

    def start(self, context: Context) -> None:
        """As :meth:`Source.start`."""

    def propose(self, sketch: Sketch, context: Context) -> None:
        """Offer what may come."""

    def committed(self, context: Context, most: int) -> None:
        """As :meth:`Source.committed`."""


@dataclass
class PlannedDrafter(Drafter):
    """What a method drafts from, and the plan by which a tree is cut from what that offers.

    Attributes:
        offering: its sources.
        plan: how large a tree pays.
        spent: seconds that drafting the last tree took, by the plan's costs.
    """

    offering: Sequence[PricedSource] = ()
    plan: Plan = field(default_factory=Plan)
    spent: float = 0.0
    _calibration: Calibration = field(default_factory=Calibration)
    _sketched: tuple[Sketch, int] | None = None  # and the text's length then

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        sketch = Sketch(context.text[-1], min(wanted - 1, self.depth), self._calibration)
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
