"""The gate's rules, one change of a measurement a row: which comparisons fail and which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarking.helpers import changed, make_measurement, points_of
from tswift.benchmarking.gate import compare, parse_rule
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
