"""Plain decoding's time from samples: a few plain steps now and then, from the state that a method is in anyway.

A benchmark against plain decoding (AR) would take AR's hours. An AR step's time depends on the length of the text and
on little else, so steps timed at many lengths, between the method's own steps, are integrated over the text instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tswift.benchmarking.lanes import Lane

STEPS = 8  # timed in a probe


@dataclass(frozen=True)
class Probe:
    """Plain steps from one state.

    Attributes:
        position: generated tokens that were there before the first timed step.
        tokens: what plain decoding drew, from ``position - 1`` on.
        seconds: wall time of each timed step.
    """

    position: int
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


def probe(lane: Lane) -> Probe | None:
    """Take plain steps where a lane stands; None if its cache has no room for two.

    The first step is not timed: it finds the processor's caches full of the method's data, not of plain decoding's. The
    others find noise that drafting has computed already, so plain decoding comes out a little too fast rather than too
    slow. They start from the lane's own state: a mistake in that they repeat, and only an audit can see it.
    """
    steps = lane.plain(1 + STEPS)
    if len(steps) < 2:
        return None
    drawn = tuple(step.tokens[0] for step in steps)
    return Probe(lane.stats.tokens + 1, drawn, tuple(step.seconds for step in steps[1:]))


def probes_differ(tokens: Sequence[int], probes: Sequence[Probe]) -> int | None:
    """Index of the first generated token that differs from what plain decoding drew in a probe; None if none does."""
    for each in sorted(probes, key=lambda probe: probe.position):
        first = each.position - 1
        for index, (ours, theirs) in enumerate(zip(tokens[first:], each.tokens, strict=False), start=first):
            if ours != theirs:
                return index
    return None


def integrate(probes: Sequence[Probe], length: int) -> float:
    """Seconds that plain decoding takes for ``length`` tokens: step times, interpolated between probes, summed.

    Args:
        probes: at least one.
        length: tokens.
    """
    at: dict[float, list[float]] = {}
    for each in probes:
        middle = each.position + (len(each.seconds) - 1) / 2
        at.setdefault(middle, []).extend(each.seconds)
    places = sorted(at)
    means = [float(np.mean(at[place])) for place in places]
    return float(np.interp(np.arange(length), places, means).sum())
