"""Conclusions from made-up figures: the same order, another one, and what is too close to say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tswift.benchmarking.statistics import Figure
from tswift.benchmarking.suites.conclusion import ASIDE, CLOSE, DIFFERS, SAME, UNKNOWN, Conclusion, conclude
from tswift.benchmarking.suites.rows import MEASURED, Row
from tswift.benchmarking.suites.suite import LENGTH, Choice, Suite

SUITE = Suite("made-up", "Made up", "letter", (Choice("a", "ar"),), ("alpha", "speedup"), ("alpha",))


def measured(axis: str, *alphas: float, length: int = 100, prefill: int = 8) -> Row:
    draws = {("p", seed): {"alpha": alpha} for seed, alpha in enumerate(alphas)}
    return Row(axis, MEASURED, prefill, length, {"alpha": Figure(len(alphas), sum(alphas) / len(alphas), None)}, draws)


def paper(axis: str, alpha: float, length: int | None = 20_000, source: str = "paper") -> Row:
    return Row(axis, source, None, length, {"alpha": Figure(1, alpha, None)})


def verdicts(conclusion: Conclusion) -> dict[tuple[str, str], str]:
    return {(pair.first, pair.second): pair.verdict for pair in conclusion.pairs}


PAPER = [paper("a", 0.1), paper("b", 0.4), paper("c", 0.7)]


def test_the_same_order() -> None:
    found = conclude(SUITE, [measured("a", 0.2), measured("b", 0.3), measured("c", 0.5)], PAPER)
    assert verdicts(found) == {("a", "b"): SAME, ("a", "c"): SAME, ("b", "c"): SAME}
    assert found.lines[0] == "Conclusion from one draw: the same ordering as in the paper, in all 3 pairs."
    assert "alpha, measured at 100 tokens: c (0.500) > b (0.300) > a (0.200)." in found.lines
    assert any(line.startswith("The paper has no rows at these lengths") for line in found.lines)
    assert found.lines[-1].startswith("One draw each, so no spread is known")


def test_another_order() -> None:
    found = conclude(SUITE, [measured("a", 0.5), measured("b", 0.3), measured("c", 0.9)], PAPER)
    assert verdicts(found) == {("a", "b"): DIFFERS, ("a", "c"): SAME, ("b", "c"): SAME}
    assert found.lines[0] == (
        "Conclusion from one draw: the ordering differs from the paper's: of 3 pairs 2 as there, 1 the other way round."
    )
    assert "alpha, differs: a above b here, below it in the paper (100 tokens)." in found.lines


def test_too_close_to_say() -> None:
    found = conclude(SUITE, [measured("a", 0.500), measured("b", 0.505), measured("c", 0.9)], PAPER)
    assert verdicts(found)["a", "b"] == CLOSE
    assert found.lines[0].endswith("where there is one: 2 of 3 pairs, 1 too close to say.")
    assert "alpha, measured at 100 tokens: c (0.900) > b (0.505) ~ a (0.500)." in found.lines
    assert "alpha, too close to say: a and b (within 0.010)." in found.lines
    every = conclude(SUITE, [measured("a", 0.5), measured("b", 0.5)], PAPER)
    assert every.lines[0] == "Conclusion from one draw: nothing can be said of the ordering: 1 pair, too close here."


def test_several_draws_bring_their_own_spread() -> None:
    apart = [measured("a", 0.30, 0.40, 0.50), measured("b", 0.35, 0.45, 0.56)]  # draws vary, differences do not
    together = [measured("a", 0.30, 0.40, 0.50), measured("b", 0.45, 0.35, 0.56)]  # the same means
    assert verdicts(conclude(SUITE, apart, PAPER)) == {("a", "b"): SAME}
    found = conclude(SUITE, together, PAPER)
    assert verdicts(found) == {("a", "b"): CLOSE}
    # differences -0.15, 0.05, -0.06: standard deviation 0.1002, and 4.30 of its thirds' root
    assert found.pairs[0].within == pytest.approx(4.30 * 0.10017 / 3**0.5, rel=1e-3)
    assert found.pairs[0].n == 3
    assert found.lines[0].startswith("Conclusion from 3 draws: nothing can be said")
    assert found.lines[-1].startswith("3 draws each; called too close: within the paired difference's 95% interval")


def test_the_paper_may_have_no_order() -> None:
    rows = [measured("a", 0.2), measured("b", 0.6)]
    rounded = conclude(SUITE, rows, [paper("a", 0.40), paper("b", 0.41)])
    assert verdicts(rounded) == {("a", "b"): UNKNOWN}
    models = [("a", 0.1, "X"), ("b", 0.4, "X"), ("a", 0.4, "Y"), ("b", 0.1, "Y")]
    disagree = conclude(SUITE, rows, [paper(axis, alpha, source=source) for axis, alpha, source in models])
    assert verdicts(disagree) == {("a", "b"): UNKNOWN}
    nothing = conclude(SUITE, rows, [])
    for found in (rounded, disagree, nothing):
        assert found.lines[0].startswith("Conclusion from one draw: measured order only; there is nothing of the paper")
        assert found.lines[1] == "alpha, measured at 100 tokens: b (0.600) > a (0.200)."
    assert not any("draws" in line for line in nothing.lines[:-1])


def test_models_that_agree_are_one_order() -> None:
    models = [("a", 0.1, "X"), ("b", 0.4, "X"), ("a", 0.7, "Y"), ("b", 0.9, "Y")]
    published = [paper(axis, alpha, source=source) for axis, alpha, source in models]
    assert verdicts(conclude(SUITE, [measured("a", 0.2), measured("b", 0.6)], published)) == {("a", "b"): SAME}


def test_each_length_is_held_against_the_nearest_published_one() -> None:
    published = [paper("a", 0.1), paper("b", 0.4), paper("a", 0.4, 90_000), paper("b", 0.1, 90_000)]
    rows = [
        measured(axis, alpha, length=length) for length in (100, 80_000) for axis, alpha in (("a", 0.2), ("b", 0.6))
    ]
    found = conclude(SUITE, rows, published)
    assert [(pair.place, pair.verdict) for pair in found.pairs] == [("100 tokens", SAME), ("80,000 tokens", DIFFERS)]


def test_lengths_that_the_paper_has_not_are_said() -> None:
    rows = [
        measured(axis, alpha, length=length)
        for length in (100, 5000, 20_000)
        for axis, alpha in (("a", 0.2), ("b", 0.6))
    ]
    said = "The paper has no rows at {}; each is held against its row of the nearest one."
    assert said.format("these lengths") in conclude(SUITE, rows[:4], PAPER).lines
    assert said.format("100 and 5,000 tokens") in conclude(SUITE, rows, PAPER).lines
    assert not any(line.startswith("The paper has no rows") for line in conclude(SUITE, rows[4:], PAPER).lines)


def test_lengths_may_be_what_is_compared() -> None:
    suite = Suite("made-up", "Made up", "model", (Choice("", "ar"),), ("alpha",), ("alpha",), along=LENGTH)
    published = [paper("Q1", 0.5), paper("Q1", 0.8, 40_000), paper("Q2", 0.4), paper("Q2", 0.6, 40_000)]
    rows = [measured("demo", 0.3, length=20_000), measured("demo", 0.2, length=41_000)]
    found = conclude(suite, rows, published)
    assert verdicts(found) == {("20,000 tokens", "41,000 tokens"): DIFFERS}
    near = [measured("demo", 0.3, length=100), measured("demo", 0.2, length=200)]  # both nearest to 20,000
    assert verdicts(conclude(suite, near, published)) == {("100 tokens", "200 tokens"): UNKNOWN}


def test_a_suite_may_be_about_some_pairs_only() -> None:
    suite = replace(SUITE, contrasts=(("a", "b"),))
    rows = [measured("a", 0.2), measured("b", 0.3), measured("c", 0.1)]
    assert verdicts(conclude(suite, rows, PAPER)) == {("a", "b"): SAME, ("a", "c"): ASIDE, ("b", "c"): ASIDE}
    assert (
        conclude(suite, rows, PAPER).lines[0]
        == "Conclusion from one draw: the same ordering as in the paper, in the one pair."
    )
    assert "alpha, measured at 100 tokens: b (0.300) > a (0.200) > c (0.100)." in conclude(suite, rows, PAPER).lines


def test_nothing_was_measured() -> None:
    for rows in ([], [measured("a", 0.2)]):
        assert conclude(SUITE, rows, PAPER).lines == (
            "Conclusion: none, since nothing was measured that could be put in order.",
        )
