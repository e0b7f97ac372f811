"""Records of benchmarks in their folders: read, gone on with after a stop or a kill, and merged from shards."""

from __future__ import annotations

import copy
import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from tswift.benchmarking.config import BenchOptions, Plan
from tswift.benchmarking.gate import Judging, bench_schema, check_schema, differ, other_workload
from tswift.benchmarking.suites import SUITES, find_suite
from tswift.benchmarking.summary import cell_of, done_cells, grid_order, machine_name
from tswift.benchmarking.table import Table
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import fields_of
from tswift.jobs.folder import FINISHED, INTERRUPTED, lock_folder
from tswift.options import options_of
from tswift.reading import MOST_RECORD, parse_json, read_file

FILES = ("bench.json", "bench-simulated.json", "suite.json")
_KINDS = (BenchOptions, SamplingParams, DraftOptions)
JUDGED = tuple(each.name for each, _ in options_of(Judging))
_MAY_DIFFER = ("prompts", "workload", "shard", *JUDGED)  # of prompts, what is in them counts
_SUITE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "suite": {"enum": list(SUITES)},
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"label": {"type": "string"}, "measurement": {"type": "object"}},
                "required": ["label", "measurement"],
            },
        },
        "missing": {"type": "array"},
        "options": {"type": "object"},
        "texts": {"type": "array", "items": {"type": "object", "required": ["label", "prompt", "prefill", "seed"]}},
        "started": {"type": "string"},
        "ended": {"type": "string"},
    },
    "required": ["suite", "groups", "missing", "texts", "started", "ended"],
}

Record = dict[str, Any]  # as in bench.json or suite.json


def open_record(folder: Path, option: str, stack: ExitStack) -> Record:
    """The record in a benchmark's folder, which stays locked until the stack ends."""
    read_record(folder, option)  # a folder without one is none to put a lock into
    stack.enter_context(lock_folder(folder, option))
    return read_record(folder, option)


def read_record(folder: Path, option: str) -> Record:
    """The record in a benchmark's folder, whether it ran to its end or not."""
    names = [name for name in FILES if (folder / name).is_file()]
    if not names:
        raise InputError(f"{folder} holds no {', '.join(FILES[:-1])} or {FILES[-1]}", option)
    path = folder / names[0]
    content = parse_json(read_file(path, MOST_RECORD, option), path, option)
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in ("bench", "suite"):
        raise InputError(f"{path} is not a record of tswift bench", option)
    if kind == "suite":
        check_schema(content, _SUITE, path, option)
    for measurement in parts(content).values():
        check_schema(measurement, bench_schema(), path, option)
        if "sessions" not in measurement or "options" not in content:
            raise InputError(f"{path} was written by an older tswift, which did not keep its options", option)
    content["options"] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content["options"].items()
    }
    try:
        plan_of(content["options"])
    except InputError as error:
        raise InputError(f"{path} is damaged ({error})", option) from None
    return content


def parts(record: Record) -> dict[str, Record]:
    """By label, a suite's measurements; of a bench itself."""
    if record["kind"] != "suite":
        return {"": record}
    return {group["label"]: group["measurement"] for group in record["groups"]}


def plan_of(options: Mapping[str, Any]) -> Plan:
    """The grid that options ask for, by name, as typed or as in a record."""
    own = find_suite(options["suite"]) if options.get("suite") else None
    return Plan(**{**({"prefills": own.prefills, "lens": own.lens} if own else {}), **fields_of(Plan, options)})


def refuse_changes(record: Record, typed: Mapping[str, Any]) -> None:
    """No option is silently ignored: what was typed for a benchmark that goes on is its own, or refused."""
    defaults = [vars(plan_of({"suite": record.get("suite")}))]
    defaults += [{each.name: each.default for each, _ in options_of(kind)} for kind in _KINDS]
    known = {**ChainMap(*defaults), **record["options"]}
    for name, value in typed.items():
        own = known.get(name)
        if plain(value) != plain(own):
            was = "none" if own is None else own
            raise InputError(f"the benchmark was made with {was}, got {value}; it keeps its options", name)


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


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
            cells.setdefault((session["host"], machine_name(session["environment"])), []).extend(names)
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
        kept = [(one["samples"], done_cells(one)) for one in others]
        samples = [sample for samples, done in kept for sample in samples if cell_of(sample) in done]
        measurement["samples"] = sorted(samples, key=grid_order(measurement["workload"]))
        measurement["sessions"] = [*(each for one in others for each in one["sessions"]), *measurement["sessions"]]
    for one in (whole, *parts(whole).values()):
        one["started"] = min(source["started"] for source in sources)
        one["ended"] = max(source["ended"] for source in sources)
    if whole["kind"] == "suite":
        texts = [(text, set(_done(source))) for source in sources for text in source["texts"]]
        whole["texts"] = [text for text, done in texts if (text["label"], *cell_of({"repeat": 0, **text})) in done]


def _done(record: Record) -> list[tuple[Any, ...]]:
    return [(label, *cell) for label, one in parts(record).items() for cell in done_cells(one)]


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
