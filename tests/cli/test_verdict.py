"""How an audit is shown."""

from __future__ import annotations

from dataclasses import replace

from tswift.cli.verify import verdict
from tswift.decoding.audit import VIOLATION, WITHIN, Audit, Finding, Level

FOUND = (
    Finding(3, 13, 7, 8, 0.01, WITHIN),
    Finding(5, 15, 7, 8, 0.02, WITHIN),
    *(Finding(index, index + 10, 7, 8, None if index > 10 else 0.5, VIOLATION) for index in range(9, 34)),
)


def test_what_is_said() -> None:
    said = verdict(Audit(4000, 3973, FOUND, 0.02, 0.5, 0.04, 0.001, 9.0, 2.0)).plain()
    rows = [line.split() for line in said.splitlines()]
    assert rows[0] == ["4,000", "tokens", "judged", "in", "2.0", "s"]
    assert rows[2:5] == [
        ["drawn", "exactly", "3,973", "0.001", "9"],
        ["within", "rounding", "2", "0.01", "0.02"],
        ["violations", "25", "0.5", "0.5"],
    ]
    assert "differ by up to 0.02 in a logit; within rounding is up to 0.04" in said
    assert said.endswith("(from 0) " + ", ".join(map(str, range(9, 29))) + " and 5 more\n")


def test_what_is_said_of_the_whole_text_and_of_what_is_not_seen() -> None:
    levels = (Level(0.0, 2, 3.25, 9), Level(0.02, 2, 0.5, 4))
    audit = Audit(4000, 3998, FOUND[:2], 0.02, 0.5, 0.04, 0.001, 9.0, 2.0, None, levels, 700)
    assert audit.ok
    said = verdict(audit, "it was made elsewhere").plain()
    assert "it was made elsewhere" in said
    assert "2 tokens within rounding, 3.2 expected, at most 9 at a false-alarm rate of 0.001" in said
    assert "700 of 4,000 tokens have a competitor within rounding: an error that swaps only a few of those" in said
    audit = replace(audit, levels=(levels[0], replace(levels[1], most=1)))
    assert not audit.ok
    assert audit.as_dict()["ok"] is False
    assert audit.as_dict()["levels"][1] == {"margin": 0.02, "observed": 2, "expected": 0.5, "most": 1}
    said = verdict(audit).plain()
    assert "more than rounding explains: 2 tokens within rounding with a change above 0.02, 0.5 expected, at mo" in said
    assert "3.2 expected" not in said


def test_what_is_said_of_an_exact_run() -> None:
    said = verdict(Audit(3, 3, (), 0.0, 1.0, 0.0, None, None, 2.0, 16)).plain()
    assert "within rounding" not in said
    assert "bit for bit: any changed token is seen" in said


def test_nothing_to_say() -> None:
    said = verdict(Audit(3, 3, (), 0.0, 1.0, 0.0, None, None, 2.0)).plain()
    assert ["violations", "0", "-", "-"] in [line.split() for line in said.splitlines()]
    assert "violations at" not in said


def test_more_difference_than_rounding_makes_is_said() -> None:
    found = Audit(3, 3, (), 5.0, 0.5, 10.0, None, None, 2.0)
    assert not found.ok
    assert "more than rounding can make, 0.5: these passes do not compute the same" in verdict(found).plain()
