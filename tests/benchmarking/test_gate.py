"""The gate, one change of a measurement a row: which comparisons fail and which do not; the files that it reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarking.helpers import changed, make_measurement, points_of
from tswift.benchmarking.gate import (
    Rule,
    bench_schema,
    compare,
    load_measurement,
    moved,
    parse_rule,
    refuse_foreign,
    refuse_single,
    schema_errors,
)
from tswift.benchmarking.report import encode_bench
from tswift.benchmarking.run import workload_hash
from tswift.errors import InputError

BASE = make_measurement()  # tokenswift: alpha 0.62 and 0.63 by seed; ar, medusa and tokenswift at 500 and 1,000 tokens


COUNTERS = ("alpha", "beta", "tokens_per_step", "passes")


Change = Callable[[dict[str, Any]], object]


def scaled(name: str, *factors: float, method: str = "tokenswift") -> Change:
    """Scale a figure of a method, by one factor or by one for each of its four points: seed by seed."""

    def scale(measurement: dict[str, Any]) -> None:
        for index, point in enumerate(points_of(measurement, method)):
            point[name] *= factors[index % len(factors)]

    return scale


def blanked(name: str, *methods: str) -> Change:
    def blank(measurement: dict[str, Any]) -> None:
        for method in methods:
            for point in points_of(measurement, method):
                point[name] = None

    return blank


def shortened(measurement: dict[str, Any]) -> None:
    """medusa did not reach the second length."""
    for sample in measurement["samples"]:
        sample["points"] = sample["points"][: 1 if sample["method"] == "medusa" else 2]


def wrong_text(measurement: dict[str, Any]) -> None:
    measurement["samples"][1].update(same_as_ar=False, explained=False, first_difference=321)


def environment(**values: Any) -> Change:
    return lambda measurement: measurement["environment"].update(values)


def unchanged(measurement: dict[str, Any]) -> None:
    """Leave it as it is."""


@pytest.mark.parametrize(
    ("rule", "change", "failed"),
    [
        *[(rule, unchanged, 0) for rule in (*COUNTERS, "speedup:10%", "tokens_per_s:10%")],
        # lower is worse, of a counter by draw, of a time by cell
        *[(name, scaled(name, 0.8), 4) for name in ("alpha", "beta", "tokens_per_step")],
        *[(name, scaled(name, 1.2), 0) for name in ("alpha", "beta", "tokens_per_step")],
        ("speedup:10%", scaled("speedup", 0.8), 2),
        ("speedup:10%", scaled("speedup", 1.2), 0),
        ("tokens_per_s:10%", scaled("tokens_per_second", 0.8), 2),
        ("tokens_per_s:10%", scaled("tokens_per_second", 1.2), 0),
        # passes: higher is worse
        ("passes", scaled("passes", 1.01), 4),
        ("passes", scaled("passes", 0.8), 0),
        ("passes:1000000", scaled("passes", 1e6), 4),
        # the tolerance: what is lost up to it passes, absolute or a share
        ("speedup:10%", scaled("speedup", 0.9), 0),
        ("speedup:10%", scaled("speedup", 0.899), 2),
        ("alpha:0.063", scaled("alpha", 0.9), 0),
        ("alpha:0.0625", scaled("alpha", 0.9), 2),
        ("passes:5%", scaled("passes", 1.05), 0),
        ("passes:4.9%", scaled("passes", 1.05), 4),
        # one rule looks at one metric
        ("beta", scaled("alpha", 0.5), 0),
        # one seed's gain does not make up for another's loss, but for times, which are compared as means
        ("alpha", scaled("alpha", 0.9, 1, 1.1, 1), 1),
        ("speedup:1%", scaled("speedup", 0.8, 1, 1.2, 1, method="medusa"), 0),
        # what is missing has regressed
        ("alpha", shortened, 1),
        ("passes:1000", lambda measurement: measurement["samples"].pop(), 2),
        ("speedup:90%", lambda measurement: measurement["samples"].pop(), 2),
        ("speedup:10%", blanked("speedup", "medusa"), 2),
        # a text that is not plain decoding's fails under any rule
        ("alpha", wrong_text, 1),
        ("speedup:90%", wrong_text, 1),
        # other versions are no other machine; counters are the same on any
        ("speedup:10%", environment(torch="2.0", git_commit=None), 0),
        ("alpha", environment(cpu="another"), 0),
    ],
)
def test_what_fails(rule: str, change: Change, failed: int) -> None:
    verdicts = compare(changed(BASE, change), BASE, [parse_rule(rule)])
    assert sum(not verdict.ok for verdict in verdicts) == failed


@pytest.mark.parametrize("change", [shortened, lambda m: m["samples"].pop(), blanked("speedup", "medusa"), wrong_text])
def test_what_only_the_baseline_lacks_does_not_fail(change: Change) -> None:
    verdicts = compare(BASE, changed(BASE, change), [parse_rule("alpha"), parse_rule("speedup:1%")])
    assert all(verdict.ok for verdict in verdicts)


@pytest.mark.parametrize(
    ("rule", "change", "force", "message"),
    [
        ("alpha", lambda m: m["workload"].update(seeds=[0], ar="sampled"), True, "another workload: ar, seeds differs"),
        ("alpha", lambda m: m["workload"].pop("heads"), True, "another workload: heads differs"),
        ("alpha", lambda m: m.update(simulated=True), True, "simulated"),
        ("speedup:10%", environment(gpu="NVIDIA H200"), False, "another machine (gpu 'NVIDIA H200' there, None here)"),
        ("tokens_per_s:10%", environment(threads=64), False, "--force compares it all the same"),
        ("speedup:10%", environment(cpu="another"), True, None),
        ("speedup:10%", blanked("speedup", "ar", "medusa", "tokenswift"), False, "the baseline holds no speedup"),
        ("alpha:0.62", unchanged, False, None),
        ("alpha:0.63", unchanged, False, "alpha can never fall by more than 0.63, the baseline has 0.63 at most"),
        ("speedup:10", unchanged, False, "a share of it is written speedup:10%"),
        ("passes:1000000", unchanged, False, None),
    ],
)
def test_which_baselines_are_refused(rule: str, change: Change, force: bool, message: str | None) -> None:
    try:
        compare(BASE, changed(BASE, change), [parse_rule(rule)], force)
        found = None
    except InputError as error:
        found = str(error)
    assert (found is None) == (message is None)
    assert (message or "") in (found or "")


GIVEN = make_measurement(simulated={"weights": False, "alpha": 0.6})


NONSENSE = ["", "%", "-1", "-0.1%", "nan", "inf", "1e999", "1_0", "x", "0:0", " 1 2", "250%", "100%"]


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
        assert result.startswith("fail_on: ")
        assert len(result.splitlines()) == 1


@pytest.mark.parametrize("text", [*(f"alpha:{text}" for text in NONSENSE), "", "alph:0", "speedup", "tokens_per_s"])
def test_rules_that_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^fail_on: "):
        parse_rule(text)


@pytest.mark.parametrize("rule", ["speedup:10%", "tokens_per_s:10%"])
def test_times_want_repeats_on_both_sides(rule: str) -> None:
    rules = [parse_rule("alpha:0"), parse_rule(rule)]
    repeated = make_measurement(repeats=2)
    with pytest.raises(InputError, match=rf"^repeats: {rule.partition(':')[0]} varies .* got 1$"):
        refuse_single(rules, 1, repeated)
    with pytest.raises(InputError, match=r"^against: .* the baseline has 1$"):
        refuse_single(rules, 2, BASE)  # two seeds are no repeats
    refuse_single(rules, 2, repeated)


def test_the_table_names_what_moved() -> None:
    ours = changed(BASE, scaled("alpha", 0.5))
    next(points_of(ours, "medusa"))["passes"] -= 10
    grid = moved(compare(ours, BASE, [parse_rule("alpha"), parse_rule("passes")]))
    assert grid.title == "4 of 24 comparisons regressed"
    # of the two seeds the one that lost more
    assert [(row[0], row[1], row[2]) for row in grid.rows] == [
        ("alpha", "tokenswift", "REGRESSED: prompt novel, seed 1; and 1 other draw"),
        ("alpha", "tokenswift", "REGRESSED: prompt novel, seed 1; and 1 other draw"),
        ("passes", "medusa", "ok: prompt novel, seed 0"),
    ]
    assert grid.rows[0][3:] == ["1,024", "500", "0.63", "0.315", "-0.315", "0.63"]
    assert grid.notes == ["Unchanged: 19."]


@pytest.mark.parametrize("rule", ["alpha:0", "beta:0", "tokens_per_step:0", "passes:0"])
def test_what_a_simulated_acceptance_sets_is_not_judged(rule: str) -> None:
    with pytest.raises(InputError, match=rf"^fail_on: {rule[:-2]} follows from --simulate-alpha and is not measured"):
        refuse_foreign({**GIVEN, "samples": []}, GIVEN, [parse_rule("speedup:10%"), parse_rule(rule)])


@given(st.floats(0, 99.9))
def test_a_percentage_is_a_share_of_the_baseline(percent: float) -> None:
    rule = parse_rule(f"speedup:{percent!r}%")
    assert rule.relative
    assert rule.limit(2.0) == pytest.approx(2 - percent / 50)
    assert rule.allows(2.0, rule.limit(2.0))
    assert not rule.allows(2.0, rule.limit(2.0) - 1e-6)


def _tolerant(schema: Any) -> Any:
    """The schema, with keys let through that it does not know, as our reader does, and without its conditions."""
    if isinstance(schema, list):
        return [_tolerant(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"if", "then", "else", *(["additionalProperties"] if schema.get("additionalProperties") is False else [])}
    return {name: _tolerant(value) for name, value in schema.items() if name not in dropped}


VALIDATOR = jsonschema.Draft202012Validator(bench_schema())
ORACLE = jsonschema.Draft202012Validator(_tolerant(bench_schema()))


GOOD = make_measurement(prefills=(8,), lens=(20, 40), seeds=(0,), repeats=2, ar="sampled", roofline=True)


LEAVES = st.sampled_from(
    [None, True, False, 0, 1, -1, 0.5, 1.5, "", "x", "finished", "a" * 64, [], {}, [1], {"len": 1}]
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in inner for found in _places(item, (*place, key)))]


PLACES = _places(GOOD)[1:]


def test_a_good_one() -> None:
    assert not list(schema_errors(GOOD, bench_schema()))
    assert not list(schema_errors(make_measurement(roofline=True, ar="sampled"), bench_schema()))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(place=st.sampled_from(PLACES), value=LEAVES | st.just("taken away"))
def test_says_what_a_whole_implementation_says(place: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(GOOD)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    if value == "taken away":
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    assert (not list(schema_errors(changed, bench_schema()))) == ORACLE.is_valid(changed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1", None, [1], {}])
def test_numbers_that_are_none(value: object) -> None:
    changed = copy.deepcopy(GOOD)
    changed["samples"][1]["points"][0]["seconds"] = value
    assert list(schema_errors(changed, bench_schema())) == ["is damaged (samples[1].points[0].seconds is no number)"]


def test_nothing_is_too_deep() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert not list(schema_errors({**GOOD, "more": deep}, bench_schema()))


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "missing at the top": lambda m: m.pop("ended"),
    "missing in a sample": lambda m: m["samples"][0].pop("same_as_ar"),
    "missing in a point": lambda m: m["samples"][0]["points"][0].pop("alpha"),
    "extra in workload": lambda m: m["workload"].update(extra=1),
    "extra in a point": lambda m: m["samples"][0]["points"][0].update(extra=1),
    "date": lambda m: m.update(started="yesterday"),
    "string for a number": lambda m: m["samples"][0]["points"][0].update(seconds="1.0"),
    "alpha above 1": lambda m: m["samples"][0]["points"][0].update(alpha=1.1),
    "slice of three": lambda m: m["samples"][0]["slices"][0].append(1),
    "probe without times": lambda m: m["samples"][0]["probes"][0][1].clear(),
    "simulated, and nothing says how": lambda m: m.update(simulated=True),
    "not simulated, and something says how": lambda m: m["workload"].update(simulated={"weights": True, "alpha": None}),
    "machine without memory": lambda m: m.update(machine={"bandwidth": 0, "flops": 1e9}),
    "floor below nothing": lambda m: m["samples"][0]["points"][0].update(floor_seconds=-1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_the_schema_refuses(name: str) -> None:
    assert not VALIDATOR.is_valid(changed(GOOD, BAD[name]))


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(encode_bench(GOOD))
    assert load_measurement(path) == GOOD
    assert len(path.read_text().splitlines()) < 150  # a sample per line


def test_the_hash_is_of_the_content() -> None:
    workload = GOOD["workload"]
    assert len(workload_hash(workload)) == 64
    assert workload_hash(workload) == workload["hash"] == workload_hash(dict(reversed(workload.items())))
    assert workload_hash({**workload, "hash": "another"}) == workload["hash"]
    assert workload_hash({**workload, "lens": tuple(workload["lens"])}) == workload["hash"]
    for name in workload.keys() - {"hash"}:
        assert workload_hash({**workload, name: "another"}) != workload["hash"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is not a bench.json"),
        (b'{"schema": 1}', "is not a bench.json"),
        (b'{"kind": "bench", "schema": 2}', "schema version 2, this tswift reads 1"),
        (b'{"kind": "bench", "schema": 1}', "lacks 'simulated'"),
        (encode_bench(changed(GOOD, lambda m: m["samples"][1]["points"][0].pop("passes"))).encode(), "lacks 'passes'"),
        (encode_bench(changed(GOOD, lambda m: m["environment"].pop("cpu"))).encode(), "lacks 'cpu'"),
        (encode_bench(changed(GOOD, lambda m: m["samples"].append(3))).encode(), "is damaged"),
        (encode_bench(changed(GOOD, lambda m: m["samples"].clear())).encode(), "holds no samples"),
        (encode_bench(changed(GOOD, lambda m: m.pop("state"))).encode(), "lacks 'state'"),
        (
            encode_bench(changed(GOOD, lambda m: m.update(state="running"))).encode(),
            "did not run to its end",
        ),
        (encode_bench(changed(GOOD, lambda m: m.update(state="interrupted"))).encode(), "did not run to its end"),
    ],
)
def test_what_is_no_measurement(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^against: .*baseline.json .*{message}") as caught:
        load_measurement(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^from: there is no file .*absent.json"):
        load_measurement(tmp_path / "absent.json", "--from")
    with pytest.raises(InputError, match="cannot be read"):
        load_measurement(tmp_path)


def test_published_measurements_can_still_be_read() -> None:
    published = [path for path in (Path(__file__).parents[2] / "results").rglob("*.json") if path.name == "bench.json"]
    for path in (*published, Path(__file__).parents[2] / "results" / "baseline.json"):
        measurement = load_measurement(path)
        VALIDATOR.validate(measurement)
        assert workload_hash(measurement["workload"]) == measurement["workload"]["hash"]
    assert published
