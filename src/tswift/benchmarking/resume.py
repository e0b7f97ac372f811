"""Benchmarks that go on after a stop or a kill."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tswift import options
from tswift.benchmarking import summary
from tswift.benchmarking.config import BenchOptions, Plan
from tswift.benchmarking.gate import JUDGED, Judging, differ
from tswift.benchmarking.record import (
    Cell,
    Options,
    Record,
    SuiteRecord,
    parse,
    to_json,
    workload_hash,
)
from tswift.benchmarking.suites import find_suite
from tswift.errors import InputError
from tswift.files import lock_folder
from tswift.jobs.folder import INTERRUPTED, read_json
from tswift.options import changed, fields_of, of_json, values_of
from tswift.tables import Table

FILES = ("bench.json", "bench-simulated.json", "suite.json")
_MAY_DIFFER = ("prompts", "workload", *JUDGED)  # of prompts, what is in them counts


def open_record(folder: Path, option: str, stack: ExitStack) -> Record:
    """The record in a benchmark's folder, which stays locked until the stack ends."""
    read_record(folder, option)  # a folder without one is none to put a lock into
    stack.enter_context(lock_folder(folder, option))
    return read_record(folder, option)


def read_record(folder: Path, option: str) -> Record:
    """The record in a benchmark's folder, whether it ran to its end or not."""
    path = next((folder / name for name in FILES if os.path.lexists(folder / name)), None)
    if path is None:
        raise InputError(f"{folder} holds no {', '.join(FILES[:-1])} or {FILES[-1]}", option)
    record = parse(read_json(path, None, option), path, option)
    if record.options is None or not all(one.sessions for one in record.parts.values()):
        raise InputError(
            f"{path} was written by an older tswift, which did not keep its options", option
        )
    if any(one.workload.peers for one in record.parts.values()):
        raise InputError(
            f"{path} has transformers' generate, which benchmarks/peers.py runs", option
        )
    record.options = of_json(record.options)
    if record.options.get("temperature") == 0:
        # older ones have the paper's penalty there, which nobody typed
        used = next(iter(record.parts.values())).workload.sampling
        record.options.setdefault("penalty", used["penalty"])
    try:
        if isinstance(record, SuiteRecord):
            find_suite(record.suite)
        plan_of(record.options)
        Judging(**fields_of(Judging, record.options))
    except InputError as error:
        raise InputError(f"{path} is damaged ($.options.{error})", option) from None
    return record


def plan_of(given: Options) -> Plan:
    """The grid that options ask for, by name, as typed or as in a record."""
    own = find_suite(str(given["suite"])) if given.get("suite") else None
    usual = {"prefills": own.prefills, "lens": own.lens} if own else {}
    return changed(Plan(), {**usual, **given})


def add_seeds(record: Record, seeds: Sequence[int]) -> None:
    """Give a benchmark that goes on more seeds than it was made with.

    Nothing happens unless its own are among them.
    """
    own = plan_of(record.options or {})
    if record.options is None or not set(own.seeds) < set(seeds):
        return
    record.options["seeds"] = tuple(seeds)
    record.state = INTERRUPTED
    for measurement in record.parts.values():
        measurement.state = INTERRUPTED
        measurement.workload.seeds = list(seeds)
        measurement.workload.hash = workload_hash(to_json(measurement.workload))


def refuse_changes(record: Record, typed: Options) -> None:
    """Refuse what was typed for a benchmark that goes on and is not its own."""
    usual = plan_of({"suite": record.suite} if isinstance(record, SuiteRecord) else {})
    known = {**values_of(BenchOptions()), **vars(usual), **(record.options or {})}
    options.refuse_changes("the benchmark", typed, known)


def continue_from(fresh: Record, earlier: Record, folder: Path) -> None:
    """Put the finished cells of an earlier record into a fresh one of the same benchmark,
    with the sessions that measured them.
    """
    _refuse_other(fresh, earlier, folder)
    for label, measurement in fresh.parts.items():
        order = summary.grid_order(measurement.workload)
        before = earlier.parts[label]
        samples = [sample for sample in before.samples if sample.cell in before.done]
        measurement.samples = sorted(samples, key=lambda sample: order(sample.cell))
        measurement.sessions = [*before.sessions, *measurement.sessions]
    for one in (fresh, *fresh.parts.values()):
        one.started, one.ended = earlier.started, earlier.ended
    if isinstance(fresh, SuiteRecord) and isinstance(earlier, SuiteRecord):
        done = {(label, cell) for label, one in earlier.parts.items() for cell in one.done}
        fresh.texts = [text for text in earlier.texts if (text.label, text.cell) in done]


def _name(label: str, cell: Cell) -> str:
    repeat = f"repeat {cell.repeat + 1}" if cell.repeat else ""
    return ", ".join(filter(None, [label, str(cell), repeat]))


def _refuse_other(record: Record, other: Record, folder: Path) -> None:
    """Refuse a record that is not of the same benchmark, saying what differs."""
    before = record.options or {}
    after = other.options or {}
    typed = sorted({*before, *after} - {*_MAY_DIFFER})
    names = [name for name in typed if to_json(before.get(name)) != to_json(after.get(name))]
    ours = record.parts
    theirs = other.parts
    for label in ours.keys() & theirs.keys() if not names else ():
        names += ours[label].workload.differing(theirs[label].workload)
    for name in ("kind", "suite", "missing"):
        if getattr(record, name, None) != getattr(other, name, None):
            names.append(name)
    if not names and list(ours) != list(theirs):
        names = ["groups"]
    if names:
        raise InputError(f"{folder} is of another benchmark: {differ(names)}", "resume")


def machines(record: Record) -> Table | None:
    """Which machine measured which cells; None where one measured all of them."""
    cells: dict[tuple[str, str], list[str]] = {}
    for label, measurement in record.parts.items():
        for session in measurement.sessions:
            names = [_name(label, cell) for cell in session.cells]
            cells.setdefault((session.host, session.environment.machine), []).extend(names)
    rows = [
        [*machine, str(len(names)), "; ".join(names)] for machine, names in cells.items() if names
    ]
    return (
        Table("What ran where", ["host", "machine", "cells", "which"], rows, left=4)
        if len(rows) > 1
        else None
    )
