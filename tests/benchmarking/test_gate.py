"""The gate, one change of a measurement a row: which comparisons fail and which do not;
the files that it reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarking.helpers import changed, make_measurement, points_of, typed
from tests.helpers import first, read_json, refused
from tests.rows import every_row
from tswift.benchmarking import gate
from tswift.benchmarking.gate import Verdict, changes_table, parse_rule, refuse_foreign
from tswift.benchmarking.record import (
    Measurement,
    encode,
    load_measurement,
    read,
    to_json,
    workload_hash,
)

# tokenswift: alpha 0.62 and 0.63 by seed; ar, medusa and tokenswift at 500 and 1,000 tokens
BASE = make_measurement()
GOOD = make_measurement(
    prefills=(8,), lens=(20, 40), seeds=(0,), repeats=2, ar="sampled", roofline=True
)
SIMULATED = make_measurement(repeats=2, simulated={"weights": False, "alpha": 0.6})
RESULTS = Path(__file__).parents[2] / "results"
COUNTERS = ("alpha", "beta", "tokens_per_step", "passes")
TIMES = (("speedup", "speedup"), ("tokens_per_s", "tokens_per_second"))

Change = Callable[[dict[str, Any]], object]


def compare(ours: dict[str, Any], baseline: dict[str, Any], *rules: str) -> list[Verdict]:
    return gate.compare(typed(ours), typed(baseline), [parse_rule(rule) for rule in rules])


def scaled(name: str, *factors: float, method: str = "tokenswift") -> Change:
    """Scale a figure of a method, by one factor or by one for each of its four points:
    seed by seed.
    """

    def scale(measurement: dict[str, Any]):
        for index, point in enumerate(points_of(measurement, method)):
            # passes are whole
            point[name] = type(point[name])(point[name] * factors[index % len(factors)])

    return scale


def blanked(name: str, *methods: str) -> Change:
    return lambda m: [
        point.update({name: None}) for method in methods for point in points_of(m, method)
    ]


def shortened(measurement: dict[str, Any]):
    """medusa did not reach the second length."""
    for sample in measurement["samples"]:
        sample["points"] = sample["points"][: 1 if sample["method"] == "medusa" else 2]


def without_last(measurement: dict[str, Any]):
    measurement["samples"].pop()


def wrong_text(measurement: dict[str, Any]):
    measurement["samples"][1].update(same_as_ar=False, explained=False, first_difference=321)


def environment(**values) -> Change:
    return lambda measurement: measurement["environment"].update(values)


def unchanged(measurement: dict[str, Any]):
    """Leave it as it is."""


@every_row(
    ("rule", "change", "failed"),
    [
        *[(rule, unchanged, 0) for rule in (*COUNTERS, "speedup:10%", "tokens_per_s:10%")],
        # lower is worse, of a counter by draw, of a time by cell; of passes higher is
        *[(name, scaled(name, 0.8), 4) for name in ("alpha", "beta", "tokens_per_step")],
        *[(name, scaled(name, 1.2), 0) for name in ("alpha", "beta", "tokens_per_step")],
        *[(f"{name}:10%", scaled(of, 0.8), 2) for name, of in TIMES],
        *[(f"{name}:10%", scaled(of, 1.2), 0) for name, of in TIMES],
        ("passes", scaled("passes", 1.01), 4),
        ("passes", scaled("passes", 0.8), 0),
        # the tolerance: what is lost up to it passes, absolute or a share
        ("speedup:10%", scaled("speedup", 0.9), 0),
        ("speedup:10%", scaled("speedup", 0.899), 2),
        ("alpha:0.063", scaled("alpha", 0.9), 0),
        ("alpha:0.0625", scaled("alpha", 0.9), 2),
        ("passes:5%", scaled("passes", 1.05), 0),
        ("passes:4.8%", scaled("passes", 1.05), 4),
        # one rule looks at one metric
        ("beta", scaled("alpha", 0.5), 0),
        # one seed's gain does not make up for another's loss, but for times, which are compared as
        # means
        ("alpha", scaled("alpha", 0.9, 1, 1.1, 1), 1),
        ("speedup:1%", scaled("speedup", 0.8, 1, 1.2, 1, method="medusa"), 0),
        # what is missing has regressed
        ("alpha", shortened, 2),
        ("passes:1000", without_last, 2),
        ("speedup:90%", without_last, 2),
        ("speedup:10%", blanked("speedup", "medusa"), 2),
        # a text that is not plain decoding's fails under any rule
        ("speedup:90%", wrong_text, 1),
        # other versions are no other machine
        ("speedup:10%", environment(torch="2.0", git_commit=None), 0),
    ],
)
def test_what_fails(rule, change, failed):
    verdicts = compare(changed(BASE, change), BASE, rule)
    assert sum(not verdict.ok for verdict in verdicts) == failed


@every_row("change", [shortened, without_last, blanked("speedup", "medusa"), wrong_text])
def test_what_only_the_baseline_lacks_does_not_fail(change):
    verdicts = compare(BASE, changed(BASE, change), "alpha", "speedup:1%")
    assert all(verdict.ok for verdict in verdicts)


FOREIGN = "another machine (gpu 'NVIDIA H200' there, None here)"
TWICE = make_measurement(repeats=2)


@every_row(
    ("ours", "rule", "change", "force", "message"),
    [
        (
            BASE,
            "alpha",
            lambda m: m["workload"].update(seeds=[0], ar="sampled"),
            True,
            "workload: ar, seeds differ",
        ),
        (
            BASE,
            "alpha",
            lambda m: m["workload"].update(heads=None),
            True,
            "another workload: heads differs",
        ),
        (BASE, "alpha", environment(cpu="another"), False, None),
        (TWICE, "speedup:10%", environment(gpu="NVIDIA H200"), False, FOREIGN),
        (
            TWICE,
            "tokens_per_s:10%",
            environment(threads=64),
            False,
            "--force compares it all the same",
        ),
        (TWICE, "speedup:10%", environment(cpu="another"), True, None),
        (
            TWICE,
            "speedup:10%",
            blanked("speedup", "ar", "medusa", "tokenswift"),
            False,
            "baseline holds no speedup",
        ),
        (BASE, "alpha:0.62", unchanged, False, None),
        (
            BASE,
            "alpha:0.63",
            unchanged,
            False,
            "alpha can never fall by more than 0.63, the baseline has 0.63 at most",
        ),
        (TWICE, "speedup:10", unchanged, False, "a share of it is written speedup:10%"),
        (BASE, "passes:1000000", unchanged, False, None),
        (SIMULATED, "alpha", unchanged, False, "fail_on: alpha follows from --simulate-alpha"),
        (SIMULATED, "speedup:10%", unchanged, False, None),
        # times want repeats
        (
            BASE,
            "speedup:10%",
            unchanged,
            False,
            "repeats: speedup varies from run to run and wants at least 2 repeats",
        ),
        (
            TWICE,
            "speedup:10%",
            lambda m: m.update(samples=m["samples"][:6]),
            False,
            "repeats, the baseline has 1",
        ),
    ],
)
def test_which_baselines_are_refused(ours, rule, change, force, message):
    arguments = (
        typed(ours),
        typed(changed(ours, change)),
        [parse_rule(rule)],
        1 if ours is BASE else 2,
        force,
    )
    if message is None:
        return refuse_foreign(*arguments)
    with refused(re.escape(message)):
        refuse_foreign(*arguments)


BAD_TOLERANCES = [
    "",
    "%",
    "-1",
    "-0.1%",
    "nan",
    "inf",
    "1e999",
    "1_0",
    "x",
    "0:0",
    " 1 2",
    "250%",
    "100%",
]


@every_row(
    "rule", [*(f"alpha:{x}" for x in BAD_TOLERANCES), "", "alph:0", "speedup", "tokens_per_s"]
)
def test_rules_that_are_refused(rule):
    with refused(r"^fail_on: "):
        parse_rule(rule)


@given(st.floats(0, 99.9))
def test_a_percentage_is_a_share_of_the_baseline(percent):
    rule = parse_rule(f"speedup:{percent!r}%")
    assert rule.limit(2.0) == pytest.approx(2 - percent / 50)
    assert rule.allows(2.0, rule.limit(2.0))
    assert not rule.allows(2.0, rule.limit(2.0) - 1e-6)


def test_the_table_has_what_moved_and_says_simulated():
    ours = changed(BASE, lambda m: (scaled("alpha", 0.9, 0.7, 0.8, 1.0)(m), wrong_text(m)))
    table = changes_table(compare(ours, BASE, "alpha"))
    assert table.title == "4 of 13 comparisons regressed"
    assert table.notes == ["Unchanged: 9."]
    other = "REGRESSED: prompt novel, seed 0: other tokens than AR from token 321"
    assert table.rows[0][:5] == ["same_as_ar", "medusa", other, "1,024", "-"]
    places = [row[2:5] for row in table.rows[1:]]
    assert sorted(places) == [
        ["REGRESSED: prompt novel, seed 0", "1,024", "1,000"],
        ["REGRESSED: prompt novel, seed 0", "1,024", "500"],
        ["REGRESSED: prompt novel, seed 1", "1,024", "500"],
    ]
    moved = table.rows[1 + places.index(["REGRESSED: prompt novel, seed 1", "1,024", "500"])]
    assert moved[5:] == ["0.63", "0.504", "-0.126", "0.63"]
    slower = changed(SIMULATED, scaled("speedup", 0.5, method="medusa"))
    rows = changes_table(compare(slower, SIMULATED, "speedup:10%"), simulated=True).rows
    assert [row[1] for row in rows] == ["medusa (simulated)"] * 2
    lacking = changes_table(compare(changed(BASE, without_last), BASE, "speedup:90%")).rows
    assert lacking[0][2] == "REGRESSED: 1 of the baseline's runs not measured"


def test_written_and_read_back(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(encode(GOOD))
    assert to_json(load_measurement(path)) == GOOD
    assert len(path.read_text().splitlines()) < 150  # a sample per line


def test_an_integer_stays_one():
    whole = changed(GOOD, lambda m: m["samples"][0].update(prefill_seconds=2))
    assert json.dumps(to_json(typed(whole)), sort_keys=True) == json.dumps(whole, sort_keys=True)


def test_the_hash_is_of_the_content():
    workload = GOOD["workload"]
    assert (
        workload_hash(workload)
        == workload["hash"]
        == workload_hash(dict(reversed(workload.items())))
    )
    assert (
        workload_hash({**workload, "hash": "another", "lens": tuple(workload["lens"])})
        == workload["hash"]
    )
    for name in workload.keys() - {"hash"}:
        assert workload_hash({**workload, name: "another"}) != workload["hash"]


@every_row(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is not a bench.json"),
        (b'{"schema": 1}', "is not a bench.json"),
        (b'{"kind": "bench", "schema": 2}', "schema version 2, this tswift reads 1"),
        (
            lambda m: m["samples"][1]["points"][0].pop("passes"),
            r"\$.samples\[1\].points\[0\].passes: is missing",
        ),
        *[
            (lambda m, name=name: m.pop(name), rf"\$.{name}: is missing")
            for name in ("environment", "samples", "simulated", "state")
        ],
        *[
            (
                lambda m, name=name, value=value: m["samples"][1]["points"][0].update(
                    {name: value}
                ),
                rf"\[0\].{name}: ",
            )
            for name in ("seconds", "tokens", "of_floor", "newer")
            for value in (math.nan, math.inf, 10**400, True, "1", None)
            if value is not None or name in ("seconds", "tokens")
        ],
        *[
            (change, "is damaged")
            for change in (
                lambda m: m["workload"].update(methods=[["ar"]]),
                lambda m: m["workload"].update(extra=1),
                lambda m: m["samples"].append(3),
                lambda m: m["samples"][0]["points"][0].update(alpha=1.1),
                lambda m: m["samples"][0]["slices"][0].append(1),
                lambda m: m.update(started="yesterday"),
                lambda m: m.update(simulated=True),
                lambda m: m["workload"].update(simulated={"weights": True, "alpha": None}),
                lambda m: m.update(machine={"bandwidth": 0, "flops": 1e9}),
            )
        ],
        (
            lambda m: m["workload"]["sampling"].update(min_p=math.nan),
            r"\$.workload.sampling.min_p: must be a text or numbers, got nan",
        ),
        (
            lambda m: m["workload"]["sampling"].update(banned=[None]),
            r"\$.workload.sampling.banned: must be a text or numbers, got \[None\]",
        ),
        (lambda m: m["samples"].clear(), "holds no samples"),
        (lambda m: m.update(state="running"), "did not run to its end"),
        (lambda m: m.update(options={"shard": [1, 2]}), "is a shard"),
    ],
)
def test_what_is_no_measurement(tmp_path, content, message):
    path = tmp_path / "baseline.json"
    path.write_bytes(
        content if isinstance(content, bytes) else json.dumps(changed(GOOD, content)).encode()
    )
    with refused(f"^against: .*baseline.json .*{message}") as caught:
        load_measurement(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path):
    with refused(r"^against: there is no file .*absent.json"):
        load_measurement(tmp_path / "absent.json")


RECORDS = sorted(
    (
        path
        for path in RESULTS.rglob("*.json")
        if path.name in ("baseline.json", "suite.json", "unfinished.json")
        or path.name.startswith("bench")
    ),
    key=lambda path: path.stat().st_size,
)


@pytest.mark.parametrize(
    "path", first(len(RECORDS) // 2, RECORDS), ids=lambda path: str(path.relative_to(RESULTS))
)
def test_records_of_earlier_versions_are_read_and_written_as_they_are(path):
    content = read_json(path)
    record = read(path, "against")
    written = to_json(record)
    if isinstance(record, Measurement):
        # an integer stays one
        assert json.dumps(written, sort_keys=True) == json.dumps(content, sort_keys=True)
        if record.state == "finished":
            verdicts = gate.compare(
                record, load_measurement(path), [parse_rule("alpha"), parse_rule("speedup:0%")]
            )
            assert verdicts
            assert {verdict.change for verdict in verdicts} <= {0, None}
    else:  # what follows from the measurements is not read
        assert content.keys() - written.keys() <= {"rows", "published", "pairs", "conclusion"}
        assert all(content[name] == value for name, value in written.items())
    for measurement in record.parts.values():
        assert workload_hash(to_json(measurement.workload)) == measurement.workload.hash


def test_results_hold_records():
    assert len(RECORDS) > 30
