"""Run folders and files of tokens, damaged in every way; whatever files a run leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.bad_inputs.case import Case, World, words_of
from tests.cli.bad_inputs.files import sparse
from tests.cli.bad_inputs.models import Change, content, cut, flip
from tests.helpers import read_json
from tswift.jobs.folder import checksum

RECORD = "run.json"


def record(change: Callable[[dict[str, Any]], object]) -> Change:
    """Another record, with the checksum that goes with it, if it has one."""

    def edit(folder: Path):
        path = folder / RECORD
        told = read_json(path)
        change(told)
        if "checksum" in told:
            told["checksum"] = checksum(told)
        path.write_text(json.dumps(told))

    return edit


def _in(part: str, **values) -> Change:
    return record(lambda told: told[part].update(values))


def _gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


_DEEP = b"[" * 100_000 + b"]" * 100_000
_READ = (RECORD, "prompt.u32", "tokens.u32")

CHANGES: dict[str, Change] = {
    "nothing in it": lambda folder: [path.unlink() for path in folder.iterdir()],
    **{f"no {name}": _gone(name) for name in _READ},
    **{f"an empty {name}": content(name, b"") for name in _READ},
    "a prompt cut by a token": cut("prompt.u32", -4),
    "a record of schema 99": record(lambda told: told.update(schema=99)),
    **{
        f"a record without {part}": record(lambda told, part=part: told.pop(part))
        for part in ("schema", "sampling", "model", "options", "prompt")
    },
    **{
        f"a record whose {part} is a list": record(lambda told, part=part: told.update({part: [1]}))
        for part in ("sampling", "model", "options", "prompt")
    },
    "a record without its seed": record(lambda told: told["options"].pop("seed")),
    "a record that somebody edited": lambda folder: (folder / RECORD).write_text(
        (folder / RECORD).read_text().replace('"temperature": 1.0', '"temperature": 0.5')
    ),
    "min-p 3": _in("sampling", min_p=3),
    "sampling by a word that is none": _in("sampling", hot=1),
    "a model that is not there": _in("model", name="/nowhere"),
    "a model with escapes": _in("model", name="./\x1b[31mred\x07\n"),
    "dtype 'nope'": _in("model", dtype="nope"),
    "drafting by a word that is none": _in("drafting", nodez=3),
    "a record nested deeply": content(RECORD, _DEEP),
    f"64 GB of {RECORD}": lambda folder: sparse(folder / RECORD),
    "64 GB of tokens.u32": lambda folder: sparse(folder / "tokens.u32"),
}

_TOKENS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "ids beyond the vocabulary": lambda path: path.write_bytes(b"\1\0\0\0\xff\xff\xff\xff"),
    "more than the positions": lambda path: path.write_bytes(b"\1\0\0\0" * 5000),
    "a pipe": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
}


# what only matters to a run that goes on
_TO_GO_ON: dict[str, Change] = {
    "no journal": _gone("journal"),
    "a token changed": flip("tokens.u32", 5),
    "a token gone": cut("tokens.u32", -4),
    "a tree of words": _in("drafting", tree=["x"]),
    "seconds of prefill in letters": record(lambda told: told.update(prefill_seconds="zz")),
    "weights of another model": _in("model", weights="0" * 64),
    "a configuration of another model": _in("model", config="0" * 64),
    "another tokenizer": _in("model", tokenizer="0" * 64),
}


# by command: the folder that it is given, and files of it that something else is in the place of
_RUN = (RECORD, f"{RECORD}.new", "prompt.u32", "tokens.u32", "text.txt", "logprobs.bin")
_OF_TEXTS = ("tokens.u32", "text.txt", RECORD)
_FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "verify FOLDER": ("run", _RUN),
    "generate --len 20 --resume FOLDER": ("run", (*_RUN, "journal", "lock")),
    "generate --resume FOLDER": (
        "job",
        ("batch.json", "out.jsonl.new", "lock", *(f"000001/{name}" for name in _OF_TEXTS)),
    ),
    "bench --resume FOLDER": ("bench", ("bench.json", "lock")),
    "generate --prompt-text x --model MODEL --out FOLDER": (
        "empty",
        ("tokens.u32", "text.txt", "journal", "lock", "prompt.u32.new"),
    ),
}
_KINDS: dict[str, Callable[[Path], object]] = {
    "named pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("elsewhere"),
    "folder": Path.mkdir,
}


def _in_the_way(command: str, name: str, kind: str) -> Case:
    """What is no file is neither opened nor followed."""

    def words(world: World) -> list[object]:
        folder = world.here / _FILES[command][0]
        known = {"run": world.run, "bench": world.bench.parent, "job": world.job}.get(folder.name)
        shutil.copytree(known, folder) if known else folder.mkdir()
        if (folder / name).exists():
            (folder / name).rename((folder / name).with_name("elsewhere"))
        _KINDS[kind](folder / name)
        return [{"FOLDER": folder, "MODEL": world.model}.get(w, w) for w in command.split()]

    return Case(f"{command}, a {kind} for {name}", words, f"{name} cannot be used (it is a {kind})")


def _case(command: str, name: str, change: Change) -> Case:
    def words(world: World) -> list[object]:
        folder = world.here / "run"
        shutil.copytree(world.run, folder)
        change(folder)
        return (
            ["verify", folder]
            if command == "verify"
            else ["generate", "--resume", folder, "--len", 20]
        )

    return Case(f"{command}, a run with {name}", words, "")


def _tokens(name: str) -> Case:
    def words(world: World) -> list[object]:
        path = world.here / "some.u32"
        _TOKENS[name](path)
        return words_of(world, "verify --tokens", "--tokens", path, without=["--tokens"])

    return Case(f"verify --tokens, a file that is {name}", words, "--tokens")


RUNS: tuple[Case, ...] = (
    *(_case("verify", *each) for each in CHANGES.items()),
    *(_case("generate --resume", *each) for each in _TO_GO_ON.items()),
    _case("verify", "another tokenizer", _TO_GO_ON["another tokenizer"]),
    *(
        _case("generate --resume", name, CHANGES[name])
        for name in (f"no {RECORD}", "a prompt cut by a token")
    ),
    *map(_tokens, _TOKENS),
    *(
        _in_the_way(command, name, kind)
        for command, (_, names) in _FILES.items()
        for at, name in enumerate(names)
        for kind in ("link", ("named pipe", "folder")[at % 2])
    ),
    *(
        Case(
            f"verify {' '.join(option)} {name[:20]!r}",
            lambda world, words=(*option, name): ["verify", *words],
            says,
        )
        for name in ("\x1b[2Jgone", "/dev/null", "nowhere\0", "x" * 5000, "/dev/zero")
        for option, says in (((), ""), (("--tokens",), "--tokens"))
    ),
)
