"""What reports say of a measurement: figures worked by hand, notes, tables, and golden texts.

After a change that is meant, write the golden files anew and read their diff:
``PYTHONPATH=src python -m tests.benchmarking.test_report``.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarking.helpers import changed, make_measurement, points_of, typed
from tests.helpers import refused
from tests.rows import every_row
from tswift.benchmarking.report import csv_text, markdown, tables, write_report
from tswift.benchmarking.summary import METRICS, Figure, Row, summarise
from tswift.jobs import folder as files
from tswift.tables import Table, duration, quantity, with_spread

GOLDEN = Path(__file__).parent / "golden"
SMALL = make_measurement()
PAPER = make_measurement(
    methods=("ar", "ar-reference", "medusa", "tokenswift"),
    prefills=(2048, 4096),
    lens=(20_000, 100_000),
    repeats=2,
    ar="sampled",
    roofline=True,
)
MEASUREMENTS = {
    "seeds": SMALL,
    "simulated": make_measurement(seeds=(0,), simulated={"weights": True, "alpha": 0.6}),
    "paper": PAPER,
}
TEXTS = {
    **{
        f"{name}.md": markdown(typed(one), paper=name == "paper")
        for name, one in MEASUREMENTS.items()
    },
    **{f"{name}.csv": csv_text(typed(one)) for name, one in MEASUREMENTS.items()},
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name):
    assert TEXTS[name] == (GOLDEN / name).read_text(encoding="utf-8")


def cell_with(name: str, values: list[float | None], **grid) -> Row:
    """The cell of medusa at one length, its points' figure set to these values in turn."""

    def set_values(measurement: dict[str, Any]):
        for point, value in zip(points_of(measurement, "medusa"), values, strict=True):
            point[name] = value

    cells = summarise(typed(changed(make_measurement(lens=(500,), **grid), set_values)))
    return next(cell for cell in cells if cell.axis == "medusa")


def test_times_count_every_sample_and_counters_every_draw_once():
    figure = cell_with("speedup", [1.0, 2.0, 4.0], seeds=(0, 1, 2)).figures["speedup"]
    assert figure.n == 3
    # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2
    assert (figure.mean, figure.std) == pytest.approx((7 / 3, math.sqrt(7 / 3)))
    repeated = cell_with("seconds", [1.0, 2.0, 3.0], seeds=(0,), repeats=3)
    assert (repeated.runs, repeated.varies) == (3, ("repeats",))
    assert repeated.figures["seconds"].std == 1.0
    assert (repeated.figures["alpha"].n, repeated.figures["alpha"].std) == (1, None)
    both = cell_with("alpha", [0.5, 0.7, 0.5, 0.7], seeds=(0, 1), repeats=2)
    assert both.varies == ("seeds", "repeats")
    assert (both.figures["alpha"].n, both.figures["speedup"].n) == (2, 4)
    assert both.figures["alpha"].std == pytest.approx(math.sqrt(0.02))
    # repeats that count differently all count
    noisy = cell_with("passes", [200, 202], seeds=(0,), repeats=2)
    assert (noisy.figures["passes"].n, noisy.figures["passes"].mean) == (2, 201)


def test_values_that_are_missing_do_not_count():
    assert cell_with("speedup", [None, 2.0], seeds=(0, 1)).figures["speedup"] == Figure(
        1, 2.0, None
    )
    nothing = cell_with("ar_seconds", [None, None], seeds=(0, 1)).figures
    assert nothing["ar_seconds"] == nothing["delta"] == Figure(0, None, None)


def test_cells_are_ordered_whatever_the_samples_are():
    measurement = make_measurement(prefills=(4096, 1024), prompts=("a", "bb"))
    random.Random(0).shuffle(measurement["samples"])
    cells = summarise(typed(measurement))
    methods = ["ar", "medusa", "tokenswift"]
    places = [
        (method, prefill, n) for prefill in (1024, 4096) for n in (500, 1000) for method in methods
    ]
    assert [(cell.axis, *cell.place) for cell in cells] == places
    assert all(set(cell.draws) == {("a", 0), ("a", 1), ("bb", 0), ("bb", 1)} for cell in cells)


def notes_of(measurement: dict[str, Any]) -> Sequence[str]:
    (table,) = tables(typed(measurement))
    return table.notes


def differing(measurement: dict[str, Any]):
    for sample in measurement["samples"][1::3]:  # medusa
        sample.update(same_as_ar=False, explained=False, first_difference=77)


GIVEN = {"weights": False, "alpha": 0.9}
OVER = "Mean ± sample standard deviation over"


@every_row(
    ("measurement", "note"),
    [
        (make_measurement(prompts=("a", "b")), f"n: 4 runs per cell. {OVER} prompts and seeds."),
        (changed(SMALL, lambda m: m["samples"].pop()), "n: 1 to 2 runs per cell."),
        (
            changed(SMALL, lambda m: m["samples"][2]["points"][0].update(depth=5)),
            "Paths have at most: medusa 3, tokenswift 4 or 5 tokens.",
        ),
        (
            changed(SMALL, differing),
            "Same tokens as AR: 2 of 4 runs. Not: medusa (prompt novel, prefill 1,024, seed 0, "
            "from token 77, NOT rounding); medusa (prompt novel, prefill 1,024, seed 1, from "
            "token 77, NOT rounding).",
        ),
        (changed(make_measurement(seeds=range(8)), differing), "; and 3 more."),
        (
            make_measurement(simulated=GIVEN),
            "Same tokens as AR, simulated acceptance apart: not compared.",
        ),
        (
            make_measurement(methods=("ar", "ar-reference", "medusa"), seeds=(0,), simulated=GIVEN),
            "Same tokens as AR, simulated acceptance apart: yes (1 run).",
        ),
        (
            changed(SMALL, lambda m: m.update(state="interrupted")),
            "The measurement did not run to its end",
        ),
    ],
)
def test_notes(measurement, note):
    start, _, end = note.partition("*")
    assert any(start in line and end in line for line in notes_of(measurement))


def test_cells_that_are_missing_are_dashes():
    def stop_early(measurement):
        for sample in measurement["samples"]:
            if sample["method"] == "medusa":
                sample["points"].pop()
            for point in sample["points"]:
                point.update(speedup=None, ar_seconds=None)

    (table,) = tables(typed(changed(SMALL, stop_early)))
    assert [row[:3] for row in table.rows] == [
        *(["AR", "1,024", "500"], ["medusa", "1,024", "500"], ["tokenswift", "1,024", "500"]),
        *(["AR", "1,024", "1,000"], ["tokenswift", "1,024", "1,000"]),
    ]
    assert [table.rows[1][table.columns.index(name)] for name in ("x", "T_AR", "delta")] == [
        "-"
    ] * 3


def test_nothing_reached_is_reported_without_plots(tmp_path):
    nothing = typed({**SMALL, "state": "interrupted", "samples": []})
    _, table, text = write_report(nothing, tmp_path, paper=True, draw=True)
    assert len(table.read_text().splitlines()) == 1  # the head
    assert "\nNothing was measured: no length was reached.\n" in text.read_text()


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "bench.json").write_text("before")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    with refused(r"^out: .* cannot be written to \(No space left on device\)"):
        write_report(typed(SMALL), tmp_path)
    assert (tmp_path / "bench.json").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


TABLE = Table(
    "A title",
    ["name", "alpha", "x"],
    [["one|two", "0.425 ± 0.007", "1.23"], ["[red]three", "-", "1.5"]],
    left=1,
    notes=["A note."],
)


def test_tables_in_markdown_and_in_a_pipe():
    assert TABLE.markdown() == (
        "## A title\n\n"
        "| name | alpha | x |\n"
        "| --- | ---: | ---: |\n"
        "| one\\|two | 0.425 ± 0.007 | 1.23 |\n"
        "| [red]three | - | 1.5 |\n\n"
        "A note.\n"
    )
    assert TABLE.plain() == (
        "A title\n"
        "name                alpha     x\n"
        "one|two     0.425 ± 0.007  1.23\n"
        "[red]three              -   1.5\n"
        "A note.\n"
    )


@every_row("width", [80, 34, 27])
def test_a_terminal_folds_and_cuts_nothing(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(TABLE)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for word in ("title", "one|two", "[red]three", "0.425", "0.007", "1.23", "1.5", "note."):
        assert word in shown


@every_row(
    ("shown", "text"),
    [
        *[(duration(None), "-"), (duration(0.0123), "0.0123 s"), (duration(9.999), "10.0 s")],
        *[
            (duration(59.94), "59.9 s"),
            (duration(60.0), "1.00 min"),
            (duration(-90.0), "-1.50 min"),
        ],
        (duration(74040.0), "1,234 min"),
        *[(quantity(2.04e12, "B/s"), "2.04 TB/s"), (quantity(999_600.0, "B/s"), "1.00 MB/s")],
        *[(quantity(999_000.0, "B/s"), "999 kB/s"), (quantity(0.0, "B/s"), "0.00 B/s")],
        *[
            (with_spread(0.6254, 0.0071, 3), "0.625 ± 0.007"),
            (with_spread(0.6254, None, 2), "0.63"),
        ],
        (with_spread(None, None, 2), "-"),
        (METRICS["seconds"].text(Figure(2, 90.0, 3.0)), "1.50 min"),
    ],
)
def test_numbers(shown, text):
    assert shown == text


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
