"""Files that commands read or write: prompts, baselines of the gate, ``--out`` and ``--json``,
of every wrong kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.bad_inputs.case import Case, World, words_of
from tests.cli.bad_inputs.options import shortened
from tests.helpers import read_json

MANY_GIGABYTES = 1 << 36  # sparse: no block of it is on the disk
Change = Callable[[Path], object]


def sparse(path: Path, size: int = MANY_GIGABYTES) -> Path:
    """A file that seems large."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def _bytes(data: bytes) -> Change:
    return lambda path: path.write_bytes(data)


def _full(path: Path):
    path.mkdir()
    (path / "text.txt").write_text("mine")


def _loop(path: Path):
    path.symlink_to(path)


PROMPTS: dict[str, Change] = {
    "missing": lambda path: None,
    "empty": _bytes(b""),
    "white space": _bytes(b" \n\t\r\n \x0b\x0c"),
    "a byte order mark alone": _bytes(b"\xef\xbb\xbf"),
    "NUL bytes": _bytes(b"text\0text"),
    "no UTF-8": _bytes(b"The ship \xff\xfe"),
    "UTF-16": _bytes("The ship".encode("utf-16")),
    "a named pipe": os.mkfifo,
}
TEXTS: dict[str, Change] = {  # of a benchmark
    "missing": lambda path: None,
    "no UTF-8": _bytes(b"The ship \xff\xfe"),
    "a folder without texts": lambda path: [path.mkdir(), (path / "a.md").write_text("no .txt")],
    "a folder with a bad text": lambda path: [
        path.mkdir(),
        (path / "a.txt").write_text("fine and long enough for eight tokens, as it seems"),
        (path / "b.txt").write_bytes(b"\xff"),
    ],
}
FOLDERS: dict[str, Change] = {  # to write to
    "a file": _bytes(b"mine"),
    "a folder with something in it": _full,
    "a pipe": os.mkfifo,
    "a link to itself": _loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere/at/all"),
    "a link to a folder with something in it": lambda path: [
        _full(path.parent / "full"),
        path.symlink_to("full"),
    ],
}
FILES: dict[str, Change] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": _loop,
    "a link to a folder": lambda path: [(path.parent / "there").mkdir(), path.symlink_to("there")],
    "a link into no folder": lambda path: path.symlink_to("nowhere/at/all"),
}
PLACES = (
    *("", "nowhere/x\0y", "x" * 256, "x" * 5000, "a/" * 3000 + "b"),
    *("/dev/null/x", "/proc/x", "/proc/self/x/y", "PROMPT/x"),
)


def _told(change: Callable[[dict[str, Any]], object]) -> Change:
    def edit(path: Path):
        told = read_json(path)
        change(told)
        path.write_text(json.dumps(told))

    return edit


BASELINES: dict[str, Change] = {  # others are in tests/benchmarking/test_gate.py
    "missing": lambda path: path.unlink(),
    "a pipe": lambda path: [path.unlink(), os.mkfifo(path)],
    "a number of 9,999 digits": _bytes(b'{"kind": "bench", "schema": ' + b"1" * 9999 + b"}"),
    "of another workload": _told(lambda told: told["workload"].update(seeds=[5])),
    "a point of speedup 1e999": lambda path: path.write_text(
        path.read_text().replace('"speedup": ', '"speedup": 1e999, "was": ', 1)
    ),
    "points without alpha": _told(
        lambda told: [
            point.update(alpha=None) for sample in told["samples"] for point in sample["points"]
        ]
    ),
}


def _command(command: str, option: str, value, world: World) -> list[object]:
    more: list[object] = ["--repeats", 2] if command == "bench" else []
    if option == "--against":
        more += ["--fail-on", "alpha:0", "--fail-on", "speedup:90%"]
    if command == "verify":
        command = "verify RUN" if option == "--json" else "verify --tokens"
    return words_of(world, command, *more, option, value, without=[option])


def _made(command: str, option: str, name: str, make: Change, called: str = "there-is") -> Case:
    def words(world: World) -> list[object]:
        path = world.here / called
        if option == "--against":
            path.write_bytes(world.bench.read_bytes())
        make(path)
        return _command(command, option, path, world)

    return Case(f"{command} {option}, {name}", words, option)


def _named(command: str, option: str, name: str) -> Case:
    def words(world: World) -> list[object]:
        (world.here / "mine").write_text("so the folder is not empty")
        return _command(command, option, name.replace("PROMPT", str(world.prompt)), world)

    return Case(f"{command} {option} {shortened(name)!r}", words, option)


def _long(world: World) -> list[object]:
    path = world.here / "long.txt"
    path.write_text("The ship had lain three days becalmed. " * 3000)
    return _command("generate", "--prompt", path, world)


CASES: tuple[Case, ...] = (
    *(_made("generate", "--prompt", *each) for each in PROMPTS.items()),
    *(
        _made(command, "--prompt", "missing", PROMPTS["missing"])
        for command in ("verify", "compare")
    ),
    _made(
        "generate",
        "--prompt",
        "with escapes in its name",
        _bytes(b"\xff"),
        "red\x1b[31m\u202etxt\r\nnew line\x9b",
    ),
    Case("generate, a prompt that is too long for the model", _long, "--len"),
    *(_made("bench", "--prompts", *each) for each in TEXTS.items()),
    # what else is no file is in tests/test_reading.py
    *(
        _named("generate", "--prompt", name)
        for name in ("", "/dev/tty0", "x" * 5000, "\x1b[2Jgone", "\udcff")
    ),
    *(_made("bench", "--against", *each) for each in BASELINES.items()),
    *(
        _named("bench", "--against", name)
        for name in ("", "nowhere\0", "x" * 5000, "\x1b[2Jgone", "/dev/zero")
    ),
    *(_made("generate", "--out", *each) for each in FOLDERS.items()),
    _made("bench", "--out", "a folder with something in it", _full),
    *(_made("compare", "--json", *each) for each in FILES.items()),
    *(_made(command, "--json", "a pipe", os.mkfifo) for command in ("verify", "roofline")),
    *(_named("generate", "--out", name) for name in PLACES),
    *(
        _named("compare", "--json", name)
        for name in (*PLACES, "nowhere/x", ".", "..", "/", "\x1b[31m/red\n/x")
    ),
)
