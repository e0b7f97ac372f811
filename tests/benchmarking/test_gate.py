"""The gate trips where it must, and only there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarking.helpers import changed, make_measurement, points_of
from tswift.benchmarking.gate import Rule, Verdict, compare, moved, parse_rule
from tswift.errors import InputError

BASE = make_measurement()
RULES = ["alpha:0", "beta:0", "tokens_per_step:0", "passes:0", "speedup:10%", "tokens_per_s:10%"]
METRICS = {"tokens_per_s": "tokens_per_second"}


def judge(ours: dict[str, Any], *rules: str, base: dict[str, Any] = BASE, force: bool = False) -> list[Verdict]:
    return compare(ours, base, [parse_rule(rule) for rule in rules], force)


def failures(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if not verdict.ok]


def scaled(name: str, factor: float, method: str = "tokenswift") -> dict[str, Any]:
    """The measurement with one figure of a method scaled."""

    def scale(measurement: dict[str, Any]) -> None:
        for point in points_of(measurement, method):
            point[name] *= factor

    return changed(BASE, scale)


def test_an_equal_measurement_passes() -> None:
    verdicts = judge(copy.deepcopy(BASE), *RULES)
    assert len(verdicts) == len(RULES) * 3 * 2  # methods, lengths
    assert not failures(verdicts)
    assert {verdict.change for verdict in verdicts} == {0.0}


@pytest.mark.parametrize("rule", RULES)
def test_trips_on_each_metric_and_never_on_an_improvement(rule: str) -> None:
    metric = rule.partition(":")[0]
    name = METRICS.get(metric, metric)
    worse, better = (1.2, 0.8) if metric == "passes" else (0.8, 1.2)
    tripped = failures(judge(scaled(name, worse), rule))
    assert [(v.metric, v.method, v.prefill, v.length) for v in tripped] == [
        (metric, "tokenswift", 1024, 500),
        (metric, "tokenswift", 1024, 1000),
    ]
    assert not failures(judge(scaled(name, better), rule))
    # one rule does not look at another's metric
    other = next(other for other in RULES if other != rule)
    assert not failures(judge(scaled(name, worse), other))


def test_a_loss_within_the_tolerance_passes() -> None:
    assert not failures(judge(scaled("speedup", 0.9), "speedup:10%"))
    assert failures(judge(scaled("speedup", 0.899), "speedup:10%"))
    # tokenswift's mean alpha is 0.625
    assert not failures(judge(scaled("alpha", 0.9), "alpha:0.0625"))
    assert failures(judge(scaled("alpha", 0.9), "alpha:0.062"))
    # its passes are about 147
    assert not failures(judge(scaled("passes", 1.05), "passes:5%"))
    assert failures(judge(scaled("passes", 1.05), "passes:4.9%"))


def test_the_smallest_change_of_a_counter_trips() -> None:
    ours = copy.deepcopy(BASE)
    next(points_of(ours, "medusa"))["passes"] += 1
    (tripped,) = failures(judge(ours, "passes:0", "alpha:0"))
    assert (tripped.metric, tripped.change, tripped.limit) == ("passes", 0.5, tripped.baseline)


def test_a_missing_cell_is_a_regression_and_a_new_one_is_not() -> None:
    def drop(measurement: dict[str, Any]) -> None:
        for sample in measurement["samples"]:
            sample["points"] = sample["points"][: 1 if sample["method"] == "medusa" else 2]

    fewer = changed(BASE, drop)
    (missing,) = failures(judge(fewer, "alpha"))
    assert (missing.method, missing.length, missing.ours, missing.note) == ("medusa", 1000, None, "not measured")
    new = [verdict for verdict in judge(BASE, "alpha", base=fewer) if verdict.baseline is None]
    assert [(verdict.method, verdict.ok, verdict.note) for verdict in new] == [("medusa", True, "not in the baseline")]


def test_a_missing_run_is_a_regression() -> None:
    fewer = changed(BASE, lambda m: m["samples"].pop())  # tokenswift, seed 1
    assert {(v.method, v.note) for v in failures(judge(fewer, "passes:1000"))} == {
        ("tokenswift", "1 of the baseline's runs not measured")
    }


def test_a_missing_value_is_a_regression() -> None:
    def blank(measurement: dict[str, Any]) -> None:
        for point in points_of(measurement, "medusa"):
            point["speedup"] = None

    blanked = changed(BASE, blank)
    assert {verdict.method for verdict in failures(judge(blanked, "speedup:10%"))} == {"medusa"}
    assert not failures(judge(BASE, "speedup:10%", base=blanked))


def test_a_rule_that_finds_nothing_to_compare_is_refused() -> None:
    def blank(measurement: dict[str, Any]) -> None:
        for sample in measurement["samples"]:
            for point in sample["points"]:
                point["speedup"] = None

    with pytest.raises(InputError, match=r"^--against: the baseline holds no speedup"):
        judge(BASE, "speedup:10%", base=changed(BASE, blank))


def test_other_tokens_than_plain_decoding_always_fail() -> None:
    ours = copy.deepcopy(BASE)
    ours["samples"][1].update(same_as_ar=False, explained=False, first_difference=321)
    (verdict,) = failures(judge(ours, *RULES))
    assert (verdict.metric, verdict.method, verdict.length) == ("same_as_ar", "medusa", None)
    assert "seed 0: other tokens than AR from token 321" in verdict.note
    assert failures(judge(ours))  # without a rule too
    assert not failures(judge(BASE, *RULES, base=ours))  # the baseline's text is not ours


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["workload"].update(dtype="bfloat16"), "dtype"),
        (lambda m: m["workload"]["sampling"].update(min_p=0.2), "sampling"),
        (lambda m: m["workload"]["drafting"]["medusa"].update(tree=[1]), "drafting"),
        (lambda m: m["workload"].update(seeds=[0], ar="sampled"), "ar, seeds"),
        (lambda m: m["workload"].pop("heads"), "heads"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_foreign_workload_is_refused(change: Callable[[dict[str, Any]], object], named: str, force: bool) -> None:
    with pytest.raises(InputError, match=f"^--against: the baseline is of another workload: {named} differs$"):
        judge(BASE, "alpha", base=changed(BASE, change), force=force)


def test_a_hash_that_does_not_fit_is_refused() -> None:
    base = copy.deepcopy(BASE)
    base["workload"]["hash"] = "0" * 64
    with pytest.raises(InputError, match="hash differs"):
        judge(BASE, "alpha", base=base)


def test_tuples_are_as_good_as_lists() -> None:
    ours = copy.deepcopy(BASE)
    ours["workload"]["lens"] = tuple(ours["workload"]["lens"])
    assert not failures(judge(ours, "alpha"))


def test_a_simulated_baseline_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--against: .*simulated"):
        judge(BASE, "alpha", base=changed(BASE, lambda m: m.update(simulated=True)))


@pytest.mark.parametrize(("name", "value"), [("cpu", "another"), ("threads", 64), ("gpu", "NVIDIA H200")])
def test_a_foreign_machine_is_refused_for_times(name: str, value: object) -> None:
    base = changed(BASE, lambda m: m["environment"].update({name: value}))
    for rule in ("speedup:10%", "tokens_per_s:10%"):
        with pytest.raises(InputError, match=rf"^--against: .* another machine \({name} .*--force"):
            judge(BASE, "alpha", rule, base=base)
        assert not failures(judge(BASE, rule, base=base, force=True))
    assert not failures(judge(BASE, "alpha", "beta", "passes", "tokens_per_step", base=base))


def test_other_versions_are_no_other_machine() -> None:
    base = changed(BASE, lambda m: m["environment"].update(torch="2.0", git_commit=None))
    assert not failures(judge(BASE, *RULES, base=base))


@given(st.sampled_from(["alpha", "passes", "speedup"]), st.floats(0, 1e6))
def test_an_absolute_tolerance_is_read_as_written(metric: str, tolerance: float) -> None:
    assert parse_rule(f"{metric}:{tolerance!r}") == Rule(metric, tolerance, relative=False)


@given(st.floats(0, 99.9))
def test_a_percentage_is_a_share_of_the_baseline(percent: float) -> None:
    rule = parse_rule(f"speedup:{percent!r}%")
    assert rule.relative
    assert rule.limit(2.0) == pytest.approx(2 - percent / 50)
    assert rule.allows(2.0, rule.limit(2.0))
    assert not rule.allows(2.0, rule.limit(2.0) - 1e-6)


def read_rule(text: str) -> Rule | str:
    """The rule, or the line that refuses it."""
    try:
        return parse_rule(text)
    except InputError as error:
        return str(error)


@given(st.text(max_size=12))
def test_any_tolerance_is_a_finite_number_or_a_line_that_names_the_option(text: str) -> None:
    result = read_rule(f"alpha:{text}")
    if isinstance(result, Rule):
        assert 0 <= result.tolerance < math.inf
    else:
        assert result.startswith("--fail-on: ")
        assert len(result.splitlines()) == 1


NONSENSE = ["", "%", "-1", "-0.1%", "nan", "inf", "1e999", "1_0", "x", "0:0", " 1 2", "250%", "100%"]


@pytest.mark.parametrize("text", [*(f"alpha:{text}" for text in NONSENSE), "", "alph:0", "speedup", "tokens_per_s"])
def test_rules_that_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^--fail-on: "):
        parse_rule(text)


def test_counters_tolerate_nothing_by_default() -> None:
    for metric in ("alpha", "beta", "tokens_per_step", "passes"):
        assert parse_rule(metric) == Rule(metric, 0.0, relative=False)
    assert parse_rule("passes:200%") == Rule("passes", 2.0, relative=True)  # passes can double


def test_the_table_names_what_moved() -> None:
    ours = scaled("alpha", 0.5)
    next(points_of(ours, "medusa"))["passes"] -= 10
    grid = moved(judge(ours, "alpha", "passes"))
    assert grid.title == "2 of 12 comparisons regressed"
    assert [(row[0], row[1], row[2]) for row in grid.rows] == [
        ("alpha", "tokenswift", "REGRESSED"),
        ("alpha", "tokenswift", "REGRESSED"),
        ("passes", "medusa", "ok"),
    ]
    assert grid.rows[0][3:] == ["1,024", "500", "0.625", "0.3125", "-0.3125", "0.625"]
    assert grid.notes == ["Unchanged: 9."]
    assert moved(judge(BASE, "alpha")).rows == []
