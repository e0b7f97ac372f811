"""Means and standard deviations of a measurement, and what they vary over. A spread is never told from one run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from tswift.benchmarking.quality import QUALITY

COUNTERS = ("alpha", "beta", "tokens_per_step", "passes")
TIMES = ("speedup", "tokens_per_second", "seconds", "ar_seconds")
ROOFLINE = ("of_floor",)  # unknown in older files
FIGURES = COUNTERS + TIMES + ROOFLINE  # those of bench; of a suite's cells, those of the text besides

_AXES = {"prompt": "prompts", "seed": "seeds", "repeat": "repeats"}


@dataclass(frozen=True)
class Figure:
    """One figure of a cell.

    Attributes:
        n: values that the mean is taken over; 0 where nothing was measured.
        mean: their mean; None for no value.
        std: their sample standard deviation (n - 1 degrees of freedom); None below two values.
    """

    n: int
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Cell:
    """What was measured of one method at one prefill and generated length.

    Attributes:
        runs: samples, repeats included.
        draws: the (prompt, seed) pairs among them.
        estimated: some of its own times are integrated from sampled steps.
        varies: what differs between the runs, of prompts, seeds and repeats.
        exact: every repeat counted the same, so the counters vary over prompts and seeds alone.
        figures: by name, all of ``FIGURES`` and of ``QUALITY``.
    """

    method: str
    prefill: int
    length: int
    runs: int
    draws: frozenset[tuple[str, int]]
    estimated: bool
    varies: tuple[str, ...]
    exact: bool
    figures: Mapping[str, Figure]

    @property
    def key(self) -> tuple[str, int, int]:
        """(method, prefill, length)."""
        return self.method, self.prefill, self.length


def summarise(measurement: Mapping[str, Any]) -> list[Cell]:
    """The samples grouped by (method, prefill, length), over prompts, seeds and repeats.

    Times (seconds, tokens/s, speedup) vary from repeat to repeat, so every run counts. Counters (alpha, beta, tokens
    per step, passes) do not, so a draw's repeats count once; if some repeat did count differently, every run counts.

    Returns:
        One cell each, ordered by prefill, length and the method's place in the workload.
    """
    groups: dict[tuple[str, int, int], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    for sample in measurement["samples"]:
        for point in sample["points"]:
            groups[sample["method"], sample["prefill"], point["len"]].append((sample, point))
    place = {method: i for i, method in enumerate(measurement["workload"]["methods"])}
    order = sorted(groups, key=lambda key: (key[1], key[2], place.get(key[0], len(place)), key[0]))
    return [_cell(*key, groups[key]) for key in order]


def by_draw(measurement: Mapping[str, Any]) -> dict[tuple[str, int, int], dict[tuple[str, int], Cell]]:
    """The cells of each draw alone: by (method, prefill, length), then by (prompt, seed)."""
    samples: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for sample in measurement["samples"]:
        samples[sample["prompt"], sample["seed"]].append(sample)
    cells: dict[tuple[str, int, int], dict[tuple[str, int], Cell]] = defaultdict(dict)
    for draw, mine in samples.items():
        for cell in summarise({**measurement, "samples": mine}):
            cells[cell.key][draw] = cell
    return dict(cells)


def _cell(
    method: str, prefill: int, length: int, members: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> Cell:
    by_draw: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for sample, point in members:
        by_draw[sample["prompt"], sample["seed"]].append(point)
    exact = all(point[name] == points[0][name] for points in by_draw.values() for point in points for name in COUNTERS)
    points = [point for _, point in members]
    counted = [points[0] for points in by_draw.values()] if exact else points
    return Cell(
        method=method,
        prefill=prefill,
        length=length,
        runs=len(members),
        draws=frozenset(by_draw),
        estimated=any(sample["estimated"] for sample, _ in members),
        varies=tuple(plural for axis, plural in _AXES.items() if len({sample[axis] for sample, _ in members}) > 1),
        exact=exact,
        figures={
            **{name: _figure(point[name] for point in counted) for name in COUNTERS},
            **{name: _figure(point[name] for point in points) for name in TIMES},
            **{name: _figure(point.get(name) for point in points) for name in ROOFLINE},
            **{name: _figure(point.get("quality", {}).get(name) for point in counted) for name in QUALITY},
        },
    )


def _figure(values: Iterable[float | None]) -> Figure:
    # the standard library's mean and stdev are exact before their last rounding: the samples' order does not matter
    known = [float(value) for value in values if value is not None]
    return Figure(len(known), mean(known) if known else None, stdev(known) if len(known) > 1 else None)
