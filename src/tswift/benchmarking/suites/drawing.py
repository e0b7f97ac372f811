"""A suite's plot: what was measured, and what was published beside it in panels of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tswift.benchmarking.grid import method_name
from tswift.benchmarking.look import dress, files, from_zero, light_grid, look
from tswift.benchmarking.plots import time_figure
from tswift.benchmarking.suites.catalogue import find_suite
from tswift.benchmarking.suites.figures import SHOWN
from tswift.benchmarking.suites.rows import Row, counterparts, measured_rows, place_name, published_rows
from tswift.benchmarking.suites.suite import LENGTH, PREFILL, Suite
from tswift.benchmarking.tables import source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers say it a second time.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = ("s", "^", "D", "v", "X", "P", "o", "*")


@dataclass(frozen=True)
class _Panel:
    """One line of panels: rows of one source, at one prefill where lines run over length."""

    title: str
    rows: Sequence[Row]


def render(record: Mapping[str, Any]) -> dict[str, bytes]:
    """The plot as ``suite.png`` and ``suite.svg``, by file name; nothing where nothing was measured."""
    suite = find_suite(record["suite"])
    measured = measured_rows(suite, record["groups"])
    if not measured:
        return {}
    if suite.plot == "time":
        figure = time_figure(record["groups"][0]["measurement"])
        figure.suptitle("\n".join([figure.get_suptitle(), *_ends(published_rows(suite))]), fontsize=12)
    else:
        figure = _figure(suite, record, measured)
    return {f"suite.{kind}": content for kind, content in files(figure).items()}


def _ends(published: Sequence[Row]) -> list[str]:
    """The paper's times, of which it gives the last ones only, in a line for each of its sources and places."""
    ends: dict[str, list[str]] = {}
    for row in published:
        place = f"{row.source}, prefill {row.prefill:,}, {row.length:,} tokens"
        ends.setdefault(place, []).append(f"{method_name(row.axis)} {SHOWN['seconds'].text(row.figures['seconds'])}")
    return [f"{place}: {', '.join(times)}" for place, times in ends.items()]


def _figure(suite: Suite, record: Mapping[str, Any], measured: Sequence[Row]) -> Figure:
    rows = _panels(suite, measured)
    with look():
        from matplotlib.figure import Figure

        if suite.plot == "bars":
            groups = max(len(row.rows) for row in rows)
            figure = Figure(figsize=(min(max(8.0, 1.5 * groups), 14.0), 1.4 + 3.4 * len(rows)), layout="constrained")
            panels = list(figure.subplots(len(rows), 1, squeeze=False)[:, 0])
            for axes, row in zip(panels, rows, strict=True):
                _bars(axes, suite, row)
        else:
            across = len(suite.plotted)
            figure = Figure(figsize=(max(7.5, 4.4 * across), 1.4 + 3.4 * len(rows)), layout="constrained")
            grid = figure.subplots(len(rows), across, squeeze=False, sharey="col")
            every = [each for row in rows for each in row.rows]
            order = list(dict.fromkeys(_line_of(suite, each) for each in every))  # a line's colour in all panels
            for row, line in zip(rows, grid, strict=True):
                for axes, name in zip(line, suite.plotted, strict=True):
                    _lines(axes, suite, row, name, order)
            for axes, name in zip(grid[0], suite.plotted, strict=True):
                axes.set_ylim(0, _highest(every, name) * 1.08 or 1)
            panels = [axes for line in grid for axes in line]
        started = record["started"][:10]
        dress(figure, suite.title, f"{source(record['groups'][0]['measurement'])}, {started}", panels)
    return figure


def _panels(suite: Suite, measured: Sequence[Row]) -> list[_Panel]:
    """Ours, by prefill where lines run over length; then the paper's, as near to ours as it has them."""
    prefills = list(dict.fromkeys(row.prefill for row in measured))
    if suite.plot == "bars":
        longest = max(row.length or 0 for row in measured)
        mine = [row for row in measured if (row.prefill, row.length) == (prefills[0], longest)]
        panels = [_Panel(f"measured, {longest:,} tokens, prefill {prefills[0]:,}", mine)]
    elif suite.along == PREFILL:
        panels = [_Panel("measured", measured)]
    else:
        mine = list(measured)
        panels = [
            _Panel(f"measured, prefill {prefill:,}", [row for row in mine if row.prefill == prefill])
            for prefill in prefills
        ]
    published = published_rows(suite)
    middle = prefills[len(prefills) // 2] or 0
    places = list(dict.fromkeys(row.axis for row in (published if suite.along == LENGTH else measured)))
    near = {
        id(row)
        for row in published
        for each in counterparts(suite, row.axis, middle, row.length or 1, published)
        if each is row
    }
    theirs = [row for row in published if row.axis in places and id(row) in near]
    for name in dict.fromkeys(row.source for row in theirs):
        mine = sorted((row for row in theirs if row.source == name), key=lambda row: places.index(row.axis))
        if any(figure in row.figures for row in mine for figure in suite.plotted):
            prefill = mine[0].prefill
            panels.append(_Panel(name if prefill is None else f"{name}, prefill {prefill:,}", mine))
    return panels


def _line_of(suite: Suite, row: Row) -> str:
    """What the line is called that a row is on: its length where lines run over the axis, else its place there."""
    if suite.plot != "axis":
        return place_name(suite, row.axis)
    return "" if row.length is None else f"{row.length:,} tokens"


def _lines(axes: Axes, suite: Suite, panel: _Panel, name: str, order: Sequence[str]) -> None:
    """Lines over length, one for each place on the axis; or over the axis, one for each length."""
    over_axis = suite.plot == "axis"
    lines: dict[str, list[tuple[float, float, float | None]]] = {}
    for row in panel.rows:
        figure = row.figures.get(name)
        if figure is None or figure.mean is None:
            continue
        x = row.length if not over_axis else row.prefill if suite.along == PREFILL else float(row.axis)
        lines.setdefault(_line_of(suite, row), []).append((float(x or 0), figure.mean, figure.std))
    for key, points in lines.items():
        style = order.index(key)
        color, marker = _COLORS[style % len(_COLORS)], _MARKERS[style % len(_MARKERS)]
        xs, ys, stds = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, label=key, color=color, marker=marker, linewidth=1.8, markersize=6, clip_on=False)
        bars = [(x, y, std) for x, y, std in zip(xs, ys, stds, strict=True) if std is not None]
        if bars:
            places, centres, spreads = zip(*bars, strict=True)
            axes.errorbar(places, centres, yerr=spreads, fmt="none", ecolor=color, elinewidth=1.4)
    from_zero(axes)
    axes.set_title(panel.title, fontsize=11)
    axes.set_ylabel(SHOWN[name].head)
    axes.set_xlabel(("prefill, tokens" if suite.along == PREFILL else suite.axis) if over_axis else "generated tokens")


def _highest(rows: Sequence[Row], name: str) -> float:
    known = [row.figures[name] for row in rows if name in row.figures]
    return max(((figure.mean or 0) + (figure.std or 0) for figure in known), default=0)


def _bars(axes: Axes, suite: Suite, panel: _Panel) -> None:
    """A group of bars for each place on the axis, a bar for each figure."""
    names = [name for name in suite.plotted if any(name in row.figures for row in panel.rows)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        known = [(place, row.figures[name]) for place, row in enumerate(panel.rows) if name in row.figures]
        points = [(place, figure.mean, figure.std) for place, figure in known if figure.mean is not None]
        if not points:
            continue
        places, means, stds = zip(*points, strict=True)
        middle = [place + width * (index - (len(names) - 1) / 2) for place in places]
        spread = [std or 0.0 for std in stds] if any(stds) else None
        axes.bar(middle, means, width * 0.92, yerr=spread, color=_COLORS[index], label=SHOWN[name].name)
    axes.set_xticks(range(len(panel.rows)), [method_name(row.axis) for row in panel.rows])
    axes.set_xlabel(suite.axis)
    axes.set_title(panel.title, fontsize=11)
    axes.set_ylim(0, 1)
    light_grid(axes, "y")
