"""A suite's table in the paper's layout, the published row beside each measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, method_name
from tswift.benchmarking.measure import SAMPLED
from tswift.benchmarking.measurement import FINISHED
from tswift.benchmarking.published import CAUTION, MACHINE
from tswift.benchmarking.statistics import summarise
from tswift.benchmarking.suites.catalogue import find_suite
from tswift.benchmarking.suites.figures import SHOWN
from tswift.benchmarking.suites.rows import MEASURED, Row, counterparts, measured_rows, place_name, published_rows
from tswift.benchmarking.suites.suite import Suite
from tswift.benchmarking.tables import runs, same_text, source


def table(record: Mapping[str, Any]) -> Grid:
    """The table of a suite.

    Args:
        record: as in ``suite.json``.
    """
    suite = find_suite(record["suite"])
    measured, published = measured_rows(suite, record["groups"]), published_rows(suite)
    columns, rows = (_wide if suite.wide else _long)(suite, measured, published)
    left = next((i for i, column in enumerate(columns) if column == "prefill"), 0)
    title = f"{suite.name}: {suite.title}"
    if record["groups"]:
        title += f": {source(record['groups'][0]['measurement'])}"
    return Grid(title, columns, rows, left, _notes(suite, record, measured, published))


Lines = tuple[list[str], list[list[str]]]


def _long(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> Lines:
    """A line for each row, the axis down."""
    beside = [counterparts(suite, row.axis, row.prefill or 0, row.length or 0, published) for row in measured]
    last = {id(theirs): index for index, found in enumerate(beside) for theirs in found}
    lines = []
    for index, (row, found) in enumerate(zip(measured, beside, strict=True)):
        lines.append(_line(suite, row))
        lines += [_line(suite, theirs) for theirs in found if last[id(theirs)] == index]
    heads = [SHOWN[name].head for name in suite.columns]
    columns, sourced = [suite.axis, "source", "prefill", "length", *heads], bool(published)
    if not sourced:
        return [column for column in columns if column != "source"], [[*line[:1], *line[2:]] for line in lines]
    return columns, lines


def _line(suite: Suite, row: Row) -> list[str]:
    figures = [SHOWN[name].text(row.figures.get(name)) for name in suite.columns]
    return [method_name(row.axis), row.source, _tokens(row.prefill), _tokens(row.length), *figures]


def _wide(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> Lines:
    """A line for each prefill and length, the axis across."""
    known = [row.axis for row in (*measured, *published)]
    axis = [label for label in dict.fromkeys((*suite.labels, *known)) if label in known]
    by_place: dict[tuple[int, int], dict[str, Row]] = {}
    for row in measured:
        by_place.setdefault((row.prefill or 0, row.length or 0), {})[row.axis] = row
    places = sorted(by_place)
    theirs = {
        place: [row for label in axis for row in counterparts(suite, label, *place, published)] for place in places
    }
    last = {id(row): place for place in places for row in theirs[place]}
    lines = []
    for place in places:
        lines.append([MEASURED, *map(_tokens, place), *_across(suite, axis, by_place[place])])
        for name in dict.fromkeys(row.source for row in theirs[place]):
            mine = {row.axis: row for row in theirs[place] if row.source == name and last[id(row)] == place}
            if mine:
                first = next(iter(mine.values()))
                lines.append([name, _tokens(first.prefill), _tokens(first.length), *_across(suite, axis, mine)])
    heads = [f"{place_name(suite, label)} {SHOWN[name].head}" for label in axis for name in suite.columns]
    return ["source", "prefill", "length", *heads], lines


def _across(suite: Suite, axis: Sequence[str], rows: Mapping[str, Row]) -> list[str]:
    found = [rows[label].figures if label in rows else {} for label in axis]
    return [SHOWN[name].text(figures.get(name)) for figures in found for name in suite.columns]


def _tokens(count: int | None) -> str:
    return NOTHING if count is None else f"{count:,}"


def _notes(suite: Suite, record: Mapping[str, Any], measured: Sequence[Row], published: Sequence[Row]) -> list[str]:
    notes = list(record["conclusion"]["lines"])
    told = [f"{SHOWN[name].head}: {SHOWN[name].meaning}" for name in suite.columns if not name.startswith("distinct_")]
    if "distinct_1" in suite.columns:
        told.insert(0, "D-n: Distinct-n, unique n-grams of generated tokens / n-grams")
    notes.append(f"{'. '.join(told)}.")
    if suite.note:
        notes.append(suite.note)
    notes += [f"Left out: {each['label']}, since {each['why']}." for each in record["missing"]]
    measurements = [group["measurement"] for group in record["groups"]]
    if any(measurement["samples"] for measurement in measurements):
        whole = {**measurements[0], "samples": [each for one in measurements for each in one["samples"]]}
        notes += [runs([cell for one in measurements for cell in summarise(one)]), same_text(whole)]
    if any(measurement["workload"]["ar"] == SAMPLED for measurement in measurements):
        notes.append("AR's time is integrated from AR steps sampled as the text grew; every x rests on that time.")
    if record["state"] != FINISHED:
        notes.append("The suite did not run to its end: these are the cells and lengths that were reached.")
    if published:
        timed = any(name in row.figures for row in published for name in ("speedup", "seconds"))
        notes.append(f"paper: on an {MACHINE}. {CAUTION}" if timed else f"paper: on an {MACHINE}.")
    return notes
