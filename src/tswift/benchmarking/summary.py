"""The metrics of bench, and a measurement as means and deviations over its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from tswift.benchmarking.config import DRAFTLESS
from tswift.tables import duration, with_spread

if TYPE_CHECKING:
    from tswift.benchmarking.record import Cell, Measurement, Point, Sample, Workload

_NAMES = {"ar": "AR", "ar-reference": "AR, reference style"}


def method_name(method: str, simulated: bool = False, sampled: bool = False) -> str:
    """A method's name in tables and plots, with remarks on its figures behind it."""
    remarks = ["simulated"] * simulated + ["sampled"] * sampled
    name = _NAMES.get(method, method)
    return f"{name} ({', '.join(remarks)})" if remarks else name


HERE = "here"  # source of measured rows
# where a metric is computed: an attribute of ``DecodeStats``, ``run._point``,
# ``suite_run.quality``, below, or a length where texts end by themselves
STATS, TIMES, QUALITY, DERIVED, ENDS = "stats", "times", "quality", "derived", "ends"


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (n - 1) of n values; None where there are too few."""

    n: int
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Metric:
    """What is known of a metric.

    Its entry in ``METRICS`` puts it in bench.json, CSV, tables, plots and the gate.
    """

    heading: str  # of its column
    meaning: str  # one line for notes
    source: str = STATS  # where it is computed
    exact: bool = False  # a counter, which is the same in every repeat; not a time
    digits: int | None = 3  # decimals; None for a duration
    gate: str = ""  # its name in ``--fail-on``; empty if the gate cannot hold it
    lower_is_better: bool = False  # for the gate
    column: bool = False  # shown in bench's table of decoding times, behind the paper's columns
    plot: str = ""  # label of its panel in bench's plot; empty for none
    drafted: bool = False  # only methods that draft have it

    @property
    def sign(self) -> int:
        """1 where a higher value is better, -1 where a lower one is."""
        return -1 if self.lower_is_better else 1

    def text(self, figure: Figure | None) -> str:
        """The figure with its spread; times without."""
        value, std = (figure.mean, figure.std) if figure else (None, None)
        return duration(value) if self.digits is None else with_spread(value, std, self.digits)


_time = partial(Metric, digits=None)
_of_text = partial(Metric, source=QUALITY, exact=True)

# in the order of bench.csv
METRICS: dict[str, Metric] = {
    "tokens": Metric("tokens", "generated tokens", source=ENDS, exact=True, digits=1),
    "alpha": Metric(
        "alpha",
        "accepted tokens / tokens drafted along each step's longest path",
        exact=True,
        drafted=True,
        gate="alpha",
        plot="acceptance rate alpha",
    ),
    "beta": Metric(
        "beta",
        "the part of alpha whose longest path came from a reused 4-gram",
        exact=True,
        drafted=True,
        gate="beta",
        plot="n-gram acceptance rate beta",
    ),
    "tokens_per_step": Metric(
        "tokens/step", "tokens / passes", exact=True, digits=2, gate="tokens_per_step"
    ),
    "passes": Metric(
        "passes", "verification passes", exact=True, digits=1, gate="passes", lower_is_better=True
    ),
    "speedup": Metric(
        "x",
        "AR's time / the method's, prefill apart",
        source=TIMES,
        digits=2,
        gate="speedup",
        plot="speedup over AR, x",
    ),
    "tokens_per_second": Metric(
        "tokens/s", "tokens / decoding time", digits=1, gate="tokens_per_s"
    ),
    "seconds": _time("time", "decoding time, prefill apart"),
    "ar_seconds": _time("T_AR", "AR's decoding time", source=TIMES),
    "of_floor": Metric(
        "time / floor", "decoding time / the least time for it", source=TIMES, digits=2
    ),
    "delta": _time("delta", "the method's time - AR's", source=DERIVED),
    **{f"distinct_{n}": _of_text(f"D-{n}", f"unique {n}-grams / {n}-grams") for n in range(1, 5)},
    "distinct": _of_text("D", "mean of Distinct-1 to Distinct-4"),
    "seq_rep_4": _of_text("seq-rep-4", "4-grams that were there before / 4-grams"),
}


def from_source(*sources: str) -> list[str]:
    """Names of the metrics from some sources."""
    return [name for name, metric in METRICS.items() if metric.source in sources]


def gated() -> dict[str, str]:
    """The metrics that the gate can hold: by the name in ``--fail-on``,
    the name in a measurement.
    """
    return {metric.gate: name for name, metric in METRICS.items() if metric.gate}


# prefill and generated length, in tokens; None where unknown
Place = tuple["int | None", "int | None"]


@dataclass(frozen=True)
class Row:
    """Figures of a method, or of another place on a suite's axis,
    at one prefill and generated length.
    """

    axis: str  # the method, or the place
    source: str  # ``here``, or the paper's model
    prefill: int | None  # tokens; None where the paper does not say
    length: int | None
    figures: Mapping[str, Figure]
    # of a measured row, whose figures are all ``METRICS``: means by prompt and seed
    draws: Mapping[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    runs: int = 0  # number of samples, repeats included
    estimated: bool = False  # whether some of its own times are integrated from sampled steps
    varies: tuple[str, ...] = ()  # what differs between the samples, of prompts, seeds and repeats
    kind: str = ""  # of a workload's prompts

    @property
    def place(self) -> Place:
        """Prefill and length."""
        return self.prefill, self.length


def summarise(measurement: Measurement) -> list[Row]:
    """Measured rows, called cells, ordered by the kind of the prompts, prefill, length and the
    method's place in the workload.

    Times vary from repeat to repeat, so every sample counts. Counters do not, so a draw's repeats
    count once; if some repeat did count differently, every sample counts.
    """
    workload = measurement.workload
    kinds = {prompt.name: prompt.kind or "" for prompt in workload.prompts}
    groups: dict[tuple[str, int, int, str], list[tuple[Sample, Point]]] = defaultdict(list)
    for sample in measurement.samples:
        kind = kinds.get(sample.prompt, "")
        for point in sample.points:
            groups[kind, sample.prefill, point.len, sample.method].append((sample, point))
    kind_order = [*dict.fromkeys([*kinds.values(), ""])]
    methods = measurement.methods
    order = sorted(
        groups, key=lambda key: (kind_order.index(key[0]), *key[1:3], methods.index(key[3]))
    )
    return [replace(_row(*key[1:], groups[key]), kind=key[0]) for key in order]


def _row(prefill: int, length: int, method: str, members: Sequence[tuple[Sample, Point]]) -> Row:
    by_draw: dict[tuple[str, int], list[Point]] = defaultdict(list)
    for sample, point in members:
        by_draw[sample.prompt, sample.seed].append(point)
    counters = [name for name in from_source(STATS) if METRICS[name].exact]
    exact = all(
        point.figure(name) == same[0].figure(name)
        for same in by_draw.values()
        for point in same
        for name in counters
    )
    points = [point for _, point in members]
    counted = [same[0] for same in by_draw.values()] if exact else points
    figures = {
        name: _figure(name, counted if metric.exact else points) for name, metric in METRICS.items()
    }
    own = figures["seconds"]
    plain = figures["ar_seconds"]
    if own.mean is not None and plain.mean is not None:
        figures["delta"] = Figure(min(own.n, plain.n), own.mean - plain.mean, None)
    draws = {}
    for draw, same in by_draw.items():
        means = {name: _figure(name, same).mean for name in METRICS}
        draws[draw] = {name: value for name, value in means.items() if value is not None}
    cells = [sample.cell for sample, _ in members]
    varies = tuple(
        f"{axis}s"
        for axis in ("prompt", "seed", "repeat")
        if len({getattr(c, axis) for c in cells}) > 1
    )
    estimated = any(sample.estimated for sample, _ in members)
    return Row(method, HERE, prefill, length, figures, draws, len(members), estimated, varies)


def _figure(name: str, points: Sequence[Point]) -> Figure:
    values = [point.figure(name) for point in points]
    # the standard library's mean and stdev are exact before their last rounding: the samples' order
    # does not matter
    known = [float(value) for value in values if value is not None]
    return Figure(
        len(known), mean(known) if known else None, stdev(known) if len(known) > 1 else None
    )


def drafts(method: str) -> bool:
    """Whether a method drafts with what we measure of drafting."""
    return method not in DRAFTLESS


def drafted_only(figures: Mapping[str, Figure], method: str) -> dict[str, Figure]:
    """Figures without those of drafting where a method does not draft."""
    return {
        name: Figure(0, None, None) if METRICS[name].drafted and not drafts(method) else figure
        for name, figure in figures.items()
    }


def grid_order(workload: Workload) -> Callable[[Cell], tuple[int, ...]]:
    """A key that sorts cells as an undisturbed benchmark measures them."""
    prompts = {prompt.name: number for number, prompt in enumerate(workload.prompts)}
    seeds = {seed: number for number, seed in enumerate(workload.seeds)}
    return lambda cell: (
        cell.repeat,
        prompts.get(cell.prompt, -1),
        cell.prefill,
        seeds.get(cell.seed, -1),
    )


def source(measurement: Measurement) -> str:
    """Model and machine, and whether the figures are simulated, as a label."""
    names = {environment.machine for environment in measurement.environments}
    model = measurement.workload.model
    model = Path(model).name if Path(model).is_absolute() else model  # a folder's or file's own
    label = f"{model}, {' and '.join(sorted(names))}"
    return f"{label} (simulated)" if measurement.simulated else label


def simulation(measurement: Measurement) -> str:
    """What a measurement simulates, in words; empty if nothing."""
    simulated = measurement.workload.simulated
    if simulated is None:
        return ""
    words = ["random weights"] if simulated.weights else []
    return ", ".join(
        words if simulated.alpha is None else [*words, f"acceptance set to {simulated.alpha:g}"]
    )


def simulated_alpha(measurement: Measurement) -> float | None:
    """The acceptance rate that was set; None where it was measured."""
    simulated = measurement.workload.simulated
    return None if simulated is None else simulated.alpha
