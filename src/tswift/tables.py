"""Tables for people, rendered for Markdown, for a terminal and for a pipe;
and figures as short texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import table as rich_table
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Title, headings, rows of text, and notes below.

    The first ``left`` columns are words, the others numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 0
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A heading, a GitHub table and the notes."""
        lines = [
            self.columns,
            ["---" if i < self.left else "---:" for i in range(len(self.columns))],
            *([cell.replace("|", "\\|") for cell in row] for row in self.rows),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", table, *self.notes]) + "\n"

    def plain(self) -> str:
        """Aligned columns, two spaces apart."""
        lines = [self.columns, *self.rows]
        aligned = []
        for i, column in enumerate(zip(*lines, strict=True)):
            width = max(map(len, column))
            aligned.append(
                [cell.ljust(width) if i < self.left else cell.rjust(width) for cell in column]
            )
        table = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
        return "\n".join([self.title, *table, *self.notes]) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For ``console.print``: a narrow terminal folds between words."""
        table = rich_table.Table(
            title=Text(self.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.caption = Text("\n".join(self.notes))
        table.caption_justify = "left"
        for i, name in enumerate(self.columns):
            longest = max(
                len(word)
                for text in (name, *(row[i] for row in self.rows))
                for word in text.split() or [""]
            )
            justify: Literal["left", "right"] = "left" if i < self.left else "right"
            table.add_column(Text(name), justify=justify, overflow="fold", min_width=longest)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))  # a name is no markup
        yield table


def with_spread(mean: float | None, std: float | None, digits: int) -> str:
    """``mean ± std`` with so many decimals; the mean alone where no spread is known."""
    if mean is None:
        return NOTHING
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def duration(seconds: float | None) -> str:
    """Minutes with three significant digits; seconds if under a minute.

    Whole numbers keep all their digits.
    """
    if seconds is None:
        return NOTHING
    if abs(seconds) < 60:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds / 60)} min"


def quantity(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: ``2.04 TB/s``."""
    powers = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
    size, prefix = next((power for power in powers if abs(value) >= power[0] * 0.9995), (1.0, ""))
    return f"{_three_digits(value / size)} {prefix}{unit}"


def _three_digits(value: float) -> str:
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 9.999 has that of 10.0
    return f"{value:,.{min(max(2 - exponent, 0), 6)}f}"


class Reporter:
    """Receives what a long job reports, and shows nothing of it; subclasses do."""

    def say(self, message: str) -> None:
        """Show a line."""

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Show how far a piece of work has come."""
