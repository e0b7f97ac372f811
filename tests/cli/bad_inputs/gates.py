"""Baselines for the gate of ``tswift bench``: no JSON, of another schema, or wrong deep inside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.bad_inputs.case import Case, World
from tests.cli.bad_inputs.prompts import sparse

Change = Callable[[Path], object]


def _bytes(data: bytes) -> Change:
    return lambda path: path.write_bytes(data)


def _edit(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(path: Path) -> None:
        told = json.loads(path.read_text())
        change(told)
        path.write_text(json.dumps(told))

    return edit


def _sample(**values: object) -> Change:
    return _edit(lambda told: told["samples"][1].update(values))


def _raw(old: str, new: str) -> Change:
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


CHANGES: dict[str, Change] = {
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: [path.unlink(), path.mkdir()],
    "a pipe": lambda path: [path.unlink(), os.mkfifo(path)],
    "64 GB": sparse,
    "/dev/zero": lambda path: [path.unlink(), path.symlink_to("/dev/zero")],
    "a link to itself": lambda path: [path.unlink(), path.symlink_to(path)],
    "empty": _bytes(b""),
    "no UTF-8": _bytes(b'{"kind": "\xff"}'),
    "a list": _bytes(b"[]"),
    "nested deeply": _bytes(b"[" * 100_000 + b"]" * 100_000),
    "a number of 9,999 digits": _bytes(b'{"kind": "bench", "schema": ' + b"1" * 9999 + b"}"),
    "of another kind": _edit(lambda told: told.update(kind="compare")),
    "of schema 99": _edit(lambda told: told.update(schema=99)),
    "of a schema that is text with escapes": _edit(lambda told: told.update(schema="\x1b[31m1")),
    "of a schema that is a long text": _edit(lambda told: told.update(schema="x" * 5000)),
    "interrupted": _edit(lambda told: told.update(state="interrupted")),
    "of state null": _edit(lambda told: told.update(state=None)),
    "of another workload": _edit(lambda told: told["workload"].update(seeds=[5])),
    "of a workload with a name of escapes": _edit(lambda told: told["workload"].update({"\x1b[31m\n": 1})),
    "of a workload without a hash": _edit(lambda told: told["workload"].pop("hash")),
    "a point of speedup 1e999": _raw('"speedup": ', '"speedup": 1e999, "was": '),
    "points without alpha": _edit(
        lambda told: [point.update(alpha=None) for sample in told["samples"] for point in sample["points"]]
    ),
    "a sample estimated 'x'": _sample(estimated=[1, "x"]),
    "with NaN in the workload": _edit(lambda told: told["workload"].update(seeds=[float("nan")])),
}


def _case(name: str) -> Case:
    def words(world: World) -> list[object]:
        path = world.here / "bench.json"
        path.write_bytes(world.bench.read_bytes())
        CHANGES[name](path)
        base = ["bench", "--model", world.model, "--prompts", world.prompt, "--prefill", 8, "--lens", "4,8"]
        gate = ["--against", path, "--fail-on", "alpha:0", "--fail-on", "speedup:90%", "--repeats", 2]
        return [*base, "--warmup", 0, "--no-plots", "--out", "new/run", *gate]

    return Case(f"bench --against, a file that is {name}", words, "--against")


def _named(name: str) -> Case:
    gate = ["--against", name, "--fail-on", "alpha:0"]
    return Case(f"bench --against {name[:20]!r}", lambda world: ["bench", "--model", world.model, *gate], "--against")


GATES: tuple[Case, ...] = (
    *map(_case, CHANGES),
    *map(_named, ("", "nowhere\0", "x" * 5000, "\x1b[2Jgone", "/dev/zero")),
)
