"""Tables on stdout: rich ones on a terminal, Markdown in a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 400  # a pipe has no width; a table is not to be folded there


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table whose first ``left`` columns are words and the others figures."""
    made = Table()
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))  # a file's name is no markup
    return made


def show(shown: Table) -> None:
    """Print a table."""
    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:
        shown.box = box.MARKDOWN
        written = io.StringIO()
        Console(file=written, width=_WIDE, highlight=False, color_system=None).print(shown)
        print(*(line for line in written.getvalue().splitlines() if line.strip()), sep="\n")
