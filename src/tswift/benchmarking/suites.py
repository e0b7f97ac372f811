"""Suites: the paper's tables and figures.

What each runs and shows, and how it compares with the paper.

``paper/suites.toml`` says what each varies. Beside it a CSV for each has published figures (Wu et
al., "From Hours to Minutes", arXiv 2502.18890; facts, transcribed): by metric, with our names for
places on the axis and times in seconds. Where the paper gives no figures, what is varied is our
choice.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from itertools import combinations
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from tswift.benchmarking.config import BASELINE
from tswift.benchmarking.summary import (
    METRICS,
    Figure,
    Place,
    Row,
    drafted_only,
    grid_order,
    method_name,
    summarise,
)
from tswift.errors import InputError, did_you_mean
from tswift.options import Values

if TYPE_CHECKING:
    from tswift.benchmarking.record import Group, SuiteRecord

PAPER_MACHINE = "NVIDIA A100 80G"
CAUTION = (
    "Published x is relative to the paper's own plain decoding, which took about 176 ms per token "
    "on LLaMA3.1-8b; ar-reference decodes in that style. Its Medusa* is Medusa with heads that "
    "the authors trained."
)
AXIS, LENGTH, PREFILL = "axis", "length", "prefill"  # what a suite puts in order

# two-sided 95% quantiles of Student's t, by degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


# By place on the axis, a method and fields of its DraftOptions. All contenders write the same text.
Contenders = Mapping[str, tuple[str, Values]]
# By place on the axis, fields of SamplingParams. Each setting has a plain decode of its own.
Settings = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Suite:
    """One of the paper's tables or figures."""

    name: str
    title: str
    axis: str  # what is varied, as a column heading
    contenders: Contenders  # what runs side by side, plain decoding apart
    columns: tuple[str, ...] = ("alpha", "speedup")  # metrics shown
    # those of them whose order is compared with the paper's
    ordered: tuple[str, ...] = ("alpha", "speedup")
    along: str = AXIS  # what is put in order: the axis, generated lengths or prefills
    settings: Settings = field(default_factory=lambda: {"": {}})
    wide: bool = False  # the axis runs across the table, as in the paper, and not down
    # plotted over the axis, a line for each length; else over length, a line for each place
    across: bool = False
    plotted: tuple[str, ...] = ("alpha", "speedup")
    prefills: tuple[int, ...] = (4096,)
    lens: tuple[int, ...] = (20_000, 40_000, 60_000, 80_000, 100_000)
    fixes: tuple[str, ...] = ()  # options that are set here without being varied
    plain: bool = False  # plain decoding is on the axis, too
    texts: bool = False  # keep the texts, and show them
    note: str = ""  # shown below the table

    @property
    def own(self) -> frozenset[str]:
        """Parameter names of the options that it varies or fixes, which nobody else can set."""
        varied = [*self.settings.values(), *(drafting for _, drafting in self.contenders.values())]
        prefill = ["prefills"] * (self.along == PREFILL)
        return frozenset(
            ["methods", *self.fixes, *prefill, *(name for fields in varied for name in fields)]
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Places on its axis; none where the model or the prefill is varied."""
        return tuple(label for label in (*self.contenders, *self.settings) if label)

    @property
    def methods(self) -> tuple[str, ...]:
        """Its methods, each once."""
        return tuple(dict.fromkeys(method for method, _ in self.contenders.values()))


def _suite(name: str, about: Mapping[str, Any]) -> Suite:
    """A suite as the file has it, whose contenders are tokenswift alone where none are named."""
    contenders = {
        label: (
            drafting.pop("method"),
            {option: _frozen(value) for option, value in drafting.items()},
        )
        for label, drafting in about.get("contenders", {"": {"method": "tokenswift"}}).items()
    }
    return Suite(
        name,
        **{field: _frozen(value) for field, value in {**about, "contenders": contenders}.items()},
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_FILES = files("tswift.benchmarking") / "paper"
SUITES: dict[str, Suite] = {
    name: _suite(name, about)
    for name, about in tomllib.loads((_FILES / "suites.toml").read_text(encoding="utf-8")).items()
}


def find_suite(name: str) -> Suite:
    """The suite of a name, or an ``InputError``."""
    if name not in SUITES:
        raise InputError(
            f"no suite {name!r:.40}; there are {', '.join(SUITES)}{did_you_mean(name, SUITES)}",
            "suite",
        )
    return SUITES[name]


def measured_rows(suite: Suite, groups: Sequence[Group]) -> list[Row]:
    """Measured rows in the order of the suite's axis."""
    rows: list[Row] = []
    for group in groups:
        for cell in summarise(group.measurement):
            if cell.axis != BASELINE or suite.plain:
                figures = drafted_only(cell.figures, cell.axis)
                shown = {name: figures[name] for name in (*suite.columns, *suite.plotted)}
                rows.append(replace(cell, axis=group.label or cell.axis, figures=shown))
    return rows


def summarise_suite(record: SuiteRecord) -> dict[str, list[dict[str, object]]]:
    """What follows from a suite's measurements, for JSON: rows, published rows, pairs.

    Its end is brought up to date, and its texts are put in order.
    """
    suite = find_suite(record.suite)
    labels = list(record.parts)
    record.ended = max(one.ended for one in record.parts.values())
    order = grid_order(record.groups[0].measurement.workload)
    record.texts.sort(key=lambda text: (labels.index(text.label), order(text.cell)))
    measured = measured_rows(suite, record.groups)
    published = published_rows(suite)
    pairs = [asdict(pair) for pair in compared(suite, measured, published)]
    return {
        "rows": [_shown(row) for row in measured],
        "published": [_shown(row) for row in published],
        "pairs": pairs,
    }


def _shown(row: Row) -> dict[str, object]:
    figures = {name: asdict(figure) for name, figure in row.figures.items()}
    return {name: getattr(row, name) for name in ("axis", "source", "prefill", "length")} | {
        "figures": figures
    }


def place_name(suite: Suite, axis: str) -> str:
    """A place on the axis where the axis' name is not in sight: ``k 20``, ``AR``."""
    return f"{suite.axis} {axis}" if axis.replace(".", "").isdecimal() else method_name(axis)


def published_rows(suite: Suite) -> list[Row]:
    """The paper's rows; none where no figures were transcribed."""
    file = _FILES / f"{suite.name}.csv"
    rows = list[Row]()
    for line in csv.DictReader(
        file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    ):
        known = {
            name: float(value)
            for name, value in line.items()
            if value and name.removesuffix("_std") in METRICS
        }
        figures = {
            name: Figure(1, known[name], known.get(f"{name}_std"))
            for name in known
            if name in METRICS
        }
        prefill, length = (
            int(line[name]) if line[name] else None for name in ("prefill", "length")
        )
        rows.append(Row(line["axis"], line["source"], prefill, length, figures))
    return rows


def counterparts(suite: Suite, axis: str, place: Place, published: Sequence[Row]) -> list[Row]:
    """Of each of the paper's sources, the row at a place, or at the nearest one: prefill first,
    then length.

    Where lengths are put in order, and not what is on the axis, every one of the paper's rows there
    counts.
    """

    def distance(row: Row) -> list[float]:
        places = zip(row.place, place, strict=True)
        return [abs(math.log(theirs / (ours or 1))) if theirs else 0.0 for theirs, ours in places]

    nearest: dict[tuple[str, str], Row] = {}
    for row in published:
        key = row.source, row.axis
        if row.axis == axis or suite.along == LENGTH:
            nearest[key] = min(nearest.get(key, row), row, key=distance)
    return list(nearest.values())


@dataclass(frozen=True)
class Pair:
    """Two measured rows, their order, and the paper's."""

    figure: str  # the metric
    place: str  # prefill, length or axis label where both were measured
    first: str
    second: str
    values: tuple[float, float]  # the figure of both
    ours: float  # the first's value minus the second's, as the mean over draws that both have
    within: float  # the largest difference that would say nothing
    n: int  # draws that both have
    # its sign of the same difference; None where it has none, or its models disagree
    paper: int | None
    verdict: str  # too close, not in the paper, same or differs


def compared(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> list[Pair]:
    """All pairs of measured rows that a suite puts in order, figure by figure and place by place.

    A pair is too close if its difference is within the figure's tolerance, or within the 95%
    interval of the paired difference where there are several draws. The paper has no order if its
    difference is within its last digit.
    """
    pairs = []
    for figure in suite.ordered:
        for place, rows in _places(suite, measured).items():
            for (name, first), (other, second) in combinations(rows.items(), 2):
                one = first.figures[figure].mean
                two = second.figures[figure].mean
                if one is None or two is None:
                    continue
                differences = [
                    values[figure] - second.draws[draw][figure]
                    for draw, values in first.draws.items()
                    if figure in values and figure in second.draws.get(draw, {})
                ]
                ours = mean(differences) if differences else one - two
                within = max(METRICS[figure].tolerance(one, two), _interval(differences))
                paper = _published_sign(suite, figure, first, second, published)
                known = (
                    "not in the paper" if not paper else "same" if ours * paper > 0 else "differs"
                )
                verdict = "too close" if abs(ours) <= within else known
                count = len(differences)
                pairs.append(
                    Pair(
                        figure, place, name, other, (one, two), ours, within, count, paper, verdict
                    )
                )
    return pairs


def _places(suite: Suite, measured: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows that are put in order, by name, grouped by where they were measured."""
    places: dict[str, dict[str, Row]] = {}
    for row in measured:
        lengths = f"{row.length:,} tokens"
        prefills = f"prefill {row.prefill:,}"
        names = {LENGTH: lengths, PREFILL: prefills, AXIS: place_name(suite, row.axis)}
        own = names.pop(suite.along)
        places.setdefault(", ".join(filter(None, names.values())), {})[own] = row
    return places


def _interval(differences: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of paired differences; 0 from a single draw,
    which has no spread.
    """
    if len(differences) < 2:
        return 0.0
    return (
        _T[min(len(differences) - 1, len(_T)) - 1]
        * stdev(differences)
        / math.sqrt(len(differences))
    )


def _published_sign(
    suite: Suite, figure: str, first: Row, second: Row, published: Sequence[Row]
) -> int | None:
    """The sign of the paper's difference; None if it has none, or has both."""
    one, two = (
        {
            # where the axis is put in order, the two sides are at different places on it
            (row.source, row.axis if suite.along == LENGTH else ""): row.figures[figure].mean or 0.0
            for row in counterparts(suite, own.axis, own.place, published)
            if figure in row.figures
        }
        for own in (first, second)
    )
    differences = [one[key] - two[key] for key in one.keys() & two.keys()]
    signs = {1 if x > 0 else -1 for x in differences if abs(x) > METRICS[figure].rounding * 1.01}
    return signs.pop() if len(signs) == 1 else None
