"""What a job shows: its text on stdout, its progress and figures on stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tswift.cli.streams import visible

if TYPE_CHECKING:
    from tswift.decoding.stats import DecodeStats
    from tswift.jobs.job import Job

_LOG_SECONDS = 30.0


class Display:
    """Streams text to stdout, and shows a progress bar on stderr, or a log line now and then if that is no terminal.

    Args:
        length: tokens of the whole text.
        quiet: nothing on stderr.
        progress: whether to show a bar or log lines at all.
    """

    def __init__(self, length: int, quiet: bool, progress: bool) -> None:
        self._length = length
        self._console = Console(stderr=True, quiet=quiet, emoji=False, markup=False)
        shown = progress and not quiet
        self._bar = self._progress_bar() if shown and sys.stderr.isatty() else None
        self._log = shown and self._bar is None
        self._through_bar = self._bar is not None and _same_terminal()
        self._line = ""  # text not yet printed above the bar
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line:
            self._console.print(self._line, markup=False, highlight=False)
        if self._bar:
            self._bar.stop()
        elif sys.stdout.isatty():
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
        if self._bar:
            self._bar.update(
                self._bar.task_ids[0],
                description="",
                total=self._length,
                length=self._length,
                completed=stats.tokens,
                figures=_figures(stats),
                left=f"left {_clock(self._left(stats))}",
            )
        elif self._due():
            self.say(
                f"{stats.tokens:,} / {self._length:,} tokens, {_figures(stats)}, "
                f"{_clock(self._logged - self._started)} elapsed, {_clock(self._left(stats))} left{_memory()}"
            )

    def show_prefill(self, done: int, total: int) -> None:
        """Show how far the prefill has come, in tokens."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], total=total, completed=done, length=total)
        elif self._due():
            self.say(f"prefill {done:,} / {total:,} tokens, {_clock(self._logged - self._started)} elapsed{_memory()}")

    def _due(self) -> bool:
        """Whether it is time for a log line."""
        if not self._log or time.monotonic() - self._logged < _LOG_SECONDS:
            return False
        self._logged = time.monotonic()
        return True

    def say(self, message: str) -> None:
        """One line on stderr, unless quiet."""
        self._console.print(f"tswift: {visible(message)}", markup=False, highlight=False, soft_wrap=True)

    def summary(self, job: Job) -> None:
        """The table at the end."""
        figures = job.figures()
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right", overflow="fold")
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
            "Distinct-1..4": " ".join(f"{value:.3f}" for value in figures["distinct"].values()),
            "peak memory": "unknown" if peak is None else f"{peak / 1e9:.2f} GB",
            "run folder": visible(str(job.folder.path)),
        }
        for name, value in rows.items():
            table.add_row(name, Text(value))  # a folder's name is no markup
        self._console.print(table, highlight=False)

    def _progress_bar(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=6),  # all columns together fit a terminal of 80
            TextColumn("{task.completed:,.0f}/{task.fields[length]:,}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task("prefill", total=None, length=self._length, figures="", left="")
        return bar

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

    def _left(self, stats: DecodeStats) -> float:
        speed = stats.tokens_per_second
        return (self._length - stats.tokens) / speed if speed else 0.0


def _figures(stats: DecodeStats) -> str:
    return f"{stats.tokens_per_second:,.1f} tokens/s alpha {stats.alpha:.2f} {stats.tokens_per_step:.2f}/step"


def _memory() -> str:
    from tswift.jobs.environment import resident_bytes

    held = resident_bytes()
    return "" if held is None else f", memory {held / 1e9:.2f} GB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _same_terminal() -> bool:
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return False
    try:
        return os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno())
    except (AttributeError, OSError):  # Windows has one console
        return True
