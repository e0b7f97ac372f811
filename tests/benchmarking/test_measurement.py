"""bench.json: its schema, written, read, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.benchmarking.helpers import changed, make_measurement
from tswift.benchmarking.measurement import (
    encode,
    file_name,
    given_alpha,
    load_measurement,
    machine,
    simulation,
    workload_hash,
)
from tswift.errors import InputError

SCHEMA = json.loads((files("tswift.benchmarking") / "bench.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
GOOD = make_measurement(ar="sampled")


@pytest.mark.parametrize(
    "grid",
    [
        {"ar": "sampled"},
        {"ar": "full", "methods": ("ar", "ar-reference"), "repeats": 2},
        {"roofline": True},
        {"simulated": {"weights": True, "alpha": None}},
        {"simulated": {"weights": False, "alpha": 0.9}},
    ],
)
def test_the_schema_takes_a_measurement(grid: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(json.loads(encode(make_measurement(**grid))))


def test_the_schema_leaves_room_where_it_should() -> None:
    def add(measurement: dict[str, Any]) -> None:
        measurement["environment"]["governor"] = "performance"
        measurement["workload"]["drafting"]["medusa"]["new"] = 1

    VALIDATOR.validate(changed(GOOD, add))


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "missing at the top": lambda m: m.pop("ended"),
    "missing in environment": lambda m: m["environment"].pop("cpu"),
    "missing in workload": lambda m: m["workload"].pop("prefills"),
    "missing in a sample": lambda m: m["samples"][0].pop("same_as_ar"),
    "missing in a point": lambda m: m["samples"][0]["points"][0].pop("alpha"),
    "extra at the top": lambda m: m.update(extra=1),
    "extra in workload": lambda m: m["workload"].update(extra=1),
    "extra in sampling": lambda m: m["workload"]["sampling"].update(extra=1),
    "extra in a prompt": lambda m: m["workload"]["prompts"][0].update(text="..."),
    "extra in a sample": lambda m: m["samples"][0].update(extra=1),
    "extra in a point": lambda m: m["samples"][0]["points"][0].update(extra=1),
    "schema": lambda m: m.update(schema=2),
    "kind": lambda m: m.update(kind="run"),
    "date": lambda m: m.update(started="yesterday"),
    "string for a number": lambda m: m["samples"][0]["points"][0].update(seconds="1.0"),
    "number for a boolean": lambda m: m["samples"][0].update(estimated=1),
    "alpha above 1": lambda m: m["samples"][0]["points"][0].update(alpha=1.1),
    "null that may not be": lambda m: m["samples"][0].update(seed=None),
    "slice of three": lambda m: m["samples"][0]["slices"][0].append(1),
    "slice of one": lambda m: m["samples"][0]["slices"][0].pop(),
    "probe without times": lambda m: m["samples"][0]["probes"][0][1].clear(),
    "other ar": lambda m: m["workload"].update(ar="guessed"),
    "drafting that is no object": lambda m: m["workload"]["drafting"].update(medusa=3),
    "simulated, and nothing says how": lambda m: m.update(simulated=True),
    "not simulated, and something says how": lambda m: m["workload"].update(simulated={"weights": True, "alpha": None}),
    "machine of one figure": lambda m: m.update(machine={"bandwidth": 1e9}),
    "machine without memory": lambda m: m.update(machine={"bandwidth": 0, "flops": 1e9}),
    "floor below nothing": lambda m: m["samples"][0]["points"][0].update(floor_seconds=-1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_the_schema_refuses(name: str) -> None:
    assert not VALIDATOR.is_valid(changed(GOOD, BAD[name]))


def test_a_bad_hash_is_refused() -> None:
    measurement = make_measurement()
    measurement["workload"]["hash"] = "abc"
    assert not VALIDATOR.is_valid(measurement)


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(encode(GOOD))
    assert load_measurement(path) == GOOD
    assert len(path.read_text().splitlines()) < 150  # a sample per line


def test_written_without_samples() -> None:
    assert json.loads(encode({**GOOD, "samples": []})) == {**GOOD, "samples": []}


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
        (encode(changed(GOOD, lambda m: m["samples"][1]["points"][0].pop("passes"))).encode(), "lacks 'passes'"),
        (encode(changed(GOOD, lambda m: m["environment"].pop("cpu"))).encode(), "lacks 'cpu'"),
        (encode(changed(GOOD, lambda m: m["samples"].append(3))).encode(), "is damaged"),
        (encode(changed(GOOD, lambda m: m["samples"].clear())).encode(), "holds no samples"),
        (encode(changed(GOOD, lambda m: m.pop("state"))).encode(), "lacks 'state'"),
        (encode(changed(GOOD, lambda m: m.update(state="running"))).encode(), "did not run to its end, it is running"),
        (encode(changed(GOOD, lambda m: m.update(state="interrupted"))).encode(), "did not run to its end"),
    ],
)
def test_what_is_no_measurement(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^--against: .*baseline.json .*{message}") as caught:
        load_measurement(path)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--from: there is no file .*absent.json"):
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


def test_what_is_simulated_in_words() -> None:
    def words(**simulated: Any) -> tuple[str, float | None]:
        measurement = make_measurement(simulated=simulated or None)
        return simulation(measurement), given_alpha(measurement)

    assert words() == ("", None)
    assert words(weights=True, alpha=None) == ("random weights", None)
    assert words(weights=False, alpha=0.9) == ("acceptance set to 0.9", 0.9)
    assert words(weights=True, alpha=1.0) == ("random weights, acceptance set to 1", 1.0)


def test_file_names() -> None:
    assert [file_name(name, simulated) for name in ("bench.json", "time.svg") for simulated in (False, True)] == [
        *("bench.json", "bench-simulated.json"),
        *("time.svg", "time-simulated.svg"),
    ]


def test_the_machine_in_words() -> None:
    assert machine({"gpu": None, "cpu": "Xeon", "threads": 2}) == "Xeon, 2 threads"
    assert machine({"gpu": "NVIDIA H200", "cpu": "Xeon", "threads": 2}) == "NVIDIA H200"
