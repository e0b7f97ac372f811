"""What the two tables say of a measurement."""

from __future__ import annotations

from typing import Any

from tests.benchmarking.helpers import changed, make_measurement
from tswift.benchmarking.grid import Grid
from tswift.benchmarking.tables import grids

PAPER = make_measurement(prefills=(4096,), lens=(20_000, 21_000), seconds_per_token=0.02)


def both(measurement: dict[str, Any], paper: bool = False) -> tuple[Grid, Grid]:
    acceptance, times = grids(measurement, paper)
    return acceptance, times


def test_the_layout_of_table_3() -> None:
    acceptance, _ = both(make_measurement(methods=("ar", "ar-reference", "medusa"), prefills=(1024, 2048)))
    assert acceptance.columns == ["prefill", "length", "AR, reference style x", "medusa alpha", "medusa x"]
    assert [row[:2] for row in acceptance.rows] == [
        ["1,024", "500"],
        ["1,024", "1,000"],
        ["2,048", "500"],
        ["2,048", "1,000"],
    ]
    assert acceptance.rows[0][3] == "0.425 ± 0.007"  # 0.42 and 0.43


def test_the_layout_of_table_4() -> None:
    measurement = make_measurement(lens=(6000,), seeds=(0,))
    _, times = both(measurement)
    assert times.columns == ["method", "prefill", "length", "alpha", "x", "T_AR", "T_method", "delta"]
    # 6,000 tokens at 0.01 s, times 1.08048; tokenswift takes 0.55 * 1.02 of it
    assert times.rows[1] == ["tokenswift", "1,024", "6,000", "0.620", "1.78", "1.08 min", "36.4 s", "-28.5 s"]


def test_plain_decoding_alone_is_shown() -> None:
    acceptance, times = both(make_measurement(methods=("ar",)))
    assert acceptance.columns == ["prefill", "length", "AR x"]
    assert times.rows[0][:5] == ["AR", "1,024", "500", "-", "1.00 ± 0.00"]
    assert times.notes[1] == "Same tokens as AR: not compared."


def test_what_alpha_divides_by() -> None:
    depths = "alpha divides by the tokens drafted along a path: medusa 3, tokenswift 4"
    assert both(make_measurement())[0].notes[1] == f"{depths}."
    assert both(make_measurement(), paper=True)[0].notes[1] == f"{depths}; the paper's is 4."
    assert len(both(make_measurement(methods=("ar", "ar-reference")))[0].notes) == 1
    deeper = changed(make_measurement(), lambda m: m["samples"][2]["points"][0].update(depth=5))
    assert both(deeper)[0].notes[1].endswith("medusa 3, tokenswift 4 or 5.")


def test_nothing_reached() -> None:
    nothing = {**make_measurement(), "state": "interrupted", "samples": []}
    for paper in (False, True):
        acceptance, times = both(nothing, paper)
        assert acceptance.rows == times.rows == []
        assert times.notes == ["Nothing was measured: no length was reached."]


def test_no_spread_from_one_run() -> None:
    acceptance, times = both(make_measurement(seeds=(0,)))
    assert not any("±" in cell for grid in (acceptance, times) for row in grid.rows for cell in row)
    assert times.notes[0] == "n: 1 run per cell. No spread is known from one run."


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


def test_estimated_times_are_labelled() -> None:
    _, times = both(make_measurement(ar="sampled"))
    assert all(row[5].endswith(" s est.") for row in times.rows)
    assert not any("est." in cell for row in times.rows for i, cell in enumerate(row) if i != 5)
    assert any(note.startswith("est.: integrated from AR steps sampled") for note in times.notes)
    assert "est." not in both(make_measurement(ar="full"))[1].plain()


def test_simulated_figures_are_labelled_in_title_column_and_row() -> None:
    simulated = make_measurement(simulated={"weights": True, "alpha": None})
    acceptance, times = both(simulated)
    for grid in (acceptance, times):
        assert "(simulated)" in grid.title
        assert all(any("(simulated)" in cell for cell in row) for row in grid.rows)
    assert acceptance.columns[3:] == [
        *("medusa (simulated) alpha", "medusa (simulated) x"),
        *("tokenswift (simulated) alpha", "tokenswift (simulated) x"),
    ]
    assert {row[0] for row in times.rows} == {"medusa (simulated)", "tokenswift (simulated)"}
    assert "Simulated: random weights. The times are real, the texts are not." in times.notes
    plain = both(make_measurement(methods=("ar",), simulated={"weights": True, "alpha": None}))
    assert [row[0] for row in plain[1].rows] == ["AR (simulated)"] * 2
    assert not any("imulated" in text for grid in both(make_measurement()) for text in (grid.plain(), *grid.notes))


def test_a_given_acceptance_is_said_and_compared_with_nothing() -> None:
    given = {"weights": False, "alpha": 0.9}
    _, times = both(make_measurement(simulated=given))
    assert "Same tokens as AR, simulated acceptance apart: not compared." in times.notes
    assert "Simulated: acceptance set to 0.9. The times are real, the texts are not." in times.notes
    _, times = both(make_measurement(methods=("ar", "ar-reference", "medusa"), seeds=(0,), simulated=given))
    assert "Same tokens as AR, simulated acceptance apart: the 1 run." in times.notes


def test_measured_over_floor_stands_beside_each_row() -> None:
    acceptance, times = both(make_measurement(seeds=(0,), roofline=True))
    assert times.columns[-2:] == ["T_AR / floor", "T_method / floor"]
    # AR's floor is 0.8 of its time, tokenswift's 0.4 of AR's
    assert times.rows[-1][-2:] == ["1.25", f"{0.55 * 1.02 / 0.4:.2f}"]
    assert times.notes[-1].startswith("floor: the least time")
    assert not any("floor" in column for column in acceptance.columns)
    _, published = both(make_measurement(prefills=(4096,), lens=(20_000,), roofline=True), paper=True)
    assert {tuple(row[-2:]) for row in published.rows if row[1].startswith("paper")} == {("-", "-")}
    assert len({len(row) for row in published.rows}) == 1


def test_files_without_a_measured_machine_have_no_such_columns() -> None:
    _, times = both(make_measurement())
    assert not any("floor" in text for text in (*times.columns, *times.notes))


def test_published_rows_stand_beside_ours() -> None:
    acceptance, times = both(PAPER, paper=True)
    assert acceptance.columns[0] == "source"
    assert [row[0] for row in acceptance.rows] == [
        "demo, this machine",
        "paper: YaRN-LLaMA2-7b-128k, NVIDIA A100 80G",
        "paper: LLaMA3.1-8b, NVIDIA A100 80G",
        "paper: Qwen2.5-1.5B, NVIDIA A100 80G",
        "paper: Qwen2.5-7B, NVIDIA A100 80G",
        "paper: Qwen2.5-14B, NVIDIA A100 80G",
        "demo, this machine",  # the paper has no 21,000 tokens
    ]
    assert acceptance.rows[2][1:] == ["4,096", "20,000", "0.39", "1.29", "0.65 ± 0.07", "1.93 ± 0.18"]
    assert acceptance.rows[3][3:5] == ["-", "-"]
    assert times.rows[3] == [
        "TokenSwift",
        "paper: Qwen2.5-1.5B, NVIDIA A100 80G",
        "4,096",
        "20,000",
        "0.69 ± 0.11",
        "1.69 ± 0.17",
        "12.0 min",
        "7.20 min",
        "-4.80 min",
    ]
    assert "176 ms" in times.notes[-1]


def test_no_published_row_of_that_size() -> None:
    _, times = both(make_measurement(), paper=True)
    assert times.notes[-1] == "The paper has no row of these methods, prefills and lengths."
    assert {row[1] for row in times.rows} == {"demo, this machine"}


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
