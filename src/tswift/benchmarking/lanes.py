"""Decodes side by side: each advances by a slice in turn, so that all of them see the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tswift.decoding.stats import DecodeStats
from tswift.decoding.step import Step
from tswift.engine import Generation


@dataclass
class Lane:
    """One decode among several.

    Attributes:
        name: what it is called in tables: its method's name, unless several of one method run side by side.
        generation: the decode; None once the lane was closed.
        tokens: generated so far.
        stats: figures so far.
        slices: raw samples: (tokens, seconds) so far at the end of every slice.
        prefill_seconds: wall time of the prefill.
        simulated: its acceptance is given, so its text is nobody's.
        method: what decodes.
    """

    name: str
    generation: Generation | None
    tokens: list[int] = field(default_factory=list)
    stats: DecodeStats = field(init=False)
    slices: list[tuple[int, float]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    simulated: bool = False
    method: str = ""

    def __post_init__(self) -> None:
        self.stats = DecodeStats(self._open.depth)
        self._steps: Iterator[Step] | None = None

    @property
    def _open(self) -> Generation:
        assert self.generation is not None
        return self.generation

    def prefill(self) -> None:
        """Forward the prompt."""
        self.prefill_seconds = self._open.decoding.prefill()

    def plain(self, count: int) -> list[Step]:
        """What plain decoding does from here on; see :meth:`tswift.decoding.loop.Decoding.plain`."""
        return self._open.decoding.plain(count)

    def close(self) -> None:
        """Let the decode and its caches go; tokens and figures stay."""
        self.generation = self._steps = None

    def advance(self, goal: int) -> None:
        """Decode until ``goal`` tokens are there; the last step may add a few more."""
        if self._steps is None:
            self._steps = self._open.steps()
        while self.stats.tokens < goal:
            step = next(self._steps)
            self.tokens += step.tokens
            self.stats.add(step)
        # what the last step left its device to do belongs to this lane, not to the next one's first step
        self.stats.seconds += self._open.decoding.settle()
        self.slices.append((self.stats.tokens, self.stats.seconds))


def interleave(lanes: Sequence[Lane], goals: Sequence[int], tick: Callable[[Lane], None]) -> None:
    """Advance all lanes from goal to goal. Each slice begins with another lane, lest one always follows the same.

    Args:
        lanes: prefilled ones.
        goals: rising numbers of tokens, one for every slice.
        tick: called after a lane has advanced.
    """
    for turn, goal in enumerate(goals):
        first = turn % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            lane.advance(goal)
            tick(lane)


def slice_goals(length: int, stops: Sequence[int] = (), slices: int = 50) -> list[int]:
    """Where slices end: ``slices`` about equal parts of ``length``, and every one of ``stops``."""
    even = {length * part // slices for part in range(1, slices + 1)}
    return sorted({goal for goal in (*even, *stops) if 0 < goal <= length})
