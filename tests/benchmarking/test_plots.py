"""The plots open and have the lines they should have."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.benchmarking.helpers import changed, make_measurement
from tswift.benchmarking.plots import acceptance_figure, available, bench_files, time_figure

METHODS = ("ar", "ar-reference", "medusa", "tokenswift")
SEEDS = make_measurement(methods=METHODS, seeds=(0, 1, 2))
SINGLE = make_measurement(seeds=(0,))


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def title_of(figure: Figure) -> str:
    return figure.get_suptitle()


@pytest.fixture(scope="module")
def images() -> dict[str, bytes]:
    return bench_files(SEEDS)


def test_images_open(images: dict[str, bytes]) -> None:
    assert list(images) == ["time.png", "time.svg", "acceptance.png", "acceptance.svg"]
    for name in ("time", "acceptance"):
        pixels = matplotlib.image.imread(io.BytesIO(images[f"{name}.png"]), format="png")
        assert min(pixels.shape[:2]) > 500
        assert pixels.std() > 0.05  # not blank
        assert ElementTree.fromstring(images[f"{name}.svg"]).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_bytes_in_another_process(images: dict[str, bytes]) -> None:
    """Where pyplot, which would take over the user's windows, stays out."""
    code = (
        "import sys\n"
        "import tswift.benchmarking.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from tests.benchmarking.helpers import make_measurement\n"
        f"seeds = make_measurement(methods={METHODS}, seeds=(0, 1, 2))\n"
        "sys.stdout.buffer.write(tswift.benchmarking.plots.bench_files(seeds)['time.svg'])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=_environment())
    assert done.stdout == images["time.svg"]


def test_the_users_configuration_is_neither_used_nor_changed(images: dict[str, bytes]) -> None:
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.hashsalt": None}):
        assert bench_files(SEEDS)["time.svg"] == images["time.svg"]
        assert matplotlib.rcParams["font.size"] == 30
        assert matplotlib.rcParams["svg.hashsalt"] is None


def test_time_has_a_line_per_method() -> None:
    figure = time_figure(SEEDS)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["AR", "AR, reference style", "medusa", "tokenswift"]
    assert legend_of(figure) == [line.get_label() for line in axes.lines]
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert len({line.get_color() for line in axes.lines}) == 4
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("generated tokens", "decoding time, seconds")
    assert "demo, Intel(R) Xeon(R) Processor @ 2.80GHz, 2 threads, 2026-11-21" in title_of(figure)


def test_time_is_the_mean_over_runs() -> None:
    measurement = make_measurement(methods=("ar",), seeds=(0, 1), lens=(6000,))
    ends = (6000.0, 7200.0)
    for sample, end in zip(measurement["samples"], ends, strict=True):
        sample["slices"] = [[3000, 60.0], [6000, end]]
    (axes,) = time_figure(measurement).axes
    tokens, minutes = axes.lines[0].get_data()
    assert (tokens[0], tokens[-1], minutes[0]) == (0, 6000, 0)
    assert np.interp([1500, 3000, 6000], tokens, minutes) == pytest.approx([0.5, 1, 110])
    assert axes.get_ylabel() == "decoding time, minutes"


def test_estimated_times_are_dashed_and_labelled() -> None:
    figure = time_figure(make_measurement(ar="sampled"))
    styles = {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines}
    assert styles == {"AR (sampled)": "--", "medusa": "-", "tokenswift": "-"}
    assert legend_of(acceptance_figure(make_measurement(ar="sampled")))[0] == "AR (sampled)"


def test_acceptance_has_three_panels() -> None:
    figure = acceptance_figure(SEEDS)
    alpha, beta, speedup = figure.axes
    drafting = ["medusa", "tokenswift"]
    assert [line.get_label() for line in alpha.lines] == [line.get_label() for line in beta.lines] == drafting
    assert [line.get_label() for line in speedup.lines] == ["AR", "AR, reference style", *drafting]
    assert legend_of(figure) == ["AR", "AR, reference style", *drafting]
    assert list(alpha.lines[0].get_xdata()) == [500, 1000]
    assert list(alpha.lines[0].get_ydata()) == pytest.approx([0.43, 0.43])  # 0.42, 0.43 and 0.44
    assert "alpha" in alpha.get_ylabel()
    assert "beta" in beta.get_ylabel()


def test_bars_only_with_several_runs() -> None:
    assert [len(axes.collections) for axes in acceptance_figure(SEEDS).axes] == [2, 2, 4]
    assert [len(axes.collections) for axes in acceptance_figure(SINGLE).axes] == [0, 0, 0]
    (low, high), *_ = acceptance_figure(SEEDS).axes[0].collections[0].get_segments()
    assert (low[1], high[1]) == pytest.approx((0.42, 0.44))  # a standard deviation of 0.01


def test_a_method_not_yet_known_is_drawn() -> None:
    def rename(measurement: dict[str, Any]) -> None:
        for sample in measurement["samples"]:
            if sample["method"] == "medusa":
                sample["method"] = "novelty"

    assert legend_of(time_figure(changed(SINGLE, rename))) == ["AR", "tokenswift", "novelty"]


def test_simulated_is_in_title_legend_and_file_name() -> None:
    simulated = make_measurement(seeds=(0,), ar="sampled", simulated={"weights": True, "alpha": 0.9})
    for build in (time_figure, acceptance_figure):
        assert "(simulated)" in title_of(build(simulated))
        assert legend_of(build(simulated)) == [
            "AR (simulated, sampled)",
            "medusa (simulated)",
            "tokenswift (simulated)",
        ]
        assert "simulated" not in title_of(build(SINGLE)) + "".join(legend_of(build(SINGLE)))
    assert list(bench_files(simulated)) == [
        *("time-simulated.png", "time-simulated.svg"),
        *("acceptance-simulated.png", "acceptance-simulated.svg"),
    ]


def test_the_legend_covers_no_data() -> None:
    for build in (time_figure, acceptance_figure):
        figure = build(SEEDS)
        figure.savefig(io.BytesIO(), format="png")  # lays it out
        legend = figure.legends[0].get_window_extent()
        assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not available()


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"}
