"""Plots of bench (figures 1 and 3 of the paper) and of suites, as PNG and SVG.

matplotlib is optional, and imported where it is used. ``pyplot`` is not used: there is no window and no global figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from tswift.benchmarking import suites
from tswift.benchmarking.config import BASELINE, REFERENCE
from tswift.benchmarking.suites import Suite
from tswift.benchmarking.summary import METRICS, Row, by_kind, drafted_only, method_name, source, summarise
from tswift.benchmarking.summary import Figure as Value

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

_DEFAULTS = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tswift"}
# Okabe and Ito's palette, which colour-blind readers can tell apart, and three more; markers repeat it.
_LOOKS = {
    BASELINE: ("#000000", "o"),
    "tokenswift": ("#0072B2", "s"),
    "medusa": ("#D55E00", "^"),
    "reuse": ("#009E73", "D"),
    "triforce": ("#CC79A7", "v"),
    "magicdec": ("#56B4E9", "P"),
    "standalone": ("#E69F00", "X"),
    REFERENCE: ("#7F7F7F", "o"),
}
_MORE_LOOKS = (("#8C564B", "<"), ("#17807E", ">"), ("#4B0082", "*"))
_CURVE_POINTS = 400

Record = Mapping[str, Any]  # as in bench.json or suite.json
Points = list[tuple[float, Value]]


@dataclass(frozen=True)
class Panel:
    """Lines through means, by name."""

    title: str
    across: str  # what runs along the horizontal axis
    up: str
    lines: Mapping[str, Points]


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def files(record: Record) -> dict[str, bytes]:
    """``time`` and ``acceptance`` of a bench, or ``suite``, each as ``.png`` and ``.svg``, by file name.

    Nothing where no length was reached. Those of a simulated measurement are ``time-simulated`` and so on. The same
    record gives the same bytes with the same matplotlib.
    """
    figures: dict[str, Figure] = {}
    if record["kind"] == "suite":
        figures = {"suite": suite_figure(record)} if record["rows"] else {}
    elif summarise(record):
        ending = "-simulated" if record["simulated"] else ""
        figures = {f"time{ending}": time_figure(record), f"acceptance{ending}": acceptance_figure(record)}
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
    """matplotlib's own defaults and ours, whatever the user's configuration says; put back afterwards."""
    import matplotlib
    from matplotlib import style

    with matplotlib.rc_context():
        style.use(["default", _DEFAULTS])
        yield


def _line_figure(
    panels: Sequence[Sequence[Panel]],
    names: Sequence[str],
    title: str,
    measurement: Record,
    width: float,
    every: int | None = None,
    **shared: Any,
) -> Figure:
    """Rows of panels whose axes begin at 0; error bars show one standard deviation each way where one is known.

    Args:
        names: of all lines, in the order of their looks. Estimated methods are dashed.
        measurement: for the title.
        every: points from one marker to the next.
    """
    used = {_LOOKS[name] for name in names if name in _LOOKS}
    free = cycle([look for look in (*_LOOKS.values(), *_MORE_LOOKS) if look not in used])
    looks = {name: _LOOKS.get(name) or next(free) for name in names}
    dashed = {sample["method"] for sample in measurement["samples"] if sample["estimated"]}
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(width, 1.8 + 3.4 * len(panels)), layout="constrained")
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, **shared)
        for axes, panel in zip(grid.flat, (panel for row in panels for panel in row), strict=True):
            axes.set_title(panel.title, fontsize=11)
            axes.set(xlabel=panel.across, ylabel=panel.up)
            for name, points in panel.lines.items():
                known = sorted((x, value.mean, value.std) for x, value in points if value.mean is not None)
                if not known:
                    continue
                color, marker = looks[name]
                label = method_name(name, measurement["simulated"], name in dashed)
                style = {"color": color, "marker": marker, "linestyle": "--" if name in dashed else "-"}
                xs, ys, _ = zip(*known, strict=True)
                axes.plot(xs, ys, label=label, linewidth=1.8, markersize=6, clip_on=False, markevery=every, **style)
                bars = [point for point in known if point[2] is not None]
                if bars:
                    xs, ys, stds = zip(*bars, strict=True)
                    axes.errorbar(xs, ys, yerr=stds, fmt="none", ecolor=color, elinewidth=1.4)
        for axes in grid.flat:
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value >= 1000 else f"{value:g}")
            axes.grid(color="#DDDDDD", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.suptitle(f"{title}\n{source(measurement)}, {measurement['started'][:10]}", fontsize=12)
        handles: dict[str, Artist] = {}  # of one legend below all panels, where no line can run
        for axes in reversed(list(grid.flat)):  # the last one has a line for each method, in their order
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
    return figure


def time_figure(measurement: Record) -> Figure:
    """Decoding time against generated tokens, prefill apart: a panel per prefill, a line per method, mean over runs."""
    places = [
        (kind, prefill, part["samples"])
        for kind, part in by_kind(measurement).items()
        for prefill in sorted({sample["prefill"] for sample in part["samples"]})
    ]
    longest = max((end[1] for _, _, samples in places for sample in samples for end in sample["slices"]), default=0.0)
    unit, scale = ("minutes", 60.0) if longest >= 60 else ("seconds", 1.0)
    panels: list[Panel] = []
    for kind, prefill, samples in places:
        lines = {}
        for method in _methods(measurement):
            runs = [sample for sample in samples if (sample["method"], sample["prefill"]) == (method, prefill)]
            curves = [np.array([(0, 0), *sample["slices"]], float).T for sample in runs]
            if curves:  # their mean, up to where the shortest of them ends
                tokens = np.linspace(0, min(curve[0, -1] for curve in curves), _CURVE_POINTS + 1)
                seconds = np.mean([np.interp(tokens, *curve) for curve in curves], axis=0) / scale
                lines[method] = [(x, Value(1, y, None)) for x, y in zip(tokens, seconds, strict=True)]
        up = "" if panels else f"decoding time, {unit}"
        panels.append(Panel(_title(kind, prefill), "generated tokens", up, lines))
    width, methods = 7.5 if len(places) == 1 else 5.5 * len(places), _methods(measurement)
    return _line_figure([panels], methods, "Decoding time", measurement, width, _CURVE_POINTS // 8, sharey=True)


def acceptance_figure(measurement: Record) -> Figure:
    """The metrics that are plotted (alpha, beta, x) against generated length: a row per prefill, a line per method."""
    shown, methods = [name for name, metric in METRICS.items() if metric.plot], _methods(measurement)
    parts = {kind: summarise(part) for kind, part in by_kind(measurement).items()}
    panels = []
    for kind, prefill in (
        (kind, n) for kind, cells in parts.items() for n in sorted({one.prefill or 0 for one in cells})
    ):
        lines: dict[str, dict[str, Points]] = {name: {method: [] for method in methods} for name in shown}
        for cell in parts[kind]:
            for name in shown if cell.prefill == prefill else ():
                point = (float(cell.length or 0), drafted_only(cell.figures, cell.axis)[name])
                lines[name][cell.axis].append(point)
        title = _title(kind, prefill)
        panels.append([Panel(title, "generated tokens", METRICS[name].plot, lines[name]) for name in shown])
    return _line_figure(panels, methods, "Acceptance and speedup", measurement, 4 * len(shown), sharex=True)


def _title(kind: str, prefill: int | None) -> str:
    return kind or f"prefill {prefill:,} tokens"


def _methods(measurement: Record) -> list[str]:
    known = measurement["workload"]["methods"]
    return list(dict.fromkeys([*known, *(sample["method"] for sample in measurement["samples"])]))


def suite_figure(record: Record) -> Figure:
    """What was measured, over generated length or over what the suite varies; the paper's figures are in the table."""
    suite, first = suites.find_suite(record["suite"]), record["groups"][0]["measurement"]
    measured = suites.measured_rows(suite, record["groups"])
    prefills = [None] if suite.along == suites.PREFILL else list(dict.fromkeys(row.prefill for row in measured))
    over = "prompt tokens" if suite.along == suites.PREFILL else suite.axis if suite.across else "generated tokens"
    panels: list[list[Panel]] = []
    for prefill in prefills:
        panels.append([])
        for name in suite.plotted:
            lines: dict[str, Points] = {}
            for row in measured:
                if prefill in (None, row.prefill):
                    line, x = _position(suite, row)
                    lines.setdefault(line, []).append((x, row.figures[name]))
            title = "" if prefill is None else _title("", prefill)
            up = METRICS[name].heading + ", s" * (METRICS[name].digits is None)
            panels[-1].append(Panel(title, over, up, lines))
    names = list(dict.fromkeys(_position(suite, row)[0] for row in measured))
    width = max(7.5, 4.4 * len(suite.plotted))
    return _line_figure(panels, names, suite.title, first, width, sharey="col")


def _position(suite: Suite, row: Row) -> tuple[str, float]:
    """The line that a row is on, and where: over length, a line for each place; over the axis, for each length."""
    if not suite.across:
        return suites.place_name(suite, row.axis), float(row.length or 0)
    line = "" if row.length is None else f"{row.length:,} tokens"
    return line, float(row.prefill or 0) if suite.along == suites.PREFILL else float(row.axis)
