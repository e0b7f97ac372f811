"""The bundled models: small enough, plain transformers, of use to each other,
and the same text from every method.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tswift
from recipes.agreement import measure_agreement
from tests.helpers import METHODS
from tswift.decoding.stats import DecodeStats
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.forward.text import chunks
from tswift.loading.model import LoadedModel
from tswift.models.config import DEMO_DRAFT
from tswift.models.hashes import fingerprint_of
from tswift.sampling.parameters import SamplingParams

FOLDER = Path(tswift.__file__).parent / "models" / "demo"
DRAFT = FOLDER / "draft"
NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"


load = functools.cache(tswift.load)


def decode(
    model: LoadedModel,
    prompt: Sequence[int],
    length: int,
    method: str,
    params: SamplingParams,
    options: DraftOptions,
) -> tuple[list[int], DecodeStats]:
    run = begin(
        model,
        Request(
            prompt=prompt, length=length, method=method, params=params, seed=5, options=options
        ),
    )
    stats = DecodeStats(run.depth)
    tokens = []
    for step in run.steps():
        stats.add(step)
        tokens += step.tokens
    return tokens, stats


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "prefill", "options"),
    [
        (SamplingParams(), 300, {"dtype": "float64"}),
        (SamplingParams(temperature=0), 1, {"dtype": "float32", "heads": "chained"}),
        (SamplingParams(min_p=0, eta=0.002, top_k=50, window=2), 40, {"dtype": "float32"}),
        (SamplingParams(), 5000, {}),
    ],
    ids=["float64", "greedy, chained heads", "eta, top-k, short window", "5,000 tokens"],
)
def test_every_method_writes_the_text_of_plain_decoding(params, prefill, options):
    demo = load(**options, draft_model=DEMO_DRAFT)
    assert demo.heads is not None
    assert demo.heads.kind == options.get("heads", "conditioned")
    prompt = demo.encode(NOVEL.read_text())[:prefill]
    drafting = DraftOptions(budget=64, nodes=16, reuse_recent=True)  # room for 4-grams, too
    # chains take long
    lengths = {name: 120 if method.gamma is None else 30 for name, method in METHODS.items()}
    runs = {
        method: decode(demo, prompt, length, method, params, drafting)
        for method, length in lengths.items()
    }
    assert len(runs["ar"][0]) == 120
    assert all(text == runs["ar"][0][: lengths[method]] for method, (text, _) in runs.items())
    # something was accepted
    assert all(runs[method][1].passes < 120 for method in ("medusa", "tokenswift"))


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
