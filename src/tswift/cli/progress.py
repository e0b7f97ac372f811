"""Progress on stderr, bars on a terminal and a line now and then elsewhere; and a job's text on stdout."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tswift.cli.streams import visible
from tswift.training import config as training

if TYPE_CHECKING:
    from tswift.decoding.stats import DecodeStats
    from tswift.jobs.job import Job

_LOG_SECONDS = 30.0
_BAR = 42  # columns of a bar without its figures


class Bars(training.Progress):
    """One bar per task, or for the last one alone if ``single``, with as many of its figures as there is room for.

    ``quiet`` is nothing on stderr, without ``progress`` there are neither bars nor log lines.
    """

    def __init__(self, quiet: bool, progress: bool, width: int = 12, single: bool = False) -> None:
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

    def __enter__(self) -> Bars:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, message: str) -> None:
        """One line on stderr, unless quiet."""
        self._console.print(f"tswift: {visible(message)}", markup=False, highlight=False, soft_wrap=True)

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Show how far a task has come; a new name is a new task."""
        if self._progress:
            while self._single and len(figures) > self._console.width - _BAR and ", " in figures:
                figures = figures.rpartition(", ")[0]
            if name not in self._tasks:
                if self._single:
                    self.clear()
                self._tasks[name] = self._progress.add_task(name, total=total, figures=figures)
            self._progress.update(self._tasks[name], completed=min(done, total), total=total, figures=figures)
        elif self._due():
            self.say(f"{name} {done:,} / {total:,} {figures}".strip())

    def clear(self) -> None:
        """Remove all tasks: others follow."""
        if self._progress:
            for task in self._tasks.values():
                self._progress.remove_task(task)
        self._tasks = {}

    def _due(self) -> bool:
        """Whether it is time for a log line."""
        if not self._log or time.monotonic() - self._logged < _LOG_SECONDS:
            return False
        self._logged = time.monotonic()
        return True


class Display(Bars):
    """The text of a job of ``length`` tokens, streamed to stdout, and its bar or log lines on stderr."""

    def __init__(self, length: int, quiet: bool, progress: bool) -> None:
        super().__init__(quiet, progress, width=6, single=True)  # all columns together fit a terminal of 80
        self._length = length
        self._through_bar = self._progress is not None and _same_terminal()
        self._line = ""  # text not yet printed above the bar

    def __exit__(self, *error: object) -> None:
        if self._line:
            self._console.print(self._line, markup=False, highlight=False)
        super().__exit__(*error)
        if not self._progress and sys.stdout.isatty():
            self._console.print()  # the text need not have ended its line

    def show(self, text: str, stats: DecodeStats) -> None:
        """Show new text and the figures so far.

        Raises:
            BrokenPipeError: nobody reads stdout any more.
        """
        if self._through_bar:
            self._print_lines(text)
        elif text:
            # as bytes: the text is UTF-8 whatever the locale
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()
        if self._progress:
            self.update("", stats.tokens, self._length, f"{_figures(stats)} left {self._left(stats)}")
        elif self._due():
            done = f"{stats.tokens:,} / {self._length:,} tokens, {_figures(stats)}"
            self.say(f"{done}, {self._elapsed()} elapsed, {self._left(stats)} left{_memory()}")

    def show_prefill(self, done: int, total: int) -> None:
        """Show how far the prefill has come, in tokens."""
        if self._progress:
            self.update("prefill", done, total)
        elif self._due():
            self.say(f"prefill {done:,} / {total:,} tokens, {self._elapsed()} elapsed{_memory()}")

    def summary(self, job: Job) -> None:
        """The table at the end."""
        figures = job.figures()
        peak = figures["peak_bytes"]
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right", overflow="fold")
        for name, value in {
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
            **({"ended at": visible(repr(job.text.stopped))} if job.text.stopped is not None else {}),
            "run folder": visible(str(job.folder.path)),
        }.items():
            table.add_row(name, Text(value))  # a folder's name is no markup
        self._console.print(table, highlight=False)

    def _print_lines(self, text: str) -> None:
        # Text and bar share a terminal, so text goes above the bar by whole lines, folded to the width.
        *lines, self._line = (self._line + text).split("\n")
        while len(self._line) >= self._console.width:
            cut = self._line.rfind(" ", 1, self._console.width)
            cut = self._console.width if cut < 0 else cut
            lines.append(self._line[:cut])
            self._line = self._line[cut:].removeprefix(" ")
        for line in lines:
            self._console.print(line, markup=False, highlight=False)

    def _elapsed(self) -> str:
        return str(timedelta(seconds=round(time.monotonic() - self._started)))

    def _left(self, stats: DecodeStats) -> str:
        speed = stats.tokens_per_second
        return str(timedelta(seconds=round((self._length - stats.tokens) / speed if speed else 0.0)))


def _figures(stats: DecodeStats) -> str:
    return f"{stats.tokens_per_second:,.1f} tokens/s alpha {stats.alpha:.2f} {stats.tokens_per_step:.2f}/step"


def _memory() -> str:
    from tswift.jobs.environment import resident_bytes

    held = resident_bytes()
    return "" if held is None else f", memory {held / 1e9:.2f} GB"


def _same_terminal() -> bool:
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (AttributeError, OSError):  # Windows has one console
        return True
