"""The regression gate, and the records it reads: ``bench.json`` and ``suite.json``.

A measurement is held against an earlier one of the same workload by rules such as ``speedup:10%``. Records are read,
gone on with after a stop or a kill, and merged from shards.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from tswift.benchmarking import summary
from tswift.benchmarking.config import BenchOptions, Plan
from tswift.benchmarking.suites import find_suite
from tswift.benchmarking.summary import (
    METRICS,
    NOTHING,
    Metric,
    Table,
    cell_of,
    gated,
    method_name,
    parts,
    plain,
    summarise,
)
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import MOST_RECORD, InputError, did_you_mean, parse_json, read_file
from tswift.jobs.config import fields_of
from tswift.jobs.folder import FINISHED, INTERRUPTED, lock_folder
from tswift.options import check_options, option, options_of

SAME_TEXT = "same_as_ar"

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_SLACK = 1e-12  # a loss of exactly the tolerance passes, whichever way its last bit was rounded
_MACHINE = ("cpu", "threads", "gpu")
_MIN_REPEATS = 2
_LARGEST = 1e300  # of a number in a file; whatever is computed from it is still finite

Draw = tuple[str, int]  # prompt and seed
Place = tuple[Any, ...]  # method, prefill, length; the draw of a counter
Value = tuple["float | None", set[Draw]]  # a mean, and what it is over

_ABSENT: Value = (None, set())

Record = dict[str, Any]  # as in bench.json or suite.json


@dataclass(frozen=True)
class Rule:
    """How much worse a metric may get."""

    figure: str  # the metric's name in a measurement
    tolerance: float  # at least 0; a share of the baseline if relative, else in the metric's own unit
    relative: bool

    @property
    def metric(self) -> Metric:
        """What is known of the metric; a time differs between machines, a counter does not."""
        return METRICS[self.figure]

    def limit(self, baseline: float) -> float:
        """The worst value that passes."""
        return baseline - self.metric.sign * self.tolerance * (abs(baseline) if self.relative else 1)

    def allows(self, baseline: float, ours: float) -> bool:
        """Whether our value passes."""
        return self.metric.sign * (ours - self.limit(baseline)) >= -_SLACK * max(1.0, abs(baseline))

    def values(self, measurement: Record) -> dict[Place, Value]:
        """What is compared, and its draws: times as means over a cell, counters draw by draw."""
        values: dict[Place, Value] = {}
        for cell in summarise(measurement):
            if self.metric.exact:
                for draw, means in cell.draws.items():
                    values[(cell.axis, *cell.place, draw)] = means.get(self.figure), {draw}
            else:
                values[(cell.axis, *cell.place, None)] = cell.figures[self.figure].mean, set(cell.draws)
        return values

    def check(self, baseline: Record) -> None:
        """Refuse a baseline without the metric, and a tolerance so loose that the rule could never fail."""
        name, known = self.metric.gate, [value for value, _ in self.values(baseline).values() if value is not None]
        if not known:
            raise InputError(f"the baseline holds no {name}", "against")
        if self.metric.sign > 0 and max(known) > 0 and all(self.allows(value, 0.0) for value in known if value > 0):
            percent = self.tolerance if 1 <= self.tolerance < 100 else 10
            message = f"{name} can never fall by more than {self.tolerance:g}, the baseline has {max(known):.4g}"
            raise InputError(f"{message} at most; a share of it is written {name}:{percent:g}%", "fail_on")


def parse_rule(text: str) -> Rule:
    """Read ``metric:tolerance``.

    A tolerance ending in % is a share of the baseline, another one is absolute. A metric alone means no tolerance at
    all, which counters can keep and times cannot.
    """
    name, colon, tolerance = text.strip().partition(":")
    figure = gated().get(name)
    if figure is None:
        raise InputError(f"knows {', '.join(gated())}, got {name!r}{did_you_mean(name, gated())}", "fail_on")
    if not colon and not METRICS[figure].exact:
        raise InputError(f"{name} varies from run to run: give a tolerance, such as {name}:10%", "fail_on")
    relative = tolerance.endswith("%")
    digits = tolerance.removesuffix("%") if colon else "0"
    value = float(digits) / (100 if relative else 1) if _NUMBER.fullmatch(digits) else math.inf
    if math.isinf(value):
        raise InputError(f"wants a tolerance such as {name}:0.05 or {name}:10%, got {tolerance!r}", "fail_on")
    if relative and value >= 1 and METRICS[figure].sign > 0:
        raise InputError(f"{name} can never fall by more than 100%, got {tolerance!r}", "fail_on")
    return Rule(figure, value, relative)


@dataclass(frozen=True)
class Judging:
    """By what a measurement is judged, and beside what it is shown; nothing that is measured depends on it."""

    against: Path | None = option(None, "bench.json to hold the figures against.", panel="Gate")
    fail_on: tuple[str, ...] = option(
        (),
        f"METRIC:TOLERANCE that fails, as speedup:10% or alpha:0; repeatable. Metrics: {', '.join(gated())}.",
        panel="Gate",
        shown="",
        repeat=True,
    )
    force: bool = option(False, "Hold times of another machine against ours.", panel="Gate", shown="", flag="--force")
    paper: bool = option(False, "Put the published rows beside ours.", panel="Output", shown="", flag="--paper")

    def __post_init__(self) -> None:
        check_options(self)
        if self.against is not None:
            object.__setattr__(self, "against", Path(self.against))  # a record keeps a text
        if (self.against is None) != (not self.rules):
            raise InputError("wants both: what to hold against, and what fails", "--against and --fail-on")
        if self.force and not self.against:
            raise InputError("goes with --against", "force")

    @cached_property
    def rules(self) -> list[Rule]:
        """What fails."""
        return [parse_rule(rule) for rule in self.fail_on]


@dataclass(frozen=True)
class Verdict:
    """One metric of one cell, compared."""

    metric: str  # the rule's, or ``same_as_ar``
    method: str
    prefill: int
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


def compare(measurement: Record, baseline: Record, rules: Sequence[Rule]) -> list[Verdict]:
    """Judge a measurement by an earlier one, which :func:`refuse_foreign` has let through.

    A cell, a run of a cell or a value that the baseline has and we have not is a regression, and so is any run of ours
    whose tokens are neither plain decoding's nor explained by rounding. What got better never is. One seed's gain in a
    counter does not make up for another's loss.
    """
    verdicts = []
    for sample in measurement["samples"]:
        if sample["explained"] is False:
            first = sample["first_difference"]
            why = "its audit finds violations" if first is None else f"other tokens than AR from token {first}"
            note = f"{_draw_name(sample['prompt'], sample['seed'])}: {why}"
            verdicts.append(Verdict(SAME_TEXT, sample["method"], sample["prefill"], None, False, note))
    for rule in rules:
        ours, theirs = rule.values(measurement), rule.values(baseline)
        keys = dict.fromkeys([*theirs, *ours])
        draws = Counter(key[:3] for key in keys)
        for key in keys:
            (value, runs), (before, expected) = ours.get(key, _ABSENT), theirs.get(key, _ABSENT)
            why = "not in the baseline" if before is None else "not measured" if value is None else ""
            if not why and expected - runs:
                why = f"{len(expected - runs)} of the baseline's runs not measured"
            ok = before is None or (value is not None and not why and rule.allows(before, value))
            method, prefill, length, draw = key
            name = _draw_name(*draw) if draw and draws[key[:3]] > 1 else ""
            note, limit = ": ".join(filter(None, (name, why))), None if before is None else rule.limit(before)
            verdicts.append(Verdict(rule.metric.gate, method, prefill, length, ok, note, before, value, limit))
    return verdicts


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
        place = [f"{worst.prefill:,}", NOTHING if worst.length is None else f"{worst.length:,}"]
        numbers = zip((worst.baseline, worst.ours, worst.change, worst.limit), ("", "", "+", ""), strict=True)
        place += [NOTHING if number is None else format(number, f"{sign}.6g") for number, sign in numbers]
        rows.append([worst.metric, method_name(worst.method, simulated), text, *place])
    return Table(
        f"{len(failed)} of {len(verdicts)} comparisons regressed",
        ["metric", "method", "verdict", "prefill", "length", "baseline", "ours", "change", "limit"],
        rows,
        left=3,
        notes=[f"Unchanged: {len(verdicts) - len(failed) - len(changed)}."],
    )


def refuse_foreign(
    measurement: Record,
    baseline: Record,
    rules: Sequence[Rule],
    repeats: int,
    force: bool = False,
) -> None:
    """Refuse a baseline that cannot be compared with. The measurement needs no samples yet.

    Args:
        repeats: of the measurement. Times that were taken once, here or in the baseline, are not judged: noise would
            decide.
        force: compare times although the machines differ.
    """
    timed = next((rule.metric.gate for rule in rules if not rule.metric.exact), None)
    counted = next((rule.metric.gate for rule in rules if rule.metric.exact), None)
    if counted and summary.simulated_alpha(measurement) is not None:
        raise InputError(f"{counted} follows from --simulate-alpha and is not measured; times are", "fail_on")
    differing = other_workload(measurement, baseline)
    if differing:
        raise InputError(f"the baseline is of another workload: {differ(differing)}", "against")
    here, there = measurement["environment"], baseline["environment"]
    ours, theirs = (one.get("sessions", [one]) for one in (measurement, baseline))  # on several machines, if merged
    other = [name for name in _MACHINE if len({one["environment"].get(name) for one in (*ours, *theirs)}) > 1]
    if timed and other and not force:
        what = ", ".join(f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in other)
        raise InputError(f"{timed} is of another machine ({what}); --force compares it all the same", "against")
    for rule in rules:
        rule.check(baseline)
    taken = len({sample["repeat"] for sample in baseline["samples"]})
    wanted = f"{timed} varies from run to run and wants at least {_MIN_REPEATS} repeats"
    if timed and repeats < _MIN_REPEATS:
        raise InputError(f"{wanted}, got {repeats}", "repeats")
    if timed and taken < _MIN_REPEATS:
        raise InputError(f"{wanted}, the baseline has {taken}", "against")


def other_workload(measurement: Record, other: Record) -> list[str]:
    """What of two measurements' workloads differs, by name."""
    ours, theirs = (plain(one["workload"]) for one in (measurement, other))  # one of them may come from a file
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    return [name for name in differing if name != "hash"] or differing


def differ(names: Sequence[str]) -> str:
    """``seeds differs``, or ``ar, seeds differ``; each name once."""
    once = dict.fromkeys(names)
    return f"{', '.join(once)} differ{'s' if len(once) == 1 else ''}"


def load_measurement(path: Path, option: str = "against") -> Record:
    """Read a complete ``bench.json``, which ``option`` named."""
    content = _read(path, option, ("bench",))
    if content.get("options", {}).get("shard"):
        raise InputError(f"{path} is a shard; bench --merge makes a whole of all of them", option)
    if content["state"] != FINISHED:  # what it has not reached would never be missed
        raise InputError(f"{path} did not run to its end, it is {content['state']}", option)
    if not any(sample["points"] for sample in content["samples"]):
        raise InputError(f"{path} holds no samples", option)
    return content


def _read(path: Path, option: str, kinds: Sequence[str]) -> Record:
    """A record of one of some kinds, as its schema says."""
    content = parse_json(read_file(path, MOST_RECORD, option), path, option)
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in kinds:
        raise InputError(f"{path} is not a {' or '.join(f'{each}.json' for each in kinds)} of tswift bench", option)
    if kind == "suite":
        _check(content, "suite", path, option)
    for measurement in parts(content).values():
        _check(measurement, "bench", path, option)
    return content


def _check(content: Record, kind: str, path: Path, option: str) -> None:
    """Refuse a record of another version, or one that is not as its schema says."""
    version = schema_of("bench")["properties"]["schema"]["const"]
    if content.get("schema") != version:
        found = f"{content.get('schema')!s:.40}"
        raise InputError(f"{path} has schema version {found}, this tswift reads {version}", option)
    error = next(_validator(kind).iter_errors(content), None)
    if error:
        raise InputError(f"{path} is damaged ({error.json_path}: {error.message[-100:]})", option)


@cache
def schema_of(kind: str) -> Mapping[str, Any]:
    """The JSON schema of ``bench.json`` or ``suite.json``."""
    return json.loads((files("tswift.benchmarking") / f"{kind}.schema.json").read_text(encoding="utf-8"))


@cache
def _validator(kind: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def number(_: Any, value: Any) -> bool:
        return type(value) in (int, float) and abs(value) < _LARGEST  # NaN is not, either

    kinds = {"number": number, "integer": lambda _, value: number(_, value) and type(value) is int}
    checker = Draft202012Validator.TYPE_CHECKER.redefine_many(kinds)
    return extend(Draft202012Validator, type_checker=checker)(schema_of(kind))


FILES = ("bench.json", "bench-simulated.json", "suite.json")
JUDGED = tuple(each.name for each, _ in options_of(Judging))
_MAY_DIFFER = ("prompts", "workload", "shard", *JUDGED)  # of prompts, what is in them counts


def open_record(folder: Path, option: str, stack: ExitStack) -> Record:
    """The record in a benchmark's folder, which stays locked until the stack ends."""
    read_record(folder, option)  # a folder without one is none to put a lock into
    stack.enter_context(lock_folder(folder, option))
    return read_record(folder, option)


def read_record(folder: Path, option: str) -> Record:
    """The record in a benchmark's folder, whether it ran to its end or not."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder} holds no {', '.join(FILES[:-1])} or {FILES[-1]}", option)
    content = _read(path, option, ("bench", "suite"))
    if "options" not in content or any("sessions" not in measurement for measurement in parts(content).values()):
        raise InputError(f"{path} was written by an older tswift, which did not keep its options", option)
    content["options"] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content["options"].items()
    }
    try:
        if content["kind"] == "suite":
            find_suite(content["suite"])
        plan_of(content["options"])
    except InputError as error:
        raise InputError(f"{path} is damaged ({error})", option) from None
    return content


def plan_of(options: Mapping[str, Any]) -> Plan:
    """The grid that options ask for, by name, as typed or as in a record."""
    own = find_suite(options["suite"]) if options.get("suite") else None
    return Plan(**{**({"prefills": own.prefills, "lens": own.lens} if own else {}), **fields_of(Plan, options)})


def refuse_changes(record: Record, typed: Mapping[str, Any]) -> None:
    """No option is silently ignored: what was typed for a benchmark that goes on is its own, or refused."""
    known = vars(plan_of({"suite": record.get("suite")}))
    for kind in (BenchOptions, SamplingParams, DraftOptions):
        known = {**{each.name: each.default for each, _ in options_of(kind)}, **known}
    known |= record["options"]
    for name, value in typed.items():
        own = known.get(name)
        if plain(value) != plain(own):
            was = "none" if own is None else own
            raise InputError(f"the benchmark was made with {was}, got {value}; it keeps its options", name)


def go_on(fresh: Record, earlier: Record, folder: Path) -> None:
    """Put the finished cells of an earlier record into a fresh one of the same benchmark."""
    _refuse_other(fresh, earlier, f"{folder} is of another benchmark", "resume")
    _absorb(fresh, [earlier])


def merge(records: Mapping[Path, Record], command: Sequence[str]) -> tuple[Record, list[str]]:
    """One record of several, each with some cells of the same grid; and the cells that none of them has, by name."""
    first, whole = next(iter(records.items()))
    places: dict[tuple[Any, ...], Path] = {}
    for folder, record in records.items():
        _refuse_other(whole, record, f"{folder} and {first} are of different benchmarks", "merge")
        for place in sorted(_done(record)):
            if place in places:
                raise InputError(f"{places[place]} and {folder} have both measured {_name(place)}", "merge")
            places[place] = folder
    whole = copy.deepcopy(whole)
    whole["options"].pop("shard", None)
    for measurement in parts(whole).values():
        measurement.update(sessions=[], command=list(command))
    _absorb(whole, list(records.values()))
    missing = [_name(place) for place in _places(whole) if place not in places]
    for one in (whole, *parts(whole).values()):
        one.update(state=INTERRUPTED if missing else FINISHED, command=list(command))
    return whole, missing


def machines(record: Record) -> Table | None:
    """Which machine measured which cells; None where one measured all of them."""
    cells: dict[tuple[str, str], list[str]] = {}
    for label, measurement in parts(record).items():
        for session in measurement.get("sessions", ()):
            names = [_name((label, *cell_of(cell))) for cell in session["cells"]]
            cells.setdefault((session["host"], summary.machine_name(session["environment"])), []).extend(names)
    rows = [[*machine, str(len(names)), "; ".join(names)] for machine, names in cells.items() if names]
    return Table("What ran where", ["host", "machine", "cells", "which"], rows, left=4) if len(rows) > 1 else None


def _refuse_other(record: Record, other: Record, message: str, option: str) -> None:
    """Refuse a record that is not of the same benchmark, saying what differs."""
    ours, theirs = parts(record), parts(other)
    names = [name for name in ("kind", "suite", "missing") if record.get(name) != other.get(name)]
    names = names or ["groups"] * (list(ours) != list(theirs))
    if not names:
        typed = {*record["options"], *other["options"]} - set(_MAY_DIFFER)
        options = sorted(n for n in typed if plain(record["options"].get(n)) != plain(other["options"].get(n)))
        said = {
            "sampling": fields_of(SamplingParams, dict.fromkeys(options)),
            "drafting": fields_of(DraftOptions, dict.fromkeys(options)),
        }
        found = [name for label in ours for name in other_workload(ours[label], theirs[label])]
        names = [*(name for name in found if not said.get(name)), *options]  # an option says more than where it belongs
    if names:
        raise InputError(f"{message}: {differ(names)}", option)


def _absorb(whole: Record, sources: Sequence[Record]) -> None:
    """Take over the finished cells of some records of the same benchmark, with the sessions that measured them."""
    for label, measurement in parts(whole).items():
        others = [parts(source)[label] for source in sources]
        kept = [(one["samples"], summary.done_cells(one)) for one in others]
        samples = [sample for samples, done in kept for sample in samples if cell_of(sample) in done]
        measurement["samples"] = sorted(samples, key=summary.grid_order(measurement["workload"]))
        measurement["sessions"] = [*(each for one in others for each in one["sessions"]), *measurement["sessions"]]
    for one in (whole, *parts(whole).values()):
        one["started"] = min(source["started"] for source in sources)
        one["ended"] = max(source["ended"] for source in sources)
    if whole["kind"] == "suite":
        texts = [(text, set(_done(source))) for source in sources for text in source["texts"]]
        whole["texts"] = [text for text, done in texts if (text["label"], *cell_of({"repeat": 0, **text})) in done]


def _done(record: Record) -> list[tuple[Any, ...]]:
    return [(label, *cell) for label, one in parts(record).items() for cell in summary.done_cells(one)]


def _places(record: Record) -> Iterator[tuple[Any, ...]]:
    """All cells of the grid, with their groups' labels."""
    for label, measurement in parts(record).items():
        workload = measurement["workload"]
        prompts = [prompt["name"] for prompt in workload["prompts"]]
        repeats = range(plan_of(record["options"]).repeats)
        yield from product([label], repeats, prompts, workload["prefills"], workload["seeds"])


def _name(place: tuple[Any, ...]) -> str:
    label, repeat, prompt, prefill, seed = place
    words = [label, prompt, f"prefill {prefill:,}", f"seed {seed}", f"repeat {repeat + 1}" if repeat else ""]
    return ", ".join(filter(None, words))
