"""Tables on stdout or stderr: framed on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from tswift.cli.streams import visible, write_stdout

if TYPE_CHECKING:
    from tswift.benchmarking.table import Table


def show(grid: Table, stderr: bool = False) -> None:
    """Print a table."""
    grid = _visible(grid)
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        Console(highlight=False, stderr=stderr).print(grid)
    elif stderr:
        print(grid.plain(), end="", file=stream)
    else:
        write_stdout(grid.plain())


def _visible(grid: Table) -> Table:
    """The table, with nothing in it that a terminal would obey."""
    return replace(
        grid,
        title=visible(grid.title),
        columns=[visible(column) for column in grid.columns],
        rows=[[visible(cell) for cell in row] for row in grid.rows],
        notes=[visible(note) for note in grid.notes],
    )
