"""Progress of several tasks at once on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tswift.cli.streams import visible

_LOG_SECONDS = 30.0


class Bars:
    """One bar per task.

    Args:
        quiet: nothing on stderr.
        progress: whether to show bars or log lines at all.
    """

    def __init__(self, quiet: bool, progress: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, emoji=False, markup=False)
        shown = progress and not quiet
        self._progress: Progress | None = None
        if shown and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._log = shown and self._progress is None
        self._logged = time.monotonic()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, message: str) -> None:
        """One line on stderr, unless quiet."""
        self._console.print(f"tswift: {visible(message)}", markup=False, highlight=False, soft_wrap=True)

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """How far a task has come; a name not seen before is a new task."""
        if self._progress:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, figures=figures)
            self._progress.update(self._tasks[name], completed=min(done, total), total=total, figures=figures)
        elif self._log and time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            self.say(f"{name} {done:,} / {total:,} {figures}".rstrip())

    def clear(self) -> None:
        """Forget all tasks: others follow."""
        if self._progress:
            for task in self._tasks.values():
                self._progress.remove_task(task)
        self._tasks = {}
