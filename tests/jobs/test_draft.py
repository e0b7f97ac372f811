"""A smaller model that a job drafts with: which one, what it needs, and what is kept of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import make_checkpoint
from tswift import engine
from tswift.drafting.options import DraftOptions
from tswift.engine import begin, preflight
from tswift.errors import InputError
from tswift.jobs.config import RunConfig
from tswift.jobs.start import resume, start
from tswift.models.load import inspect_model, load

PROMPT = "The ship had lain three days becalmed, and nobody spoke."


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return make_checkpoint(tmp_path_factory.mktemp("small") / "m", **changes)


def _settings(checkpoint: Path, tmp_path: Path, **changes: object) -> RunConfig:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    asked = {"length": 6, "method": "standalone", "prompt": str(tmp_path / "prompt.txt"), "out": tmp_path / "run"}
    return RunConfig(**{**asked, "model": str(checkpoint), **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_keeps_its_name_and_weights(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    job = start(_settings(checkpoint, tmp_path, draft_model=str(small)), ["tswift"])
    assert job.model.draft is not None
    job.run(lambda *given: None)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["options"]["draft_model"] == str(small)
    assert record["model"]["draft"]["name"] == str(small)
    assert re.fullmatch("[0-9a-f]{64}", record["model"]["draft"]["weights"])
    plain = start(_settings(checkpoint, tmp_path, method="ar", out=tmp_path / "plain"), ["tswift"])
    assert plain.model.draft is None
    plain.run(lambda *given: None)
    assert "draft" not in json.loads((tmp_path / "plain" / "run.json").read_text())["model"]
    assert (tmp_path / "plain" / "tokens.u32").read_bytes() == (tmp_path / "run" / "tokens.u32").read_bytes()


def test_a_resumed_run_takes_it_again_and_says_if_it_is_another(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    own = make_checkpoint(tmp_path / "own", hidden_size=16, num_hidden_layers=1, intermediate_size=48)
    job = start(_settings(checkpoint, tmp_path, draft_model=str(own)), ["tswift"])
    job.run(lambda *given: None)
    going_on = resume(tmp_path / "run", {"length": 8}, False, ["tswift"])
    assert going_on is not None
    assert going_on.model.draft_name == str(own)
    assert not [note for note in going_on.notes if "draft model" in note]
    going_on.run(lambda *given: None)
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    for asked, name in (({}, own), ({"draft_model": str(small)}, small)):
        length = 10 if name is own else 12
        going_on = resume(tmp_path / "run", {"length": length, **asked}, False, ["tswift"])
        assert going_on is not None
        said = f"the draft model {name} is not the one that the run was begun with; no token depends on it"
        assert said in going_on.notes
        going_on.run(lambda *given: None)
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
