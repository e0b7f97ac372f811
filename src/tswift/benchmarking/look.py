"""How plots look: matplotlib's own defaults and ours, one legend below all panels, PNG and SVG.

matplotlib is optional, and imported where it is used. ``pyplot`` is not used: there is no window and no global figure.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOK = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tswift"}


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


@contextmanager
def look() -> Iterator[None]:
    """matplotlib's own defaults and ours, whatever the user's configuration says; put back afterwards."""
    import matplotlib
    from matplotlib import style

    with matplotlib.rc_context():
        style.use(["default", _LOOK])
        yield


def files(figure: Figure) -> dict[str, bytes]:
    """A figure as PNG and as SVG, by kind; the same bytes for the same figure and matplotlib."""
    images = {}
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        buffer = io.BytesIO()
        with look():
            figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
        images[kind] = buffer.getvalue()
    return images


def from_zero(axes: Axes) -> None:
    """Both axes from 0, thousands of tokens as K, and a light grid."""
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value >= 1000 else f"{value:g}")
    light_grid(axes)


def light_grid(axes: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    """Lines that say where a value is, behind everything."""
    axes.grid(axis=which, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def dress(figure: Figure, title: str, below: str, panels: Sequence[Axes]) -> None:
    """A title and a line below it, and one legend below all panels, where no line can run."""
    figure.suptitle(f"{title}\n{below}", fontsize=12)
    handles: dict[str, Artist] = {}
    for axes in reversed(panels):  # the last one has a line for each method, in their order
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False)
