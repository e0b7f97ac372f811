"""The files of a measurement, the texts against golden ones.

After a change that is meant, write the golden files anew and read their diff:
``PYTHONPATH=src python -m tests.benchmarking.test_report``.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.benchmarking.helpers import make_measurement
from tswift.benchmarking import look
from tswift.benchmarking.report import csv_report, markdown_report, write_measurement, write_reports
from tswift.errors import InputError
from tswift.jobs import folder as files

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


def test_csv_has_a_line_per_cell() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_report(SMALL))))
    assert [(line["method"], line["length"]) for line in lines] == [
        (method, length) for length in ("500", "1000") for method in ("ar", "medusa", "tokenswift")
    ]
    assert (lines[1]["alpha_n"], lines[1]["alpha_mean"]) == ("2", "0.425")
    assert float(lines[1]["alpha_std"]) == pytest.approx(0.01 / 2**0.5)
    assert {line["alpha_std"] for line in csv.DictReader(io.StringIO(csv_report(SINGLE)))} == {""}


def test_all_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    paths = write_reports(SMALL, tmp_path / "a" / "b", paper=False, plots=True)
    assert [path.name for path in paths] == [
        *("bench.json", "bench.csv", "bench.md"),
        *("time.png", "time.svg", "acceptance.png", "acceptance.svg"),
    ]
    assert sorted(paths) == sorted((tmp_path / "a" / "b").iterdir())
    assert json.loads(paths[0].read_text()) == SMALL


def test_every_file_of_a_simulated_measurement_says_so(tmp_path: Path) -> None:
    paths = write_reports(SINGLE, tmp_path / "a", paper=False, plots=True)
    assert [path.name for path in paths] == [
        *("bench-simulated.json", "bench-simulated.csv", "bench-simulated.md"),
        *("time-simulated.png", "time-simulated.svg", "acceptance-simulated.png", "acceptance-simulated.svg"),
    ]
    assert sorted(paths) == sorted((tmp_path / "a").iterdir())
    assert write_measurement(SINGLE, tmp_path).name == "bench-simulated.json"
    assert all("simulated" in line for line in csv_report(SINGLE).splitlines())
    for path in paths:
        if path.suffix in (".svg", ".md"):
            assert "(simulated)" in path.read_text(encoding="utf-8")


def test_plots_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(write_reports(SMALL, tmp_path, paper=True, plots=False)) == 3
    monkeypatch.setattr(look, "available", lambda: False)
    assert len(write_reports(SMALL, tmp_path, paper=True, plots=True)) == 3


def test_nothing_reached_is_reported_without_plots(tmp_path: Path) -> None:
    nothing = {**SMALL, "state": "interrupted", "samples": []}
    paths = write_reports(nothing, tmp_path, paper=True, plots=True)
    assert [path.name for path in paths] == ["bench.json", "bench.csv", "bench.md"]
    assert json.loads(paths[0].read_text()) == nothing
    assert len(paths[1].read_text().splitlines()) == 1  # the head
    assert "\nNothing was measured: no length was reached.\n" in paths[2].read_text()


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench.json").write_text("before")

    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(InputError, match=r"^--out: .* cannot be written to \(No space left on device\)"):
        write_reports(SMALL, tmp_path, paper=False, plots=False)
    assert (tmp_path / "bench.json").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^--out: "):
        write_reports(SMALL, tmp_path / "file" / "below", paper=False, plots=False)


if __name__ == "__main__":
    for name, make in TEXTS.items():
        (GOLDEN / name).write_text(make(), encoding="utf-8")
