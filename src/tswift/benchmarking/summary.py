"""The metrics of bench, and a measurement (the dict behind ``bench.json``) as means and deviations over its samples.

Tables of text are rendered for Markdown, for a terminal and for a pipe.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any, Literal

from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tswift.benchmarking.config import DRAFTLESS, PEERS

NOTHING = "-"

_NAMES = {"ar": "AR", "ar-reference": "AR, reference style"}


@dataclass(frozen=True)
class Table:
    """Title, headings, rows of text, and notes below. The first ``left`` columns are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 0
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A heading, a GitHub table and the notes."""
        lines = [
            self.columns,
            ["---" if i < self.left else "---:" for i in range(len(self.columns))],
            *([cell.replace("|", "\\|") for cell in row] for row in self.rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", table, *self.notes]) + "\n"

    def plain(self) -> str:
        """Aligned columns, two spaces apart."""
        lines = [self.columns, *self.rows]
        aligned = []
        for i, column in enumerate(zip(*lines, strict=True)):
            width = max(map(len, column))
            aligned.append([cell.ljust(width) if i < self.left else cell.rjust(width) for cell in column])
        table = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
        return "\n".join([self.title, *table, *self.notes]) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For ``console.print``: a narrow terminal folds between words."""
        table = rich_table.Table(title=Text(self.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.caption, table.caption_justify = Text("\n".join(self.notes)), "left"
        for i, name in enumerate(self.columns):
            longest = max(len(word) for text in (name, *(row[i] for row in self.rows)) for word in text.split() or [""])
            justify: Literal["left", "right"] = "left" if i < self.left else "right"
            table.add_column(Text(name), justify=justify, overflow="fold", min_width=longest)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))  # a name is no markup
        yield table


def method_name(method: str, simulated: bool = False, sampled: bool = False) -> str:
    """A method's name in tables and plots, with remarks on its figures behind it."""
    remarks = ["simulated"] * simulated + ["sampled"] * sampled
    name = _NAMES.get(method, method)
    return f"{name} ({', '.join(remarks)})" if remarks else name


def with_spread(mean: float | None, std: float | None, digits: int) -> str:
    """``mean ± std`` with so many decimals; the mean alone where no spread is known."""
    if mean is None:
        return NOTHING
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Minutes with three significant digits; seconds if under a minute. Whole numbers keep all their digits."""
    if seconds is None:
        return NOTHING
    if abs(seconds) < 60:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds / 60)} min"


def quantity(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: ``2.04 TB/s``."""
    powers = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
    size, prefix = next((power for power in powers if abs(value) >= power[0] * 0.9995), (1.0, ""))
    return f"{_three_digits(value / size)} {prefix}{unit}"


def _three_digits(value: float) -> str:
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 9.999 has that of 10.0
    return f"{value:,.{min(max(2 - exponent, 0), 6)}f}"


CELL = ("repeat", "prompt", "prefill", "seed")  # what names a cell of the grid: all methods side by side on one case
HERE = "here"  # source of measured rows
# where a metric is computed: an attribute of ``DecodeStats``, ``run._point``, ``quality.py``, or below and in reports
STATS, TIMES, QUALITY, DERIVED = "stats", "times", "quality", "derived"


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (n - 1) of n values; None where there are too few."""

    n: int
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Metric:
    """What is known of a metric. Its entry in ``METRICS`` puts it in bench.json, CSV, tables, plots and the gate."""

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
    close: float = 0.01  # a difference in suites that says nothing: in its own unit, or relative to the larger value
    relative: bool = False  # see close
    rounding: float = 0.01  # the paper's last digit, in our unit

    @property
    def sign(self) -> int:
        """1 where a higher value is better, -1 where a lower one is."""
        return -1 if self.lower_is_better else 1

    def text(self, figure: Figure | None, digits: int | None = None) -> str:
        """The figure with its spread, with ``digits`` decimals if given; times without spread."""
        value, std = (figure.mean, figure.std) if figure else (None, None)
        return duration(value) if self.digits is None else with_spread(value, std, digits or self.digits)

    def tolerance(self, first: float, second: float) -> float:
        """The largest difference of two values that says nothing."""
        return self.close * max(abs(first), abs(second)) if self.relative else self.close


_TIME: dict[str, Any] = {"digits": None, "close": 0.05, "relative": True, "rounding": 0.6}
_TEXT: dict[str, Any] = {"source": QUALITY, "exact": True}

# in the order of bench.csv
METRICS: dict[str, Metric] = {
    "alpha": Metric(
        "alpha", "accepted draft tokens / most that could be", exact=True, drafted=True, gate="alpha",
        plot="acceptance rate alpha",
    ),
    "beta": Metric(
        "beta", "the part of alpha whose longest path came from a reused 4-gram", exact=True, drafted=True, gate="beta",
        plot="n-gram acceptance rate beta",
    ),
    "tokens_per_step": Metric("tokens/step", "tokens / passes", exact=True, digits=2, gate="tokens_per_step"),
    "passes": Metric("passes", "verification passes", exact=True, digits=1, gate="passes", lower_is_better=True),
    "speedup": Metric(
        "x", "AR's time / the method's, prefill apart", source=TIMES, digits=2, gate="speedup",
        plot="speedup over AR, x", close=0.05, relative=True,
    ),
    "tokens_per_second": Metric("tokens/s", "tokens / decoding time", digits=1, gate="tokens_per_s"),
    "seconds": Metric("time", "decoding time, prefill apart", **_TIME),
    "ar_seconds": Metric("T_AR", "AR's decoding time", source=TIMES, **_TIME),
    "of_floor": Metric("T_method / floor", "decoding time / the least time", source=TIMES, digits=2),
    "delta": Metric("delta", "the method's time - AR's", source=DERIVED, **_TIME),
    "ar_of_floor": Metric("T_AR / floor", "AR's decoding time / the least time", source=DERIVED, digits=2),
    **{
        f"distinct_{n}": Metric(f"D-{n}", f"unique {n}-grams / {n}-grams", **_TEXT)
        for n in range(1, 5)
    },
    "distinct": Metric("D", "mean of Distinct-1 to Distinct-4", **_TEXT),
    "seq_rep_4": Metric("seq-rep-4", "4-grams that were there before / 4-grams", **_TEXT),
    "self_bleu": Metric("self-BLEU", "mean BLEU-4 of pieces of 64 tokens against the others", **_TEXT),
    "compression": Metric(
        "LZMA", "compression ratio, bytes / bytes after LZMA", digits=2, close=0.03, relative=True, **_TEXT
    ),
}  # fmt: skip


def from_source(*sources: str) -> list[str]:
    """Names of the metrics from some sources."""
    return [name for name, metric in METRICS.items() if metric.source in sources]


def gated() -> dict[str, str]:
    """The metrics that the gate can hold: by the name in ``--fail-on``, the name in a measurement."""
    return {metric.gate: name for name, metric in METRICS.items() if metric.gate}


Place = tuple["int | None", "int | None"]  # prefill and generated length, in tokens; None where unknown


@dataclass(frozen=True)
class Row:
    """Figures of a method, or of another place on a suite's axis, at one prefill and generated length."""

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
    exact: bool = True  # whether all repeats have equal counters

    @property
    def place(self) -> Place:
        """Prefill and length."""
        return self.prefill, self.length


def summarise(measurement: Mapping[str, Any]) -> list[Row]:
    """Measured rows, called cells, ordered by prefill, length and the method's place in the workload.

    Times vary from repeat to repeat, so every sample counts. Counters do not, so a draw's repeats count once; if some
    repeat did count differently, every sample counts.
    """
    groups: dict[tuple[int, int, str], list[tuple[Any, Any]]] = defaultdict(list)
    for sample in measurement["samples"]:
        for point in sample["points"]:
            groups[sample["prefill"], point["len"], sample["method"]].append((sample, point))
    workload = measurement["workload"]
    rank = {method: i for i, method in enumerate([*workload["methods"], *workload.get("peers", ())])}
    order = sorted(groups, key=lambda key: (*key[:2], rank.get(key[2], len(rank)), key[2]))
    return [_cell(*key, groups[key]) for key in order]


def by_kind(measurement: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The measurement for each kind of a workload's prompts; as a whole, under ``""``, where prompts have no kinds."""
    kinds = {prompt["name"]: prompt.get("kind", "") for prompt in measurement["workload"]["prompts"]}
    samples: dict[str, list[Any]] = {kind: [] for kind in kinds.values()}
    for sample in measurement["samples"]:
        samples.setdefault(kinds.get(sample["prompt"], ""), []).append(sample)
    return {kind: {**measurement, "samples": found} for kind, found in samples.items()}


def _cell(prefill: int, length: int, method: str, members: Sequence[tuple[Any, Any]]) -> Row:
    by_draw: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for sample, point in members:
        by_draw[sample["prompt"], sample["seed"]].append(point)
    counters = [name for name in from_source(STATS) if METRICS[name].exact]
    exact = all(
        point.get(name) == same[0].get(name) for same in by_draw.values() for point in same for name in counters
    )
    points = [point for _, point in members]
    counted = [same[0] for same in by_draw.values()] if exact else points
    figures = {name: _figure(name, counted if metric.exact else points) for name, metric in METRICS.items()}
    own, plain = figures["seconds"], figures["ar_seconds"]
    if own.mean is not None and plain.mean is not None:
        figures["delta"] = Figure(min(own.n, plain.n), own.mean - plain.mean, None)
    draws = {}
    for draw, same in by_draw.items():
        means = {name: _figure(name, same).mean for name in METRICS}
        draws[draw] = {name: value for name, value in means.items() if value is not None}
    varies = tuple(f"{axis}s" for axis in ("prompt", "seed", "repeat") if len({s[axis] for s, _ in members}) > 1)
    estimated = any(sample["estimated"] for sample, _ in members)
    return Row(method, HERE, prefill, length, figures, draws, len(members), estimated, varies, exact)


def _figure(name: str, points: Sequence[Any]) -> Figure:
    quality = METRICS[name].source == QUALITY
    values = [(point.get("quality", {}) if quality else point).get(name) for point in points]
    # the standard library's mean and stdev are exact before their last rounding: the samples' order does not matter
    known = [float(value) for value in values if value is not None]
    return Figure(len(known), mean(known) if known else None, stdev(known) if len(known) > 1 else None)


def drafts(method: str) -> bool:
    """Whether a method drafts with what we measure of drafting."""
    return method not in (*DRAFTLESS, *PEERS)


def drafted_only(figures: Mapping[str, Figure], method: str) -> dict[str, Figure]:
    """Figures without those of drafting where a method does not draft."""
    return {
        name: Figure(0, None, None) if METRICS[name].drafted and not drafts(method) else figure
        for name, figure in figures.items()
    }


def parts(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By label, a suite's measurements; of a bench itself."""
    if record["kind"] != "suite":
        return {"": record}
    return {group["label"]: group["measurement"] for group in record["groups"]}


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


def cell_of(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    """The cell that a sample, or an entry of a session's ``cells``, is of."""
    return tuple(sample[name] for name in CELL)


def done_cells(measurement: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """The cells that were measured to their ends, in whichever session."""
    return {cell_of(cell) for session in measurement["sessions"] for cell in session["cells"]}


def grid_order(workload: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """A key that sorts samples, or kept texts, as an undisturbed benchmark measures them."""
    prompts = {prompt["name"]: number for number, prompt in enumerate(workload["prompts"])}
    seeds = {seed: number for number, seed in enumerate(workload["seeds"])}
    return lambda sample: (
        sample.get("repeat", 0),
        prompts.get(sample["prompt"], -1),
        sample["prefill"],
        seeds.get(sample["seed"], -1),
    )


def machine_name(environment: Mapping[str, Any]) -> str:
    """The GPU, or the CPU and its threads in use."""
    threads = environment["threads"]
    return environment["gpu"] or f"{environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def source(measurement: Mapping[str, Any]) -> str:
    """Model and machine, and whether the figures are simulated, as a label."""
    names = {machine_name(session["environment"]) for session in measurement.get("sessions", [measurement])}
    label = f"{measurement['workload']['model']}, {' and '.join(sorted(names))}"
    return f"{label} (simulated)" if measurement["simulated"] else label


def simulation(measurement: Mapping[str, Any]) -> str:
    """What a measurement simulates, in words; empty if nothing."""
    workload, alpha = measurement["workload"], simulated_alpha(measurement)
    words = ["random weights"] if (workload.get("simulated") or {}).get("weights") else []
    return ", ".join(words if alpha is None else [*words, f"acceptance set to {alpha:g}"])


def simulated_alpha(measurement: Mapping[str, Any]) -> float | None:
    """The acceptance rate that was set; None where it was measured."""
    return (measurement["workload"].get("simulated") or {}).get("alpha")
