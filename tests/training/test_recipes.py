"""The recipes of the bundled models, from documents to model cards, in miniature."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import tswift
from recipes import demo, demo_draft, texts
from recipes.draft import DraftPlan
from recipes.heads import HeadsPlan, train_heads, write_text
from recipes.pretrain import Plan, head_losses, pretrain
from tests.helpers import HIDDEN, refused, tiny_llama, tokens_of
from tswift.sampling.parameters import SamplingParams
from tswift.speculators.heads import HEAD_TYPES, ChainedHeads

WORDS = [
    *"abcdefgh",
    "ship",
    "sailed",
    "over",
    "grey",
    "sea",
    "nobody",
    "weather",
    "before",
    "that",
    "night",
]


@pytest.fixture
def corpus(tmp_path) -> Path:
    rng = random.Random(1)
    (tmp_path / "corpus").mkdir()
    for number in range(50):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(" ".join(rng.choices(WORDS, k=120)))
    return tmp_path / "corpus"


def test_the_recipe_makes_a_model_that_generates(tmp_path, corpus, monkeypatch):
    shape = demo.demo_config(300).to_dict() | {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
    }
    shrunk = {
        "POSITIONS": (0, 40),
        "WINDOW": 16,
        "TEXTS": 2,
        "_ROW": 48,
        "demo_config": lambda _: LlamaConfig(**shape),
    }
    for name, value in shrunk.items():
        monkeypatch.setattr(demo, name, value)
    plan = Plan(
        steps=4,
        tokens_per_step=128,
        short_row=32,
        long_row=64,
        warmup=2,
        long_from=0.5,
        heads_from=0.5,
    )
    heads = HeadsPlan(steps=2, matrix_lr=0.01, tokens_per_step=64, rows=(32,))
    recipe = demo.Recipe(
        str(corpus), "Weather", plan, vocab_size=300, rows=4, chained=heads, conditioned=heads
    )
    demo.build(tmp_path / "model", tmp_path / "work", recipe)
    with refused(r"^--work: .* another recipe"):
        demo.build(tmp_path / "model", tmp_path / "work", dataclasses.replace(recipe, rows=5))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "{" not in card
    assert re.search(r"^\| loss \| \d+\.\d{3} \| \d+\.\d{3} \|$", card, re.M)
    for kind in ("chained", None):
        model = tswift.load(str(tmp_path / "model"), heads=kind)
        assert model.heads.kind == (kind or "conditioned")
        plain, drafted = (
            tokens_of(tswift.generate(model, "the ship", 12, method=each))
            for each in ("ar", "tokenswift")
        )
        assert drafted == plain
    # stages that are finished are skipped
    monkeypatch.setattr(demo, "load_documents", lambda corpus: pytest.fail("read twice"))
    demo.build(tmp_path / "again", tmp_path / "work", recipe)
    weights = [(tmp_path / name / "heads.safetensors").read_bytes() for name in ("model", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_recipe_makes_a_draft_model(tmp_path, corpus, monkeypatch):
    for name, value in {"POSITIONS": (0, 40), "WINDOW": 16, "TEXTS": 2}.items():
        monkeypatch.setattr(demo_draft, name, value)
    path, work, out = (
        tmp_path / "work" / "corpus" / "kept.parquet",
        tmp_path / "work",
        tmp_path / "out",
    )
    demo_draft.keep_documents(str(corpus), path)
    config = DraftPlan(str(path.parent), 3, seq_len=32, batch=2, warmup=1, held_out=1)
    demo_draft.build(str(corpus), out, work, config, "Weather")
    card = (out / "README.md").read_text()
    weights = (out / "model.safetensors").read_bytes()
    assert "{" not in card
    assert "Weather: the 48 documents" in card
    assert re.search(r"^\| agreement, last 512 tokens \| 0\.\d{3} \| 0\.\d{3} \|$", card, re.M)
    assert tswift.load(draft_model=str(out)).draft.max_positions == 131_072
    demo_draft.build(str(corpus), out, work, config, "Weather")  # it is finished
    assert (out / "model.safetensors").read_bytes() == weights


def test_pretraining_lowers_the_loss_of_model_and_heads():
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    heads = ChainedHeads(16, 2)
    stream = np.tile(np.arange(17, dtype=np.uint16), 60)  # counting: easy to learn
    ids = torch.from_numpy(stream[:64].astype(np.int64)).unsqueeze(0)

    def losses():
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            own = F.cross_entropy(model.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            return own.item(), head_losses(hidden, ids, heads, model.lm_head).mean().item()

    before = losses()
    plan = Plan(
        steps=60, tokens_per_step=128, short_row=32, long_row=64, warmup=3, position_limit=4096
    )
    pretrain(model, heads, stream, plan, lambda line: None)
    after = losses()
    assert after[0] < 0.7 * before[0]
    assert after[1] < 0.9 * before[1]


def test_text_of_the_models_own_and_heads_that_learn_from_it():
    model = tiny_llama("gqa", torch.float32).requires_grad_(False)
    starts = np.random.default_rng(1).integers(1, 97, size=(6, 4))
    lines = []
    text = write_text(model, starts, 64, SamplingParams(min_p=0.05), 3, lines.append)
    assert text.shape == (6, 64)
    assert (text[:, :4] == starts).all()
    assert not (text[:, 4:] == model.config.eos_token_id).any()
    with pytest.raises(ValueError, match="penalty window of 16"):
        write_text(model, starts, 17, SamplingParams(window=16), 1, lines.append)
    torch.manual_seed(2)
    heads = HEAD_TYPES["conditioned"](HIDDEN, 2)
    plan = HeadsPlan(
        steps=41, matrix_lr=0.02, tokens_per_step=128, rows=(32, 64), position_limit=512
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lines.clear()
    train_heads(model, heads, text.ravel(), plan, lines.append)
    first, last = (
        [float(loss) for loss in line.split("losses ")[1].split()[:2]]
        for line in (lines[0], lines[-1])
    )
    assert all(later < earlier for earlier, later in zip(first, last, strict=True))
    # the base is frozen
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_texts_for_heads_are_the_models_own_and_parts_of_books(tiny, monkeypatch):
    monkeypatch.setattr(texts, "_EXTRACT", 30)
    books = [f"{name} " * 20 for name in ("alpha", "beta", "gamma", "delta")] + [
        "too short to take part of"
    ]
    parts = texts.extracts(books, 4, np.random.default_rng(1))
    assert {part.split()[0] for part in parts} == {"alpha", "beta", "gamma", "delta"}
    assert {len(part) for part in parts} <= {*range(24, 30)}
    model = tswift.load(str(tiny.model), dtype="float64")
    model.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    for name, value in {"_ANSWER": 12, "_START": 3, "_END": 20}.items():
        monkeypatch.setattr(texts, name, value)
    rng = np.random.default_rng(1)
    *answers, book = itertools.islice(texts.written(model, books, 1, rng), 3)
    asked = [request.format(topic) for request in texts.REQUESTS for topic in texts.TOPICS]
    assert all(
        any(text.startswith(request) and len(text) > len(request) for request in asked)
        for text in answers
    )
    start = model.tokenizer.decode(model.tokenizer(book)["input_ids"][:3])
    assert any(start in text for text in books)
    assert 3 < len(model.tokenizer(book)["input_ids"]) <= 20
