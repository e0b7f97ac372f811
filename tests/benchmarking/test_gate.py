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
from tswift.benchmarking.gate import Verdict, compare, moved, parse_rule, refuse_foreign, refuse_single
from tswift.benchmarking.rules import Rule
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
    assert len(verdicts) == (4 * 2 + 2) * 3 * 2  # counters per seed, times; methods, lengths
    assert not failures(verdicts)
    assert {verdict.change for verdict in verdicts} == {0.0}
    assert moved(verdicts).rows == []


@pytest.mark.parametrize("rule", RULES)
def test_trips_on_each_metric_and_never_on_an_improvement(rule: str) -> None:
    metric = rule.partition(":")[0]
    name = METRICS.get(metric, metric)
    worse, better = (1.2, 0.8) if metric == "passes" else (0.8, 1.2)
    tripped = failures(judge(scaled(name, worse), rule))
    notes = ["prompt novel, seed 0", "prompt novel, seed 1"] if metric not in ("speedup", "tokens_per_s") else [""]
    assert [(v.metric, v.method, v.prefill, v.length, v.note) for v in tripped] == [
        (metric, "tokenswift", 1024, length, note) for length in (500, 1000) for note in notes
    ]
    assert not failures(judge(scaled(name, better), rule))
    # one rule does not look at another's metric
    other = next(other for other in RULES if other != rule)
    assert not failures(judge(scaled(name, worse), other))


def test_a_loss_within_the_tolerance_passes() -> None:
    assert not failures(judge(scaled("speedup", 0.9), "speedup:10%"))
    assert failures(judge(scaled("speedup", 0.899), "speedup:10%"))
    # tokenswift's alpha is 0.62 for seed 0, 0.63 for seed 1
    assert not failures(judge(scaled("alpha", 0.9), "alpha:0.063"))
    assert {verdict.note for verdict in failures(judge(scaled("alpha", 0.9), "alpha:0.062"))} == {
        "prompt novel, seed 1"
    }
    # its passes are about 147
    assert not failures(judge(scaled("passes", 1.05), "passes:5%"))
    assert failures(judge(scaled("passes", 1.05), "passes:4.9%"))


def test_the_smallest_change_of_a_counter_trips() -> None:
    ours = copy.deepcopy(BASE)
    next(points_of(ours, "medusa"))["passes"] += 1
    (tripped,) = failures(judge(ours, "passes:0", "alpha:0"))
    assert (tripped.metric, tripped.change, tripped.limit) == ("passes", 1, tripped.baseline)


def test_one_seeds_gain_does_not_make_up_for_anothers_loss() -> None:
    ours = copy.deepcopy(BASE)
    for point, change in zip(points_of(ours, "medusa"), (-0.05, 0, 0.05, 0), strict=True):  # seed 0, then seed 1
        point["alpha"] += change
    verdicts = judge(ours, "alpha:0")
    (tripped,) = failures(verdicts)
    assert (tripped.method, tripped.length, tripped.note) == ("medusa", 500, "prompt novel, seed 0")
    assert (tripped.baseline, tripped.change) == pytest.approx((0.42, -0.05))
    assert [row[2] for row in moved(verdicts).rows] == ["REGRESSED: prompt novel, seed 0", "ok: prompt novel, seed 1"]


def test_times_are_compared_as_means() -> None:
    ours = copy.deepcopy(BASE)
    for point, factor in zip(points_of(ours, "medusa"), (0.8, 1, 1.2, 1), strict=True):
        point["speedup"] *= factor
    assert not failures(judge(ours, "speedup:1%"))


def test_a_single_draw_is_not_named() -> None:
    single = make_measurement(seeds=(0,), repeats=2)
    ours = copy.deepcopy(single)
    for point in points_of(ours, "medusa"):
        point["alpha"] -= 0.1
    assert [verdict.note for verdict in failures(judge(ours, "alpha:0", base=single))] == ["", ""]


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
        ("tokenswift", "prompt novel, seed 1: not measured")
    }
    assert {(v.method, v.note) for v in failures(judge(fewer, "speedup:90%"))} == {
        ("tokenswift", "1 of the baseline's runs not measured")
    }
    more = [verdict for verdict in judge(BASE, "passes", base=fewer) if verdict.baseline is None]
    assert {(v.ok, v.note) for v in more} == {(True, "prompt novel, seed 1: not in the baseline")}


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


@pytest.mark.parametrize(
    ("rule", "suggested"),
    [
        ("speedup:10", "speedup:10%"),
        ("alpha:1", "alpha:1%"),
        ("alpha:0.63", "alpha:10%"),  # the largest there is
        ("beta:0.05", "beta:10%"),
        ("tokens_per_step:20", "tokens_per_step:20%"),
        ("tokens_per_s:1000", "tokens_per_s:10%"),
    ],
)
def test_a_tolerance_that_can_never_fail_is_refused_before_measuring(rule: str, suggested: str) -> None:
    unmeasured = {**BASE, "samples": []}
    with pytest.raises(InputError, match=rf"^--fail-on: {rule.partition(':')[0]} can never fall .* {suggested}$"):
        refuse_foreign(unmeasured, BASE, [parse_rule("alpha:0"), parse_rule(rule)])


@pytest.mark.parametrize(
    ("rule", "name"),
    [("alpha:0.62", "alpha"), ("beta:0.049", "beta"), ("speedup:1.5", "speedup"), ("speedup:99.9%", "speedup")],
)
def test_a_tolerance_that_can_fail_is_not_refused(rule: str, name: str) -> None:
    assert failures(judge(scaled(name, 0.0), rule))


def test_more_passes_can_always_fail() -> None:
    assert failures(judge(scaled("passes", 1e6), "passes:1000000"))


def test_where_nothing_was_drafted_no_tolerance_is_at_fault() -> None:
    plain = make_measurement(methods=("ar",))
    assert not failures(judge(plain, "alpha:0", base=plain))


@pytest.mark.parametrize("rule", ["speedup:10%", "tokens_per_s:10%"])
def test_times_want_repeats_on_both_sides(rule: str) -> None:
    rules = [parse_rule("alpha:0"), parse_rule(rule)]
    repeated = make_measurement(repeats=2)
    with pytest.raises(InputError, match=rf"^--repeats: {rule.partition(':')[0]} varies .* got 1$"):
        refuse_single(rules, 1, repeated)
    with pytest.raises(InputError, match=r"^--against: .* the baseline has 1$"):
        refuse_single(rules, 2, BASE)  # two seeds are no repeats
    refuse_single(rules, 2, repeated)


def test_counters_want_no_repeats() -> None:
    refuse_single([parse_rule(rule) for rule in ("alpha", "beta", "tokens_per_step", "passes")], 1, BASE)


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


GIVEN = make_measurement(simulated={"weights": False, "alpha": 0.6})


@pytest.mark.parametrize("rule", ["alpha:0", "beta:0", "tokens_per_step:0", "passes:0"])
def test_what_a_simulated_acceptance_sets_is_not_judged(rule: str) -> None:
    with pytest.raises(InputError, match=rf"^--fail-on: {rule[:-2]} follows from --simulate-alpha and is not measured"):
        refuse_foreign({**GIVEN, "samples": []}, GIVEN, [parse_rule("speedup:10%"), parse_rule(rule)])


def test_simulated_times_are_judged_and_labelled() -> None:
    ours = copy.deepcopy(GIVEN)
    for point in points_of(ours, "tokenswift"):
        point["speedup"] *= 0.5
    verdicts = judge(ours, "speedup:10%", base=GIVEN)
    assert {row[1] for row in moved(verdicts, simulated=True).rows} == {"tokenswift (simulated)"}
    other = make_measurement(simulated={"weights": False, "alpha": 0.7})
    with pytest.raises(InputError, match="another workload: simulated differs"):
        judge(GIVEN, "speedup:10%", base=other)


def test_counters_of_random_weights_are_judged() -> None:
    random = make_measurement(simulated={"weights": True, "alpha": None})
    assert not failures(judge(random, *RULES, base=random))


def test_the_machines_speed_is_no_part_of_the_workload() -> None:
    measured = make_measurement(roofline=True)
    assert measured["workload"] == BASE["workload"]
    assert not failures(judge(measured, *RULES))
    assert not failures(judge(BASE, *RULES, base=measured))


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
    assert grid.title == "4 of 24 comparisons regressed"
    # of the two seeds the one that lost more
    assert [(row[0], row[1], row[2]) for row in grid.rows] == [
        ("alpha", "tokenswift", "REGRESSED: prompt novel, seed 1; and 1 other draw"),
        ("alpha", "tokenswift", "REGRESSED: prompt novel, seed 1; and 1 other draw"),
        ("passes", "medusa", "ok: prompt novel, seed 0"),
    ]
    assert grid.rows[0][3:] == ["1,024", "500", "0.63", "0.315", "-0.315", "0.63"]
    assert grid.notes == ["Unchanged: 19."]


def test_the_table_has_a_row_for_each_text_and_puts_what_is_missing_first() -> None:
    ours = copy.deepcopy(BASE)
    for sample in ours["samples"][1::3]:  # medusa
        sample.update(same_as_ar=False, explained=False, first_difference=321)
    for point in points_of(ours, "tokenswift"):
        point["alpha"] -= 0.1
    ours["samples"].pop()  # tokenswift, seed 1
    assert [row[:3] for row in moved(judge(ours, "alpha")).rows] == [
        ["same_as_ar", "medusa", "REGRESSED: prompt novel, seed 0: other tokens than AR from token 321"],
        ["same_as_ar", "medusa", "REGRESSED: prompt novel, seed 1: other tokens than AR from token 321"],
        *[["alpha", "tokenswift", "REGRESSED: prompt novel, seed 1: not measured; and 1 other draw"]] * 2,
    ]
