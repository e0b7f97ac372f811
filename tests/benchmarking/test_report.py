"""What reports say of a measurement: figures worked by hand, layouts, and golden texts.

After a change that is meant, write the golden files anew and read their diff:
``PYTHONPATH=src python -m tests.benchmarking.test_report``.
"""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarking.helpers import changed, make_measurement, points_of
from tswift.benchmarking.grid import Grid, duration, quantity, with_spread
from tswift.benchmarking.report import bench_grids, csv_report, markdown_report, write_bench
from tswift.benchmarking.summary import Cell, summarise
from tswift.errors import InputError
from tswift.jobs import folder as files


def only_cell(measurement: dict[str, Any], method: str) -> Cell:
    (cell,) = (cell for cell in summarise(measurement) if cell.method == method)
    return cell


def with_values(name: str, values: list[float | None], **grid: Any) -> Cell:
    """The cell of medusa at one length, its points' figure set to these values in turn."""

    def set_values(measurement: dict[str, Any]) -> None:
        for point, value in zip(points_of(measurement, "medusa"), values, strict=True):
            point[name] = value

    return only_cell(changed(make_measurement(lens=(500,), **grid), set_values), "medusa")


def test_mean_and_sample_deviation() -> None:
    figure = with_values("speedup", [1.0, 2.0, 4.0], seeds=(0, 1, 2)).figures["speedup"]
    assert figure.n == 3
    assert figure.mean == pytest.approx(7 / 3)
    assert figure.std == pytest.approx(math.sqrt(7 / 3))  # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2


def test_repeats_spread_times_and_leave_counters_exact() -> None:
    cell = with_values("seconds", [1.0, 2.0, 3.0], seeds=(0,), repeats=3)
    assert (cell.runs, cell.varies, cell.exact) == (3, ("repeats",), True)
    assert cell.figures["seconds"].std == 1.0
    assert (cell.figures["alpha"].n, cell.figures["alpha"].std) == (1, None)


def test_repeats_count_once_for_counters_over_seeds() -> None:
    cell = with_values("alpha", [0.5, 0.7, 0.5, 0.7], seeds=(0, 1), repeats=2)
    assert cell.varies == ("seeds", "repeats")
    assert cell.figures["alpha"].n == 2
    assert cell.figures["alpha"].std == pytest.approx(math.sqrt(0.02))
    assert cell.figures["speedup"].n == 4


def test_repeats_that_count_differently_are_all_counted() -> None:
    cell = with_values("passes", [200, 202], seeds=(0,), repeats=2)
    assert not cell.exact
    assert (cell.figures["passes"].n, cell.figures["passes"].mean) == (2, 201)


def test_values_that_are_missing_do_not_count() -> None:
    cell = with_values("speedup", [None, 2.0], seeds=(0, 1))
    assert (cell.figures["speedup"].n, cell.figures["speedup"].mean, cell.figures["speedup"].std) == (1, 2.0, None)
    nothing = with_values("ar_seconds", [None, None], seeds=(0, 1)).figures["ar_seconds"]
    assert (nothing.n, nothing.mean, nothing.std) == (0, None, None)


def test_groups_and_their_order() -> None:
    measurement = make_measurement(prefills=(4096, 1024), lens=(500, 1000), prompts=("a", "bb"), seeds=(0, 1))
    random.Random(0).shuffle(measurement["samples"])
    cells = summarise(measurement)
    methods = ["ar", "medusa", "tokenswift"]
    assert [c.key for c in cells] == [(m, p, n) for p in (1024, 4096) for n in (500, 1000) for m in methods]
    assert {cell.varies for cell in cells} == {("prompts", "seeds")}
    assert {cell.draws for cell in cells} == {frozenset({("a", 0), ("a", 1), ("bb", 0), ("bb", 1)})}


def both(measurement: dict[str, Any], paper: bool = False) -> tuple[Grid, Grid]:
    acceptance, times = bench_grids(measurement, paper)
    return acceptance, times


def test_the_layout_of_table_4() -> None:
    measurement = make_measurement(lens=(6000,), seeds=(0,))
    _, times = both(measurement)
    assert times.columns == ["method", "prefill", "length", "alpha", "x", "T_AR", "T_method", "delta"]
    # 6,000 tokens at 0.01 s, times 1.08048; tokenswift takes 0.55 * 1.02 of it
    assert times.rows[1] == ["tokenswift", "1,024", "6,000", "0.620", "1.78", "1.08 min", "36.4 s", "-28.5 s"]


def test_what_alpha_divides_by() -> None:
    depths = "alpha divides by the tokens drafted along a path: medusa 3, tokenswift 4"
    assert both(make_measurement())[0].notes[1] == f"{depths}."
    assert both(make_measurement(), paper=True)[0].notes[1] == f"{depths}; the paper's is 4."
    assert len(both(make_measurement(methods=("ar", "ar-reference")))[0].notes) == 1
    deeper = changed(make_measurement(), lambda m: m["samples"][2]["points"][0].update(depth=5))
    assert both(deeper)[0].notes[1].endswith("medusa 3, tokenswift 4 or 5.")


def test_what_the_spread_is_over() -> None:
    def note(**grid: Any) -> str:
        return both(make_measurement(**grid))[1].notes[0]

    spread = "Mean ± sample standard deviation over"
    assert note(seeds=(0, 1, 2)) == f"n: 3 runs per cell. {spread} seeds."
    assert note(prompts=("a", "b")) == f"n: 4 runs per cell. {spread} prompts and seeds."
    assert note(seeds=(0,), repeats=3).endswith(
        "repeats. Every repeat counted the same: alpha and the other counters are exact."
    )
    assert note(prompts=("a", "b"), repeats=2).startswith(f"n: 8 runs per cell. {spread} prompts, seeds and repeats.")
    assert note(repeats=2).endswith("vary over seeds alone.")
    lopsided = changed(make_measurement(), lambda m: m["samples"].pop())
    assert both(lopsided)[1].notes[0].startswith("n: 1 to 2 runs per cell.")
    noisy = changed(make_measurement(repeats=2), lambda m: m["samples"][1]["points"][0].update(passes=3))
    assert both(noisy)[1].notes[0].endswith("Repeats did not all count the same.")


def test_other_texts_are_named() -> None:
    def differ(measurement: dict[str, Any]) -> None:
        for sample in measurement["samples"][1::3]:  # medusa
            sample.update(same_as_ar=False, explained=False, first_difference=77)

    assert both(make_measurement())[1].notes[1] == "Same tokens as AR: all 4 runs."
    assert both(changed(make_measurement(), differ))[1].notes[1] == (
        "Same tokens as AR: 2 of 4 runs. "
        "Not: medusa (prompt novel, prefill 1,024, seed 0, from token 77, NOT rounding); "
        "medusa (prompt novel, prefill 1,024, seed 1, from token 77, NOT rounding)."
    )
    assert both(changed(make_measurement(seeds=range(8)), differ))[1].notes[1].endswith("; and 3 more.")


def test_a_given_acceptance_is_said_and_compared_with_nothing() -> None:
    given = {"weights": False, "alpha": 0.9}
    _, times = both(make_measurement(simulated=given))
    assert "Same tokens as AR, simulated acceptance apart: not compared." in times.notes
    assert "Simulated: acceptance set to 0.9. The times are real, the texts are not." in times.notes
    _, times = both(make_measurement(methods=("ar", "ar-reference", "medusa"), seeds=(0,), simulated=given))
    assert "Same tokens as AR, simulated acceptance apart: the 1 run." in times.notes


def test_cells_that_are_missing_are_dashes() -> None:
    def stop_early(measurement: dict[str, Any]) -> None:
        for sample in measurement["samples"]:
            if sample["method"] == "medusa":
                sample["points"].pop()
            for point in sample["points"]:
                point.update(speedup=None, ar_seconds=None)

    acceptance, times = both(changed(make_measurement(), stop_early))
    assert acceptance.rows[1][2:4] == ["-", "-"]
    assert times.rows[0][4:6] == ["-", "-"]
    assert times.rows[0][7] == "-"


GOLDEN = Path(__file__).parent / "golden"


SMALL = make_measurement()


SINGLE = make_measurement(seeds=(0,), simulated={"weights": True, "alpha": 0.6})


PAPER = make_measurement(
    methods=("ar", "ar-reference", "medusa", "tokenswift"),
    prefills=(2048, 4096),
    lens=(20_000, 100_000),
    repeats=2,
    ar="sampled",
    roofline=True,
)


TEXTS = {
    "seeds.md": lambda: markdown_report(SMALL),
    "seeds.csv": lambda: csv_report(SMALL),
    "simulated.md": lambda: markdown_report(SINGLE),
    "simulated.csv": lambda: csv_report(SINGLE),
    "paper.md": lambda: markdown_report(PAPER, paper=True),
    "paper.csv": lambda: csv_report(PAPER),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden(name: str) -> None:
    assert TEXTS[name]() == (GOLDEN / name).read_text(encoding="utf-8")


def test_all_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    paths = write_bench(SMALL, tmp_path / "a" / "b", draw=True)
    assert [path.name for path in paths] == [
        *("bench.json", "bench.csv", "bench.md"),
        *("time.png", "time.svg", "acceptance.png", "acceptance.svg"),
    ]
    assert sorted(paths) == sorted((tmp_path / "a" / "b").iterdir())
    assert json.loads(paths[0].read_text()) == SMALL


def test_nothing_reached_is_reported_without_plots(tmp_path: Path) -> None:
    nothing = {**SMALL, "state": "interrupted", "samples": []}
    paths = write_bench(nothing, tmp_path, paper=True, draw=True)
    assert [path.name for path in paths] == ["bench.json", "bench.csv", "bench.md"]
    assert json.loads(paths[0].read_text()) == nothing
    assert len(paths[1].read_text().splitlines()) == 1  # the head
    assert "\nNothing was measured: no length was reached.\n" in paths[2].read_text()


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench.json").write_text("before")

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(InputError, match=r"^out: .* cannot be written to \(No space left on device\)"):
        write_bench(SMALL, tmp_path)
    assert (tmp_path / "bench.json").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


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


@pytest.mark.parametrize("width", [80, 34, 27])
def test_a_terminal_folds_and_cuts_nothing(width: int) -> None:
    shown = on_terminal(GRID, width)
    assert max(map(len, shown.splitlines())) <= width
    for word in ("title", "one|two", "[red]three", "0.425", "0.007", "1.23", "1.5", "note."):
        assert word in shown


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


def test_a_spread_only_where_known() -> None:
    assert with_spread(0.6254, 0.0071, 3) == "0.625 ± 0.007"
    assert with_spread(0.6254, None, 2) == "0.63"
    assert with_spread(None, None, 2) == "-"


if __name__ == "__main__":
    for name, make in TEXTS.items():
        (GOLDEN / name).write_text(make(), encoding="utf-8")
