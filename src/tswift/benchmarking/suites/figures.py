"""The figures that suites show: what each is called, how it is written, and how close is too close to order."""

from __future__ import annotations

from dataclasses import dataclass

from tswift.benchmarking.grid import NOTHING, duration, with_spread
from tswift.benchmarking.statistics import Figure


@dataclass(frozen=True)
class Shown:
    """A figure as tables and plots have it.

    Attributes:
        head: of its column.
        meaning: for a note below, and the axis of a plot.
        digits: decimals; None for a time.
        close: a difference that says nothing, whatever the spread: in the figure's own unit, or a share of the larger.
        relative: see close.
        rounding: the paper's last digit, in our unit.
        name: in a legend of bars.
    """

    head: str
    meaning: str
    digits: int | None = 3
    close: float = 0.01
    relative: bool = False
    rounding: float = 0.01
    name: str = ""

    def text(self, figure: Figure | None) -> str:
        """The figure with its spread; times without."""
        if figure is None or figure.mean is None:
            return NOTHING
        return duration(figure.mean) if self.digits is None else with_spread(figure.mean, figure.std, self.digits)

    def number(self, value: float) -> str:
        """A value alone."""
        return duration(value) if self.digits is None else f"{value:.{self.digits}f}"

    def tolerance(self, first: float, second: float) -> float:
        """The least difference of two values that says anything."""
        return self.close * max(abs(first), abs(second)) if self.relative else self.close


def _time(head: str, meaning: str) -> Shown:
    return Shown(head, meaning, digits=None, close=0.05, relative=True, rounding=0.6)


def _share(head: str, meaning: str) -> Shown:
    return Shown(head, meaning)


SHOWN: dict[str, Shown] = {
    "alpha": _share("alpha", "accepted draft tokens / most that could be"),
    "beta": _share("beta", "the part of alpha whose longest path came from a reused 4-gram"),
    "speedup": Shown("x", "AR's time / the method's, prefill apart", digits=2, close=0.05, relative=True),
    "ar_seconds": _time("T_AR", "AR's decoding time"),
    "seconds": _time("time", "decoding time, prefill apart"),
    "delta": _time("delta", "the method's time - AR's"),
    **{f"distinct_{n}": Shown(f"D-{n}", f"unique {n}-grams / {n}-grams", name=f"Distinct-{n}") for n in range(1, 5)},
    "distinct": Shown("D", "mean of Distinct-1 to Distinct-4", name="mean"),
    "seq_rep_4": _share("seq-rep-4", "4-grams that were there before / 4-grams"),
    "self_bleu": _share("self-BLEU", "mean BLEU-4 of pieces of 64 tokens against the others"),
    "compression": Shown("LZMA", "compression ratio, bytes / bytes after LZMA", digits=2, close=0.03, relative=True),
}
