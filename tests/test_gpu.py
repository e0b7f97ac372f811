"""What needs a CUDA device: `make gpu`. On other machines these are skipped."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import tswift
from tests.helpers import decode_steps, random_prompt, tiny_heads, tiny_llama, tokens_of
from tswift.attention.layout import Layout
from tswift.attention.sdpa import TreeAttention
from tswift.decoding.audit import audit
from tswift.decoding.generation import begin
from tswift.decoding.sampling import SamplingParams, noise_bits
from tswift.drafting.methods import METHODS, DraftOptions, make_drafter
from tswift.jobs.prompt import read_prompt
from tswift.models.loading import LoadedModel
from tswift.models.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_the_noise_has_the_same_bits_everywhere() -> None:
    tokens = torch.arange(5000)
    assert torch.equal(noise_bits(7, range(40), tokens), noise_bits(7, range(40), tokens.cuda()).cpu())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
def test_attention_against_float64(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    query, keys, values = (torch.randn(heads, rows, 64).to(dtype) for heads, rows in ((8, 5), (2, 20005), (2, 20005)))
    ancestors = torch.ones(5, 5, dtype=torch.bool).tril()
    layout = Layout(2, 4, dtype, torch.device("cuda"))
    ours = TreeAttention(layout, 20000, 5, ancestors.cuda())(query.cuda(), keys.cuda(), values.cuda(), 0.125)
    wide = [x.double() for x in (query, keys, values)]
    exact = TreeAttention(Layout(2, 4, torch.float64, torch.device("cpu")), 20000, 5, ancestors)(*wide, 0.125)
    assert (ours.cpu().double() - exact).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_method_writes_the_text_of_plain_decoding(dtype: torch.dtype) -> None:
    target = Target(deepcopy(tiny_llama("gqa", dtype)).to("cuda"))
    heads = deepcopy(tiny_heads(dtype)).to("cuda")
    params, options = SamplingParams(window=20, min_p=0.02), DraftOptions(budget=64)
    texts = [
        tokens_of(decode_steps(target, make_drafter(name, target, heads, options), random_prompt(30), params, 3, 200))
        for name in METHODS
    ]
    assert texts == [texts[0]] * len(METHODS)


def bundled(dtype: str) -> LoadedModel:
    return tswift.load("demo", device="cuda", dtype=dtype)


def demo_prompt(model: LoadedModel) -> list[int]:
    return model.encode(read_prompt(None))[:1024]


def demo_text(model: LoadedModel, method: str, length: int, seed: int = 1) -> list[int]:
    return tokens_of(list(begin(model, demo_prompt(model), length, method=method, seed=seed).steps()))[:length]


def sampling_of(model: LoadedModel) -> SamplingParams:
    """Parameters as ``begin`` has them: the end of the text is never drawn."""
    return SamplingParams(banned=model.eos_ids)


def test_the_bundled_model_writes_the_text_of_plain_decoding_in_float32() -> None:
    model = bundled("float32")
    texts = {method: demo_text(model, method, 2000) for method in METHODS}
    plain = texts.pop("ar")
    assert len(plain) == 2000
    for method, text in texts.items():
        assert text == plain, method


def test_what_differs_in_bfloat16_is_rounding() -> None:
    """The audit, which must see through another seed's text, explains every text, the same or not."""
    model = bundled("bfloat16")
    prompt, params = demo_prompt(model), sampling_of(model)
    for method in METHODS:
        assert audit(model.target, prompt, demo_text(model, method, 1000), params, 1).ok, method
    assert not audit(model.target, prompt, demo_text(model, "ar", 1000, seed=2), params, 1).ok


@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_replayed_passes_write_the_text_of_others(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bundled("float32")
    if not model.target._attention.STATIC:
        pytest.skip(f"{model.attention} attention has no passes to replay")
    run = begin(model, demo_prompt(model), 500, method=method, seed=1)
    replayed = tokens_of(list(run.steps()))
    assert model.target._passes[run.decoding._context.kv]
    monkeypatch.setattr(Target, "prepare", lambda self, kv, limit: None)
    other = begin(model, demo_prompt(model), 500, method=method, seed=1)
    assert tokens_of(list(other.steps())) == replayed
    assert other.decoding._context.kv not in model.target._passes
