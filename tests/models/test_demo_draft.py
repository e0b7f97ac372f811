"""The bundled draft model: small, plain transformers, and of use to the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tswift
from tswift.decoding.params import SamplingParams
from tswift.decoding.stats import DecodeStats
from tswift.engine import begin
from tswift.models.checkpoint import fingerprint_of
from tswift.models.config import DEMO_DRAFT
from tswift.models.load import LoadedModel
from tswift.training.tasks import measure_agreement

FOLDER = Path(tswift.__file__).parent / "models" / "demo" / "draft"
NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return tswift.load(dtype="float32", device="cpu", draft_model=DEMO_DRAFT)


def test_it_is_small_and_plain_transformers_loads_it(demo: LoadedModel) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_300_000
    plain = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert 450_000 < plain.num_parameters() < 550_000
    assert demo.draft is not None
    assert fingerprint_of(demo.draft.model) == fingerprint_of(plain)
    assert demo.draft.max_positions == demo.target.max_positions


def test_it_is_a_model_of_its_own() -> None:
    assert tswift.load(DEMO_DRAFT, device="cpu").heads is None


def test_it_draws_what_the_model_draws(demo: LoadedModel) -> None:
    text = demo.encode(NOVEL.read_text())[:1025]
    assert demo.draft is not None
    score = measure_agreement(demo.target, demo.draft, text, SamplingParams())
    assert score.agreement > 0.35
    assert score.target_loss < score.loss < score.target_loss + 1


@pytest.mark.parametrize("method", ["standalone", "triforce"])
def test_it_drafts_unasked_and_changes_no_token(demo: LoadedModel, method: str) -> None:
    prompt = demo.encode(NOVEL.read_text())[:200]
    texts = []
    for name in ("ar", method):
        run = begin(demo, prompt, 80, method=name, seed=3)
        stats, tokens = DecodeStats(run.depth), []
        for step in run.steps():
            stats.add(step)
            tokens += step.tokens
        texts.append(tokens[:80])
    assert texts[0] == texts[1]
    assert stats.tokens_per_step > 1.3
