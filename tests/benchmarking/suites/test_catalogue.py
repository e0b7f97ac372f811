"""The suites as data: what they say fits together, and fits what was published."""

from __future__ import annotations

import pytest

from tswift.benchmarking.suites.catalogue import SUITES, find_suite
from tswift.benchmarking.suites.figures import SHOWN
from tswift.benchmarking.suites.rows import published_rows
from tswift.benchmarking.suites.suite import LENGTH, Suite
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError

EVERY = pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)


@EVERY
def test_a_suite_fits_together(suite: Suite) -> None:
    assert set(suite.judged) <= set(suite.columns)
    assert {*suite.columns, *suite.plotted} <= set(SHOWN)
    assert set(suite.methods) <= set(METHODS)
    assert len(set(suite.labels)) == len(suite.labels)
    assert len(suite.choices) == 1 or len(suite.settings) == 1  # one axis
    for setting in suite.settings:
        SamplingParams(**setting.sampling)
        assert set(setting.sampling) == set(suite.settings[0].sampling)  # or one would keep what another sets
    for choice in suite.choices:
        DraftOptions(**choice.drafting)
        assert set(choice.drafting) <= METHODS[choice.method].uses
    assert {label for pair in suite.contrasts for label in pair} <= set(suite.labels)
    if suite.plot == "axis":
        assert all(float(label) >= 0 for label in suite.labels)


@EVERY
def test_every_published_row_has_its_place(suite: Suite) -> None:
    rows = published_rows(suite)
    assert bool(rows) == (suite.paper is not None)
    names = {*suite.labels, *suite.methods, *(["ar"] if suite.plain else [])}
    for row in rows:
        assert row.axis in names or suite.along == LENGTH
        assert row.figures
        assert all(figure.mean is not None for figure in row.figures.values())
    if suite.paper is not None:
        assert set(suite.judged) <= {name for row in rows for name in row.figures}


def test_what_was_published_is_read_as_it_is() -> None:
    partial = next(row for row in published_rows(SUITES["table5"]) if (row.axis, row.length) == ("partial", 60_000))
    assert {name: figure.mean for name, figure in partial.figures.items()} == {"alpha": 0.18, "speedup": 1.19}
    without = next(row for row in published_rows(SUITES["table6"]) if row.axis == "min-p 0.1")
    assert [without.figures[name].mean for name in ("distinct_1", "distinct", "speedup")] == [0.07, 0.12, 3.58]
    qwen = published_rows(SUITES["table4"])[0]
    assert (qwen.axis, qwen.prefill, qwen.length) == ("Qwen2.5-1.5B", 4096, 20_000)
    assert [qwen.figures[name].mean for name in ("ar_seconds", "seconds", "delta")] == [720, 432, -288]
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
    assert SUITES["table14"].own == {"methods", "prefill", "ngrams"}


def test_another_name() -> None:
    with pytest.raises(InputError, match=r"^--suite: no suite 'table2'; there are table1, table3, .*case-study$"):
        find_suite("table2")
