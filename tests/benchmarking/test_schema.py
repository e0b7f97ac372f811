"""Our reader of JSON schemas says what a whole implementation of the language says."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarking.helpers import make_measurement
from tswift.benchmarking.schema import bench_schema, complaints


def _tolerant(schema: Any) -> Any:
    """The schema, with keys let through that it does not know, as our reader does, and without its conditions."""
    if isinstance(schema, list):
        return [_tolerant(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"if", "then", "else", *(["additionalProperties"] if schema.get("additionalProperties") is False else [])}
    return {name: _tolerant(value) for name, value in schema.items() if name not in dropped}


ORACLE = jsonschema.Draft202012Validator(_tolerant(bench_schema()))
GOOD = make_measurement(prefills=(8,), lens=(20, 40), seeds=(0,), repeats=2)
LEAVES = st.sampled_from(
    [None, True, False, 0, 1, -1, 0.5, 1.5, "", "x", "finished", "a" * 64, [], {}, [1], {"len": 1}]
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in inner for found in _places(item, (*place, key)))]


PLACES = _places(GOOD)[1:]


def test_is_the_one_in_the_package() -> None:
    assert bench_schema() == json.loads((files("tswift.benchmarking") / "bench.schema.json").read_text())


def test_a_good_one() -> None:
    assert not list(complaints(GOOD, bench_schema()))
    assert not list(complaints(make_measurement(roofline=True, ar="sampled"), bench_schema()))


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
    assert (not list(complaints(changed, bench_schema()))) == ORACLE.is_valid(changed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1", None, [1], {}])
def test_numbers_that_are_none(value: object) -> None:
    changed = copy.deepcopy(GOOD)
    changed["samples"][1]["points"][0]["seconds"] = value
    assert list(complaints(changed, bench_schema())) == ["is damaged (samples[1].points[0].seconds is no number)"]


def test_nothing_is_too_deep() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert not list(complaints({**GOOD, "more": deep}, bench_schema()))
