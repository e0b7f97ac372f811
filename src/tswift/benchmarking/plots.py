"""Plots of a measurement: time against tokens (figure 1 of the paper), acceptance against length (its figure 3).

matplotlib is optional, and imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tswift.benchmarking.grid import marks, method_name
from tswift.benchmarking.look import dress, files, from_zero, look
from tswift.benchmarking.measurement import BASELINE, DRAFTLESS, REFERENCE, file_name
from tswift.benchmarking.statistics import Cell, summarise
from tswift.benchmarking.tables import source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers say it a second time.
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
_CURVE_POINTS = 400


def render(measurement: Mapping[str, Any]) -> dict[str, bytes]:
    """All plots as files: ``time`` and ``acceptance``, each as ``.png`` and ``.svg``, by file name.

    Those of a simulated measurement are ``time-simulated`` and so on.
    The same measurement gives the same bytes with the same matplotlib. One that reached no length has no plots.
    """
    if not summarise(measurement):
        return {}
    built: dict[str, Callable[[Mapping[str, Any]], Figure]] = {"time": time_figure, "acceptance": acceptance_figure}
    images = {}
    for name, build in built.items():
        figure = build(measurement)
        for kind, content in files(figure).items():
            images[file_name(f"{name}.{kind}", measurement["simulated"])] = content
    return images


def time_figure(measurement: Mapping[str, Any]) -> Figure:
    """Decoding time against generated tokens, prefill apart: a panel per prefill, a line per method, mean over runs."""
    samples = measurement["samples"]
    prefills = sorted({sample["prefill"] for sample in samples})
    methods = _methods(measurement)
    longest = max((seconds for sample in samples for _, seconds in _curve(sample)), default=0.0)
    unit, seconds_per_unit = ("minutes", 60.0) if longest >= 60 else ("seconds", 1.0)
    with look():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5 if len(prefills) == 1 else 5.5 * len(prefills), 5.2), layout="constrained")
        panels = figure.subplots(1, len(prefills), squeeze=False, sharey=True)[0]
        for axes, prefill in zip(panels, prefills, strict=True):
            for method in methods:
                mine = [sample for sample in samples if (sample["method"], sample["prefill"]) == (method, prefill)]
                if not mine:
                    continue
                estimated = any(sample["estimated"] for sample in mine)
                tokens, seconds = _mean_curve([_curve(sample) for sample in mine])
                axes.plot(
                    tokens,
                    seconds / seconds_per_unit,
                    label=method_name(method, *marks(measurement["simulated"], estimated)),
                    linestyle="--" if estimated else "-",
                    **_style(method, measurement, every=_CURVE_POINTS // 8),
                )
            axes.set_xlabel("generated tokens")
            axes.set_title(f"prefill {prefill:,} tokens", fontsize=11)
            from_zero(axes)
        panels[0].set_ylabel(f"decoding time, {unit}")
        _dress(figure, "Decoding time", measurement, panels)
    return figure


def acceptance_figure(measurement: Mapping[str, Any]) -> Figure:
    """alpha, beta and x against generated length: a row per prefill, a line per method.

    Bars are a standard deviation each way, where there is more than one value. alpha and beta leave out what drafts
    nothing.
    """
    cells = summarise(measurement)
    prefills = sorted({cell.prefill for cell in cells})
    methods = _methods(measurement)
    titles = {"alpha": "acceptance rate alpha", "beta": "n-gram acceptance rate beta", "speedup": "speedup over AR, x"}
    with look():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 1.4 + 3.4 * len(prefills)), layout="constrained")
        grid = figure.subplots(len(prefills), 3, squeeze=False, sharex=True)
        for row, prefill in zip(grid, prefills, strict=True):
            for axes, (name, title) in zip(row, titles.items(), strict=True):
                for method in methods:
                    mine = [cell for cell in cells if (cell.method, cell.prefill) == (method, prefill)]
                    if name == "speedup" or method not in DRAFTLESS:
                        _with_bars(axes, mine, name, method, measurement)
                axes.set_title(f"prefill {prefill:,} tokens", fontsize=11)
                axes.set_ylabel(title)
                from_zero(axes)
        for axes in grid[-1]:
            axes.set_xlabel("generated tokens")
        _dress(figure, "Acceptance and speedup", measurement, list(grid.flat))
    return figure


def _with_bars(axes: Axes, cells: Sequence[Cell], name: str, method: str, measurement: Mapping[str, Any]) -> None:
    known = [(cell.length, cell.figures[name].mean, cell.figures[name].std) for cell in cells]
    means = [(length, mean) for length, mean, _ in known if mean is not None]
    if not means:
        return
    estimated = any(cell.estimated for cell in cells)
    style = _style(method, measurement)
    label, line = method_name(method, *marks(measurement["simulated"], estimated)), "--" if estimated else "-"
    axes.plot(*np.array(means).T, label=label, linestyle=line, **style)
    bars = [(length, mean, std) for length, mean, std in known if mean is not None and std is not None]
    if bars:
        lengths, centres, stds = np.array(bars).T
        axes.errorbar(lengths, centres, yerr=stds, fmt="none", ecolor=style["color"], elinewidth=1.4)


def _curve(sample: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(tokens, seconds) from the start on; the points of a run that kept no slices."""
    slices = sample["slices"] or [(point["tokens"], point["seconds"]) for point in sample["points"]]
    return [(0.0, 0.0), *((float(tokens), float(seconds)) for tokens, seconds in slices)]


def _mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of several runs at evenly spaced tokens, up to where the shortest of them ends."""
    tokens = np.linspace(0, min(curve[-1][0] for curve in curves), _CURVE_POINTS + 1)
    columns = [np.asarray(curve).T for curve in curves]
    return tokens, np.mean([np.interp(tokens, *column) for column in columns], axis=0)


def _methods(measurement: Mapping[str, Any]) -> list[str]:
    known = list(measurement["workload"]["methods"])
    return list(dict.fromkeys(known + [sample["method"] for sample in measurement["samples"]]))


def _style(method: str, measurement: Mapping[str, Any], every: int = 1) -> dict[str, Any]:
    strangers = [other for other in _methods(measurement) if other not in _STYLES]
    known = _STYLES.get(method)
    color, marker = known or _OTHER_STYLES[strangers.index(method) % len(_OTHER_STYLES)]
    return {"color": color, "marker": marker, "markersize": 6, "markevery": every, "linewidth": 1.8, "clip_on": False}


def _dress(figure: Figure, title: str, measurement: Mapping[str, Any], panels: Sequence[Axes]) -> None:
    """Title, what was measured on what and when, and the legend."""
    dress(figure, title, f"{source(measurement)}, {measurement['started'][:10]}", panels)
