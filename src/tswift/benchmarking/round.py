"""One round of a benchmark: every method on one prompt, prefill and seed, in interleaved slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tswift.benchmarking.comparison import first_difference
from tswift.benchmarking.floor import Floor
from tswift.benchmarking.lanes import Lane, interleave, slice_goals
from tswift.benchmarking.measurement import BASELINE, REFERENCE
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.sampled import Probe, integrate, probe, probes_differ
from tswift.decoding.stats import DecodeStats

Sample = dict[str, Any]  # as in bench.json


@dataclass(frozen=True)
class Place:
    """A round's place in the grid."""

    repeat: int
    prompt: Prompt
    prefill: int
    seed: int

    def __str__(self) -> str:
        return f"{self.prompt.name}, prefill {self.prefill:,}, seed {self.seed}"


@dataclass
class _Entrant:
    """A lane, and what was noted of it on the way.

    Attributes:
        lane: the lane.
        marks: its figures when it had reached each length.
        probes: plain steps taken between its own.
    """

    lane: Lane
    marks: list[DecodeStats]
    probes: list[Probe]


class Round:
    """Lanes that run to the longest length. Without one for plain decoding its time is sampled between their slices.

    Args:
        place: where in the grid.
        lanes: fresh ones, long enough.
        lens: rising lengths to read off.
        floor: tells the least time that it could have taken; None if nothing does.
    """

    def __init__(self, place: Place, lanes: Sequence[Lane], lens: Sequence[int], floor: Floor | None = None) -> None:
        self._place, self._lens, self._floor = place, lens, floor
        self._entrants = {lane.name: _Entrant(lane, [], []) for lane in lanes}

    def run(self, tick: Callable[[Lane], None], keep: Callable[[list[Sample]], None]) -> bool:
        """Run to the end, or to Ctrl-C.

        Args:
            tick: called when a lane has advanced by a slice.
            keep: called with the samples whenever all lanes have reached another length.

        Returns:
            Whether Ctrl-C was pressed.
        """
        lanes = [entrant.lane for entrant in self._entrants.values()]
        kept = 0

        def after(lane: Lane) -> None:
            nonlocal kept
            entrant = self._entrants[lane.name]
            if len(entrant.marks) < len(self._lens) and lane.stats.tokens >= self._lens[len(entrant.marks)]:
                entrant.marks.append(lane.stats.copy())
            if BASELINE not in self._entrants and lane.method != REFERENCE and (taken := probe(lane)):
                entrant.probes.append(taken)
            tick(lane)
            if self._reached > kept:
                kept = self._reached
                keep(self.samples())

        try:
            for lane in lanes:
                lane.prefill()
                after(lane)
            interleave(lanes, slice_goals(self._lens[-1], self._lens), after)
        except KeyboardInterrupt:
            return True
        return False

    @property
    def _reached(self) -> int:
        return min(len(entrant.marks) for entrant in self._entrants.values())

    @property
    def texts(self) -> dict[str, list[int]]:
        """The generated tokens so far, by label."""
        return {label: entrant.lane.tokens for label, entrant in self._entrants.items()}

    def samples(self) -> list[Sample]:
        """The samples, with the lengths that all lanes have reached; none if there is no such length."""
        lens = self._lens[: self._reached]
        if not lens:
            return []
        plain = self._entrants.get(BASELINE)
        pooled = [taken for entrant in self._entrants.values() for taken in entrant.probes]

        def ar_seconds(index: int, tokens: int) -> float:
            if plain is None:
                return integrate(pooled, tokens)
            return plain.marks[index].seconds * tokens / plain.marks[index].tokens

        samples = [] if plain else [self._estimated(pooled, lens)]
        for entrant in self._entrants.values():
            lane = entrant.lane
            different, compared = self._compared(entrant)
            floors = self._floors(lane.name, entrant.marks[: len(lens)])
            samples.append(
                {
                    **self._key(lane.name),
                    "estimated": False,
                    "prefill_seconds": lane.prefill_seconds,
                    "same_as_ar": None if entrant is plain or lane.simulated else different is None,
                    "explained": None,
                    "first_difference": different,
                    "compared_tokens": compared,
                    "slices": [list(each) for each in lane.slices],
                    "probes": [[each.position, list(each.seconds)] for each in entrant.probes] or None,
                    "points": [
                        _point(length, mark, ar_seconds(index, mark.tokens), floors[index])
                        for index, (length, mark) in enumerate(zip(lens, entrant.marks, strict=False))
                    ],
                }
            )
        return samples

    def explain(self, samples: Sequence[Sample], explained: Callable[[Lane], bool]) -> None:
        """Say of the texts that need it whether rounding explains all that is not drawn exactly.

        They need it if one differs from plain decoding's, plain decoding's own then too, or if plain decoding was
        sampled: its few steps start from the lanes' own state. A text of simulated acceptance is no draw at all.

        Args:
            samples: those of :meth:`samples`; their ``explained`` is set.
            explained: asks an audit. The lanes' caches are gone by then.
        """
        for entrant in self._entrants.values():
            entrant.lane.close()
        differ = any(sample["same_as_ar"] is False for sample in samples)
        for sample in samples:
            needed = sample["same_as_ar"] is False or (differ and sample["method"] == BASELINE)
            if sample["estimated"] or not (needed or BASELINE not in self._entrants):
                continue
            lane = self._entrants[sample["method"]].lane
            if not lane.simulated:
                sample["explained"] = explained(lane)

    def _compared(self, entrant: _Entrant) -> tuple[int | None, int]:
        """First token that is not plain decoding's, if there is one, and how many tokens could be compared."""
        lane, plain = entrant.lane, self._entrants.get(BASELINE)
        if lane.simulated or entrant is plain:
            return None, 0
        if plain:
            compared = min(len(lane.tokens), len(plain.lane.tokens))
            return first_difference(lane.tokens, plain.lane.tokens), compared
        # a lane that takes no probes is held against those of the others
        probes = entrant.probes or [each for other in self._entrants.values() for each in other.probes]
        compared = sum(len(lane.tokens[each.position - 1 :][: len(each.tokens)]) for each in probes)
        return probes_differ(lane.tokens, probes), compared

    def _floors(self, method: str, marks: Sequence[DecodeStats]) -> Sequence[float | None]:
        return self._floor.seconds(method, self._place.prefill, marks) if self._floor else [None] * len(marks)

    def _estimated(self, probes: Sequence[Probe], lens: Sequence[int]) -> Sample:
        """Plain decoding's sample where it was not run."""
        marks = [
            DecodeStats(0, passes=n, tokens=n, nodes=n, seconds=integrate(probes, n), accepted=Counter({0: n}))
            for n in lens
        ]
        floors = self._floors(BASELINE, marks)
        return {
            **self._key(BASELINE),
            "estimated": True,
            "prefill_seconds": None,
            "same_as_ar": None,
            "explained": None,
            "first_difference": None,
            "compared_tokens": 0,
            "slices": [[goal, integrate(probes, goal)] for goal in slice_goals(lens[-1], lens)],
            "probes": None,
            "points": [
                _point(mark.tokens, mark, mark.seconds, floor) for mark, floor in zip(marks, floors, strict=True)
            ],
        }

    def _key(self, method: str) -> Sample:
        place = self._place
        return {
            "prompt": place.prompt.name,
            "prefill": place.prefill,
            "seed": place.seed,
            "repeat": place.repeat,
            "method": method,
        }


def _point(length: int, stats: DecodeStats, ar_seconds: float, floor_seconds: float | None) -> Sample:
    most = max(stats.accepted, default=0)
    return {
        "len": length,
        "tokens": stats.tokens,
        "seconds": stats.seconds,
        "passes": stats.passes,
        "nodes": stats.nodes,
        "depth": stats.depth,
        "accepted": [stats.accepted[count] for count in range(most + 1)],
        "reused": stats.reused,
        "alpha": stats.alpha,
        "beta": stats.beta,
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_second": stats.tokens_per_second,
        "ar_seconds": ar_seconds,
        "speedup": ar_seconds / stats.seconds,
        "floor_seconds": floor_seconds,
        "of_floor": None if floor_seconds is None else stats.seconds / floor_seconds,
    }
