"""Means and spreads against cases worked by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.benchmarking.helpers import changed, make_measurement, points_of
from tswift.benchmarking.statistics import FIGURES, Cell, by_draw, summarise


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


def test_no_spread_from_one_run() -> None:
    cell = with_values("alpha", [0.5], seeds=(3,), roofline=True)
    assert cell.varies == ()
    assert [(figure.n, figure.std) for figure in map(cell.figures.get, FIGURES)] == [(1, None)] * len(FIGURES)
    assert cell.figures["alpha"].mean == 0.5


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


def test_the_share_of_the_floor_is_unknown_in_older_files() -> None:
    old = only_cell(make_measurement(lens=(500,)), "medusa").figures["of_floor"]
    assert (old.n, old.mean) == (0, None)
    new = only_cell(make_measurement(lens=(500,), seeds=(0,), roofline=True), "medusa").figures["of_floor"]
    assert (new.n, new.mean) == (1, pytest.approx(0.8 * 1.02 / 0.4))


def test_groups_and_their_order() -> None:
    measurement = make_measurement(prefills=(4096, 1024), lens=(500, 1000), prompts=("a", "bb"), seeds=(0, 1))
    random.Random(0).shuffle(measurement["samples"])
    cells = summarise(measurement)
    methods = ["ar", "medusa", "tokenswift"]
    assert [c.key for c in cells] == [(m, p, n) for p in (1024, 4096) for n in (500, 1000) for m in methods]
    assert {cell.varies for cell in cells} == {("prompts", "seeds")}
    assert {cell.draws for cell in cells} == {frozenset({("a", 0), ("a", 1), ("bb", 0), ("bb", 1)})}


def test_each_draw_alone() -> None:
    measurement = make_measurement(prompts=("a", "bb"), seeds=(0, 1), repeats=2)
    cells = by_draw(measurement)
    assert list(cells) == [cell.key for cell in summarise(measurement)]
    mine = cells["medusa", 1024, 500]
    assert {draw: cell.figures["alpha"].mean for draw, cell in mine.items()} == {
        ("a", 0): pytest.approx(0.42),
        ("a", 1): pytest.approx(0.43),
        ("bb", 0): pytest.approx(0.40),
        ("bb", 1): pytest.approx(0.41),
    }
    assert {(cell.runs, *cell.draws) for cell in mine.values()} == {(2, draw) for draw in mine}


def test_the_order_of_samples_does_not_change_a_bit() -> None:
    measurement = make_measurement(seeds=range(7), repeats=3)
    shuffled = changed(measurement, lambda m: random.Random(1).shuffle(m["samples"]))
    assert summarise(measurement) == summarise(shuffled)


def test_estimated_times_are_marked() -> None:
    cells = summarise(make_measurement(ar="sampled"))
    assert {cell.method for cell in cells if cell.estimated} == {"ar"}
    assert not any(cell.estimated for cell in summarise(make_measurement(ar="full")))
