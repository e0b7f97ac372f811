"""``tswift bench --suite`` from the outside: every suite at tiny scale, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.conftest import SENTENCES, make_checkpoint
from tests.helpers import read_json
from tswift.benchmarking.record import read, to_json
from tswift.benchmarking.suites import SUITES
from tswift.benchmarking.summary import QUALITY, from_source
from tswift.drafting.methods import METHODS

SMALL = "--lens 6,12 --warmup 0"
PREFILLS = (4, 6, 9)  # in place of those that a suite varies
DRAWN = ("table7", "figure1", "figure4")  # over lengths, of times, over the axis
# one of each kind: with draft models, of lengths, of settings in pairs, of prefills, with texts
QUICK = ("table7", "figure1")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A smaller model with the tokens of the other one."""
    return make_checkpoint(tmp_path_factory.mktemp("small"), num_hidden_layers=1)


@pytest.fixture
def suite(tswift, checkpoint, tmp_path, load_once):
    text = tmp_path / "prompt.txt"
    text.write_text(" ".join(SENTENCES[:4]))
    return lambda name, *words: tswift(
        f"bench --suite {name} --model {checkpoint} --prompts", text, *words
    )


@pytest.fixture
def small(suite, monkeypatch):
    """A suite at tiny scale: two of its settings, and if it varies the prefill,
    on a smaller scale.
    """

    def run(name, *words):
        monkeypatch.setitem(
            vars(SUITES[name]), "settings", dict(list(SUITES[name].settings.items())[:2])
        )
        if SUITES[name].of_prefills:
            monkeypatch.setitem(vars(SUITES[name]), "prefills", PREFILLS)
            return suite(name, SMALL, *words)
        return suite(name, SMALL, "--prefill 8", *words)

    return run


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUITES],
)
def test_a_suite_from_end_to_end(small, small_model, name):
    drafted = any("draft_model" in METHODS[method].needs for method in SUITES[name].methods)
    words = [f"--draft-model {small_model}"] * drafted + ["--no-plots"] * (name not in DRAWN)
    small(name, "--out s", *words).ok()
    written = {"suite.json", "suite.csv", "suite.md", *["suite.html"] * SUITES[name].texts}
    plots = ["suite", "time"] if name == "figure1" else ["suite"] * (name in DRAWN)
    written |= {f"{plot}.{kind}" for plot in plots for kind in ("png", "svg")}
    assert {path.name for path in Path("s").iterdir()} == written
    record = read_json(Path("s/suite.json"))
    assert (record["schema"], record["kind"], record["suite"], record["state"]) == (
        1,
        "suite",
        name,
        "finished",
    )
    assert record["missing"] == []
    assert {row["axis"] for row in record["rows"]} >= {*SUITES[name].labels}
    for group in record["groups"]:
        for sample in group["measurement"]["samples"]:
            assert sample["same_as_ar"] is (None if sample["method"] == "ar" else True)
            for point in sample["points"]:
                assert tuple(point["quality"]) == tuple(from_source(QUALITY))
    written = to_json(read(Path("s/suite.json"), "resume"))
    assert written == {
        name: value for name, value in record.items() if name not in ("rows", "published")
    }
    lines = list(csv.DictReader(Path("s/suite.csv").read_text().splitlines()))
    assert len(lines) == len(record["rows"]) + len(record["published"])
    for line, row in zip(lines, [*record["rows"], *record["published"]], strict=True):
        for figure, values in row["figures"].items():
            assert line[f"{figure}_mean"] == (
                "" if values["mean"] is None else f"{values['mean']:.9g}"
            )
    if SUITES[name].texts:
        texts = [(text["label"], len(text["tokens"])) for text in record["texts"]]
        assert texts == [("with penalty", 12), ("without", 12)]
        assert Path("s/suite.html").read_text().count("<section>") == 2


@pytest.mark.slow
def test_options_that_a_suite_does_not_vary_count(small):
    words = "--penalty 1.1 --seeds 3,4 --ngrams 5 --ar sampled --repeats 2 --tree 2,1"
    small("table4", "--out s --no-plots", words).ok()
    record = read_json(Path("s/suite.json"))
    (group,) = record["groups"]
    workload = group["measurement"]["workload"]
    assert (workload["sampling"]["penalty"], workload["seeds"], workload["ar"]) == (
        1.1,
        [3, 4],
        "sampled",
    )
    assert workload["drafting"]["tokenswift"]["ngrams"] == 5
    assert workload["drafting"]["tokenswift"]["tree"] == [2, 1]
    assert [row["figures"]["alpha"]["n"] for row in record["rows"]] == [2] * 2
    assert [row["figures"]["speedup"]["n"] for row in record["rows"]] == [4] * 2
    assert "AR's time is integrated from AR steps sampled" in Path("s/suite.md").read_text()


def test_a_small_model_with_too_few_positions_is_left_out(small, tmp_path):
    short = make_checkpoint(tmp_path / "short", num_hidden_layers=1, max_position_embeddings=16)
    result = small("table1", f"--out s --no-plots --draft-model {short}").ok()
    missing = {each["label"]: each["why"] for each in read_json(Path("s/suite.json"))["missing"]}
    why = "8 prompt tokens and 12 new ones need 20 positions, the draft model has 16"
    assert missing == {"triforce": why, "standalone": why}
    assert f"triforce is left out: {why}" in result.err
