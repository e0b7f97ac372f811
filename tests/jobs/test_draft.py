"""What else a job loads to draft with, a smaller model or weights of fewer bits: what it needs, what is kept of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from tests import fake_torchao
from tests.benchmarking.helpers import MACHINE
from tests.conftest import make_checkpoint
from tswift import engine
from tswift.benchmarking.config import BenchOptions, Plan, configure
from tswift.benchmarking.gate import schema_of
from tswift.benchmarking.roofline import floor_of
from tswift.benchmarking.run import begin_measurement
from tswift.benchmarking.workloads import Prompt
from tswift.drafting.options import DraftOptions
from tswift.engine import begin, preflight
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.job import resume, start
from tswift.models.load import inspect_model, load

PROMPT = "The ship had lain three days becalmed, and nobody spoke."


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return make_checkpoint(tmp_path_factory.mktemp("small") / "m", **changes)


def _settings(checkpoint: Path, tmp_path: Path, **changes: object) -> RunConfig:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    asked = {"length": 6, "method": "standalone", "prompt": str(tmp_path / "prompt.txt"), "out": tmp_path / "run"}
    return RunConfig(**{**asked, "model": str(checkpoint), **changes})


def test_a_resumed_run_takes_it_again_and_says_if_it_is_another(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    own = make_checkpoint(tmp_path / "own", hidden_size=16, num_hidden_layers=1, intermediate_size=48)
    start(_settings(checkpoint, tmp_path, draft_model=str(own)), ["tswift"]).run(lambda *given: None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["draft_model"] == record["model"]["draft"]["name"] == str(own)
    assert re.fullmatch("[0-9a-f]{64}", record["model"]["draft"]["weights"])
    going_on = resume(tmp_path / "run", {"length": 8}, False, ["tswift"])
    assert going_on.model.draft_name == str(own)
    assert not [note for note in going_on.notes if "draft model" in note]
    going_on.run(lambda *given: None)
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    for asked, name in (({}, own), ({"draft_model": str(small)}, small)):
        length = 10 if name is own else 12
        going_on = resume(tmp_path / "run", {"length": length, **asked}, False, ["tswift"])
        said = f"the draft model {name} is not the one that the run was begun with; no token depends on it"
        assert said in going_on.notes
        going_on.run(lambda *given: None)
    plain = start(_settings(checkpoint, tmp_path, method="ar", length=12, out=tmp_path / "plain"), ["tswift"])
    plain.run(lambda *given: None)
    assert "draft" not in json.loads((tmp_path / "plain" / "run.json").read_text())["model"]
    assert plain.tokens == going_on.tokens
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [session["draft"]["name"] for session in record["resumed"]] == [str(own), str(own), str(small)]
    with pytest.raises(InputError, match=r"^draft_model: there is no folder '/nowhere'$"):
        resume(tmp_path / "run", {"length": 14, "draft_model": "/nowhere"}, False, ["tswift"])


def test_it_is_foreseen_where_nobody_can_say_how_many_heads_the_model_has(
    checkpoint: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = preflight(str(checkpoint), 3, 50, "standalone", DraftOptions(), draft_model=str(small))
    monkeypatch.setattr(
        engine, "inspect_model", lambda *given, **more: replace(inspect_model(*given, **more), heads=None)
    )
    found = preflight(str(checkpoint), 3, 50, "standalone", DraftOptions(), draft_model=str(small))
    assert replace(found, heads_bytes=known.heads_bytes) == known


@pytest.mark.parametrize("method", ["standalone", "auto"])
def test_too_few_positions(method: str, checkpoint: Path, small: Path) -> None:
    with pytest.raises(InputError) as caught:
        preflight(str(checkpoint), 3, 62, method, DraftOptions(), draft_model=str(small))
    wanted = "draft_model: at least 3 prompt tokens and 62 new ones need 65 positions, the draft model has 64"
    assert str(caught.value) == wanted
    model = load(str(checkpoint), draft_model=str(small))
    begin(model, [1, 2, 3], 61, method=method)
    begin(model, [1, 2, 3], 62, method="ar")  # which does not look at it
    plain = preflight(str(checkpoint), 3, 50, "ar", DraftOptions(), draft_model=str(small))
    assert (plain.draft_bytes, plain.draft_kv_bytes) == (0, 0)
    with pytest.raises(InputError, match=r"^draft_model: 3 prompt tokens and 62 new ones need 65 positions"):
        begin(model, [1, 2, 3], 62, method=method)


def test_another_vocabulary_is_seen_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", vocab_size=321)
    with pytest.raises(InputError, match=r"^draft_model: .* has a vocabulary of 321, .* has 320$"):
        preflight(str(checkpoint), 3, 5, "standalone", DraftOptions(), draft_model=str(other))
    with pytest.raises(InputError, match=r"^draft_model: there is no folder '/nowhere'$"):
        preflight(str(checkpoint), 3, 5, "standalone", DraftOptions(), draft_model="/nowhere")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)


def test_a_run_with_drafting_weights_says_so_and_goes_on_with_others(
    checkpoint: Path, tmp_path: Path, torchao: None
) -> None:
    job = start(_settings(checkpoint, tmp_path, length=20, method="magicdec", draft_weights="int8"), ["tswift"])
    assert "drafting passes in int8" in job.statement()[0]
    job.run(lambda *given: None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["draft_weights"] == record["model"]["draft_weights"] == "int8"
    assert record["model"]["quantization"] is None
    lengths = {"none": 30, "fp8": 40, None: 50}  # the last goes on as the run was begun
    for kind, length in lengths.items():
        asked = {"length": length, **({} if kind is None else {"draft_weights": kind})}
        going_on = resume(tmp_path / "run", asked, False, ["tswift"])
        assert (going_on.model.drafting is None) is (kind == "none")
        going_on.run(lambda *given: None)
    assert [
        session["draft_weights"] for session in json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    ] == [None, "fp8", "int8"]
    plain = start(_settings(checkpoint, tmp_path, method="ar", length=50, out=tmp_path / "plain"), ["tswift"])
    plain.run(lambda *given: None)
    assert going_on.tokens == plain.tokens
    assert "draft_weights" not in json.loads((tmp_path / "plain" / "run.json").read_text())["model"]


def test_drafting_weights_are_refused_where_no_pass_of_the_model_drafts(
    checkpoint: Path, tmp_path: Path, torchao: None
) -> None:
    with pytest.raises(InputError, match=r"^draft_weights: reuse does not draft with the model itself; "):
        start(_settings(checkpoint, tmp_path, method="reuse", draft_weights="int8"), ["tswift"])
    start(_settings(checkpoint, tmp_path, length=20, method="ar"), ["tswift"]).run(lambda *given: None)
    with pytest.raises(InputError, match=r"^draft_weights: must be one of none, int8, fp8, int4, got 'int9'"):
        resume(tmp_path / "run", {"length": 30, "draft_weights": "int9"}, False, ["tswift"])
    for length in (20, 25):  # finished, and gone on with
        with pytest.raises(InputError, match=r"^draft_weights: ar does not draft with the model itself; "):
            resume(tmp_path / "run", {"length": length, "draft_weights": "int8"}, False, ["tswift"])


def test_drafting_weights_of_methods_side_by_side(checkpoint: Path, torchao: None) -> None:
    methods = ("ar", "medusa", "magicdec")
    entry = BenchOptions(methods, model=str(checkpoint), device="cpu", drafting={"budget": 64}, draft_weights="int8")
    config = configure(entry)
    floor = floor_of(config, MACHINE)
    assert [floor.drafting[method].bits for method in methods] == [None, None, 8]
    prompt, plan = Prompt("p", tuple(range(1, 9))), Plan(prefills=(8,), lens=(20,), warmup=0)
    measurement = begin_measurement(config, [prompt], plan, ["tswift"], MACHINE)
    assert measurement["workload"]["draft_weights"] == "int8"
    jsonschema.validate(json.loads(json.dumps(measurement)), schema_of("bench"))
    plain = begin_measurement(
        configure(BenchOptions(methods, model=str(checkpoint), device="cpu")), [prompt], plan, ["tswift"], MACHINE
    )
    assert "draft_weights" not in plain["workload"]
