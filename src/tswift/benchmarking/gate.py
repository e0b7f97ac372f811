"""The regression gate: a measurement against an earlier one of the same workload, by rules such as ``speedup:10%``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, method_name
from tswift.benchmarking.statistics import Cell, summarise
from tswift.errors import InputError

SAME_TEXT = "same_as_ar"

_FIGURES = {
    "alpha": "alpha",
    "beta": "beta",
    "tokens_per_step": "tokens_per_step",
    "passes": "passes",
    "speedup": "speedup",
    "tokens_per_s": "tokens_per_second",
}
_TIMES = ("speedup", "tokens_per_s")
_MORE_IS_WORSE = ("passes",)
_MACHINE = ("cpu", "threads", "gpu")
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get.

    Attributes:
        metric: one of alpha, beta, tokens_per_step, passes, speedup, tokens_per_s.
        tolerance: at least 0; a share of the baseline if relative, else in the metric's own unit.
        relative: see tolerance.
    """

    metric: str
    tolerance: float
    relative: bool

    @property
    def timed(self) -> bool:
        """Whether the metric is a time, which another machine has another of."""
        return self.metric in _TIMES

    @property
    def figure(self) -> str:
        """The metric's name in a measurement."""
        return _FIGURES[self.metric]

    def limit(self, baseline: float) -> float:
        """The worst value that is still fine."""
        loss = self.tolerance * abs(baseline) if self.relative else self.tolerance
        return baseline + loss if self.metric in _MORE_IS_WORSE else baseline - loss

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether ours is no worse than the limit."""
        slack = _SLACK * max(1.0, abs(baseline))
        limit = self.limit(baseline)
        return ours <= limit + slack if self.metric in _MORE_IS_WORSE else ours >= limit - slack


@dataclass(frozen=True)
class Verdict:
    """One metric of one cell, compared.

    Attributes:
        metric: the rule's, or ``same_as_ar``.
        length: generated tokens; None for ``same_as_ar``, which is of a whole run.
        baseline: its value; None where it has none.
        ours: our value; None where there is none.
        change: ours - baseline; None where one is missing.
        limit: the worst value that is still fine; None without a baseline.
        ok: no regression.
        note: why, where the figures do not say it.
    """

    metric: str
    method: str
    prefill: int
    length: int | None
    baseline: float | None
    ours: float | None
    change: float | None
    limit: float | None
    ok: bool
    note: str = ""


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone means no tolerance at
    all, which counters can keep and times cannot.

    Raises:
        InputError: no such metric, a time without a tolerance, or one that is no number from 0 up or can never fail.
    """
    metric, colon, tolerance = text.strip().partition(":")
    if metric not in _FIGURES:
        raise InputError(f"knows {', '.join(_FIGURES)}, got {metric!r}", "--fail-on")
    if not colon:
        if metric in _TIMES:
            raise InputError(f"{metric} varies from run to run: give a tolerance, such as {metric}:10%", "--fail-on")
        return Rule(metric, 0.0, relative=False)
    relative = tolerance.endswith("%")
    digits = tolerance[:-1] if relative else tolerance
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        raise InputError(
            f"wants a tolerance such as {metric}:0.05 or {metric}:10%, got {tolerance!r}",
            "--fail-on",
        )
    if relative and value >= 1 and metric not in _MORE_IS_WORSE:
        raise InputError(f"{metric} can never fall by more than 100%, got {tolerance!r}", "--fail-on")
    return Rule(metric, value, relative)


def compare(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> list[Verdict]:
    """Judge a measurement by an earlier one.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so is any run of ours
    whose tokens are neither plain decoding's nor explained by rounding. What got better never is.

    Args:
        measurement: ours.
        baseline: the earlier one, as from ``load_measurement``.
        rules: what may get how much worse.
        force: compare times although the machines differ.

    Returns:
        A verdict per rule and cell of either measurement, and one per run with tokens that neither plain
        decoding nor rounding explains.

    Raises:
        InputError: the baseline is of another workload, or simulated where ours is not or the other way round, or has
            nothing a rule asks for; or times are to be compared between machines without force.
    """
    refuse_foreign(measurement, baseline, rules, force)
    ours = {cell.key: cell for cell in summarise(measurement)}
    theirs = {cell.key: cell for cell in summarise(baseline)}
    for rule in rules:
        if all(cell.figures[rule.figure].mean is None for cell in theirs.values()):
            raise InputError(f"the baseline holds no {rule.metric}", "--against")
    verdicts = [_other_text(sample) for sample in measurement["samples"] if sample["explained"] is False]
    for rule in rules:
        verdicts += [_verdict(rule, key, ours.get(key), theirs.get(key)) for key in dict.fromkeys([*theirs, *ours])]
    return verdicts


def moved(verdicts: Sequence[Verdict]) -> Grid:
    """The regressions, then whatever else changed, as a table."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    changed = [verdict for verdict in verdicts if verdict.ok and (verdict.change or verdict.note)]
    still = len(verdicts) - len(failed) - len(changed)
    return Grid(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        [_row(verdict) for verdict in (*failed, *changed)],
        left=3,
        notes=[f"Unchanged: {still}."],
    )


def refuse_foreign(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Raises:
        InputError: as :func:`compare`.
    """
    # through JSON, as the baseline has come: it has no tuples
    ours, theirs = json.loads(json.dumps(measurement["workload"])), baseline["workload"]
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        named = [name for name in differing if name != "hash"] or differing
        raise InputError(f"the baseline is of another workload: {', '.join(named)} differs", "--against")
    if measurement["simulated"] != baseline["simulated"]:
        raise InputError("one of the two measurements is simulated, the other is not", "--against")
    timed = [rule.metric for rule in rules if rule.timed]
    here, there = measurement["environment"], baseline["environment"]
    other = [name for name in _MACHINE if here.get(name) != there.get(name)]
    if timed and other and not force:
        what = ", ".join(f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in other)
        raise InputError(f"{timed[0]} is of another machine ({what}); --force compares it all the same", "--against")


def _other_text(sample: Mapping[str, Any]) -> Verdict:
    where = f"prompt {sample['prompt']}, seed {sample['seed']}"
    first = sample["first_difference"]
    note = f"{where}: " + (
        "its audit finds violations" if first is None else f"other tokens than AR from token {first}"
    )
    return Verdict(SAME_TEXT, sample["method"], sample["prefill"], None, None, None, None, None, ok=False, note=note)


def _verdict(rule: Rule, key: tuple[str, int, int], ours: Cell | None, theirs: Cell | None) -> Verdict:
    value = None if ours is None else ours.figures[rule.figure].mean
    before = None if theirs is None else theirs.figures[rule.figure].mean
    if before is None:
        return Verdict(rule.metric, *key, before, value, None, None, ok=True, note="not in the baseline")
    limit = rule.limit(before)
    if value is None:
        return Verdict(rule.metric, *key, before, value, None, limit, ok=False, note="not measured")
    absent = theirs.draws - ours.draws if ours and theirs else frozenset()
    note = f"{len(absent)} of the baseline's runs not measured" if absent else ""
    ok = not absent and rule.allows(before, value)
    return Verdict(rule.metric, *key, before, value, value - before, limit, ok, note)


def _row(verdict: Verdict) -> list[str]:
    word = "ok" if verdict.ok else "REGRESSED"
    return [
        verdict.metric,
        method_name(verdict.method),
        f"{word}: {verdict.note}" if verdict.note else word,
        f"{verdict.prefill:,}",
        NOTHING if verdict.length is None else f"{verdict.length:,}",
        *(NOTHING if value is None else f"{value:.6g}" for value in (verdict.baseline, verdict.ours)),
        NOTHING if verdict.change is None else f"{verdict.change:+.6g}",
        NOTHING if verdict.limit is None else f"{verdict.limit:.6g}",
    ]
