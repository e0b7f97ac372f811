"""One cell of a benchmark's grid: every method on one prompt, prefill and seed, in interleaved slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tswift.benchmarking.comparison import first_difference
from tswift.benchmarking.lanes import Lane, interleave, slice_goals
from tswift.benchmarking.lineup import BASELINE
from tswift.benchmarking.prompts import Prompt
from tswift.benchmarking.sampled import Probe, integrate, probe, probes_differ
from tswift.decoding.stats import DecodeStats


@dataclass(frozen=True)
class Cell:
    """Where in the grid, and in which repeat."""

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


def run_cell(
    cell: Cell,
    lanes: Sequence[Lane],
    lens: Sequence[int],
    tick: Callable[[Lane], None],
    explain: Callable[[Lane], bool],
) -> tuple[list[dict[str, Any]], bool]:
    """Run the lanes to the longest length, or to Ctrl-C.

    Without a lane for plain decoding its time is sampled: plain steps are taken between the others' slices.

    Args:
        cell: which one.
        lanes: fresh ones, long enough.
        lens: rising lengths to read off.
        tick: called when a lane has advanced by a slice.
        explain: whether rounding explains all that is not drawn exactly in a text; asked for one that differs from
            plain decoding's, and for every one where that was sampled: its few steps start from the lane's own state.

    Returns:
        The cell's samples as in ``bench.json``, with the lengths that all lanes have reached (no samples if there is
        none), and whether Ctrl-C was pressed.
    """
    entrants = {lane.name: _Entrant(lane, [], []) for lane in lanes}
    sampled = BASELINE not in entrants

    def after(lane: Lane) -> None:
        entrant = entrants[lane.name]
        if len(entrant.marks) < len(lens) and lane.stats.tokens >= lens[len(entrant.marks)]:
            entrant.marks.append(lane.stats.copy())
        if sampled and (taken := probe(lane)):
            entrant.probes.append(taken)
        tick(lane)

    interrupted = False
    try:
        for lane in lanes:
            lane.prefill()
            after(lane)
        interleave(lanes, slice_goals(lens[-1], lens), after)
    except KeyboardInterrupt:
        interrupted = True
    reached = lens[: min(len(entrant.marks) for entrant in entrants.values())]
    return (_samples(cell, entrants, reached, explain) if reached else []), interrupted


def _samples(
    cell: Cell, entrants: dict[str, _Entrant], lens: Sequence[int], explain: Callable[[Lane], bool]
) -> list[dict[str, Any]]:
    plain = entrants.get(BASELINE)
    pooled = [taken for entrant in entrants.values() for taken in entrant.probes]

    def ar_seconds(index: int, tokens: int) -> float:
        if plain is None:
            return integrate(pooled, tokens)
        return plain.marks[index].seconds * tokens / plain.marks[index].tokens

    samples = [] if plain else [_estimated(cell, pooled, lens)]
    for entrant in entrants.values():
        lane = entrant.lane
        if plain is None:
            different = probes_differ(lane.tokens, entrant.probes)
            compared = sum(len(lane.tokens[each.position - 1 :][: len(each.tokens)]) for each in entrant.probes)
        else:
            different = first_difference(lane.tokens, plain.lane.tokens)
            compared = min(len(lane.tokens), len(plain.lane.tokens))
        samples.append(
            {
                **_of(cell, lane.name),
                "estimated": False,
                "prefill_seconds": lane.prefill_seconds,
                "same_as_ar": None if entrant is plain else different is None,
                "explained": explain(lane) if plain is None or different is not None else None,
                "first_difference": different,
                "compared_tokens": 0 if entrant is plain else compared,
                "slices": [list(each) for each in lane.slices],
                "probes": [[each.position, list(each.seconds)] for each in entrant.probes] or None,
                "points": [
                    _point(length, mark, ar_seconds(index, mark.tokens))
                    for index, (length, mark) in enumerate(zip(lens, entrant.marks, strict=False))
                ],
            }
        )
    return samples


def _estimated(cell: Cell, probes: Sequence[Probe], lens: Sequence[int]) -> dict[str, Any]:
    """Plain decoding's row where it was not run but sampled."""
    points = []
    for length in lens:
        stats = DecodeStats(0, passes=length, tokens=length, nodes=length, seconds=integrate(probes, length))
        stats.accepted[0] = length
        points.append(_point(length, stats, stats.seconds))
    return {
        **_of(cell, BASELINE),
        "estimated": True,
        "prefill_seconds": None,
        "same_as_ar": None,
        "explained": None,
        "first_difference": None,
        "compared_tokens": 0,
        "slices": [[goal, integrate(probes, goal)] for goal in slice_goals(lens[-1], lens)],
        "probes": None,
        "points": points,
    }


def _of(cell: Cell, method: str) -> dict[str, Any]:
    return {
        "prompt": cell.prompt.name,
        "prefill": cell.prefill,
        "seed": cell.seed,
        "repeat": cell.repeat,
        "method": method,
    }


def _point(length: int, stats: DecodeStats, ar_seconds: float) -> dict[str, Any]:
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
    }
