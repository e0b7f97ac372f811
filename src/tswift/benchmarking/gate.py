"""The regression gate: a measurement against an earlier one of the same workload, by rules such as ``speedup:10%``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, marks, method_name
from tswift.benchmarking.measurement import given_alpha
from tswift.benchmarking.rules import Rule, parse_rule
from tswift.benchmarking.statistics import Cell, by_draw, summarise
from tswift.errors import InputError

__all__ = ["Rule", "Verdict", "compare", "moved", "parse_rule", "refuse_foreign", "refuse_single"]

SAME_TEXT = "same_as_ar"

_MACHINE = ("cpu", "threads", "gpu")
_FEWEST_REPEATS = 2


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
        note: why, where the figures do not say it; and of which draw, where a cell has several and they are judged
            one by one.
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


def compare(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> list[Verdict]:
    """Judge a measurement by an earlier one.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so is any run of ours
    whose tokens are neither plain decoding's nor explained by rounding. What got better never is. Times are compared
    as means over a cell, counters draw by draw: they are exact, and one seed's gain does not make up for another's
    loss.

    Args:
        measurement: ours.
        baseline: the earlier one, as from ``load_measurement``.
        rules: what may get how much worse.
        force: compare times although the machines differ.

    Returns:
        A verdict per rule and cell of either measurement (for a counter, per draw of a cell that both have), and one
        per run with tokens that neither plain decoding nor rounding explains.

    Raises:
        InputError: the baseline is of another workload, or simulated where ours is not or the other way round, or has
            nothing a rule asks for or nothing it could fail; or times are to be compared between machines without
            force.
    """
    refuse_foreign(measurement, baseline, rules, force)
    ours, theirs = ({cell.key: cell for cell in summarise(each)} for each in (measurement, baseline))
    our_draws, their_draws = by_draw(measurement), by_draw(baseline)
    verdicts = [_other_text(sample) for sample in measurement["samples"] if sample["explained"] is False]
    for rule in rules:
        for key in dict.fromkeys([*theirs, *ours]):
            if rule.timed or key not in ours or key not in theirs:
                verdicts.append(_verdict(rule, key, ours.get(key), theirs.get(key)))
            else:
                verdicts += _by_draw(rule, key, our_draws[key], their_draws[key])
    return verdicts


def moved(verdicts: Sequence[Verdict], simulated: bool = False) -> Grid:
    """The regressions, then whatever else changed, as a table.

    Of the draws of a cell that fared alike it has one row: the one that moved most.

    Args:
        verdicts: of one measurement.
        simulated: whether that is simulated, which every row then says.
    """
    failed = [verdict for verdict in verdicts if not verdict.ok]
    changed = [verdict for verdict in verdicts if verdict.ok and verdict.change != 0]
    still = len(verdicts) - len(failed) - len(changed)
    alike: dict[object, list[Verdict]] = {}
    for verdict in (*failed, *changed):
        cell = (verdict.metric, verdict.method, verdict.prefill, verdict.length, verdict.ok)
        alike.setdefault(id(verdict) if verdict.metric == SAME_TEXT else cell, []).append(verdict)
    return Grid(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        [_row(max(group, key=_distance), len(group) - 1, marks(simulated)) for group in alike.values()],
        left=3,
        notes=[f"Unchanged: {still}."],
    )


def refuse_foreign(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Raises:
        InputError: as :func:`compare`; or a rule is of what a simulated acceptance sets.
    """
    counted = next((rule.metric for rule in rules if not rule.timed), None)
    if counted and given_alpha(measurement) is not None:
        raise InputError(f"{counted} follows from --simulate-alpha and is not measured; times are", "--fail-on")
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
    means = summarise(baseline)
    single = [cell for draws in by_draw(baseline).values() for cell in draws.values()]
    for rule in rules:
        values = [cell.figures[rule.figure].mean for cell in (means if rule.timed else single)]
        known = [value for value in values if value is not None]
        if not known:
            raise InputError(f"the baseline holds no {rule.metric}", "--against")
        rule.refuse_idle(known)


def refuse_single(rules: Sequence[Rule], repeats: int, baseline: Mapping[str, Any]) -> None:
    """Refuse to judge times that were taken once: the machine's own noise would be the verdict.

    Args:
        rules: what may get how much worse; counters may be from one run.
        repeats: ours.
        baseline: the earlier measurement, as from ``load_measurement``.

    Raises:
        InputError: a rule is of a time, and ours or the baseline's has no repeats.
    """
    timed = next((rule.metric for rule in rules if rule.timed), None)
    if timed is None:
        return
    wanted = f"{timed} varies from run to run and wants at least {_FEWEST_REPEATS} repeats"
    if repeats < _FEWEST_REPEATS:
        raise InputError(f"{wanted}, got {repeats}", "--repeats")
    theirs = len({sample["repeat"] for sample in baseline["samples"]})
    if theirs < _FEWEST_REPEATS:
        raise InputError(f"{wanted}, the baseline has {theirs}", "--against")


def _other_text(sample: Mapping[str, Any]) -> Verdict:
    where = _draw_name(sample["prompt"], sample["seed"])
    first = sample["first_difference"]
    note = f"{where}: " + (
        "its audit finds violations" if first is None else f"other tokens than AR from token {first}"
    )
    return Verdict(SAME_TEXT, sample["method"], sample["prefill"], None, None, None, None, None, ok=False, note=note)


def _by_draw(
    rule: Rule,
    key: tuple[str, int, int],
    ours: Mapping[tuple[str, int], Cell],
    theirs: Mapping[tuple[str, int], Cell],
) -> list[Verdict]:
    draws = dict.fromkeys([*theirs, *ours])
    verdicts = [_verdict(rule, key, ours.get(draw), theirs.get(draw)) for draw in draws]
    if len(draws) == 1:
        return verdicts
    return [
        replace(verdict, note=": ".join(filter(None, (_draw_name(*draw), verdict.note))))
        for draw, verdict in zip(draws, verdicts, strict=True)
    ]


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


def _draw_name(prompt: str, seed: int) -> str:
    return f"prompt {prompt}, seed {seed}"


def _distance(verdict: Verdict) -> float:
    """How far a value moved; one that is missing moved furthest."""
    return math.inf if verdict.change is None else abs(verdict.change)


def _row(verdict: Verdict, others: int, said: Sequence[str]) -> list[str]:
    word = "ok" if verdict.ok else "REGRESSED"
    told = f"{word}: {verdict.note}" if verdict.note else word
    return [
        verdict.metric,
        method_name(verdict.method, *said),
        f"{told}; and {others} other {'draw' if others == 1 else 'draws'}" if others else told,
        f"{verdict.prefill:,}",
        NOTHING if verdict.length is None else f"{verdict.length:,}",
        *(NOTHING if value is None else f"{value:.6g}" for value in (verdict.baseline, verdict.ours)),
        NOTHING if verdict.change is None else f"{verdict.change:+.6g}",
        NOTHING if verdict.limit is None else f"{verdict.limit:.6g}",
    ]
