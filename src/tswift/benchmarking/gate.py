"""The regression gate: a measurement against an earlier one of the same workload, by rules such as ``speedup:10%``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tswift.benchmarking.grid import NOTHING, Grid, marks, method_name
from tswift.benchmarking.summary import COUNTERS, FINISHED, Cell, by_draw, simulated_alpha, summarise
from tswift.errors import InputError
from tswift.reading import MOST_RECORD, parse_json, read_file

SAME_TEXT = "same_as_ar"

_TIMES = {"speedup": "speedup", "tokens_per_s": "tokens_per_second"}  # metric of a rule: its name in a measurement
METRICS = {**{name: name for name in COUNTERS}, **_TIMES}
_MORE_IS_WORSE = ("passes",)
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded
_MACHINE = ("cpu", "threads", "gpu")
_FEWEST_REPEATS = 2
_LARGEST = 1e300  # of a number in a file; whatever is computed from it is still finite


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get.

    Attributes:
        metric: one of ``METRICS``.
        tolerance: at least 0; a share of the baseline if relative, else in the metric's own unit.
        relative: see tolerance.
    """

    metric: str
    tolerance: float
    relative: bool

    @property
    def timed(self) -> bool:
        """Whether the metric is a time, which differs between machines."""
        return self.metric in _TIMES

    @property
    def figure(self) -> str:
        """The metric's name in a measurement."""
        return METRICS[self.metric]

    def limit(self, baseline: float) -> float:
        """The worst value that passes."""
        loss = self.tolerance * abs(baseline) if self.relative else self.tolerance
        return baseline + loss if self.metric in _MORE_IS_WORSE else baseline - loss

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether our value passes."""
        slack = _SLACK * max(1.0, abs(baseline))
        limit = self.limit(baseline)
        return ours <= limit + slack if self.metric in _MORE_IS_WORSE else ours >= limit - slack

    def refuse_idle(self, baseline: Sequence[float]) -> None:
        """Refuse a tolerance so loose that the rule could never fail.

        Raises:
            InputError: it is.
        """
        positive = [value for value in baseline if value > 0]
        if self.metric in _MORE_IS_WORSE or not positive or not all(self.allows(value, 0.0) for value in positive):
            return
        percent = self.tolerance if 1 <= self.tolerance < 100 else 10
        message = f"{self.metric} can never fall by more than {self.tolerance:g}, the baseline has {max(positive):.4g}"
        raise InputError(f"{message} at most; a share of it is written {self.metric}:{percent:g}%", "--fail-on")


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone means no tolerance at
    all, which counters can keep and times cannot.

    Raises:
        InputError: no such metric, a time without a tolerance, or one that is no number from 0 up or can never fail.
    """
    metric, colon, tolerance = text.strip().partition(":")
    if metric not in METRICS:
        raise InputError(f"knows {', '.join(METRICS)}, got {metric!r}", "--fail-on")
    if not colon:
        if metric in _TIMES:
            raise InputError(f"{metric} varies from run to run: give a tolerance, such as {metric}:10%", "--fail-on")
        return Rule(metric, 0.0, relative=False)
    relative = tolerance.endswith("%")
    digits = tolerance[:-1] if relative else tolerance
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        example = f"{metric}:0.05 or {metric}:10%"
        raise InputError(f"wants a tolerance such as {example}, got {tolerance!r}", "--fail-on")
    if relative and value >= 1 and metric not in _MORE_IS_WORSE:
        raise InputError(f"{metric} can never fall by more than 100%, got {tolerance!r}", "--fail-on")
    return Rule(metric, value, relative)


@dataclass(frozen=True)
class Verdict:
    """One metric of one cell, compared.

    Attributes:
        metric: the rule's, or ``same_as_ar``.
        length: generated tokens; None for ``same_as_ar``, which is of a whole run.
        baseline, ours: values; None where there is none.
        limit: the worst value that passes; None without a baseline.
        note: why, where the figures do not say it; and the draw, where a cell has several.
    """

    metric: str
    method: str
    prefill: int
    length: int | None
    baseline: float | None
    ours: float | None
    limit: float | None
    ok: bool
    note: str = ""

    @property
    def change(self) -> float | None:
        """Ours - baseline; None where one is missing."""
        return None if self.ours is None or self.baseline is None else self.ours - self.baseline


def compare(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> list[Verdict]:
    """Judge a measurement by an earlier one.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so is any run of ours
    whose tokens are neither plain decoding's nor explained by rounding. What got better never is. Times are compared
    as means over a cell, counters draw by draw: they are exact, and one seed's gain does not make up for another's
    loss.

    Args:
        baseline: as from :func:`load_measurement`.
        force: compare times although the machines differ.

    Raises:
        InputError: as :func:`refuse_foreign`.
    """
    refuse_foreign(measurement, baseline, rules, force)
    ours, theirs = ({cell.key: cell for cell in summarise(each)} for each in (measurement, baseline))
    our_draws, their_draws = by_draw(measurement), by_draw(baseline)
    verdicts = [_wrong_text(sample) for sample in measurement["samples"] if sample["explained"] is False]
    for rule in rules:
        for key in dict.fromkeys([*theirs, *ours]):
            if rule.timed or key not in ours or key not in theirs:
                verdicts.append(_verdict(rule, key, ours.get(key), theirs.get(key)))
                continue
            draws = dict.fromkeys([*their_draws[key], *our_draws[key]])
            for draw in draws:
                verdict = _verdict(rule, key, our_draws[key].get(draw), their_draws[key].get(draw))
                note = ": ".join(filter(None, (_draw_name(*draw), verdict.note)))
                verdicts.append(replace(verdict, note=note) if len(draws) > 1 else verdict)
    return verdicts


def moved(verdicts: Sequence[Verdict], simulated: bool = False) -> Grid:
    """Table of the regressions, then of whatever else changed.

    Of the draws of a cell that fared alike it has one row: the one that moved most.
    """
    failed = [verdict for verdict in verdicts if not verdict.ok]
    changed = [verdict for verdict in verdicts if verdict.ok and verdict.change != 0]
    alike: dict[object, list[Verdict]] = {}
    for verdict in (*failed, *changed):
        cell = (verdict.metric, verdict.method, verdict.prefill, verdict.length, verdict.ok)
        alike.setdefault(id(verdict) if verdict.metric == SAME_TEXT else cell, []).append(verdict)
    return Grid(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        [_row(max(group, key=_distance), len(group) - 1, marks(simulated)) for group in alike.values()],
        left=3,
        notes=[f"Unchanged: {len(verdicts) - len(failed) - len(changed)}."],
    )


def refuse_foreign(
    measurement: Mapping[str, Any], baseline: Mapping[str, Any], rules: Sequence[Rule], force: bool = False
) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Raises:
        InputError: the baseline is of another workload, or simulated where ours is not; times are of another machine,
            without force; a rule is of what simulated acceptance sets, of what the baseline lacks, or can never fail.
    """
    counted = next((rule.metric for rule in rules if not rule.timed), None)
    if counted and simulated_alpha(measurement) is not None:
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

    Raises:
        InputError: a rule is of a time, and we or the baseline have too few repeats.
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


def _wrong_text(sample: Mapping[str, Any]) -> Verdict:
    first = sample["first_difference"]
    why = "its audit finds violations" if first is None else f"other tokens than AR from token {first}"
    note = f"{_draw_name(sample['prompt'], sample['seed'])}: {why}"
    return Verdict(SAME_TEXT, sample["method"], sample["prefill"], None, None, None, None, ok=False, note=note)


def _verdict(rule: Rule, key: tuple[str, int, int], ours: Cell | None, theirs: Cell | None) -> Verdict:
    value = None if ours is None else ours.figures[rule.figure].mean
    before = None if theirs is None else theirs.figures[rule.figure].mean
    if before is None:
        return Verdict(rule.metric, *key, before, value, None, ok=True, note="not in the baseline")
    limit = rule.limit(before)
    if value is None:
        return Verdict(rule.metric, *key, before, value, limit, ok=False, note="not measured")
    absent = theirs.draws - ours.draws if ours and theirs else frozenset()
    note = f"{len(absent)} of the baseline's runs not measured" if absent else ""
    return Verdict(rule.metric, *key, before, value, limit, not absent and rule.allows(before, value), note)


def _draw_name(prompt: str, seed: int) -> str:
    return f"prompt {prompt}, seed {seed}"


def _distance(verdict: Verdict) -> float:
    """How far a value moved; one that is missing moved furthest."""
    return math.inf if verdict.change is None else abs(verdict.change)


def _row(verdict: Verdict, others: int, said: Sequence[str]) -> list[str]:
    word = "ok" if verdict.ok else "REGRESSED"
    text = f"{word}: {verdict.note}" if verdict.note else word
    values = [verdict.baseline, verdict.ours, verdict.change, verdict.limit]
    return [
        verdict.metric,
        method_name(verdict.method, *said),
        f"{text}; and {others} other {'draw' if others == 1 else 'draws'}" if others else text,
        f"{verdict.prefill:,}",
        NOTHING if verdict.length is None else f"{verdict.length:,}",
        *(NOTHING if value is None else f"{value:{'+' * (i == 2)}.6g}" for i, value in enumerate(values)),
    ]


def load_measurement(path: Path, option: str = "--against") -> dict[str, Any]:
    """Read a ``bench.json`` that is whole.

    Args:
        option: what named the file, for errors.

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
        found = f"{content.get('schema')}"[:40]
        raise InputError(f"{path} has schema version {found}, this tswift reads {version}", option)
    wrong = next(schema_errors(content, schema), None)
    if wrong:
        raise InputError(f"{path} {wrong}", option)
    if content["simulated"] != ("simulated" in content["workload"]):
        said = f"simulated is {content['simulated']}, its workload says otherwise"
        raise InputError(f"{path} is damaged ({said})", option)
    if content["state"] != FINISHED:  # what it has not reached would never be missed
        raise InputError(f"{path} did not run to its end, it is {content['state']}", option)
    if not summarise(content):
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


def schema_errors(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """What a value is or lacks against its JSON schema, in words that go behind a file's name.

    It knows the keywords of ``bench.schema.json``; unknown keys of a value are let through.

    Args:
        place: where the value is in the file, as ``samples[1].points[0]``.
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
    elif (
        value != schema.get("const", value) or value not in schema.get("enum", [value]) or not _in_range(value, schema)
    ):
        yield f"is damaged ({place or 'it'} is {value!r:.40})"


def _in_range(value: Any, schema: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    low, below, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    return not _number(value) or (
        (low is None or value >= low) and (below is None or value > below) and (high is None or value <= high)
    )
