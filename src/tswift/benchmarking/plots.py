"""Plots of bench (figures 1 and 3 of the paper) and of suites, as PNG and SVG.

matplotlib is optional, and imported where it is used. ``pyplot`` is not used: there is no window
and no global figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tswift.benchmarking import suites
from tswift.benchmarking.record import Measurement, Record, SuiteRecord
from tswift.benchmarking.summary import (
    METRICS,
    drafted_only,
    method_name,
    source,
    summarise,
)
from tswift.benchmarking.summary import Figure as Value

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

_DEFAULTS = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "tswift",
}
# Okabe and Ito's palette, which colour-blind readers can tell apart, and three more; markers repeat
# it. Plain decoding is black.
_COLORS = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"),
    *("#8C564B", "#17807E", "#4B0082"),
)
_MARKERS = "os^DvPX<>*"
_CURVE_POINTS = 400

Points = list[tuple[float, Value]]
Where = tuple[str, "int | None"]  # kind of a workload's prompts, and prefill


class Panel(NamedTuple):
    """Lines through means, by name."""

    title: str
    across: str  # what runs along the horizontal axis
    up: str
    lines: dict[str, Points]
    places: Sequence[str] = ()  # by name along the horizontal axis, from 1 on; none for numbers


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def files(record: Record) -> dict[str, bytes]:
    """``time`` and ``acceptance`` of a bench, ``suite`` and, of methods, ``time`` of a suite,
    each as ``.png`` and ``.svg``, by file name.

    Nothing where no length was reached. Those of a simulated measurement are ``time-simulated`` and
    so on. The same record gives the same bytes with the same matplotlib.
    """
    figures: dict[str, Figure] = {}
    if isinstance(record, SuiteRecord):
        if any(summarise(one) for one in record.parts.values()):
            figures["suite"] = suite_figure(record)
            suite = suites.find_suite(record.suite)
            if suite.axis == "method" and not suite.of_prefills:
                figures["time"] = time_figure(record.groups[0].measurement)
    elif summarise(record):
        ending = "-simulated" if record.simulated else ""
        figures = {
            f"time{ending}": time_figure(record),
            f"acceptance{ending}": acceptance_figure(record),
        }
    images = {}
    for stem, figure in figures.items():
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            with _style():
                figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            images[f"{stem}.{kind}"] = buffer.getvalue()
    return images


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's own defaults and ours, whatever the user's configuration says;
    put back afterwards.
    """
    import matplotlib
    from matplotlib import style

    with matplotlib.rc_context():
        style.use(["default", _DEFAULTS])
        yield


def _line_figure(
    panels: Sequence[Sequence[Panel]],
    names: Sequence[str],
    title: str,
    measurement: Measurement,
    width: float,
    every: int | None = None,
    sharex: bool = False,
    sharey: bool | Literal["col"] = False,
) -> Figure:
    """Rows of panels whose axes begin at 0, but for those of x; error bars show one standard
    deviation each way where one is known.

    Args:
        names: of all lines, in the order of their looks. Estimated methods are dashed.
        measurement: for the title.
        every: points from one marker to the next.
    """
    looks = dict(zip(names, cycle(zip(_COLORS, _MARKERS, strict=True)), strict=False))
    dashed = {sample.method for sample in measurement.samples if sample.estimated}
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(width, 1.8 + 3.4 * len(panels)), layout="constrained")
        grid = figure.subplots(
            len(panels), len(panels[0]), squeeze=False, sharex=sharex, sharey=sharey
        )
        for axes, panel in zip(grid.flat, (panel for row in panels for panel in row), strict=True):
            axes.set_title(panel.title, fontsize=11)
            axes.set(xlabel=panel.across, ylabel=panel.up)
            for name, points in panel.lines.items():
                known = sorted(
                    (x, value.mean, value.std) for x, value in points if value.mean is not None
                )
                if not known:
                    continue
                color, marker = looks[name]
                xs, ys, stds = zip(*known, strict=True)
                axes.plot(
                    xs,
                    ys,
                    label=method_name(name, measurement.simulated, name in dashed),
                    color=color,
                    marker=marker,
                    linestyle="--" if name in dashed else "-",
                    linewidth=1.8,
                    markersize=6,
                    clip_on=False,
                    markevery=every,
                )
                if None not in stds:
                    axes.errorbar(xs, ys, yerr=stds, fmt="none", ecolor=color, elinewidth=1.4)
            axes.set_xlim(left=0)
            if panel.up != METRICS["speedup"].plot:  # 1 is what a ratio is to be compared with
                axes.set_ylim(bottom=0)
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value / 1000:g}K" if value >= 1000 else f"{value:g}"
            )
            if panel.places:
                axes.set_xticks(
                    range(1, len(panel.places) + 1), panel.places, rotation=30, ha="right"
                )
                axes.set_xlim(0.5, len(panel.places) + 0.5)
            axes.grid(color="#DDDDDD", linewidth=0.8)
            axes.set_axisbelow(True)
        subtitle = f"{source(measurement)}, {measurement.started[:10]}"
        figure.suptitle(f"{title}\n{subtitle}", fontsize=12, wrap=True)  # a path may be long
        handles: dict[str, Artist] = {}  # of one legend below all panels, where no line can run
        for axes in reversed(list(grid.flat)):
            # the last one has a line for each method, in their order
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if not panels[0][0].places:
            figure.legend(
                list(handles.values()),
                list(handles),
                loc="outside lower center",
                ncols=4,
                frameon=False,
            )
    return figure


def time_figure(measurement: Measurement) -> Figure:
    """Decoding time against generated tokens, prefill apart: a panel per prefill,
    a line per method, mean over runs.
    """
    curves: dict[Where, dict[str, list[np.ndarray]]] = {}  # by panel and method
    prompts = measurement.workload.prompts
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        own = {prompt.name for prompt in prompts if prompt.kind == kind}
        for sample in sorted(measurement.samples, key=lambda sample: sample.prefill):
            if sample.prompt in own:
                lines = curves.setdefault((kind or "", sample.prefill), {})
                curve = np.array([(0, 0), *sample.slices], float).T
                lines.setdefault(sample.method, []).append(curve)
    longest = max(
        (curve[1, -1] for lines in curves.values() for runs in lines.values() for curve in runs),
        default=0.0,
    )
    unit, scale = ("minutes", 60.0) if longest >= 60 else ("seconds", 1.0)
    panels: list[Panel] = []
    for where, by_method in curves.items():
        means: dict[str, Points] = {}
        for method, runs in by_method.items():  # their mean, up to where the shortest of them ends
            tokens = np.linspace(0, min(curve[0, -1] for curve in runs), _CURVE_POINTS + 1)
            seconds = np.mean([np.interp(tokens, *curve) for curve in runs], axis=0) / scale
            means[method] = [(x, Value(1, y, None)) for x, y in zip(tokens, seconds, strict=True)]
        panels.append(
            Panel(
                _title(where), "generated tokens", "" if panels else f"decoding time, {unit}", means
            )
        )
    width = 7.5 if len(panels) == 1 else 5.5 * len(panels)
    every = _CURVE_POINTS // 8
    return _line_figure(
        [panels], measurement.methods, "Decoding time", measurement, width, every, sharey=True
    )


def acceptance_figure(measurement: Measurement) -> Figure:
    """The metrics that are plotted (alpha, beta, x) and known against generated length:
    a row per prefill, a line per method.
    """
    points = [
        (
            (cell.kind, cell.prefill),
            cell.axis,
            float(cell.length or 0),
            drafted_only(cell.figures, cell.axis),
        )
        for cell in summarise(measurement)
    ]
    plotted = {name: metric.plot for name, metric in METRICS.items() if metric.plot}
    known = {name for *_, found in points for name in plotted if found[name].mean is not None}
    shown = {name: words for name, words in plotted.items() if name in known} or plotted
    panels = _panels(points, "generated tokens", shown)
    return _line_figure(
        panels,
        measurement.methods,
        "Acceptance and speedup",
        measurement,
        4 * len(shown),
        sharex=True,
    )


def suite_figure(record: SuiteRecord) -> Figure:
    """What was measured, over generated length or over what the suite varies.

    With one length, what the suite varies stands side by side. The paper's figures are in the
    table.
    """
    suite = suites.find_suite(record.suite)
    over = suite.axis if suite.across else "generated tokens"
    points = []
    rows = suites.measured_rows(suite, record.groups)
    lengths = {row.length for row in rows}
    numbered = suite.across or suite.of_prefills or len(lengths) > 1
    places = [] if numbered else list(dict.fromkeys(row.axis for row in rows))
    for row in rows:
        where: Where = "", row.prefill
        # over length, a line for each place on the axis; over the axis, or over prefills, for each
        # length
        line = f"{row.length:,} tokens"
        if suite.of_prefills:
            over = "prompt tokens"
            where = "", None
            x = float(row.prefill or 0)
        elif suite.across:
            x = float(row.axis)
        elif places:
            over = f"{suite.axis}, after {line}"
            line = row.axis
            x = places.index(row.axis) + 1.0
        else:
            line = f"{suite.axis} {row.axis}" if row.axis.isdecimal() else row.axis
            x = float(row.length or 0)
        points.append((where, line, x, row.figures))
    shown = {
        name: METRICS[name].heading + ", s" * (METRICS[name].digits is None)
        for name in suite.plotted
    }
    names = list(dict.fromkeys(line for _, line, *_ in points))
    width = max(7.5, 4.4 * len(shown))
    first = record.groups[0].measurement
    return _line_figure(
        _panels(points, over, shown, places), names, suite.title, first, width, sharey="col"
    )


def _panels(
    points: Sequence[tuple[Where, str, float, Mapping[str, Value]]],
    across: str,
    shown: Mapping[str, str],
    places: Sequence[str] = (),
) -> list[list[Panel]]:
    """Of points, each with where it was measured and its line, a row of panels for each place:
    one for each metric.
    """
    panels: dict[Where, list[Panel]] = {}
    for where, line, x, figures in points:
        if where not in panels:
            panels[where] = [Panel(_title(where), across, up, {}, places) for up in shown.values()]
        for panel, name in zip(panels[where], shown, strict=True):
            panel.lines.setdefault(line, []).append((x, figures[name]))
    return list(panels.values())


def _title(where: Where) -> str:
    kind, prefill = where
    return kind or ("" if prefill is None else f"prefill {prefill:,} tokens")
