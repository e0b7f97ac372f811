"""The regression gate: a measurement against an earlier one of the same workload, by rules such as ``speedup:10%``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tswift.benchmarking.summary import FINISHED, METRICS, Cell, by_draw, gated, simulated_alpha, summarise
from tswift.benchmarking.table import NOTHING, Table, method_name
from tswift.errors import InputError, did_you_mean
from tswift.reading import MOST_RECORD, parse_json, read_file

SAME_TEXT = "same_as_ar"

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded
_MACHINE = ("cpu", "threads", "gpu")
_MIN_REPEATS = 2
_LARGEST = 1e300  # of a number in a file; whatever is computed from it is still finite

Record = Mapping[str, Any]  # as in bench.json
Key = tuple[str, int, int]  # method, prefill, length


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get."""

    metric: str  # its name in ``--fail-on``
    tolerance: float  # at least 0; a share of the baseline if relative, else in the metric's own unit
    relative: bool

    @property
    def figure(self) -> str:
        """The metric's name in a measurement."""
        return gated()[self.metric]

    @property
    def timed(self) -> bool:
        """Whether the metric is a time, which differs between machines."""
        return not METRICS[self.figure].exact

    @property
    def _sign(self) -> int:
        return -1 if METRICS[self.figure].lower_is_better else 1

    def limit(self, baseline: float) -> float:
        """The worst value that passes."""
        return baseline - self._sign * (self.tolerance * abs(baseline) if self.relative else self.tolerance)

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether our value passes."""
        return self._sign * (ours - self.limit(baseline)) >= -_SLACK * max(1.0, abs(baseline))

    def refuse_idle(self, baseline: Sequence[float]) -> None:
        """Refuse a tolerance so loose that the rule could never fail."""
        positive = [value for value in baseline if value > 0]
        if self._sign < 0 or not positive or not all(self.allows(value, 0.0) for value in positive):
            return
        percent = self.tolerance if 1 <= self.tolerance < 100 else 10
        message = f"{self.metric} can never fall by more than {self.tolerance:g}, the baseline has {max(positive):.4g}"
        raise InputError(f"{message} at most; a share of it is written {self.metric}:{percent:g}%", "fail_on")


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone means no tolerance at
    all, which counters can keep and times cannot.

    Raises:
        InputError: no such metric, a time without a tolerance, or one that is no number from 0 up or can never fail.
    """
    metric, colon, tolerance = text.strip().partition(":")
    if metric not in gated():
        raise InputError(f"knows {', '.join(gated())}, got {metric!r}{did_you_mean(metric, gated())}", "fail_on")
    rule = Rule(metric, 0.0, relative=False)
    if not colon:
        if rule.timed:
            raise InputError(f"{metric} varies from run to run: give a tolerance, such as {metric}:10%", "fail_on")
        return rule
    relative = tolerance.endswith("%")
    digits = tolerance[:-1] if relative else tolerance
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        example = f"{metric}:0.05 or {metric}:10%"
        raise InputError(f"wants a tolerance such as {example}, got {tolerance!r}", "fail_on")
    if relative and value >= 1 and not METRICS[rule.figure].lower_is_better:
        raise InputError(f"{metric} can never fall by more than 100%, got {tolerance!r}", "fail_on")
    return Rule(metric, value, relative)


@dataclass(frozen=True)
class Verdict:
    """One metric of one cell, compared."""

    metric: str  # the rule's, or ``same_as_ar``
    method: str
    prefill: int
    length: int | None  # generated tokens; None for ``same_as_ar``, which is of a whole run
    baseline: float | None
    ours: float | None
    limit: float | None  # the worst value that passes
    ok: bool
    note: str = ""  # why, where the figures do not say it; and the draw, where a cell has several

    @property
    def change(self) -> float | None:
        """Ours - baseline; None where one is missing."""
        return None if self.ours is None or self.baseline is None else self.ours - self.baseline


def compare(measurement: Record, baseline: Record, rules: Sequence[Rule]) -> list[Verdict]:
    """Judge a measurement by an earlier one, which :func:`refuse_foreign` has let through.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so is any run of ours
    whose tokens are neither plain decoding's nor explained by rounding. What got better never is. Times are compared
    as means over a cell, counters draw by draw: they are exact, and one seed's gain does not make up for another's
    loss.
    """
    verdicts = []
    for sample in measurement["samples"]:
        if sample["explained"] is False:
            first = sample["first_difference"]
            why = "its audit finds violations" if first is None else f"other tokens than AR from token {first}"
            note = f"{_draw_name(sample['prompt'], sample['seed'])}: {why}"
            missing = (None, None, None, None)
            verdicts.append(Verdict(SAME_TEXT, sample["method"], sample["prefill"], *missing, ok=False, note=note))
    for rule in rules:
        ours, theirs = _cells(measurement, rule.timed), _cells(baseline, rule.timed)
        for key in dict.fromkeys([*theirs, *ours]):
            draws = dict.fromkeys([*theirs.get(key, {}), *ours.get(key, {})])
            for draw in draws:
                name = _draw_name(*draw) if draw and len(draws) > 1 else ""
                verdicts.append(_verdict(rule, key, ours.get(key, {}).get(draw), theirs.get(key, {}).get(draw), name))
    return verdicts


def _cells(measurement: Record, timed: bool) -> Mapping[Key, Mapping[Any, Cell]]:
    """What is compared: cells as a whole for times, each draw of a cell for counters."""
    if timed:
        return {cell.key: {None: cell} for cell in summarise(measurement)}
    return by_draw(measurement)


def _verdict(rule: Rule, key: Key, ours: Cell | None, theirs: Cell | None, name: str) -> Verdict:
    value = None if ours is None else ours.figures[rule.figure].mean
    before = None if theirs is None else theirs.figures[rule.figure].mean
    limit, ok, why = None if before is None else rule.limit(before), True, ""
    if before is None:
        why = "not in the baseline"
    elif value is None:
        ok, why = False, "not measured"
    else:
        absent = theirs.draws - ours.draws if ours and theirs else ()
        why = f"{len(absent)} of the baseline's runs not measured" if absent else ""
        ok = not absent and rule.allows(before, value)
    return Verdict(rule.metric, *key, before, value, limit, ok, ": ".join(filter(None, (name, why))))


def _draw_name(prompt: str, seed: int) -> str:
    return f"prompt {prompt}, seed {seed}"


def moved(verdicts: Sequence[Verdict], simulated: bool = False) -> Table:
    """Table of the regressions, then of whatever else changed.

    Draws of a cell with the same outcome share one row: the one that moved most.
    """
    failed = [verdict for verdict in verdicts if not verdict.ok]
    changed = [verdict for verdict in verdicts if verdict.ok and verdict.change != 0]
    groups: dict[object, list[Verdict]] = {}
    for verdict in (*failed, *changed):
        cell = (verdict.metric, verdict.method, verdict.prefill, verdict.length, verdict.ok)
        groups.setdefault(id(verdict) if verdict.metric == SAME_TEXT else cell, []).append(verdict)
    rows = []
    for group in groups.values():
        worst = max(group, key=lambda verdict: math.inf if verdict.change is None else abs(verdict.change))
        text = ": ".join(filter(None, ("ok" if worst.ok else "REGRESSED", worst.note)))
        if len(group) > 1:
            text += f"; and {len(group) - 1} other {'draw' if len(group) == 2 else 'draws'}"
        numbers = (worst.baseline, worst.ours, worst.change, worst.limit)
        place = [f"{worst.prefill:,}", NOTHING if worst.length is None else f"{worst.length:,}"]
        place += [NOTHING if x is None else f"{x:{'+' * (i == 2)}.6g}" for i, x in enumerate(numbers)]
        rows.append([worst.metric, method_name(worst.method, simulated), text, *place])
    return Table(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        rows,
        left=3,
        notes=[f"Unchanged: {len(verdicts) - len(failed) - len(changed)}."],
    )


def refuse_foreign(measurement: Record, baseline: Record, rules: Sequence[Rule], force: bool = False) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Args:
        force: compare times although the machines differ.

    Raises:
        InputError: the baseline is of another workload, or simulated where ours is not; times are of another machine,
            without force; a rule is of what simulated acceptance sets, of what the baseline lacks, or can never fail.
    """
    counted = next((rule.metric for rule in rules if not rule.timed), None)
    if counted and simulated_alpha(measurement) is not None:
        raise InputError(f"{counted} follows from --simulate-alpha and is not measured; times are", "fail_on")
    # through JSON, as the baseline has come: it has no tuples
    ours, theirs = json.loads(json.dumps(measurement["workload"])), baseline["workload"]
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        named = [name for name in differing if name != "hash"] or differing
        raise InputError(f"the baseline is of another workload: {', '.join(named)} differs", "against")
    if measurement["simulated"] != baseline["simulated"]:
        raise InputError("one of the two measurements is simulated, the other is not", "against")
    timed = [rule.metric for rule in rules if rule.timed]
    here, there = measurement["environment"], baseline["environment"]
    other = [name for name in _MACHINE if here.get(name) != there.get(name)]
    if timed and other and not force:
        what = ", ".join(f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in other)
        raise InputError(f"{timed[0]} is of another machine ({what}); --force compares it all the same", "against")
    for rule in rules:
        cells = [cell for draws in _cells(baseline, rule.timed).values() for cell in draws.values()]
        known = [value for cell in cells if (value := cell.figures[rule.figure].mean) is not None]
        if not known:
            raise InputError(f"the baseline holds no {rule.metric}", "against")
        rule.refuse_idle(known)


def refuse_single(rules: Sequence[Rule], repeats: int, baseline: Record) -> None:
    """Refuse to judge times that were taken once, here or in the baseline: machine noise would decide."""
    timed = next((rule.metric for rule in rules if rule.timed), None)
    theirs = len({sample["repeat"] for sample in baseline["samples"]})
    wanted = f"{timed} varies from run to run and wants at least {_MIN_REPEATS} repeats"
    if timed and repeats < _MIN_REPEATS:
        raise InputError(f"{wanted}, got {repeats}", "repeats")
    if timed and theirs < _MIN_REPEATS:
        raise InputError(f"{wanted}, the baseline has {theirs}", "against")


def load_measurement(path: Path, option: str = "against") -> dict[str, Any]:
    """Read a complete ``bench.json``, which ``option`` named.

    Raises:
        InputError: it cannot be read, is no ``bench.json``, is of another schema version, lacks figures, or did not run
            to its end.
    """
    content = parse_json(read_file(path, MOST_RECORD, option), path, option)
    schema = bench_schema()
    kind, version = (schema["properties"][name]["const"] for name in ("kind", "schema"))
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise InputError(f"{path} is not a bench.json of tswift bench", option)
    if content.get("schema") != version:
        raise InputError(
            f"{path} has schema version {content.get('schema')!s:.40}, this tswift reads {version}", option
        )
    wrong = next(schema_errors(content, schema), None)
    if wrong:
        raise InputError(f"{path} {wrong}", option)
    if content["simulated"] != ("simulated" in content["workload"]):
        reason = f"simulated is {content['simulated']}, its workload says otherwise"
        raise InputError(f"{path} is damaged ({reason})", option)
    if content["state"] != FINISHED:  # what it has not reached would never be missed
        raise InputError(f"{path} did not run to its end, it is {content['state']}", option)
    if not any(sample["points"] for sample in content["samples"]):
        raise InputError(f"{path} holds no samples", option)
    return content


@cache
def bench_schema() -> Mapping[str, Any]:
    """The JSON schema of ``bench.json``."""
    return json.loads((Path(__file__).parent / "bench.schema.json").read_text(encoding="utf-8"))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _number(value) and math.isfinite(value),
    "integer": lambda value: _number(value) and isinstance(value, int),
}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "const": lambda value, allowed: value == allowed,
    "enum": lambda value, allowed: value in allowed,
    "pattern": lambda value, allowed: not isinstance(value, str) or re.search(allowed, value) is not None,
    "minimum": lambda value, allowed: not _number(value) or value >= allowed,
    "exclusiveMinimum": lambda value, allowed: not _number(value) or value > allowed,
    "maximum": lambda value, allowed: not _number(value) or value <= allowed,
}


def schema_errors(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """What is wrong with the value at a place such as ``samples[1].points[0]``, in words that follow a file name.

    It knows the keywords of ``bench.schema.json``; unknown keys of a value are let through.
    """
    if not schema:
        return
    names = schema.get("type", list(_TYPES))
    names = [names] if isinstance(names, str) else names
    if not any(_TYPES[name](value) for name in names):
        yield f"is damaged ({place or 'it'} is no {' or '.join(names)})"
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"lacks {name!r}" + (f" in {place}" if place else "")
        rest = schema.get("additionalProperties") or {}
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, rest)
            yield from schema_errors(item, known, f"{place}.{name}" if place else name)
    elif isinstance(value, list):
        first = schema.get("prefixItems", [])
        if len(value) < schema.get("minItems", 0) or (first and len(value) > len(first)):
            yield f"is damaged ({place} has {len(value)} items)"
            return
        for index, item in enumerate(value):
            known = first[index] if first else schema.get("items", {})
            yield from schema_errors(item, known, f"{place}[{index}]")
    elif any(name in schema and not allows(value, schema[name]) for name, allows in _LIMITS.items()):
        yield f"is damaged ({place or 'it'} is {value!r:.40})"
