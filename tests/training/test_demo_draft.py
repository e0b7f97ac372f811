"""The recipe of the bundled draft model, from documents to a model card, in miniature."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import tswift
from tests.training.test_demo import WORDS
from tswift.errors import InputError
from tswift.training import demo_draft
from tswift.training.demo import divided
from tswift.training.draft_plan import DraftPlan


def test_six_documents_are_held_out() -> None:
    texts = [str(number) for number in range(300)]
    kept, held = divided(texts)
    assert held == ["0", "41", "82", "123", "164", "205"]
    assert sorted(kept + held, key=int) == texts


def test_the_recipe_makes_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, rng = tmp_path / "corpus", random.Random(1)
    corpus.mkdir()
    for number in range(50):
        (corpus / f"{number:02}.txt").write_text(" ".join(rng.choices(WORDS, k=100)))
    for name, value in (("POSITIONS", (0, 40)), ("WINDOW", 16), ("TEXTS", 2)):
        monkeypatch.setattr(demo_draft, name, value)
    path = tmp_path / "work" / "corpus" / "kept.parquet"
    demo_draft.keep_documents(str(corpus), path)
    plan = DraftPlan(str(path.parent), seq_len=32, batch=2, steps=3, warmup=1, held_out=1, device="cpu")
    demo_draft.build(str(corpus), tmp_path / "out", tmp_path / "work", plan, "Weather")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "{" not in card
    assert "Weather: the 48 documents" in card
    assert re.search(r"^\| agreement, last 512 tokens \| 0\.\d{3} \| 0\.\d{3} \|$", card, re.M)
    draft = tswift.load(draft=str(tmp_path / "out")).draft
    assert draft is not None
    assert draft.max_positions == 131_072
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    demo_draft.build(str(corpus), tmp_path / "out", tmp_path / "work", plan, "Weather")  # it is finished
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_what_was_interrupted_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_draft, "load_documents", lambda corpus: ["a text"] * 50)
    monkeypatch.setattr(demo_draft, "train", lambda *given: demo_draft_outcome(tmp_path))
    with pytest.raises(InputError, match=r"^--work: the training was interrupted; the same command goes on"):
        demo_draft.build("x", tmp_path / "out", tmp_path / "work", DraftPlan("x"))
    assert not (tmp_path / "out").exists()


def demo_draft_outcome(folder: Path) -> object:
    from tswift.training.course import Outcome

    return Outcome(folder, DraftPlan("x"), 3, None, None, 15)
