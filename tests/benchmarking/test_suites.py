"""Suites: the catalogue as data, their runs, and measured orders beside the paper's."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.rows import every_row
from tswift.benchmarking.config import BenchOptions, Plan
from tswift.benchmarking.record import SuiteRecord
from tswift.benchmarking.report import order_table, tables, write_report
from tswift.benchmarking.run import measure
from tswift.benchmarking.suite_run import begin_suite, judge_texts, prepare, quality, tree_nodes
from tswift.benchmarking.suites import (
    LENGTH,
    SUITES,
    Suite,
    compared,
    find_suite,
    published_rows,
    summarise_suite,
)
from tswift.benchmarking.summary import METRICS, Figure, Row
from tswift.benchmarking.workloads import Prompt
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.sampling.parameters import SamplingParams

PUBLISHED = {f"table{n}" for n in (1, 3, 4, 5, 6, 7, 8, 12)} | {"figure1"}


@every_row("suite", SUITES.values())
def test_a_suite_fits_together(suite: Suite) -> None:
    assert set(suite.ordered) <= set(suite.columns)
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
def test_every_published_row_has_its_place(suite: Suite) -> None:
    rows = published_rows(suite)
    assert bool(rows) == (suite.name in PUBLISHED)
    names = {*suite.labels, *suite.methods, *(["ar"] if suite.plain else [])}
    for row in rows:
        assert row.axis in names or suite.along == LENGTH
        assert row.figures
        assert all(figure.mean is not None for figure in row.figures.values())
    if rows:
        assert set(suite.ordered) <= {name for row in rows for name in row.figures}


def test_what_was_published_is_read_as_it_is() -> None:
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
    assert {row.axis: row.figures["seconds"].mean for row in published_rows(SUITES["figure1"])} == {
        "ar": 18_000,
        "tokenswift": 5_400,
    }
    assert {row.axis: row.figures["speedup"].mean for row in published_rows(SUITES["table1"])} == {
        "triforce": 1.02,
        "magicdec": 1.2,
        "standalone": 1.06,
    }


def test_what_a_suite_sets_itself() -> None:
    assert SUITES["table5"].own == {"methods", "kv", "ngrams"}
    assert SUITES["table7"].own == {"methods", "tree", "nodes", "gamma", "ngrams"}
    assert SUITES["table12"].own == {"methods", "top_p", "min_p", "eta"}
    assert SUITES["table14"].own == {"methods", "prefills", "ngrams"}
    with pytest.raises(
        InputError,
        match=r"^suite: no suite 'table2'; there are table1, .*case-study; did you mean table\d",
    ):
        find_suite("table2")


SUITE = Suite("made-up", "Made up", "letter", {"a": ("ar", {})}, ("alpha", "speedup"), ("alpha",))
BY_LENGTH = replace(SUITE, axis="model", along=LENGTH)


def measured(axis: str, *alphas: float, length: int = 100) -> Row:
    draws = {("p", seed): {"alpha": alpha} for seed, alpha in enumerate(alphas)}
    return Row(
        axis,
        "here",
        8,
        length,
        {"alpha": Figure(len(alphas), sum(alphas) / len(alphas), None)},
        draws,
    )


def paper(axis: str, alpha: float, length: int | None = 20_000, source: str = "paper") -> Row:
    return Row(axis, source, None, length, {"alpha": Figure(1, alpha, None)})


def models(*alphas: float) -> list[Row]:
    """The paper's a and b of two models."""
    return [
        paper(axis, alpha, source=name)
        for (name, axis), alpha in zip(("Xa", "Xb", "Ya", "Yb"), alphas, strict=True)
    ]


PAPER = [paper("a", 0.1), paper("b", 0.4), paper("c", 0.7)]
TWO = [measured("a", 0.2), measured("b", 0.6)]
Q = [paper("Q1", 0.5), paper("Q1", 0.8, 40_000), paper("Q2", 0.4), paper("Q2", 0.6, 40_000)]


@every_row(
    ("suite", "rows", "published", "verdicts"),
    [
        (SUITE, TWO, PAPER, ["same"]),
        # the paper has no order within its last digit, where its models disagree, or where it has
        # no row
        (SUITE, TWO, [paper("a", 0.40), paper("b", 0.41)], ["not in the paper"]),
        (SUITE, TWO, models(0.1, 0.4, 0.4, 0.1), ["not in the paper"]),
        (SUITE, TWO, models(0.1, 0.4, 0.7, 0.9), ["same"]),
        (SUITE, TWO, [], ["not in the paper"]),
        # several draws bring their own spread: the same means, but differences that vary
        (
            SUITE,
            [measured("a", 0.30, 0.40, 0.50), measured("b", 0.35, 0.45, 0.56)],
            PAPER,
            ["same"],
        ),
        (
            SUITE,
            [measured("a", 0.30, 0.40, 0.50), measured("b", 0.45, 0.35, 0.56)],
            PAPER,
            ["too close"],
        ),
        (SUITE, TWO[:1], PAPER, []),
        (SUITE, [], PAPER, []),
        # each length is held against the nearest published one
        (
            SUITE,
            [
                measured(axis, alpha, length=n)
                for n in (100, 80_000)
                for axis, alpha in (("a", 0.2), ("b", 0.6))
            ],
            [paper("a", 0.1), paper("b", 0.4), paper("a", 0.4, 90_000), paper("b", 0.1, 90_000)],
            ["same", "differs"],
        ),
        # lengths may be what is compared: the nearest published ones, if they are two
        (
            BY_LENGTH,
            [measured("demo", 0.3, length=20_000), measured("demo", 0.2, length=41_000)],
            Q,
            ["differs"],
        ),
        (
            BY_LENGTH,
            [measured("demo", 0.3), measured("demo", 0.2, length=200)],
            Q,
            ["not in the paper"],
        ),
    ],
)
def test_verdicts(suite: Suite, rows: list[Row], published: list[Row], verdicts: list[str]) -> None:
    assert [pair.verdict for pair in compared(suite, rows, published)] == verdicts


@every_row(
    ("alphas", "row"),
    [
        ((0.2, 0.3, 0.5), ["c > b > a", "3 of 3", "-", "-"]),
        ((0.5, 0.3, 0.9), ["c > a > b", "2 of 3", "a > b", "-"]),
        ((0.5, 0.505, 0.9), ["c > b ~ a", "2 of 3", "-", "b ~ a"]),
    ],
)
def test_the_order_beside_the_papers(alphas: tuple[float, ...], row: list[str]) -> None:
    rows = [measured(axis, alpha) for axis, alpha in zip("abc", alphas, strict=True)]
    assert order_table(compared(SUITE, rows, PAPER)).rows == [
        ["alpha", "100 tokens, prefill 8", *row, "1"]
    ]


def test_the_interval_of_paired_differences() -> None:
    (pair,) = compared(
        SUITE, [measured("a", 0.30, 0.40, 0.50), measured("b", 0.45, 0.35, 0.56)], PAPER
    )
    # differences -0.15, 0.05, -0.06: standard deviation 0.1002, and 4.30 of its thirds' root
    assert pair.within == pytest.approx(4.30 * 0.10017 / 3**0.5, rel=1e-3)
    assert (pair.n, pair.ours) == (3, pytest.approx(-0.16 / 3))


PROMPTS = [Prompt("p", list(range(1, 9)))]


class Prepared:
    """A suite at tiny scale on the checkpoint."""

    def __init__(self, checkpoint: Path, name: str, **changes: Any) -> None:
        self.suite = dataclasses.replace(SUITES[name], **changes)
        self.groups, self.missing = prepare(
            self.suite, BenchOptions.of({}, {"model": str(checkpoint)}), Plan((4,), (6,))
        )

    def begin(self, plan: Plan) -> SuiteRecord:
        return begin_suite(self.suite, self.groups, self.missing, PROMPTS, plan, ["tswift"])

    def run(self, record: SuiteRecord, plan: Plan, tick: Any = lambda *at: None) -> Any:
        judge = partial(judge_texts, record, next(iter(self.groups.values())).model.tokenizer)
        record.state = measure(self.groups, record, PROMPTS, plan, tick, lambda: None, judge)
        return summarise_suite(record)["rows"]


def test_ctrl_c_keeps_what_was_measured(checkpoint: Path, tmp_path: Path) -> None:
    prepared = Prepared(checkpoint, "table12")
    plan = Plan((4,), (6, 12), warmup=0)
    record = prepared.begin(plan)

    def tick(label, number, cells, case, run) -> None:  # type: ignore[no-untyped-def]
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
    assert any(
        note.startswith("The suite did not run to its end") for note in tables(record)[0].notes
    )
    assert len(write_report(record, tmp_path)) == 3


@pytest.mark.slow
def test_every_text_has_its_own_figures(checkpoint: Path) -> None:
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
            expected = quality(text.tokens[:length], "".join(text.pieces[:length]))
            # a character may be cut in two at the end of a part
            assert {**(ours.quality or {}), "compression": 0} == pytest.approx(
                {**expected, "compression": 0}
            )
            assert ours.quality == theirs.quality
    (first, second) = (row for row in rows if row["axis"] == "without")
    assert first["figures"]["distinct"]["n"] == 2
    assert second["figures"]["self_bleu"]["std"] is not None


def test_what_cannot_run_is_left_out_and_said(checkpoint: Path, tmp_path: Path) -> None:
    short, long = (
        {"short": ("tokenswift", {"tree": (1, 1)})},
        {"long": ("tokenswift", {"tree": (1,) * 9})},
    )
    prepared = Prepared(checkpoint, "table7", contenders=short | long)
    assert [variant.label for variant in prepared.groups[""].contenders] == ["ar", "short"]
    assert prepared.missing == {"long": "tokenswift can draft 4 levels with these heads, got 9"}
    record = prepared.begin(Plan((4,), (6,), warmup=0))
    assert f"Left out: long, since {prepared.missing['long']}." in tables(record)[0].notes
    with pytest.raises(
        InputError, match=r"^suite: table7 cannot run on this model: tokenswift can draft 4 levels"
    ):
        Prepared(checkpoint, "table7", contenders=long)


def test_a_tree_of_a_suite_has_room_for_all_of_its_nodes(checkpoint: Path) -> None:
    contenders = Prepared(checkpoint, "table7").groups[""].contenders
    # the heads are chained
    assert [variant.options.nodes for variant in contenders[1:]] == [121, 821, 41]
    assert tree_nodes((1, 9, 9, 9), conditioned=True) == 1 + 1 + 9 + 9 + 9
