"""A measurement (the dict behind ``bench.json``) in figures: means and standard deviations over its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

FINISHED = "finished"
# attributes of DecodeStats that are exact for a seed; one more here is in bench.json, bench.csv and the gate
COUNTERS = ("alpha", "beta", "tokens_per_step", "passes")
TIMES = ("speedup", "tokens_per_second", "seconds", "ar_seconds")
FIGURES = (*COUNTERS, *TIMES, "of_floor")
# of texts, which suites measure; see quality.py
QUALITY = (*(f"distinct_{n}" for n in range(1, 5)), "distinct", "seq_rep_4", "self_bleu", "compression")

_AXES = {"prompt": "prompts", "seed": "seeds", "repeat": "repeats"}


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (n - 1) of n values; None where there are too few."""

    n: int
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Cell:
    """Figures of one method at one prefill and generated length.

    Attributes:
        runs: number of samples, repeats included.
        draws: the (prompt, seed) pairs among them.
        estimated: whether some of its own times are integrated from sampled steps.
        varies: what differs between the samples, of prompts, seeds and repeats.
        exact: whether all repeats have equal counters.
        figures: by name, all of ``FIGURES`` and ``QUALITY``.
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
    """Cells of a measurement, ordered by prefill, length and the method's place in the workload.

    Times vary from repeat to repeat, so every sample counts. Counters do not, so a draw's repeats count once; if some
    repeat did count differently, every sample counts.
    """
    groups: dict[tuple[str, int, int], list[tuple[Any, Any]]] = defaultdict(list)
    for sample in measurement["samples"]:
        for point in sample["points"]:
            groups[sample["method"], sample["prefill"], point["len"]].append((sample, point))
    place = {method: i for i, method in enumerate(measurement["workload"]["methods"])}
    order = sorted(groups, key=lambda key: (key[1], key[2], place.get(key[0], len(place)), key[0]))
    return [_cell(*key, groups[key]) for key in order]


def by_draw(measurement: Mapping[str, Any]) -> dict[tuple[str, int, int], dict[tuple[str, int], Cell]]:
    """Cells of each draw alone: by (method, prefill, length), then by (prompt, seed)."""
    samples: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for sample in measurement["samples"]:
        samples[sample["prompt"], sample["seed"]].append(sample)
    cells: dict[tuple[str, int, int], dict[tuple[str, int], Cell]] = defaultdict(dict)
    for draw, mine in samples.items():
        for cell in summarise({**measurement, "samples": mine}):
            cells[cell.key][draw] = cell
    return dict(cells)


def machine_name(environment: Mapping[str, Any]) -> str:
    """The GPU, or the CPU and its threads in use."""
    threads = environment["threads"]
    return environment["gpu"] or f"{environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def source(measurement: Mapping[str, Any]) -> str:
    """Model and machine, and whether the figures are simulated, as a label."""
    label = f"{measurement['workload']['model']}, {machine_name(measurement['environment'])}"
    return f"{label} (simulated)" if measurement["simulated"] else label


def simulation(measurement: Mapping[str, Any]) -> str:
    """What a measurement simulates, in words; empty if nothing."""
    what, alpha = measurement["workload"].get("simulated") or {}, simulated_alpha(measurement)
    words = ["random weights"] if what.get("weights") else []
    return ", ".join(words if alpha is None else [*words, f"acceptance set to {alpha:g}"])


def simulated_alpha(measurement: Mapping[str, Any]) -> float | None:
    """The acceptance rate that was set; None where it was measured."""
    return (measurement["workload"].get("simulated") or {}).get("alpha")


def _cell(method: str, prefill: int, length: int, members: Sequence[tuple[Any, Any]]) -> Cell:
    draws: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for sample, point in members:
        draws[sample["prompt"], sample["seed"]].append(point)
    exact = all(point[name] == points[0][name] for points in draws.values() for point in points for name in COUNTERS)
    points = [point for _, point in members]
    counted = [points[0] for points in draws.values()] if exact else points
    return Cell(
        method=method,
        prefill=prefill,
        length=length,
        runs=len(members),
        draws=frozenset(draws),
        estimated=any(sample["estimated"] for sample, _ in members),
        varies=tuple(plural for axis, plural in _AXES.items() if len({sample[axis] for sample, _ in members}) > 1),
        exact=exact,
        figures={
            **{name: _figure(point.get(name) for point in counted) for name in COUNTERS},
            **{name: _figure(point.get(name) for point in points) for name in (*TIMES, "of_floor")},
            **{name: _figure(point.get("quality", {}).get(name) for point in counted) for name in QUALITY},
        },
    )


def _figure(values: Iterable[float | None]) -> Figure:
    # the standard library's mean and stdev are exact before their last rounding: the samples' order does not matter
    known = [float(value) for value in values if value is not None]
    return Figure(len(known), mean(known) if known else None, stdev(known) if len(known) > 1 else None)
