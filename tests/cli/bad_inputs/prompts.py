"""Prompts that are none: missing, no text, no file, too long, endless."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.cli.bad_inputs.case import Case, World, generate

MANY_GIGABYTES = 1 << 36  # sparse: no block of it is on the disk


def sparse(path: Path, size: int = MANY_GIGABYTES) -> Path:
    """A file that seems large."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


MAKERS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": _bytes(b""),
    "white space": _bytes(b" \n\t\r\n \x0b\x0c"),
    "a byte order mark alone": _bytes(b"\xef\xbb\xbf"),
    "NUL bytes": _bytes(b"text\0text"),
    "no UTF-8": _bytes(b"The ship \xff\xfe"),
    "UTF-16": _bytes("The ship".encode("utf-16")),
    "a named pipe": os.mkfifo,
    "too long for the model": _bytes(b"The ship had lain three days becalmed. " * 3000),
}


def _file(name: str, command: str) -> Case:
    def words(world: World) -> list[object]:
        path = world.here / "bad.txt"
        MAKERS[name](path)
        if command == "bench":
            return ["bench", "--model", world.model, "--prompts", path, "--prefill", 8, "--lens", 4, "--out", "new/run"]
        if command == "verify":
            return ["verify", "--tokens", world.run / "tokens.u32", "--model", world.model, "--prompt", path]
        if command == "compare":
            return ["compare", "--model", world.model, "--prompt", path, "--len", 4]
        return generate(world, "--prompt", path)

    option = {"bench": "--prompts", "generate": "--len" if name.startswith("too long") else "--prompt"}
    return Case(f"{command}, a prompt that is {name}", words, option.get(command, "--prompt"))


def _folder(world: World) -> list[object]:
    (world.here / "texts").mkdir()
    (world.here / "texts" / "a.md").write_text("no .txt")
    return ["bench", "--model", world.model, "--prompts", world.here / "texts", "--lens", 4, "--out", "new/run"]


def _folder_with_a_bad_one(world: World) -> list[object]:
    (world.here / "texts").mkdir()
    (world.here / "texts" / "a.txt").write_text("fine and long enough for eight tokens, as it seems")
    (world.here / "texts" / "b.txt").write_bytes(b"\xff")
    return ["bench", "--model", world.model, "--prompts", world.here / "texts", "--lens", 4, "--out", "new/run"]


def _short(world: World) -> list[object]:
    path = world.here / "short.txt"
    path.write_text("Hi")
    return ["bench", "--model", world.model, "--prompts", path, "--lens", 4, "--prefill", 999, "--out", "new/run"]


def _named(name: str) -> Case:
    return Case(f"generate --prompt {name!r}", lambda world: generate(world, "--prompt", name), "--prompt")


def _named_badly(world: World) -> list[object]:
    path = world.here / "red\x1b[31m\u202etxt\r\nnew line\x9b"
    path.write_bytes(b"\xff")
    return generate(world, "--prompt", path)


PROMPTS: tuple[Case, ...] = (
    *(_file(name, "generate") for name in MAKERS),
    *(_file(name, "bench") for name in ("missing", "no UTF-8", "a named pipe")),
    *(_file("missing", command) for command in ("verify", "compare")),
    *map(_named, ("", "/dev/tty0", "x" * 5000, "\x1b[2Jgone", "\udcff")),  # others are in tests/test_reading.py
    Case("bench --prompts, a folder without texts", _folder, "--prompts"),
    Case("bench --prompts, a folder with a bad text", _folder_with_a_bad_one, "--prompts"),
    Case("bench --prompts, fewer tokens than --prefill", _short, "--prefill"),
    Case("generate --prompt, a name with escapes in it", _named_badly, "--prompt"),
)
