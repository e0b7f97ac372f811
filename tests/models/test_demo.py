"""The bundled models: small enough, plain transformers, of use to each other,
and the same text from every method.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tswift
from recipes.agreement import measure_agreement
from tswift.engine import Request, begin
from tswift.forward.text import chunks
from tswift.models.config import DEMO_DRAFT
from tswift.models.hashes import fingerprint_of
from tswift.sampling.parameters import SamplingParams

FOLDER = Path(tswift.__file__).parent / "models" / "demo"
DRAFT = FOLDER / "draft"
NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"


load = functools.cache(tswift.load)


def test_model_and_tokenizer_fit_in_nine_megabytes():
    files = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert sum((FOLDER / name).stat().st_size for name in files) < 9_000_000


def test_plain_transformers_loads_it_and_agrees():
    text = NOVEL.read_text()[:2000]
    plain = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    ids = AutoTokenizer.from_pretrained(FOLDER)(text, return_tensors="pt")["input_ids"]
    wanted = plain(ids).logits[0]
    model = tswift.load(dtype="float64")
    run = begin(model, Request(prompt=ids[0].tolist(), length=1, method="ar"))
    hidden = torch.cat(
        [part.hidden for part in chunks(model.target, ids[0].tolist(), run.decoding._context.kv)]
    )
    torch.testing.assert_close(model.target.logits(hidden), wanted, rtol=0, atol=1e-4)


def test_it_is_small_and_plain_transformers_loads_it():
    demo = load(dtype="float32", draft_model=DEMO_DRAFT)
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 1_300_000
    plain = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    assert 450_000 < plain.num_parameters() < 550_000
    assert demo.draft is not None
    assert fingerprint_of(demo.draft.model) == fingerprint_of(plain)
    assert demo.draft.max_positions == demo.target.max_positions


def test_it_draws_what_the_model_draws():
    demo = load(dtype="float32", draft_model=DEMO_DRAFT)
    text = demo.encode(NOVEL.read_text())[:1025]
    assert demo.draft is not None
    score = measure_agreement(demo.target, demo.draft, text, SamplingParams())
    assert score["agreement"] > 0.35
    assert score["target_loss"] < score["loss"] < score["target_loss"] + 1
