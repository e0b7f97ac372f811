"""What else a job loads to draft with, a smaller model or weights of fewer bits: what it needs,
what is kept of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import make_checkpoint
from tests.helpers import first, read_json, refused
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.jobs.config import RunConfig
from tswift.jobs.job import start
from tswift.jobs.resuming import resume
from tswift.loading.model import load
from tswift.loading.plan import ModelPlan, plan_model
from tswift.memory import Demand, preflight
from tswift.models.config import ModelConfig

PROMPT = "The ship had lain three days becalmed, and nobody spoke."


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    changes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    return make_checkpoint(tmp_path_factory.mktemp("small") / "m", **changes)


def _start(checkpoint: Path, folder: Path, **changes):
    """A run of 6 tokens that is made in ``run``, ready to begin."""
    (folder / "prompt.txt").write_text(PROMPT)
    asked = {
        "length": 6,
        "method": "standalone",
        "prompt": str(folder / "prompt.txt"),
        "out": folder / "run",
    }
    return start(RunConfig.of(**{**asked, "model": str(checkpoint), **changes}), ["tswift"])


def _run(job) -> dict[str, Any]:
    """The record of a run, which it makes to its end."""
    job.run(lambda *given: None)
    return read_json(job.folder.path / "run.json")


def _resume(folder: Path, **asked):
    return resume(folder / "run", asked, False, ["tswift"])


def _plain(checkpoint: Path, folder: Path, length: int, **options: str):
    """Plain decoding, which draws the same tokens and names nothing to draft with."""
    job = _start(checkpoint, folder, method="ar", length=length, out=folder / "plain", **options)
    assert "draft" not in _run(job)["model"]
    return job


@pytest.mark.slow
def test_a_resumed_run_takes_it_again_and_says_if_it_is_another(checkpoint, small, tmp_path):
    own = make_checkpoint(
        tmp_path / "own", hidden_size=16, num_hidden_layers=1, intermediate_size=48
    )
    record = _run(_start(checkpoint, tmp_path, draft_model=str(own)))
    assert record["options"]["draft_model"] == record["model"]["draft"]["name"] == str(own)
    assert re.fullmatch("[0-9a-f]{64}", record["model"]["draft"]["weights"])
    job = _resume(tmp_path, length=8)
    assert job.model.draft_name == str(own)
    _run(job)
    weights = load_file(own / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    for asked in ({"length": 10}, {"length": 12, "draft_model": str(small)}):
        job = _resume(tmp_path, **asked)
        record = _run(job)
    assert job.tokens == _plain(checkpoint, tmp_path, 12).tokens
    assert [session["draft"]["name"] for session in record["resumed"]] == [
        str(own),
        str(own),
        str(small),
    ]
    with refused(r"^draft_model: there is no folder '/nowhere'$"):
        _resume(tmp_path, length=14, draft_model="/nowhere")


def _preflight(checkpoint: Path, length: int, method: str, draft):
    plan = plan_model(ModelConfig(model=str(checkpoint), draft_model=str(draft)))
    return preflight(plan, Demand(3, length, method, DraftOptions()))


def test_it_is_foreseen_where_nobody_can_say_how_many_heads_the_model_has(
    checkpoint, small, monkeypatch
):
    known = _preflight(checkpoint, 50, "standalone", small)
    monkeypatch.setattr(ModelPlan, "heads_count", None)
    assert _preflight(checkpoint, 50, "standalone", small) == known


@pytest.mark.parametrize("method", first(1, ["standalone", "auto"]))
def test_too_few_positions(method, checkpoint, small):
    with refused() as caught:
        _preflight(checkpoint, 62, method, small)
    wanted = (
        "draft_model: at least 3 prompt tokens and 62 new ones need 65 positions, the draft model "
        "has 64"
    )
    assert str(caught.value) == wanted
    model = load(str(checkpoint), draft_model=str(small))
    begin(model, Request(prompt=[1, 2, 3], length=61, method=method))
    begin(model, Request(prompt=[1, 2, 3], length=62, method="ar"))  # which does not look at it
    plain = _preflight(checkpoint, 50, "ar", small)
    assert "draft model" not in plain.loaded
    assert "draft model's KV" not in plain.caches
    with refused(r"^draft_model: 3 prompt tokens and 62 new ones need 65 positions"):
        begin(model, Request(prompt=[1, 2, 3], length=62, method=method))


def test_another_vocabulary_is_seen_before_anything_is_loaded(checkpoint, tmp_path):
    other = make_checkpoint(tmp_path / "other", vocab_size=321)
    with refused(r"^draft_model: .* has a vocabulary of 321, .* has 320$"):
        _preflight(checkpoint, 5, "standalone", other)
    with refused(r"^draft_model: there is no folder '/nowhere'$"):
        _preflight(checkpoint, 5, "standalone", "/nowhere")
