"""Suites: the paper's tables and figures: what each runs and shows.

``paper/suites.toml`` says what each varies. Beside it a CSV for each has published figures (Wu et
al., "From Hours to Minutes", arXiv 2502.18890; facts, transcribed): by metric, with our names for
places on the axis and times in seconds. Where the paper gives no figures, what is varied is our
choice.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tswift.benchmarking.config import BASELINE
from tswift.benchmarking.summary import (
    METRICS,
    Figure,
    Row,
    drafted_only,
    grid_order,
    summarise,
)
from tswift.errors import Object, no_such
from tswift.options import Values

if TYPE_CHECKING:
    from tswift.benchmarking.record import Group, SuiteRecord

CAUTION = (
    "Published x is relative to the paper's own plain decoding, which took about 176 ms per token "
    "on LLaMA3.1-8b; ar-reference decodes in that style. Its Medusa* is Medusa with heads that "
    "the authors trained."
)
PUBLISHED = "paper: on an NVIDIA A100 80G."

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
    settings: Settings = field(default_factory=lambda: {"": {}})
    of_prefills: bool = False  # the prefill is what is varied
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
        prefill = ["prefills"] * self.of_prefills
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


def _suite(name: str, about: Values) -> Suite:
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


def _frozen(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


_FILES = files("tswift.benchmarking") / "paper"
SUITES: dict[str, Suite] = {
    name: _suite(name, about)
    for name, about in tomllib.loads((_FILES / "suites.toml").read_text(encoding="utf-8")).items()
}


def find_suite(name: str) -> Suite:
    """The suite of a name, or an ``InputError``."""
    if name not in SUITES:
        raise no_such("suite", name, SUITES, "suite")
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


def summarise_suite(record: SuiteRecord) -> dict[str, list[Object]]:
    """What follows from a suite's measurements, for JSON: its rows, and the published ones.

    Its end is brought up to date, and its texts are put in order.
    """
    suite = find_suite(record.suite)
    labels = list(record.parts)
    record.ended = max(one.ended for one in record.parts.values())
    order = grid_order(record.groups[0].measurement.workload)
    record.texts.sort(key=lambda text: (labels.index(text.label), order(text.cell)))
    measured = measured_rows(suite, record.groups)
    published = published_rows(suite)
    return {
        "rows": [_shown(row) for row in measured],
        "published": [_shown(row) for row in published],
    }


def _shown(row: Row) -> Object:
    figures = {name: asdict(figure) for name, figure in row.figures.items()}
    return {name: getattr(row, name) for name in ("axis", "source", "prefill", "length")} | {
        "figures": figures
    }


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
