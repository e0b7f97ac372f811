"""Tables on stdout or stderr: framed on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from tswift.cli.streams import write_stdout

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid


def show(grid: Grid, stderr: bool = False) -> None:
    """Print a table."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        Console(highlight=False, stderr=stderr).print(grid)
    elif stderr:
        print(grid.plain(), end="", file=stream)
    else:
        write_stdout(grid.plain())
