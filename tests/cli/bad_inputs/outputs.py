"""Places that cannot be written to, or would be written over: ``--out`` and ``--json``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.cli.bad_inputs.case import Case, World

Maker = Callable[[Path], object]


def _file(path: Path) -> None:
    path.write_text("mine")


def _full(path: Path) -> None:
    path.mkdir()
    (path / "text.txt").write_text("mine")


def _loop(path: Path) -> None:
    path.symlink_to(path)


FOLDERS: dict[str, Maker] = {
    "a file": _file,
    "a folder with something in it": _full,
    "a pipe": os.mkfifo,
    "a link to itself": _loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere/at/all"),
    "a link to a folder with something in it": lambda path: [_full(path.parent / "full"), path.symlink_to("full")],
}
FILES: dict[str, Maker] = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": _loop,
    "a link to a folder": lambda path: [(path.parent / "there").mkdir(), path.symlink_to("there")],
    "a link into no folder": lambda path: path.symlink_to("nowhere/at/all"),
}
NAMES = (
    "",
    "nowhere/x\0y",
    "x" * 256,
    "x" * 5000,
    "a/" * 3000 + "b",
    "/dev/null/x",
    "/proc/x",
    "/proc/self/x/y",
    "PROMPT/x",
)
_ONLY_FILES = ("nowhere/x", ".", "..", "/", "\x1b[31m/red\n/x")


def _command(command: str, world: World, option: str, value: object) -> list[object]:
    words = {
        "generate": ["generate", "--model", world.model, "--prompt", world.prompt, "--len", 4],
        "bench": ["bench", "--model", world.model, "--prompts", world.prompt, "--prefill", 8, "--lens", 4],
        "compare": ["compare", "--model", world.model, "--prompt", world.prompt, "--len", 4],
        "verify": ["verify", world.run],
        "roofline": ["roofline", "--model", world.model, "--bandwidth", 1, "--flops", 1, "--len", 9, "--prefill", 9],
    }[command]
    return [*words, option, value]


def _made(command: str, option: str, name: str, make: Maker) -> Case:
    def words(world: World) -> list[object]:
        make(world.here / "there-is")
        return _command(command, world, option, world.here / "there-is")

    return Case(f"{command} {option}, {name}", words, option)


def _named(command: str, option: str, name: str) -> Case:
    def words(world: World) -> list[object]:
        (world.here / "mine").write_text("so the folder is not empty")
        return _command(command, world, option, name.replace("PROMPT", str(world.prompt)))

    shown = name if len(name) < 40 else f"{name[:12]}... ({len(name):,} characters)"
    return Case(f"{command} {option} {shown!r}", words, option)


OUTPUTS: tuple[Case, ...] = (
    *(_made("generate", "--out", name, make) for name, make in FOLDERS.items()),
    _made("bench", "--out", "a folder with something in it", _full),
    *(_made("compare", "--json", name, make) for name, make in FILES.items()),
    *(_made(command, "--json", "a pipe", os.mkfifo) for command in ("verify", "roofline")),
    *(_named("generate", "--out", name) for name in NAMES),
    *(_named("compare", "--json", name) for name in (*NAMES, *_ONLY_FILES)),
)
