"""A bad input, the files that all of them start from, and what a refusal has to be."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import IO

from tests.conftest import make_checkpoint

SECONDS = 30  # a case that takes longer hangs
MEMORY = 1 << 31  # bytes that a case may map in addition
_MISTAKE = "a mistake in tswift"
_LONGEST = 700  # characters of a line that people are to read


@dataclass(frozen=True)
class World:
    """What is there before a case begins."""

    model: Path  # a tiny checkpoint with heads
    prompt: Path  # a short text
    run: Path  # the folder of a finished run of that model on that prompt
    bench: Path  # a ``bench.json`` of two repeats
    job: Path  # the folder of a file of two prompts, whose texts are made
    here: Path  # an empty folder, the case's own and its working directory


@dataclass(frozen=True)
class Case:
    """A bad input."""

    name: str  # what is bad
    words: Callable[[World], Sequence[object]]  # makes the files, and says the command line
    says: str  # what the line has to hold: the option or the file


@dataclass(frozen=True)
class Refusal:
    """What a command did."""

    code: int | None  # its exit code; None if it raised, or was stopped because it hung
    out: bytes
    err: str
    faults: tuple[str, ...] = ()  # what is wrong with it

    @property
    def traceback(self) -> bool:
        """Whether it raised, or told of a mistake in the program."""
        return self.code is None or "Traceback" in self.err or _MISTAKE in self.err


class Hangs(BaseException):
    """A case took too long; no ``except Exception`` holds it up."""


# command lines that are fine, of which a case makes a bad one; words in capitals are files of the
# world
COMMANDS = {
    "generate": "generate --model MODEL --prompt PROMPT --len 4 --out new/run",
    "compare": "compare --model MODEL --prompt PROMPT --len 4",
    "bench": "bench --model MODEL --prompts PROMPT --prefill 8 --lens 4,8 --no-plots --warmup 0 "
    "--costs nominal "
    "--out new/run",
    "bench --suite": "bench --model MODEL --prompts PROMPT --lens 6,12 --warmup 0 "
    "--out new/run --suite",
    "roofline": "roofline --model MODEL --bandwidth 100 --flops 10 --len 100 --prefill 8",
    "verify --tokens": "verify --tokens TOKENS --prompt PROMPT --model MODEL",
    "verify RUN": "verify RUN",
    "generate --resume RUN": "generate --resume RUN",
    "train": "train --corpus PROMPT --model MODEL --seq-len 8 --steps 1 --out new/run",
    "heads inspect FILE": "heads inspect HEADS",
    "tswift": "",
}


def words_of(world: World, command: str, *more, without: Sequence[str] = ()) -> list[object]:
    """A command's words, ``without`` some options and their values, and then ``more``."""
    base: list[object] = [*COMMANDS[command].split()]
    for option in (*without, *["--lens"] * ("--lens" in more)):  # which cannot be given twice
        if option in base:
            del base[base.index(option) : base.index(option) + 2]
    names = {"MODEL": world.model, "PROMPT": world.prompt, "RUN": world.run, "BENCH": world.bench}
    names |= {"TOKENS": world.run / "tokens.u32", "HEADS": world.model / "heads.safetensors"}
    return [names.get(str(word), word) for word in (*base, *more)]


def generate(world: World, *words) -> list[object]:
    """``tswift generate`` on the tiny model, to a new folder."""
    return words_of(world, "generate", *words)


def make_world(folder: Path, here: Path) -> World:
    """Make the files that cases start from, by the commands that make them for users."""
    prompt = folder / "prompt.txt"
    prompt.write_text("The ship had lain three days becalmed, and nobody spoke.")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "It was."}\n' * 2)
    world = World(
        make_checkpoint(folder / "model"),
        prompt,
        folder / "run",
        folder / "bench" / "bench.json",
        folder / "job",
        here,
    )
    for words in (
        words_of(world, "generate", "--len", 12, "--out", world.run),
        words_of(world, "bench", "--repeats", 2, "--out", world.bench.parent),
        ["generate", "--model", world.model, "--len", 4, "--prompts", prompts, "--out", world.job],
    ):
        made = run(words, here)
        assert made.code == 0, made.err
    return world


def tree(folder: Path) -> dict[str, str]:
    """What a folder holds, by name: a digest of every file, and what every link points at."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        elif path.is_file():
            size = path.stat().st_size
            found[str(path)] = (
                f"{size} {sha256(path.read_bytes()).hexdigest() if size < 1 << 24 else ''}"
            )
        else:
            found[str(path)] = "no file"
    return found


def attempt(case: Case, world: World) -> Refusal:
    """Try a bad input, and say what is wrong with how it was refused."""
    words = case.words(world)
    before = tree(world.here)
    found = run(words, world.here)
    wrong = _faults(case, found)
    if tree(world.here) != before:
        wrong.append("what was there was touched, or something is left behind")
    return replace(found, faults=tuple(wrong))


def run(words: Sequence[object], here: Path) -> Refusal:
    """Run ``tswift`` with these words in this process, and catch all that it writes,
    whoever writes it.
    """
    from tswift.cli import main

    before = os.getcwd()
    os.chdir(here)
    code = None
    raised = ""
    try:
        with _caught() as (out, err):
            try:
                with _limited():
                    code = main([str(word) for word in words])
            except BaseException as error:
                raised = f"{type(error).__name__} {error}"
            sys.stdout.flush()
            sys.stderr.flush()
            return Refusal(code, _content(out), _content(err).decode(errors="replace") + raised)
    finally:
        os.chdir(before)


def _faults(case: Case, found: Refusal) -> list[str]:
    line = found.err
    checks = {
        f"exit code {found.code}": found.code == 2,
        "something on stdout": found.out == b"",
        "not one line": line.count("\n") == 1 and line.endswith("\n"),
        "not said by tswift": line.startswith("tswift: error: "),
        "a traceback": not found.traceback,
        f"does not say {case.says!r}": case.says in line,
        "something that a terminal obeys": line[:-1].isprintable(),
        "far too long": len(line) <= _LONGEST,
        "too few words": len(line.split()) >= 5,
    }
    return [name for name, fine in checks.items() if not fine]


@contextlib.contextmanager
def _caught() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Stdout and stderr into files, by descriptor: libraries in C and Rust write there, too."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                os.fdopen(number, "wb", closefd=False), "utf-8", errors, write_through=True
            )
            for number, errors in ((1, "strict"), (2, "backslashreplace"))
        )
        try:
            yield out, err
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            sys.stdout, sys.stderr = streams
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Little time, and little more memory than there is in use:
    what hangs or takes too much is stopped, and shows.
    """

    def hangs(number: int, frame: FrameType | None):
        raise Hangs

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.alarm(SECONDS)
    # what hangs in a library hears no signal
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)
