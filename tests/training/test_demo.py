"""The recipe of the bundled model, from documents to a model card, in miniature."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

import tswift
from tswift.errors import InputError
from tswift.training import demo
from tswift.training.heads import HeadsPlan
from tswift.training.pretrain import Plan

WORDS = [*"abcdefgh", "ship", "sailed", "over", "grey", "sea", "nobody", "weather", "before", "that", "night"]


def test_the_recipe_makes_a_model_that_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, rng = tmp_path / "corpus", random.Random(1)
    corpus.mkdir()
    for number in range(50):
        (corpus / f"{number:02}.txt").write_text(" ".join(rng.choices(WORDS, k=400)))
    monkeypatch.setattr(demo, "POSITIONS", (0, 40))
    monkeypatch.setattr(demo, "WINDOW", 16)
    monkeypatch.setattr(demo, "TEXTS", 2)
    monkeypatch.setattr(demo, "_ROW", 48)
    plan = Plan(steps=4, tokens_per_step=128, short_row=32, long_row=64, warmup=2, long_from=0.5, heads_from=0.5)
    heads = HeadsPlan(steps=2, matrix_lr=0.01, tokens_per_step=64, rows=(32,))
    recipe = demo.Recipe(str(corpus), "Weather", plan, vocab_size=300, rows=4, chained=heads, conditioned=heads)
    demo.build(tmp_path / "model", tmp_path / "work", recipe)
    with pytest.raises(InputError, match=r"^--work: .* another recipe"):
        demo.build(tmp_path / "model", tmp_path / "work", dataclasses.replace(recipe, rows=5))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "{" not in card
    assert re.search(r"^\| loss \| \d+\.\d{3} \| \d+\.\d{3} \|$", card, re.M)
    for kind in ("chained", None):
        model = tswift.load(str(tmp_path / "model"), heads=kind)
        assert model.heads is not None
        assert model.heads.kind == (kind or "conditioned")
        texts = [
            [token for step in tswift.generate(model, "the ship", 12, method=method) for token in step.tokens]
            for method in ("ar", "medusa", "tokenswift")
        ]
        assert texts == [texts[0]] * 3


def test_finished_stages_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(demo, "load_documents", lambda corpus: [f"text number {n} of the sea" * 20 for n in range(50)])
    first = demo._streams("anywhere", work, 280, lambda line: None)
    monkeypatch.setattr(demo, "load_documents", lambda corpus: pytest.fail("read twice"))
    again = demo._streams("anywhere", work, 280, lambda line: None)
    assert (first[1] == again[1]).all()
    assert (first[2] == again[2]).all()
