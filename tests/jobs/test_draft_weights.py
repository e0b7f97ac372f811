"""``--draft-weights`` in a job: who takes it, what is kept of it, and that a resumed run may have another."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests import fake_torchao
from tests.benchmarking.helpers import MACHINE
from tswift.benchmarking.config import BenchOptions, Plan, Prompt, configure
from tswift.benchmarking.gate import bench_schema
from tswift.benchmarking.roofline import floor_of
from tswift.benchmarking.run import begin_measurement
from tswift.benchmarking.suite_run import prepare
from tswift.benchmarking.suites import find_suite
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.start import resume, start

WORDS = ["tswift"]


@pytest.fixture(autouse=True)
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)


def _settings(checkpoint: Path, tmp_path: Path, **changes: object) -> RunConfig:
    (tmp_path / "prompt.txt").write_text("The ship had lain three days becalmed, and nobody spoke.")
    asked = {"length": 20, "method": "magicdec", "prompt": str(tmp_path / "prompt.txt"), "model": str(checkpoint)}
    return RunConfig(**{**asked, "device": "cpu", "out": tmp_path / "run", **changes})  # type: ignore[arg-type]


def _record(tmp_path: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((tmp_path / "run" / "run.json").read_text())


def test_a_run_says_so_and_goes_on_with_another(checkpoint: Path, tmp_path: Path) -> None:
    job = start(_settings(checkpoint, tmp_path, draft_weights="int8"), WORDS)
    assert "drafting passes in int8" in job.statement()[0]
    job.run(lambda *given: None)
    record = _record(tmp_path)
    assert record["options"]["draft_weights"] == record["model"]["draft_weights"] == "int8"
    assert record["model"]["quantization"] is None
    lengths = {"none": 30, "fp8": 40, None: 50}
    for kind, length in lengths.items():
        asked = {"length": length, **({} if kind is None else {"draft_weights": kind})}
        going_on = resume(tmp_path / "run", asked, False, WORDS)
        assert going_on is not None
        assert (going_on.model.drafting is None) is (kind == "none")
        going_on.run(lambda *given: None)
    assert [session["draft_weights"] for session in _record(tmp_path)["resumed"]] == [None, "fp8", "int8"]
    plain = start(_settings(checkpoint, tmp_path, method="ar", length=50, out=tmp_path / "plain"), WORDS)
    plain.run(lambda *given: None)
    assert going_on.tokens == plain.tokens
    assert "draft_weights" not in json.loads((tmp_path / "plain" / "run.json").read_text())["model"]


def test_a_run_begun_without_goes_on_with(checkpoint: Path, tmp_path: Path) -> None:
    start(_settings(checkpoint, tmp_path), WORDS).run(lambda *given: None)
    going_on = resume(tmp_path / "run", {"length": 25, "draft_weights": "int8"}, False, WORDS)
    assert going_on is not None
    assert going_on.model.draft_weights == "int8"
    going_on.run(lambda *given: None)
    with pytest.raises(InputError, match=r"^draft_weights: must be one of none, int8, fp8, int4, got 'int9'"):
        resume(tmp_path / "run", {"length": 30, "draft_weights": "int9"}, False, WORDS)


def test_it_is_refused_where_no_pass_of_the_model_drafts(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^draft_weights: reuse does not draft with the model itself; "):
        start(_settings(checkpoint, tmp_path, method="reuse", draft_weights="int8"), WORDS)
    start(_settings(checkpoint, tmp_path, method="ar"), WORDS).run(lambda *given: None)
    for length in (20, 25):  # finished, and gone on with
        with pytest.raises(InputError, match=r"^draft_weights: ar does not draft with the model itself; "):
            resume(tmp_path / "run", {"length": length, "draft_weights": "int8"}, False, WORDS)
    figure = find_suite("table12")
    with pytest.raises(InputError, match=r"^draft_weights: must be one of none, int8, fp8, int4, got 'int9'"):
        prepare(figure, BenchOptions(model=str(checkpoint), device="cpu", draft_weights="int9"), Plan(lens=(50,)))


def test_methods_side_by_side(checkpoint: Path) -> None:
    methods = ("ar", "medusa", "magicdec")
    entry = BenchOptions(methods, model=str(checkpoint), device="cpu", drafting={"budget": 64}, draft_weights="int8")
    config = configure(entry)
    floor = floor_of(config, MACHINE)
    assert floor is not None
    assert [floor.drafting[method].bits for method in methods] == [None, None, 8]
    prompt, plan = Prompt("p", tuple(range(1, 9))), Plan(prefills=(8,), lens=(20,), warmup=0)
    measurement = begin_measurement(config, [prompt], plan, WORDS, MACHINE)
    assert measurement["workload"]["draft_weights"] == "int8"
    jsonschema.validate(json.loads(json.dumps(measurement)), bench_schema())
    plain = begin_measurement(
        configure(BenchOptions(methods, model=str(checkpoint), device="cpu")), [prompt], plan, WORDS, MACHINE
    )
    assert "draft_weights" not in plain["workload"]
