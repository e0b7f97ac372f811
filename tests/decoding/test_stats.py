"""Figures against steps counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    PLAIN,
    Proposals,
    decode_method,
    decode_steps,
    drafter_of,
    needs_program,
    options_for,
    tiny_target,
)
from tswift.decoding.drafter import Drafter, Step
from tswift.decoding.stats import DecodeStats, distinct


def test_figures_of_steps_counted_by_hand():
    stats = DecodeStats(depth=4)
    for step in (
        Step((1, 2, 3, 4, 5), 4, "reuse", 9, 0.5),
        Step((1,), 0, "", 9, 0.25),
        Step((1, 2, 3), 2, "heads", 7, 0.25),
        Step((7, 8), 1, "reuse", 1, 1.0),
    ):
        stats.add(step)
    assert (stats.passes, stats.tokens, stats.nodes) == (4, 11, 26)
    assert stats.alpha == 7 / 16
    assert stats.beta == 5 / 16
    assert stats.tokens_per_step == 11 / 4
    assert stats.tokens_per_second == 11 / 2
    assert stats.accepted == {4: 1, 0: 1, 2: 1, 1: 1}


def test_nothing_counted_and_nothing_drafted():
    for depth in (0, 4):
        stats = DecodeStats(depth)
        assert (stats.alpha, stats.beta, stats.tokens_per_step, stats.tokens_per_second) == (
            0,
            0,
            0,
            0,
        )
    stats = DecodeStats(0)
    stats.add(Step((5,), 0, "", 1, 0.1))
    assert (stats.alpha, stats.tokens_per_step) == (0, 1)


def test_steps_of_a_decode_add_up():
    """All that is drafted is true, by a source named reuse: alpha and beta are 1,
    the cut last step apart.
    """
    target = tiny_target()
    plain = decode_method("ar", target, [4], PLAIN, 2, 30)
    source = Proposals(lambda context: [plain[len(context.text) - 1 :][:3]])
    source.name = "reuse"
    for length, steps in ((12, 3), (14, 4)):
        stats = DecodeStats(3)
        for step in decode_steps(target, Drafter([source], 3, 4), [4], PLAIN, 2, length):
            stats.add(step)
        assert (stats.passes, stats.tokens) == (steps, length)
        assert stats.alpha == stats.beta == (9 if length == 12 else 10) / (3 * steps)


def test_alpha_is_of_what_was_drafted_where_that_varies():
    """Also for a run whose journal is of before that was counted."""
    stats = DecodeStats(depth=31)
    for step in (Step((1, 2), 1, "", 4, 0.5, drafted=2), Step((1,), 0, "", 1, 0.5, drafted=0)):
        stats.add(step)
    assert (stats.alpha, stats.tokens_per_step) == (1 / 2, 3 / 2)
    again = DecodeStats.counted(31, 3, stats.counters())
    assert again == stats
    older = {name: value for name, value in stats.counters().items() if name != "drafted"}
    resumed = DecodeStats.counted(31, 3, older)
    assert resumed.alpha == 1 / 62
    resumed.add(Step((1, 2, 3), 2, "", 4, 0.5, drafted=2))
    assert resumed.alpha == 3 / 64


@pytest.mark.parametrize(
    "method", ["reuse", pytest.param("recall", marks=needs_program), "auto", "medusa"]
)
def test_what_a_step_says_that_it_drafted(method):
    """Nothing where the method always drafts as far; elsewhere no less than was accepted,
    nothing in plain steps.
    """
    target, greedy = tiny_target(), replace(PLAIN, temperature=0.0)  # the text repeats itself soon
    drafter = drafter_of(
        method, target, options_for(method, **({"tree": (1, 1, 1)} if method == "medusa" else {}))
    )
    steps = [*decode_steps(target, drafter, [4, 5, 6], greedy, 2, 60)]
    if method == "medusa":
        assert {step.drafted for step in steps} == {None}
        return
    assert all(
        step.drafted is not None and step.accepted <= step.drafted < step.nodes for step in steps
    )
    assert all((step.drafted == 0) == (step.nodes == 1) for step in steps)
    assert len({step.drafted for step in steps}) > 1


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_distinct_n_is_unique_ngrams_over_ngrams(tokens, n):
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    assert distinct(tokens, n) == (pytest.approx(len(set(grams)) / len(grams)) if grams else 0)


COUNTERS = {
    **{"passes": 3, "nodes": 9, "seconds": 0.5, "reused": 1},
    **{"accepted": {"0": 1, "2": 2}, "sizes": {"1": 1, "4": 2}, "choices": {"a": 1, "b": 2}},
}


def test_counters_that_are_none():
    assert DecodeStats.counted(4, 7, COUNTERS).counters() == COUNTERS
    values = [None, "3", -1, 1.5, math.nan, math.inf, 10**400, [1], {"x": 1}, {"1": -1}, {"-1": 1}]
    for name, value in product(COUNTERS, values):
        if (name, value) not in (("seconds", 1.5), ("choices", {"x": 1}), ("choices", {"-1": 1})):
            with pytest.raises(ValueError, match="its counters are broken"):
                DecodeStats.counted(4, 7, {**COUNTERS, name: value})
