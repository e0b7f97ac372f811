"""Suites: the catalogue as data, and their runs."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import refused
from tests.rows import every_row
from tswift.benchmarking.config import BenchOptions, Plan
from tswift.benchmarking.plots import suite_figure
from tswift.benchmarking.record import SuiteRecord
from tswift.benchmarking.report import tables, write_report
from tswift.benchmarking.run import measure
from tswift.benchmarking.suite_run import begin_suite, judge_texts, prepare, quality, tree_nodes
from tswift.benchmarking.suites import SUITES, find_suite, published_rows, summarise_suite
from tswift.benchmarking.summary import METRICS
from tswift.benchmarking.workloads import Prompt
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.sampling.parameters import SamplingParams

pytestmark = pytest.mark.usefixtures("load_once")

PUBLISHED = {f"table{n}" for n in (1, 3, 4, 5, 6, 7, 8, 12)} | {"figure1"}


@every_row("suite", SUITES.values())
def test_a_suite_fits_together(suite):
    assert {*suite.columns, *suite.plotted} <= set(METRICS)
    assert set(suite.methods) <= set(METHODS)
    assert len(set(suite.labels)) == len(suite.labels)
    assert len(suite.contenders) == 1 or len(suite.settings) == 1  # one axis
    for sampling in suite.settings.values():
        SamplingParams(**sampling)
        # or one would keep what another sets
        assert sampling.keys() == next(iter(suite.settings.values())).keys()
    for method, drafting in suite.contenders.values():
        DraftOptions(**drafting)
        assert set(drafting) <= METHODS[method].uses
    if suite.across:
        assert all(float(label) >= 0 for label in suite.labels)


@every_row("suite", SUITES.values())
def test_every_published_row_has_its_place(suite):
    rows = published_rows(suite)
    assert bool(rows) == (suite.name in PUBLISHED)
    names = {*suite.labels, *suite.methods, *(["ar"] if suite.plain else [])}
    for row in rows:
        assert row.axis in names or suite.axis == "model"
        assert row.figures
        assert all(figure.mean is not None for figure in row.figures.values())
    if rows:
        assert {*suite.columns} & {name for row in rows for name in row.figures}


def test_what_was_published_is_read_as_it_is():
    partial = next(
        row
        for row in published_rows(SUITES["table5"])
        if (row.axis, row.length) == ("partial", 60_000)
    )
    assert {name: figure.mean for name, figure in partial.figures.items()} == {
        "alpha": 0.18,
        "speedup": 1.19,
    }
    without = next(row for row in published_rows(SUITES["table6"]) if row.axis == "min-p 0.1")
    assert [without.figures[name].mean for name in ("distinct_1", "distinct", "speedup")] == [
        0.07,
        0.12,
        3.58,
    ]
    qwen = published_rows(SUITES["table4"])[0]
    assert (qwen.axis, qwen.prefill, qwen.length) == ("Qwen2.5-1.5B", 4096, 20_000)
    assert [qwen.figures[name].mean for name in ("ar_seconds", "seconds", "delta")] == [
        720,
        432,
        -288,
    ]
    assert (qwen.figures["alpha"].mean, qwen.figures["alpha"].std) == (0.69, 0.11)


def test_what_a_suite_sets_itself():
    assert SUITES["table5"].own == {"methods", "kv", "ngrams"}
    assert SUITES["table7"].own == {"methods", "tree", "nodes", "gamma", "ngrams"}
    assert SUITES["table12"].own == {"methods", "top_p", "min_p", "eta"}
    assert SUITES["table14"].own == {"methods", "prefills", "ngrams"}
    with refused(
        r"^suite: no suite 'table2'; there are table1, .*case-study; did you mean table\d"
    ):
        find_suite("table2")


PROMPTS = [Prompt("p", list(range(1, 9)))]


class Prepared:
    """A suite at tiny scale on the checkpoint."""

    def __init__(self, checkpoint: Path, name: str, **changes):
        self.suite = dataclasses.replace(SUITES[name], **changes)
        self.groups, self.missing = prepare(
            self.suite, BenchOptions.of({}, {"model": str(checkpoint)}), Plan((4,), (6,))
        )

    def begin(self, plan: Plan) -> SuiteRecord:
        return begin_suite(self.suite, self.groups, self.missing, PROMPTS, plan, ["tswift"])

    def run(self, record: SuiteRecord, plan: Plan, tick=lambda *at: None):
        judge = partial(judge_texts, record, next(iter(self.groups.values())).model.tokenizer)
        record.state = measure(self.groups, record, PROMPTS, plan, tick, lambda: None, judge)
        return summarise_suite(record)["rows"]


def test_ctrl_c_keeps_what_was_measured(checkpoint, tmp_path):
    prepared = Prepared(checkpoint, "table12")
    plan = Plan((4,), (6, 12), warmup=0)
    record = prepared.begin(plan)

    def tick(label, number, cells, case, run):
        if label == "min-p 0.1" and run.stats.tokens > 8:
            raise KeyboardInterrupt

    rows = prepared.run(record, plan, tick)
    assert record.state == "interrupted"
    assert [one.state for one in record.parts.values()] == ["finished", "interrupted", "running"]
    assert {(row["axis"], row["length"]) for row in rows} == {
        ("top-p 0.9", 6),
        ("top-p 0.9", 12),
        ("min-p 0.1", 6),
    }
    assert "The measurement did not run to its end" in " ".join(tables(record)[0].notes)
    assert len(write_report(record, tmp_path)) == 3


def test_the_places_of_one_length_stand_side_by_side_in_the_plot(checkpoint):
    prepared = Prepared(checkpoint, "table12")
    places = ["top-p 0.9", "min-p 0.1", "eta 2e-4"]
    for lens, ticks, legends in (((6,), places, []), ((6, 12), None, [places])):
        plan = Plan((4,), lens, warmup=0)
        record = prepared.begin(plan)
        prepared.run(record, plan)
        figure = suite_figure(record)
        for axes in figure.axes:
            assert [list(line.get_xdata()) for line in axes.lines] == (
                [[1], [2], [3]] if ticks else [[6, 12]] * 3
            )
            assert ticks in (None, [label.get_text() for label in axes.get_xticklabels()])
        shown = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
        assert shown == legends


@pytest.mark.slow
def test_every_text_has_its_own_figures(checkpoint):
    prepared = Prepared(checkpoint, "case-study")
    plan = Plan((4,), (30, 150), (1, 2), warmup=0)
    record = prepared.begin(plan)
    rows = prepared.run(record, plan)
    assert [(text.label, text.seed) for text in record.texts] == [
        *(("with penalty", seed) for seed in (1, 2)),
        *(("without", seed) for seed in (1, 2)),
    ]
    samples = [sample for one in record.parts.values() for sample in one.samples]
    for text, plain, drafted in zip(record.texts, samples[::2], samples[1::2], strict=True):
        assert (plain.method, plain.seed) == ("ar", text.seed)
        for length, ours, theirs in zip((30, 150), plain.points, drafted.points, strict=True):
            assert ours.quality == quality(text.tokens[:length])
            assert ours.quality == theirs.quality
    (first, second) = (row for row in rows if row["axis"] == "without")
    assert first["figures"]["distinct"]["n"] == 2
    assert second["figures"]["seq_rep_4"]["std"] is not None


def test_what_cannot_run_is_left_out_and_said(checkpoint, tmp_path):
    short, long = (
        {"short": ("tokenswift", {"tree": (1, 1)})},
        {"long": ("tokenswift", {"tree": (1,) * 9})},
    )
    prepared = Prepared(checkpoint, "table7", contenders=short | long)
    assert [variant.label for variant in prepared.groups[""].contenders] == ["ar", "short"]
    assert prepared.missing == {"long": "tokenswift can draft 4 levels with these heads, got 9"}
    record = prepared.begin(Plan((4,), (6,), warmup=0))
    assert f"Left out: long, since {prepared.missing['long']}." in tables(record)[0].notes
    with refused(r"^suite: table7 cannot run on this model: tokenswift can draft 4 levels"):
        Prepared(checkpoint, "table7", contenders=long)


def test_a_tree_of_a_suite_has_room_for_all_of_its_nodes(checkpoint):
    contenders = Prepared(checkpoint, "table7").groups[""].contenders
    # the heads are chained
    assert [variant.options.nodes for variant in contenders[1:]] == [121, 821, 41]
    assert tree_nodes((1, 9, 9, 9), conditioned=True) == 1 + 1 + 9 + 9 + 9
