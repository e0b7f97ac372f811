"""The plots open and have the lines they should have."""

from __future__ import annotations

import io
import sys
from xml.etree import ElementTree

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.benchmarking.helpers import make_measurement, typed
from tswift.benchmarking.plots import acceptance_figure, files, time_figure

SEEDS = typed(
    make_measurement(methods=("ar", "ar-reference", "medusa", "tokenswift"), seeds=(0, 1, 2))
)
SINGLE = typed(make_measurement(seeds=(0,)))
NAMES = ["AR", "AR, reference style", "medusa", "tokenswift"]


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def labels_of(axes) -> list[str]:
    return [line.get_label() for line in axes.lines]


@pytest.fixture(scope="module")
def images() -> dict[str, bytes]:
    return files(SEEDS)


@pytest.mark.slow
def test_images_open(images):
    assert list(images) == ["time.png", "time.svg", "acceptance.png", "acceptance.svg"]
    for name in ("time", "acceptance"):
        pixels = matplotlib.image.imread(io.BytesIO(images[f"{name}.png"]), format="png")
        assert min(pixels.shape[:2]) > 500
        assert pixels.std() > 0.05  # not blank
        assert (
            ElementTree.fromstring(images[f"{name}.svg"]).tag == "{http://www.w3.org/2000/svg}svg"
        )


@pytest.mark.slow
def test_the_same_bytes_whatever_the_users_configuration_says(images, monkeypatch):
    # it would take over the user's windows
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.hashsalt": None}):
        assert files(SEEDS)["time.svg"] == images["time.svg"]
        assert matplotlib.rcParams["font.size"] == 30
        assert matplotlib.rcParams["svg.hashsalt"] is None


def test_time_has_a_line_per_method():
    figure = time_figure(SEEDS)
    (axes,) = figure.axes
    assert labels_of(axes) == legend_of(figure) == NAMES
    assert {line.get_linestyle() for line in axes.lines} == {"-"}
    assert len({line.get_color() for line in axes.lines}) == 4
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("generated tokens", "decoding time, seconds")
    assert (
        "demo, Intel(R) Xeon(R) Processor @ 2.80GHz, 2 threads, 2026-11-21" in figure.get_suptitle()
    )


def test_a_model_is_called_by_its_own_name():
    for name, shown in (("/data/model.gguf", "model.gguf,"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B,")):
        measurement = make_measurement(seeds=(0,))
        measurement["workload"]["model"] = name
        assert time_figure(typed(measurement)).get_suptitle().split("\n")[1].startswith(shown)


def test_time_is_the_mean_over_runs():
    measurement = typed(make_measurement(methods=("ar",), seeds=(0, 1), lens=(6000,)))
    for sample, end in zip(measurement.samples, (6000.0, 7200.0), strict=True):
        sample.slices = [(3000, 60.0), (6000, end)]
    (axes,) = time_figure(measurement).axes
    tokens, minutes = axes.lines[0].get_data()
    assert (tokens[0], tokens[-1], minutes[0]) == (0, 6000, 0)
    assert np.interp([1500, 3000, 6000], tokens, minutes) == pytest.approx([0.5, 1, 110])
    assert axes.get_ylabel() == "decoding time, minutes"


def test_acceptance_has_three_panels_and_bars_of_a_standard_deviation():
    figure = acceptance_figure(SEEDS)
    alpha, beta, speedup = figure.axes
    assert labels_of(alpha) == labels_of(beta) == NAMES[2:]
    assert labels_of(speedup) == legend_of(figure) == NAMES
    assert list(alpha.lines[0].get_xdata()) == [500, 1000]
    assert list(alpha.lines[0].get_ydata()) == pytest.approx([0.43, 0.43])  # 0.42, 0.43 and 0.44
    assert [axes.get_ylabel().split()[-1] for axes in figure.axes] == ["alpha", "beta", "x"]
    assert [len(axes.collections) for axes in figure.axes] == [2, 2, 4]
    (low, high), *_ = alpha.collections[0].get_segments()
    assert (low[1], high[1]) == pytest.approx((0.42, 0.44))  # a standard deviation of 0.01
    assert [len(axes.collections) for axes in acceptance_figure(SINGLE).axes] == [0, 0, 0]
    assert [axes.get_ylim()[0] == 0 for axes in figure.axes] == [True, True, False]


def test_acceptance_has_no_empty_panel():
    plain = typed(make_measurement(methods=("ar",), seeds=(0,)))
    assert [axes.get_ylabel() for axes in acceptance_figure(plain).axes] == ["speedup over AR, x"]


@pytest.mark.slow
def test_simulated_and_estimated_are_in_title_legend_and_file_name():
    simulated = typed(
        make_measurement(seeds=(0,), ar="sampled", simulated={"weights": True, "alpha": 0.9})
    )
    for build in (time_figure, acceptance_figure):
        figure = build(simulated)
        assert "(simulated)" in figure.get_suptitle()
        assert legend_of(figure) == [
            "AR (simulated, sampled)",
            "medusa (simulated)",
            "tokenswift (simulated)",
        ]
        assert [line.get_linestyle() for line in figure.axes[-1].lines] == ["--", "-", "-"]
    assert [*files(simulated)][::2] == ["time-simulated.png", "acceptance-simulated.png"]


def test_each_prefill_and_each_kind_of_prompts_has_its_panels():
    record = make_measurement(prompts=("a", "bb"), seeds=(0,), prefills=(8, 16))
    assert [axes.get_title() for axes in time_figure(typed(record)).axes] == [
        "prefill 8 tokens",
        "prefill 16 tokens",
    ]
    for prompt, kind in zip(record["workload"]["prompts"], ("prose", "log"), strict=True):
        prompt.update(kind=kind, tokens=16)
    measurement = typed(record)
    assert [axes.get_title() for axes in time_figure(measurement).axes] == [
        "prose",
        "prose",
        "log",
        "log",
    ]
    assert [axes.get_title() for axes in acceptance_figure(measurement).axes[::3]] == [
        "prose",
        "prose",
        "log",
        "log",
    ]
