"""Rows of a suite's table: those measured, from its groups, and those published, from the paper's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tswift.benchmarking.grid import method_name
from tswift.benchmarking.measurement import BASELINE, DRAFTLESS
from tswift.benchmarking.published import read_lines
from tswift.benchmarking.statistics import Cell, Figure, by_draw, summarise
from tswift.benchmarking.suites.suite import LENGTH, Paper, Suite

MEASURED = "here"

Draw = tuple[str, int]  # prompt and seed


@dataclass(frozen=True)
class Row:
    """Figures at one place of a suite.

    Attributes:
        axis: what was varied.
        source: ``here``, or where the paper has it from.
        prefill, length: tokens; None where the paper does not say.
        figures: by name.
        draws: a measured row's figures by prompt and seed.
    """

    axis: str
    source: str
    prefill: int | None
    length: int | None
    figures: Mapping[str, Figure]
    draws: Mapping[Draw, Mapping[str, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, draws apart: they are the samples."""
        figures = {
            name: {"n": figure.n, "mean": figure.mean, "std": figure.std} for name, figure in self.figures.items()
        }
        place = {"axis": self.axis, "source": self.source, "prefill": self.prefill, "length": self.length}
        return {**place, "figures": figures}


def place_name(suite: Suite, axis: str) -> str:
    """What a place on the axis is called where its head is not in sight: ``k 20``, ``AR``."""
    return f"{suite.axis} {axis}" if axis.replace(".", "").isdecimal() else method_name(axis)


def measured_rows(suite: Suite, groups: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of what was measured, in the order of the suite's axis.

    Args:
        suite: the suite.
        groups: as in ``suite.json``, as many as there are by now.
    """
    rows = []
    for group in groups:
        measurement = group["measurement"]
        draws = by_draw(measurement)
        for cell in summarise(measurement):
            if cell.method == BASELINE and not suite.plain:
                continue
            each = {draw: _means(_figures(suite, one)) for draw, one in draws[cell.key].items()}
            axis = group["label"] or cell.method
            rows.append(Row(axis, MEASURED, cell.prefill, cell.length, _figures(suite, cell), each))
    return rows


def published_rows(suite: Suite) -> list[Row]:
    """The paper's rows; none where no figures were transcribed."""
    return [] if suite.paper is None else [_published(suite.paper, line) for line in read_lines(suite.paper.file)]


def counterparts(suite: Suite, axis: str, prefill: int, length: int, published: Sequence[Row]) -> list[Row]:
    """Of each of the paper's sources, the row at a place, or at the nearest one: prefill first, then length.

    Where lengths are compared and not what is on the axis, every one of the paper's rows there counts.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in published:
        if row.axis != axis and suite.along != LENGTH:
            continue
        key = row.source, row.axis
        if key not in found or _distance(row, prefill, length) < _distance(found[key], prefill, length):
            found[key] = row
    return list(found.values())


def _figures(suite: Suite, cell: Cell) -> dict[str, Figure]:
    own, plain = cell.figures["seconds"], cell.figures["ar_seconds"]
    delta = None if own.mean is None or plain.mean is None else own.mean - plain.mean
    every = {**cell.figures, "delta": Figure(min(own.n, plain.n), delta, None)}
    if cell.method in DRAFTLESS:  # nothing of theirs could be accepted
        every |= {name: Figure(0, None, None) for name in ("alpha", "beta")}
    return {name: every[name] for name in dict.fromkeys((*suite.columns, *suite.plotted))}


def _means(figures: Mapping[str, Figure]) -> dict[str, float]:
    return {name: figure.mean for name, figure in figures.items() if figure.mean is not None}


def _published(paper: Paper, line: Mapping[str, str]) -> Row:
    def number(column: str) -> float | None:
        factor = 60.0 if column.endswith("minutes") else 1.0
        return float(line[column]) * factor if line.get(column) else None

    def whole(column: str) -> int | None:
        return int(line[column]) if line.get(column) else None

    axis = " ".join(line[column] for column in paper.axis)
    model = "" if "model" in paper.axis else line.get("model", "")
    figures = {name: Figure(1, number(column), number(f"{column}_std")) for name, column in paper.figures.items()}
    source = f"paper: {model}" if model else "paper"
    return Row(paper.names.get(axis, axis), source, whole("prefill"), whole("generated_length"), figures)


def _distance(row: Row, prefill: int, length: int) -> tuple[float, float]:
    pairs = ((row.prefill, prefill), (row.length, length))
    prefills, lengths = (abs(math.log(theirs / ours)) if theirs else 0.0 for theirs, ours in pairs)
    return prefills, lengths
