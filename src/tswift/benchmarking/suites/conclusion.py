"""Whether the measured order is the paper's: pair by pair, with what is too close to say, and never more than that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import mean, stdev
from typing import Any

from tswift.benchmarking.suites.figures import SHOWN
from tswift.benchmarking.suites.rows import Row, counterparts, place_name
from tswift.benchmarking.suites.suite import AXIS, LENGTH, PREFILL, Suite

SAME, DIFFERS, CLOSE, UNKNOWN, ASIDE = "same", "differs", "too close", "not in the paper", "not what this is about"

_MOST = 4  # pairs told in words; all of them are in suite.json
# two-sided 95% quantiles of Student's t, by degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Pair:
    """Two measured rows of which one is ahead, or not.

    Attributes:
        figure: its name.
        place: where both were measured.
        first, second: what they are called.
        ours: the first's value minus the second's.
        within: the difference that would say nothing.
        n: draws that both have.
        paper: its sign of the same difference; None where it has none, or its models disagree.
        verdict: same, differs, too close, not in the paper, or none of the suite's contrasts.
    """

    figure: str
    place: str
    first: str
    second: str
    ours: float
    within: float
    n: int
    paper: int | None
    verdict: str


@dataclass(frozen=True)
class Conclusion:
    """What follows from the rows.

    Attributes:
        lines: in words, the first one the sum of it.
        pairs: each of them.
    """

    lines: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"lines": list(self.lines), "pairs": [asdict(pair) for pair in self.pairs]}


def conclude(suite: Suite, measured: Sequence[Row], published: Sequence[Row]) -> Conclusion:
    """Hold the order of the measured rows against the paper's.

    A pair is too close to say if its difference is within the figure's tolerance, or within the 95% interval of the
    paired difference where there are several draws. The paper's is none if within its last digit.
    """
    pairs = tuple(pair for figure in suite.judged for pair in _pairs(suite, figure, measured, published))
    if not pairs:
        return Conclusion(("Conclusion: none, since nothing was measured that could be put in order.",), ())
    held = [pair for pair in pairs if pair.verdict not in (UNKNOWN, ASIDE)]
    lines = [_sum(suite, pairs, held), *_orders(suite, measured, pairs)]
    if held:
        lines += [line for figure in suite.judged for line in _details(figure, held)]
        lines += _lengths(measured, published)
    return Conclusion((*lines, _spread(suite, pairs)), pairs)


def _pairs(suite: Suite, figure: str, measured: Sequence[Row], published: Sequence[Row]) -> Iterator[Pair]:
    for place, rows in _places(suite, measured).items():
        for (one, first), (other, second) in combinations(rows.items(), 2):
            values = [row.figures[figure].mean for row in (first, second)]
            if values[0] is None or values[1] is None:
                continue
            shared = [
                draw for draw in first.draws if figure in first.draws[draw] and figure in second.draws.get(draw, {})
            ]
            apart = [first.draws[draw][figure] - second.draws[draw][figure] for draw in shared]
            ours = mean(apart) if apart else values[0] - values[1]
            within = max(SHOWN[figure].tolerance(values[0], values[1]), _interval(apart))
            paper = _published_sign(suite, figure, first, second, published)
            verdict = UNKNOWN if not paper else CLOSE if abs(ours) <= within else SAME if ours * paper > 0 else DIFFERS
            if suite.contrasts and (first.axis, second.axis) not in suite.contrasts:
                verdict = ASIDE
            yield Pair(figure, place, one, other, ours, within, len(shared), paper, verdict)


def _places(suite: Suite, measured: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows that are held against one another, by what they are called, by where they are."""
    severals = {name: len({getattr(row, name) for row in measured}) > 1 for name in ("axis", "prefill", "length")}
    places: dict[str, dict[str, Row]] = {}
    for row in measured:
        names = {
            LENGTH: f"{row.length:,} tokens",
            AXIS: place_name(suite, row.axis),
            PREFILL: f"prefill {row.prefill:,}",
        }
        own = names.pop(suite.along)
        told = [name for along, name in names.items() if severals[along]] or list(names.values())[:1]
        places.setdefault(", ".join(told), {})[own] = row
    return places


def _interval(apart: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of paired differences; 0 from a single draw, which has no spread."""
    if len(apart) < 2:
        return 0.0
    return _T[min(len(apart) - 1, len(_T)) - 1] * stdev(apart) / math.sqrt(len(apart))


def _published_sign(suite: Suite, figure: str, first: Row, second: Row, published: Sequence[Row]) -> int | None:
    """The sign of the paper's difference; None if it has none, or has both."""
    sides: list[Mapping[tuple[str, str], Row]] = []
    for row in (first, second):
        assert row.prefill is not None
        assert row.length is not None
        found = counterparts(suite, row.axis, row.prefill, row.length, published)
        # where the axis is compared, the two sides are at different places on it
        sides.append({(each.source, each.axis if suite.along == LENGTH else ""): each for each in found})
    signs = set()
    for key in sides[0].keys() & sides[1].keys():
        theirs = [side[key].figures.get(figure) for side in sides]
        means = [each.mean for each in theirs if each is not None and each.mean is not None]
        if len(means) == 2 and abs(means[0] - means[1]) > SHOWN[figure].rounding * 1.01:
            signs.add(1 if means[0] > means[1] else -1)
    return signs.pop() if len(signs) == 1 else None


def _sum(suite: Suite, pairs: Sequence[Pair], held: Sequence[Pair]) -> str:
    draws = max(pair.n for pair in pairs)
    begun = f"Conclusion from {draws} draws" if draws > 1 else "Conclusion from one draw"
    if not held:
        why = (
            "its figures are not in this package" if suite.paper is None else "it has no such pair, or its own disagree"
        )
        return f"{begun}: measured order only; there is nothing of the paper to hold it against ({why})."
    same, differs, close = (sum(pair.verdict == verdict for pair in held) for verdict in (SAME, DIFFERS, CLOSE))
    if same == len(held):
        number = {1: "the one pair", 2: "both pairs"}.get(same, f"all {same} pairs")
        return f"{begun}: the same ordering as in the paper, in {number}."
    if close == len(held):
        return f"{begun}: nothing can be said of the ordering: {_count(close)}, too close here."
    left = f", {close} too close to say" if close else ""
    if not differs:
        return f"{begun}: the same ordering as in the paper where there is one: {same} of {_count(len(held))}{left}."
    return (
        f"{begun}: the ordering differs from the paper's: of {_count(len(held))} {same} as there, "
        f"{differs} the other way round{left}."
    )


def _orders(suite: Suite, measured: Sequence[Row], pairs: Sequence[Pair]) -> Iterator[str]:
    """Each figure's measured order at the last place."""
    places = _places(suite, measured)
    place, rows = list(places.items())[-1]
    for figure in suite.judged:
        here = [pair for pair in pairs if (pair.figure, pair.place) == (figure, place)]
        close = [{pair.first, pair.second} for pair in here if abs(pair.ours) <= pair.within]
        means = {name: row.figures[figure].mean for name, row in rows.items()}
        known = [(value, name) for name, value in means.items() if value is not None]
        ranked = sorted(known, key=lambda each: -each[0])  # equal ones as they stand on the axis
        if len(ranked) < 2:
            continue
        told = [f"{name} ({SHOWN[figure].number(value)})" for value, name in ranked]
        line = told[0]
        for (_, before), (_, after), text in zip(ranked, ranked[1:], told[1:], strict=False):
            line += f" {'~' if {before, after} in close else '>'} {text}"
        yield f"{SHOWN[figure].head}, measured at {place}: {line}."


def _details(figure: str, held: Sequence[Pair]) -> Iterator[str]:
    """In words, the pairs of a figure that are the other way round, and those that are too close."""
    head = SHOWN[figure].head
    by_names: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in held:
        if pair.figure == figure:
            high, low = (pair.first, pair.second) if pair.ours >= 0 else (pair.second, pair.first)
            names = (high, low) if pair.verdict == DIFFERS else (pair.first, pair.second)
            by_names.setdefault((pair.verdict, *names), []).append(pair)
    reversed_ = [
        f"{high} above {low} here, below it in the paper ({_listed([pair.place for pair in pairs])})"
        for (verdict, high, low), pairs in by_names.items()
        if verdict == DIFFERS
    ]
    close = [
        f"{one} and {other} (within {SHOWN[figure].number(max(pair.within for pair in pairs))})"
        for (verdict, one, other), pairs in by_names.items()
        if verdict == CLOSE
    ]
    if reversed_:
        yield f"{head}, differs: {_few(reversed_)}."
    if close:
        yield f"{head}, too close to say: {_few(close)}."


def _lengths(measured: Sequence[Row], published: Sequence[Row]) -> Iterator[str]:
    ours, theirs = ({row.length for row in rows if row.length} for rows in (measured, published))
    other = sorted(ours - theirs)
    if theirs and other:
        which = "these lengths" if len(other) == len(ours) else f"{' and '.join(f'{each:,}' for each in other)} tokens"
        yield f"The paper has no rows at {which}; each is held against its row of the nearest one."


def _spread(suite: Suite, pairs: Sequence[Pair]) -> str:
    counts = {pair.n for pair in pairs}
    limits = "; ".join(
        f"{SHOWN[figure].head} {SHOWN[figure].close:.0%}"
        if SHOWN[figure].relative
        else f"{SHOWN[figure].head} {SHOWN[figure].close:g}"
        for figure in suite.judged
    )
    if max(counts) < 2:
        return f"One draw each, so no spread is known; called too close: differences up to {limits}."
    draws = f"{max(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{draws} draws each; called too close: within the paired difference's 95% interval, or up to {limits}."


def _listed(places: Sequence[str]) -> str:
    few = "; ".join(places[:3])
    return few if len(places) <= 3 else f"{few}; and {len(places) - 3} more places"


def _few(told: Sequence[str]) -> str:
    more = f"; and {len(told) - _MOST} more" if len(told) > _MOST else ""
    return f"{'; '.join(told[:_MOST])}{more}"


def _count(number: int) -> str:
    return f"{number} pair" if number == 1 else f"{number} pairs"
