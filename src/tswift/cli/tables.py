"""Tables on stdout: framed on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid


def show(grid: Grid) -> None:
    """Print a table."""
    if sys.stdout.isatty():
        Console(highlight=False).print(grid.rich())
    else:
        print(grid.plain(), end="")
