"""Plots of bench (figures 1 and 3 of the paper) and of suites, as PNG and SVG.

matplotlib is optional, and imported where it is used. ``pyplot`` is not used: there is no window and no global figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tswift.benchmarking.config import BASELINE, DRAFTLESS, REFERENCE
from tswift.benchmarking.suite_run import measured_rows
from tswift.benchmarking.suites import (
    LENGTH,
    PREFILL,
    Row,
    Suite,
    counterparts,
    find_suite,
    place_name,
    published_rows,
)
from tswift.benchmarking.summary import METRICS, source, summarise
from tswift.benchmarking.summary import Figure as Value
from tswift.benchmarking.table import method_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DEFAULTS = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tswift"}
# Okabe and Ito's palette, which colour-blind readers can tell apart; markers repeat it.
_STYLES = {
    BASELINE: ("#000000", "o"),
    "tokenswift": ("#0072B2", "s"),
    "medusa": ("#D55E00", "^"),
    "reuse": ("#009E73", "D"),
    "triforce": ("#CC79A7", "v"),
    "magicdec": ("#56B4E9", "P"),
    "standalone": ("#E69F00", "X"),
    REFERENCE: ("#7F7F7F", "o"),
}
_OTHER_STYLES = (("#8C564B", "<"), ("#17807E", ">"), ("#4B0082", "*"))
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_MARKERS = ("s", "^", "D", "v", "X", "P", "o", "*")
_CURVE_POINTS = 400

Record = Mapping[str, Any]  # as in bench.json or suite.json
Panel = tuple[str, Sequence[Row]]  # title and rows of one source, at one prefill where lines run over length


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def bench_files(measurement: Record) -> dict[str, bytes]:
    """``time`` and ``acceptance``, each as ``.png`` and ``.svg``, by file name; nothing where no length was reached.

    Those of a simulated measurement are ``time-simulated`` and so on. The same measurement gives the same bytes with
    the same matplotlib.
    """
    if not summarise(measurement):
        return {}
    ending = "-simulated" if measurement["simulated"] else ""
    return _files(f"time{ending}", time_figure(measurement)) | _files(
        f"acceptance{ending}", acceptance_figure(measurement)
    )


def suite_files(record: Record) -> dict[str, bytes]:
    """The plot as ``suite.png`` and ``suite.svg``, by file name; nothing where nothing was measured."""
    suite = find_suite(record["suite"])
    measured = measured_rows(suite, record["groups"])
    if not measured:
        return {}
    if suite.plot == "time":
        figure = time_figure(record["groups"][0]["measurement"])
        figure.suptitle("\n".join([figure.get_suptitle(), *_published_times(suite)]), fontsize=12)
    else:
        figure = _suite_figure(suite, record, measured)
    return _files("suite", figure)


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's own defaults and ours, whatever the user's configuration says; put back afterwards."""
    import matplotlib
    from matplotlib import style

    with matplotlib.rc_context():
        style.use(["default", _DEFAULTS])
        yield


def _files(stem: str, figure: Figure) -> dict[str, bytes]:
    """A figure as PNG and as SVG, by file name."""
    images = {}
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        with _style():
            figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
        images[f"{stem}.{kind}"] = buffer.getvalue()
    return images


def _new_figure(width: float, rows: int, columns: int, **shared: Any) -> tuple[Figure, Any]:
    """A figure ``width`` inches wide, and its panels as an array of rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 1.8 + 3.4 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def _from_zero(axes: Axes) -> None:
    """Both axes from 0, thousands of tokens as K, and a light grid."""
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value >= 1000 else f"{value:g}")
    _light_grid(axes)


def _light_grid(axes: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(axis=which, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _finish(figure: Figure, title: str, about: Record, started: str, panels: Sequence[Axes]) -> None:
    """A title, what was measured and when, and one legend below all panels, where no line can run."""
    figure.suptitle(f"{title}\n{source(about)}, {started[:10]}", fontsize=12)
    handles: dict[str, Artist] = {}
    for axes in reversed(panels):  # the last one has a line for each method, in their order
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)


def _plot(axes: Axes, points: Sequence[tuple[float, Value]], label: str, **style: Any) -> None:
    """A line through means, with bars of one standard deviation each way where one is known."""
    known = sorted((x, value.mean, value.std) for x, value in points if value.mean is not None)
    if not known:
        return
    xs, ys, _ = zip(*known, strict=True)
    axes.plot(xs, ys, label=label, linewidth=1.8, markersize=6, clip_on=False, **style)
    bars = [(x, y, std) for x, y, std in known if std is not None]
    if bars:
        xs, ys, stds = zip(*bars, strict=True)
        axes.errorbar(xs, ys, yerr=stds, fmt="none", ecolor=style["color"], elinewidth=1.4)


def time_figure(measurement: Record) -> Figure:
    """Decoding time against generated tokens, prefill apart: a panel per prefill, a line per method, mean over runs."""
    samples = measurement["samples"]
    prefills = sorted({sample["prefill"] for sample in samples})
    longest = max((seconds for sample in samples for _, seconds in _curve(sample)), default=0.0)
    unit, seconds_per_unit = ("minutes", 60.0) if longest >= 60 else ("seconds", 1.0)
    with _style():
        width = 7.5 if len(prefills) == 1 else 5.5 * len(prefills)
        figure, ((*panels,),) = _new_figure(width, 1, len(prefills), sharey=True)
        for axes, prefill in zip(panels, prefills, strict=True):
            for method in _methods(measurement):
                runs = [sample for sample in samples if (sample["method"], sample["prefill"]) == (method, prefill)]
                if not runs:
                    continue
                tokens, seconds = _mean_curve([_curve(sample) for sample in runs])
                points = [(x, Value(1, y / seconds_per_unit, None)) for x, y in zip(tokens, seconds, strict=True)]
                estimated = any(sample["estimated"] for sample in runs)
                _plot(axes, points, markevery=_CURVE_POINTS // 8, **_line(method, measurement, estimated))
            axes.set_xlabel("generated tokens")
            axes.set_title(f"prefill {prefill:,} tokens", fontsize=11)
            _from_zero(axes)
        panels[0].set_ylabel(f"decoding time, {unit}")
        _finish(figure, "Decoding time", measurement, measurement["started"], panels)
    return figure


def acceptance_figure(measurement: Record) -> Figure:
    """The metrics that are plotted (alpha, beta, x) against generated length: a row per prefill, a line per method."""
    cells = summarise(measurement)
    prefills = sorted({cell.prefill for cell in cells})
    shown = [name for name, metric in METRICS.items() if metric.plot]
    with _style():
        figure, grid = _new_figure(4 * len(shown), len(prefills), len(shown), sharex=True)
        for row, prefill in zip(grid, prefills, strict=True):
            for axes, name in zip(row, shown, strict=True):
                for method in _methods(measurement):
                    line = [cell for cell in cells if (cell.method, cell.prefill) == (method, prefill)]
                    if method not in DRAFTLESS or not METRICS[name].drafted:
                        estimated = any(cell.estimated for cell in line)
                        points = [(float(cell.length), cell.figures[name]) for cell in line]
                        _plot(axes, points, **_line(method, measurement, estimated))
                axes.set_title(f"prefill {prefill:,} tokens", fontsize=11)
                axes.set_ylabel(METRICS[name].plot)
                _from_zero(axes)
        for axes in grid[-1]:
            axes.set_xlabel("generated tokens")
        _finish(figure, "Acceptance and speedup", measurement, measurement["started"], list(grid.flat))
    return figure


def _curve(sample: Record) -> list[tuple[float, float]]:
    """(tokens, seconds) from the start on."""
    return [(0.0, 0.0), *((float(tokens), float(seconds)) for tokens, seconds in sample["slices"])]


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of several runs at evenly spaced tokens, up to where the shortest of them ends."""
    tokens = np.linspace(0, min(curve[-1][0] for curve in curves), _CURVE_POINTS + 1)
    columns = [np.asarray(curve).T for curve in curves]
    return tokens, np.mean([np.interp(tokens, *column) for column in columns], axis=0)


def _methods(measurement: Record) -> list[str]:
    known = list(measurement["workload"]["methods"])
    return list(dict.fromkeys(known + [sample["method"] for sample in measurement["samples"]]))


def _line(method: str, measurement: Record, estimated: bool) -> dict[str, Any]:
    """Label, colour, marker and dashes of a method's line."""
    others = [other for other in _methods(measurement) if other not in _STYLES]
    color, marker = _STYLES.get(method) or _OTHER_STYLES[others.index(method) % len(_OTHER_STYLES)]
    label = method_name(method, measurement["simulated"], estimated)
    return {"label": label, "color": color, "marker": marker, "linestyle": "--" if estimated else "-"}


def _published_times(suite: Suite) -> list[str]:
    """The paper's times, of which it gives the last ones only, in a line for each of its sources and places."""
    ends: dict[str, list[str]] = {}
    for row in published_rows(suite):
        place = f"{row.source}, prefill {row.prefill:,}, {row.length:,} tokens"
        ends.setdefault(place, []).append(f"{method_name(row.axis)} {METRICS['seconds'].text(row.figures['seconds'])}")
    return [f"{place}: {', '.join(times)}" for place, times in ends.items()]


def _suite_figure(suite: Suite, record: Record, measured: Sequence[Row]) -> Figure:
    """What was measured, and what was published beside it in panels of its own."""
    panels = _panels(suite, measured)
    rows = [row for _, rows in panels for row in rows]
    with _style():
        if suite.plot == "bars":
            width = min(max(8.0, 1.5 * max(len(rows) for _, rows in panels)), 14.0)
            figure, grid = _new_figure(width, len(panels), 1)
            for (axes,), panel in zip(grid, panels, strict=True):
                _bars(axes, suite, panel)
        else:
            across = len(suite.plotted)
            figure, grid = _new_figure(max(7.5, 4.4 * across), len(panels), across, sharey="col")
            order = list(dict.fromkeys(_line_name(suite, row) for row in rows))  # a line's colour in all panels
            for panel, line in zip(panels, grid, strict=True):
                for axes, name in zip(line, suite.plotted, strict=True):
                    _lines(axes, suite, panel, name, order)
            for axes, name in zip(grid[0], suite.plotted, strict=True):
                known = [row.figures[name] for row in rows if name in row.figures]
                highest = max(((value.mean or 0) + (value.std or 0) for value in known), default=0)
                axes.set_ylim(0, highest * 1.08 or 1)
        about = record["groups"][0]["measurement"]
        _finish(figure, suite.title, about, record["started"], list(grid.flat))
    return figure


def _panels(suite: Suite, measured: Sequence[Row]) -> list[Panel]:
    """Ours, by prefill where lines run over length; then the paper's, as near to ours as it has them."""
    prefills = list(dict.fromkeys(row.prefill for row in measured))
    panels: list[Panel] = []
    if suite.plot == "bars":
        longest = max(row.length or 0 for row in measured)
        last = [row for row in measured if (row.prefill, row.length) == (prefills[0], longest)]
        panels.append((f"measured, {longest:,} tokens, prefill {prefills[0]:,}", last))
    elif suite.along == PREFILL:
        panels.append(("measured", measured))
    else:
        for prefill in prefills:
            panels.append((f"measured, prefill {prefill:,}", [row for row in measured if row.prefill == prefill]))
    published = published_rows(suite)
    middle = prefills[len(prefills) // 2] or 0
    places = list(dict.fromkeys(row.axis for row in (published if suite.along == LENGTH else measured)))
    beside = [
        row
        for row in published
        if row.axis in places and row in counterparts(suite, row.axis, middle, row.length or 1, published)
    ]
    for name in dict.fromkeys(row.source for row in beside):
        rows = sorted((row for row in beside if row.source == name), key=lambda row: places.index(row.axis))
        if any(figure in row.figures for row in rows for figure in suite.plotted):
            prefill = rows[0].prefill
            panels.append((name if prefill is None else f"{name}, prefill {prefill:,}", rows))
    return panels


def _line_name(suite: Suite, row: Row) -> str:
    """Name of the line that a row is on: its length where lines run over the axis, else its place there."""
    if suite.plot != "axis":
        return place_name(suite, row.axis)
    return "" if row.length is None else f"{row.length:,} tokens"


def _lines(axes: Axes, suite: Suite, panel: Panel, name: str, order: Sequence[str]) -> None:
    """Lines over length, one for each place on the axis; or over the axis, one for each length."""
    title, rows = panel
    over_axis, over_prefill = suite.plot == "axis", suite.along == PREFILL
    lines: dict[str, list[tuple[float, Value]]] = {}
    for row in rows:
        if name in row.figures:
            x = row.length if not over_axis else row.prefill if over_prefill else float(row.axis)
            lines.setdefault(_line_name(suite, row), []).append((float(x or 0), row.figures[name]))
    for key, points in lines.items():
        style = order.index(key)
        _plot(axes, points, key, color=_COLORS[style % len(_COLORS)], marker=_MARKERS[style % len(_MARKERS)])
    _from_zero(axes)
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(METRICS[name].heading)
    axes.set_xlabel(("prefill, tokens" if over_prefill else suite.axis) if over_axis else "generated tokens")


def _bars(axes: Axes, suite: Suite, panel: Panel) -> None:
    """A group of bars for each place on the axis, a bar for each figure."""
    title, rows = panel
    names = [name for name in suite.plotted if any(name in row.figures for row in rows)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        values = [(place, row.figures[name]) for place, row in enumerate(rows) if name in row.figures]
        known = [(place, value.mean, value.std or 0.0) for place, value in values if value.mean is not None]
        if known:
            places, means, stds = zip(*known, strict=True)
            middles = [place + width * (index - (len(names) - 1) / 2) for place in places]
            spread = stds if any(stds) else None
            axes.bar(middles, means, width * 0.92, yerr=spread, color=_COLORS[index], label=METRICS[name].legend)
    axes.set_xticks(range(len(rows)), [method_name(row.axis) for row in rows])
    axes.set_xlabel(suite.axis)
    axes.set_title(title, fontsize=11)
    axes.set_ylim(0, 1)
    _light_grid(axes, "y")
