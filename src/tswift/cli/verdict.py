"""How an audit is shown: a progress bar while it runs, a table of what it found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from tswift.decoding.audit import Audit

_LOG_SECONDS = 30.0
_MOST_SHOWN = 20
_HEADER = ("class", "tokens", "smallest", "largest", "of what")


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """What to call with tokens done and in all: a bar on stderr, or a line every 30 s if that is no terminal."""
    if not shown:
        yield None
    elif sys.stderr.isatty():
        columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task("verify", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _logger()


def print_audit(audit: Audit, console: Console) -> None:
    """Print what was found: a table on a terminal, aligned text elsewhere."""
    explains = "change of the logits that explains it"
    rows = [
        (
            "drawn exactly",
            audit.exact,
            _known(audit.least_lead, audit.greatest_lead),
            "lead in score over the next token",
        ),
        ("within rounding", len(audit.within), _known(*(finding.margin for finding in audit.within)), explains),
        ("violations", len(audit.violations), _known(*(finding.margin for finding in audit.violations)), explains),
    ]
    cells = [
        (name, f"{count:,}", _number(min(values, default=None)), _number(max(values, default=None)), what)
        for name, count, values, what in rows
    ]
    if console.is_terminal:
        table = Table(*_HEADER)
        for column in table.columns[1:4]:
            column.justify = "right"
        for cell in cells:
            table.add_row(*cell)
        console.print(table, highlight=False)
    else:
        for cell in (_HEADER, *cells):
            console.out("{:<15} {:>10} {:>10} {:>10}  {}".format(*cell), highlight=False)
    for line in _lines(audit):
        console.out(line, highlight=False)


def _lines(audit: Audit) -> Iterator[str]:
    yield (
        f"passes of different widths differ by up to {_number(audit.measured)} in a logit; "
        f"within rounding is up to {_number(audit.bound)}"
    )
    yield f"{audit.tokens:,} tokens in {audit.seconds:,.1f} s"
    if audit.violations:
        places = ", ".join(str(finding.index) for finding in audit.violations[:_MOST_SHOWN])
        more = len(audit.violations) - _MOST_SHOWN
        yield f"violations at generated tokens (from 0) {places}" + (f" and {more:,} more" if more > 0 else "")


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _logger() -> Callable[[int, int], None]:
    logged = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _LOG_SECONDS:
            logged = time.monotonic()
            print(f"tswift: verified {done:,} / {total:,} tokens", file=sys.stderr)

    return log
