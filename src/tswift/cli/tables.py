"""Tables on stdout or stderr: framed on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid


def show(grid: Grid, stderr: bool = False) -> None:
    """Print a table."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        Console(highlight=False, stderr=stderr).print(grid)
    else:
        print(grid.plain(), end="", file=stream)
