"""The regression gate: a measurement is held against an earlier one of the same workload,
by rules.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.benchmarking import summary
from tswift.benchmarking.summary import METRICS, Metric, gated, method_name, summarise
from tswift.errors import InputError, did_you_mean
from tswift.options import check_options, option, options_of, switch
from tswift.tables import NOTHING, Table

if TYPE_CHECKING:
    from tswift.benchmarking.record import Measurement

SAME_TEXT = "same_as_ar"

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded
_MACHINE = ("cpu", "threads", "gpu")
_MIN_REPEATS = 2

Draw = tuple[str, int]  # prompt and seed
# method, prefill, length; the draw of a counter, or the prompts' kind of a time
Place = tuple[str, "int | None", "int | None", str]
Value = tuple["float | None", set[Draw]]  # a mean, and what it is over

_ABSENT: Value = (None, set())


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get."""

    figure: str  # the metric's name in a measurement
    # at least 0; a share of the baseline if relative, else in the metric's own unit
    tolerance: float
    relative: bool

    @property
    def metric(self) -> Metric:
        """What is known of the metric; a time differs between machines, a counter does not."""
        return METRICS[self.figure]

    def limit(self, baseline: float) -> float:
        """The worst value that passes."""
        return baseline - self.metric.sign * self.tolerance * (
            abs(baseline) if self.relative else 1
        )

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether our value passes."""
        return self.metric.sign * (ours - self.limit(baseline)) >= -_SLACK * max(1.0, abs(baseline))

    def values(self, measurement: Measurement) -> dict[Place, Value]:
        """What is compared, and its draws: times as means over a cell, counters draw by draw."""
        values: dict[Place, Value] = {}
        for cell in summarise(measurement):
            if self.metric.exact:
                for draw, means in cell.draws.items():
                    values[cell.axis, cell.prefill, cell.length, _draw_name(*draw)] = (
                        means.get(self.figure),
                        {draw},
                    )
            else:
                values[cell.axis, cell.prefill, cell.length, cell.kind] = (
                    cell.figures[self.figure].mean,
                    set(cell.draws),
                )
        return values

    def check(self, baseline: Measurement) -> None:
        """Refuse a baseline without the metric, and a tolerance so loose that the rule could never
        fail.
        """
        name = self.metric.gate
        known = [value for value, _ in self.values(baseline).values() if value is not None]
        if not known:
            raise InputError(f"the baseline holds no {name}", "against")
        if (
            self.metric.sign > 0
            and max(known) > 0
            and all(self.allows(value, 0.0) for value in known if value > 0)
        ):
            percent = self.tolerance if 1 <= self.tolerance < 100 else 10
            message = (
                f"{name} can never fall by more than {self.tolerance:g}, the baseline has "
                f"{max(known):.4g}"
            )
            raise InputError(
                f"{message} at most; a share of it is written {name}:{percent:g}%", "fail_on"
            )


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone
    means no tolerance at all, which counters can keep and times cannot.
    """
    name, colon, tolerance = text.strip().partition(":")
    figure = gated().get(name)
    if figure is None:
        raise InputError(
            f"knows {', '.join(gated())}, got {name!r}{did_you_mean(name, gated())}", "fail_on"
        )
    if not colon and not METRICS[figure].exact:
        raise InputError(
            f"{name} varies from run to run: give a tolerance, such as {name}:10%", "fail_on"
        )
    relative = tolerance.endswith("%")
    digits = tolerance.removesuffix("%") if colon else "0"
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        raise InputError(
            f"wants a tolerance such as {name}:0.05 or {name}:10%, got {tolerance!r}", "fail_on"
        )
    if relative and value >= 1 and METRICS[figure].sign > 0:
        raise InputError(f"{name} can never fall by more than 100%, got {tolerance!r}", "fail_on")
    return Rule(figure, value, relative)


@dataclass(frozen=True)
class Judging:
    """By what a measurement is judged, and beside what it is shown;
    nothing that is measured depends on it.
    """

    against: Path | None = option(None, "bench.json to hold the figures against.", panel="Gate")
    fail_on: tuple[str, ...] = option(
        (),
        "METRIC:TOLERANCE that fails, as speedup:10% or alpha:0; repeatable. Metrics: "
        f"{', '.join(gated())}.",
        panel="Gate",
        shown="",
        repeat=True,
    )
    force: bool = switch("Hold times of another machine against ours.", panel="Gate")
    paper: bool = switch("Put the published rows beside ours.", panel="Output")

    def __post_init__(self) -> None:
        check_options(self)
        if self.against is not None:
            object.__setattr__(self, "against", Path(self.against))  # a record keeps a text
        if (self.against is None) != (not self.rules):
            raise InputError(
                "wants both: what to hold against, and what fails", "--against and --fail-on"
            )
        if self.force and not self.against:
            raise InputError("goes with --against", "force")

    @cached_property
    def rules(self) -> list[Rule]:
        """What fails."""
        return [parse_rule(rule) for rule in self.fail_on]


JUDGED = tuple(each.name for each, _ in options_of(Judging))


@dataclass(frozen=True)
class Verdict:
    """One metric of one cell, compared."""

    metric: str  # the rule's, or ``same_as_ar``
    method: str
    prefill: int | None
    length: int | None  # generated tokens; None for ``same_as_ar``, which is of a whole run
    ok: bool
    note: str = ""  # why, where the figures do not say it; and the draw, where a cell has several
    baseline: float | None = None
    ours: float | None = None
    limit: float | None = None  # the worst value that passes

    @property
    def change(self) -> float | None:
        """Ours - baseline; None where one is missing."""
        return None if self.ours is None or self.baseline is None else self.ours - self.baseline


def compare(
    measurement: Measurement, baseline: Measurement, rules: Sequence[Rule]
) -> list[Verdict]:
    """Judge a measurement by an earlier one, which :func:`refuse_foreign` has let through.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so
    is any run of ours whose tokens are neither plain decoding's nor explained by rounding. What got
    better never is. One seed's gain in a counter does not make up for another's loss.
    """
    verdicts = []
    for sample in measurement.samples:
        if sample.explained is False:
            first = sample.first_difference
            why = (
                "its audit finds violations"
                if first is None
                else f"other tokens than AR from token {first}"
            )
            note = f"{_draw_name(sample.prompt, sample.seed)}: {why}"
            verdicts.append(Verdict(SAME_TEXT, sample.method, sample.prefill, None, False, note))
    for rule in rules:
        ours = rule.values(measurement)
        theirs = rule.values(baseline)
        keys = dict.fromkeys([*theirs, *ours])
        draws = Counter(key[:3] for key in keys)
        for key in keys:
            (value, runs) = ours.get(key, _ABSENT)
            (before, expected) = theirs.get(key, _ABSENT)
            why = (
                "not in the baseline" if before is None else "not measured" if value is None else ""
            )
            if not why and expected - runs:
                why = f"{len(expected - runs)} of the baseline's runs not measured"
            ok = before is None or (value is not None and not why and rule.allows(before, value))
            method, prefill, length, name = key
            note = ": ".join(filter(None, (name if draws[key[:3]] > 1 else "", why)))
            limit = None if before is None else rule.limit(before)
            verdicts.append(
                Verdict(rule.metric.gate, method, prefill, length, ok, note, before, value, limit)
            )
    return verdicts


def _draw_name(prompt: str, seed: int) -> str:
    return f"prompt {prompt}, seed {seed}"


def _number(value: float | None, sign: str = "") -> str:
    return NOTHING if value is None else format(value, f"{sign}.6g")


def changes_table(verdicts: Sequence[Verdict], simulated: bool = False) -> Table:
    """Table of the regressions, then of whatever else changed."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    changed = [verdict for verdict in verdicts if verdict.ok and verdict.change != 0]
    rows = []
    for each in (*failed, *changed):
        said = ": ".join(filter(None, ("ok" if each.ok else "REGRESSED", each.note)))
        row = [each.metric, method_name(each.method, simulated), said]
        row += [NOTHING if count is None else f"{count:,}" for count in (each.prefill, each.length)]
        row += [_number(each.baseline), _number(each.ours)]
        rows.append([*row, _number(each.change, "+"), _number(each.limit)])
    return Table(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        rows,
        left=3,
        notes=[f"Unchanged: {len(verdicts) - len(rows)}."],
    )


def refuse_foreign(
    measurement: Measurement,
    baseline: Measurement,
    rules: Sequence[Rule],
    repeats: int,
    force: bool = False,
) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Args:
        repeats: of the measurement. Times that were taken once, here or in the baseline, are not
            judged: noise would decide.
        force: compare times although the machines differ.
    """
    timed = next((rule.metric.gate for rule in rules if not rule.metric.exact), None)
    counted = next((rule.metric.gate for rule in rules if rule.metric.exact), None)
    if counted and summary.simulated_alpha(measurement) is not None:
        raise InputError(
            f"{counted} follows from --simulate-alpha and is not measured; times are", "fail_on"
        )
    differing = measurement.workload.differing(baseline.workload)
    if differing:
        raise InputError(f"the baseline is of another workload: {differ(differing)}", "against")
    here = vars(measurement.environment)
    there = vars(baseline.environment)
    # several machines, if it was resumed on another one
    used = [vars(one) for one in (*measurement.environments, *baseline.environments)]
    other = [name for name in _MACHINE if len({one[name] for one in used}) > 1]
    if timed and other and not force:
        what = ", ".join(f"{name} {there[name]!r} there, {here[name]!r} here" for name in other)
        raise InputError(
            f"{timed} is of another machine ({what}); --force compares it all the same", "against"
        )
    for rule in rules:
        rule.check(baseline)
    taken = len({sample.repeat for sample in baseline.samples})
    wanted = f"{timed} varies from run to run and wants at least {_MIN_REPEATS} repeats"
    if timed and repeats < _MIN_REPEATS:
        raise InputError(f"{wanted}, got {repeats}", "repeats")
    if timed and taken < _MIN_REPEATS:
        raise InputError(f"{wanted}, the baseline has {taken}", "against")


def differ(names: Sequence[str]) -> str:
    """``seeds differs``, or ``ar, seeds differ``; each name once."""
    once = dict.fromkeys(names)
    return f"{', '.join(once)} differ{'s' if len(once) == 1 else ''}"
