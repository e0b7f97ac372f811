"""Tables for Markdown, a pipe and a terminal; numbers as text."""

from __future__ import annotations

import io
import string
from collections import Counter

import pytest
from rich.console import Console

from tswift.benchmarking.grid import Grid, duration, marks, method_name, quantity, with_spread

GRID = Grid(
    "A title",
    ["name", "alpha", "x"],
    [["one|two", "0.425 ± 0.007", "1.23"], ["[red]three", "-", "1.5"]],
    left=1,
    notes=["A note."],
)


def on_terminal(grid: Grid, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(grid)
    return console.file.getvalue()


def test_markdown() -> None:
    assert GRID.markdown() == (
        "## A title\n\n"
        "| name | alpha | x |\n"
        "| --- | ---: | ---: |\n"
        "| one\\|two | 0.425 ± 0.007 | 1.23 |\n"
        "| [red]three | - | 1.5 |\n\n"
        "A note.\n"
    )


def test_plain() -> None:
    assert GRID.plain() == (
        "A title\n"
        "name                alpha     x\n"
        "one|two     0.425 ± 0.007  1.23\n"
        "[red]three              -   1.5\n"
        "A note.\n"
    )


def test_no_rows() -> None:
    empty = Grid("Nothing", ["a", "b"], [])
    assert empty.plain() == "Nothing\na  b\n"
    assert "Nothing" in on_terminal(empty, 40)


@pytest.mark.parametrize("width", [80, 34, 27])
def test_a_terminal_folds_and_cuts_nothing(width: int) -> None:
    shown = on_terminal(GRID, width)
    assert max(map(len, shown.splitlines())) <= width
    for word in ("title", "one|two", "[red]three", "0.425", "0.007", "1.23", "1.5", "note."):
        assert word in shown


def test_a_very_narrow_terminal_folds_within_words() -> None:
    narrow, wide = (Counter(on_terminal(GRID, width)) for width in (20, 80))
    assert all(narrow[letter] == wide[letter] for letter in string.ascii_letters + string.digits)


def test_a_terminal_of_no_width_ends() -> None:
    assert on_terminal(GRID, 5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0.00 s"),
        (0.0123, "0.0123 s"),
        (1.0, "1.00 s"),
        (9.999, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "60.0 s"),
        (60.0, "1.00 min"),
        (-90.0, "-1.50 min"),
        (750.0, "12.5 min"),
        (7200.0, "120 min"),
        (5999.7, "100 min"),
        (74040.0, "1,234 min"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.04e12, "2.04 TB/s"),
        (15_009_857_536, "15.0 GB/s"),
        (999_600.0, "1.00 MB/s"),
        (999_000.0, "999 kB/s"),
        (12.0, "12.0 B/s"),
        (0.0, "0.00 B/s"),
        (3.2e16, "32,000 TB/s"),
    ],
)
def test_quantities(value: float, text: str) -> None:
    assert quantity(value, "B/s") == text


def test_what_is_said_behind_a_name() -> None:
    assert method_name("ar") == "AR"
    assert method_name("ar", *marks(simulated=True, sampled=True)) == "AR (simulated, sampled)"
    assert method_name("medusa", *marks(simulated=True)) == "medusa (simulated)"
    assert method_name("medusa", *marks(simulated=False)) == "medusa"


def test_a_spread_only_where_known() -> None:
    assert with_spread(0.6254, 0.0071, 3) == "0.625 ± 0.007"
    assert with_spread(0.6254, None, 2) == "0.63"
    assert with_spread(None, None, 2) == "-"
