"""What a command gives out: tables, JSON, progress, a job's text; and exit codes.

Tables are framed on a terminal and aligned text in a pipe. Progress goes to stderr: bars on a
terminal, a line now and then elsewhere. Control characters are escaped; closed pipes and missing
streams are handled.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import sys
import time
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from errno import EACCES, ELOOP
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tswift.errors import InputError, Notice
from tswift.files import write_whole
from tswift.options import Values
from tswift.stages import listening
from tswift.tables import Reporter, Table

if TYPE_CHECKING:
    from tswift.decoding.stats import DecodeStats
    from tswift.jobs.job import Job


# exit codes
OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
CLOSED_PIPE = 141  # nobody reads stdout any more: what a shell reports for SIGPIPE

_LONGEST_WORD = 240  # characters; a name that is longer loses its middle


def visible(text: str) -> str:
    """A text with escapes such as ``\\x1b`` for every character that is not printed but obeyed,
    or misleads.

    Names of files and models come from outside: a terminal must not be told by them to move its
    cursor, change its colours or turn its text round.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def one_line(message: str) -> str:
    """A message as one visible line of words, none of them endless."""
    half = _LONGEST_WORD // 2
    words = [visible(word) for word in message.split()]
    return " ".join(
        word if len(word) <= 2 * half else f"{word[:half]}...{word[-half:]}" for word in words
    )


def tell(message: str, quiet: bool = False) -> None:
    """Say something on stderr, in one line, unless quiet; a pipe that nobody reads is no error."""
    if not quiet:
        with suppress(OSError):
            print(f"tswift: {one_line(message)}", file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Say on stderr what went wrong, in one line."""
    tell(f"error: {message}")


@contextmanager
def warnings_in_a_line(quiet: bool) -> Iterator[None]:
    """While entered, a :class:`Notice` is said in a line on stderr, or not at all."""

    def say(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, Notice):
            show_others(message, category, *where, **more)
        else:
            tell(str(message), quiet)

    with warnings.catch_warnings():
        show_others = warnings.showwarning
        warnings.showwarning = say
        yield


@contextmanager
def loading_notice(what: str, quiet: bool, logged: bool = False) -> Iterator[None]:
    """While entered, ``what`` is loaded, which takes seconds: a terminal is told so, by stage,
    a log as well if it is ``logged``, and so is who interrupts it. Those who want quiet are told
    of no :class:`Notice` either.
    """
    what = one_line(what)
    told = sys.stderr is not None and (logged or sys.stderr.isatty()) and not quiet

    def say(stage: str) -> None:
        tell(f"{stage} ...", quiet=not told)

    say(f"loading {what}")
    if quiet:
        warnings.simplefilter("ignore", Notice)
    try:
        with listening(say):
            yield
    except KeyboardInterrupt as stop:
        tell(f"{str(stop) or 'interrupted'} while {what} was loaded; nothing was begun", quiet)
        raise


@contextmanager
def writing_stdout() -> Iterator[None]:
    """While entered, Exit if nobody reads stdout.

    Typer would say 1, which here means a regression.
    """
    try:
        yield
    except BrokenPipeError:
        abandon_stdout()
        raise typer.Exit(CLOSED_PIPE) from None


def write_stdout(text: str) -> None:
    """Write to stdout at once; Exit if nobody reads it."""
    encoding = sys.stdout.encoding or "utf-8"
    with writing_stdout():
        # what it has no character for
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()


def open_closed() -> None:
    """Let a standard stream that was closed (``>&-``) lead nowhere.

    Else the next file to be opened would take its number, and libraries write there; and Python's
    own would be None.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if name != "stdin":  # that there is no prompt is to be said
                setattr(sys, name, open(nowhere, "w", encoding="utf-8"))  # noqa: SIM115


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere,
    or Python would raise once more at its exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


SCHEMA = 1
_STDOUT = Path("-")


def show(table: Table, stderr: bool = False) -> None:
    """Print a table."""
    # nothing that a terminal would obey
    table = dataclasses.replace(
        table,
        title=visible(table.title),
        columns=[visible(column) for column in table.columns],
        rows=[[visible(cell) for cell in row] for row in table.rows],
        notes=[visible(note) for note in table.notes],
    )
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        Console(highlight=False, stderr=stderr).print(table)
    elif stderr:
        print(table.plain(), end="", file=stream)
    else:
        write_stdout(table.plain())


@dataclass(frozen=True)
class Output:
    """Where a command's result goes: tables to stdout, and JSON to a file,
    or to stdout in their place.
    """

    json: Path | None = None

    def show(self, *tables: Table) -> None:
        """Print tables, unless JSON takes their place."""
        for table in tables if self.json != _STDOUT else ():
            show(table)

    def write(self, kind: str, command: Sequence[str], content: Values) -> None:
        """Write the JSON that was asked for, whole or not at all."""
        ascii_only = (
            self.json == _STDOUT and codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
        )
        record = {"schema": SCHEMA, "kind": kind, "command": command, **content}
        text = json.dumps(record, indent=2, ensure_ascii=ascii_only, default=_plain) + "\n"
        if self.json == _STDOUT:
            write_stdout(text)
        elif self.json:
            # incomplete UTF-8, as JSON writes it
            write_whole(self.json, text.encode(errors="backslashreplace"))


def writable(path: Path | None) -> Output:
    """The output with JSON to this file, an error if it could not be written later.

    ``-`` is stdout.
    """
    if path is None or path == _STDOUT:
        return Output(path)
    try:
        real = path.resolve()  # what a link points at is written, and the link stays
        if real.is_symlink():  # a loop
            raise OSError(ELOOP, os.strerror(ELOOP))
        if real.exists() and not real.is_file():
            raise InputError(f"{path} is no file; - is stdout", "json")
        if real.exists() and not os.access(real, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        with TemporaryFile(dir=real.parent):  # as one is made beside it
            pass
        with suppress(FileNotFoundError):
            real.with_name(f"{real.name}.new").stat()  # a name that is too long
    except InputError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, up to Python 3.12
        reason = getattr(error, "strerror", None) or os.strerror(ELOOP)
        raise InputError(f"{path} cannot be written ({reason})", "json") from None
    except ValueError:  # a NUL in the name, or incomplete UTF-8
        raise InputError(f"invalid file name {path}", "json") from None
    return Output(real)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


_LOG_SECONDS = 30.0
_BAR = 42  # columns of a bar without its figures


class Bars(Reporter):
    """One bar per task, or for the last one alone if ``single``,
    with as many of its figures as there is room for.

    ``quiet`` is nothing on stderr, without ``progress`` there are neither bars nor log lines.
    """

    def __init__(self, quiet: bool, progress: bool, width: int = 12, single: bool = False) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, quiet=quiet, emoji=False, markup=False)
        shown = progress and not quiet
        self._progress: Progress | None = None
        if shown and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=width),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._log = shown and self._progress is None
        self._started = self._logged = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._single = single
        self._through_bar = self._progress is not None and _same_terminal()
        self._line = ""  # text not yet printed above the bar

    def __enter__(self) -> Bars:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._line:
            self._console.print(self._line, markup=False, highlight=False)
        if self._progress:
            self._progress.stop()

    def write(self, text: str) -> None:
        """Write to stdout at once, above bars on the same terminal;
        OSError if nobody reads it any more.
        """
        if self._through_bar:
            self._print_lines(text)
        elif text:
            # as bytes: the text is UTF-8 whatever the locale
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()

    def _print_lines(self, text: str) -> None:
        # text and bar share a terminal, so text goes above the bar by whole lines, folded to the
        # width
        *lines, self._line = (self._line + text).split("\n")
        while len(self._line) >= self._console.width:
            cut = self._line.rfind(" ", 1, self._console.width)
            cut = self._console.width if cut < 0 else cut
            lines.append(self._line[:cut])
            self._line = self._line[cut:].removeprefix(" ")
        for line in lines:
            self._console.print(line, markup=False, highlight=False)

    def say(self, message: str) -> None:
        """One line on stderr, unless quiet."""
        self._console.print(
            f"tswift: {visible(message)}", markup=False, highlight=False, soft_wrap=True
        )

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Show how far a task has come; a new name is a new task."""
        if self._progress:
            while self._single and len(figures) > self._console.width - _BAR and ", " in figures:
                figures = figures.rpartition(", ")[0]
            if name not in self._tasks:
                if self._single:
                    self.clear()
                self._tasks[name] = self._progress.add_task(name, total=total, figures=figures)
            self._progress.update(
                self._tasks[name], completed=min(done, total), total=total, figures=figures
            )
        elif self._due():
            self.say(f"{name} {done:,} / {total:,} {figures}".strip())

    def clear(self, *names: str) -> None:
        """Remove some tasks, or all."""
        for name in names or [*self._tasks]:
            if self._progress and name in self._tasks:
                self._progress.remove_task(self._tasks.pop(name))

    def _due(self) -> bool:
        """Whether it is time for a log line."""
        if not self._log or time.monotonic() - self._logged < _LOG_SECONDS:
            return False
        self._logged = time.monotonic()
        return True


class Pace:
    """Estimates the time until a text is finished: its last tokens take longer than its first
    ones, as each has a longer text before it.

    Args:
        prompt: tokens before the text.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        # how many tokens there were after how many seconds, about every second
        self._seen: list[tuple[int, float]] = []
        self._now = 0, 0.0

    def learn(self, stats: DecodeStats) -> None:
        """Take the figures so far; to be called after every step."""
        self._now = stats.tokens, stats.seconds
        if not self._seen or stats.seconds >= self._seen[-1][1] + 1:
            self._seen.append(self._now)

    def left(self, rest: int) -> float:
        """Seconds that so many more tokens will take."""
        tokens, seconds = self._now
        first, begun = self._seen[0]
        place = bisect_left(self._seen, ((first + tokens) // 2,))
        middle, halfway = self._seen[min(place, len(self._seen) - 1)]
        if not first < middle < tokens:
            return rest * seconds / max(tokens, 1)
        earlier = (halfway - begun) / (middle - first)
        later = (seconds - halfway) / (tokens - middle)
        # seconds that each token takes more than the one before it
        growth = 2 * (later - earlier) / (tokens - first)
        where = (middle + tokens) / 2  # the place whose token takes ``later`` seconds
        # noise aside, time grows at most in proportion to the text
        growth = min(max(growth, 0.0), later / (self._prompt + where))
        return rest * (later + growth * (tokens + rest / 2 - where))


class Display(Bars):
    """The text of a job, streamed to stdout, and its bar or log lines on stderr."""

    def __init__(self, job: Job, quiet: bool, progress: bool) -> None:
        # all columns together fit a terminal of 80
        super().__init__(quiet, progress, width=6, single=True)
        self._length = job.config.text.length
        self._pace = Pace(len(job.prompt))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not self._progress and sys.stdout.isatty():
            self._console.print()  # the text need not have ended its line

    def show(self, text: str, stats: DecodeStats) -> None:
        """Show new text and the figures so far; OSError if nobody reads stdout any more."""
        self.write(text)
        self._pace.learn(stats)
        if self._progress:
            self.update(
                "", stats.tokens, self._length, f"{figures(stats)} left {self._left(stats)}"
            )
        elif self._due():
            done = f"{stats.tokens:,} / {self._length:,} tokens, {figures(stats)}"
            self._log_line(done, f", {self._left(stats)} left")

    def show_prefill(self, done: int, total: int) -> None:
        """Show how far the prefill has come, in tokens."""
        if self._progress:
            self.update("prefill", done, total)
        elif self._due():
            self._log_line(f"prefill {done:,} / {total:,} tokens")

    def summary(self, job: Job) -> None:
        """The table at the end, unless quiet."""
        if self._console.quiet:
            return
        figures = job.figures()
        peak = figures["peak_bytes"]
        rows = {
            "tokens": f"{figures['tokens']:,}",
            "prefill tokens": f"{figures['prefill_tokens']:,}",
            "prefill time": f"{figures['prefill_seconds']:.2f} s",
            "decode time": f"{figures['decode_seconds']:.2f} s",
            "tokens/s": f"{figures['tokens_per_second']:,.1f}",
            "target passes": f"{figures['target_passes']:,}",
            "tokens per step": f"{figures['tokens_per_step']:.2f}",
            "alpha": f"{figures['alpha']:.3f}",
            "beta": f"{figures['beta']:.3f}",
            "Distinct-1..4": " ".join(f"{share:.3f}" for share in figures["distinct"].values()),
            "peak memory": "unknown" if peak is None else f"{peak / 1e9:.2f} GB",
            **(
                {"ended at": visible(repr(job.text.stopped))}
                if job.text.stopped is not None
                else {}
            ),
            "run folder": visible(str(job.folder.path)),
        }
        self._console.print(Table("done", ["", ""], [*rows.items()], left=1), highlight=False)

    def _log_line(self, done: str, left: str = "") -> None:
        from tswift.machine import resident_bytes

        held = resident_bytes()
        elapsed = timedelta(seconds=round(time.monotonic() - self._started))
        self.say(
            f"{done}, {elapsed} elapsed{left}"
            + ("" if held is None else f", memory {held / 1e9:.2f} GB")
        )

    def _left(self, stats: DecodeStats) -> str:
        return str(timedelta(seconds=round(self._pace.left(self._length - stats.tokens))))


def figures(stats: DecodeStats) -> str:
    """Those of a text in a line."""
    return (
        f"{stats.tokens_per_second:,.1f} tokens/s {stats.tokens_per_step:.2f}/step alpha "
        f"{stats.alpha:.2f}"
    )


def _same_terminal() -> bool:
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (AttributeError, OSError):  # Windows has one console
        return True
