"""In passes of a fixed width every method writes plain decoding's text, in 16 bits too, cut and resumed anywhere."""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random

import pytest
import torch

import tswift
from tests.helpers import METHODS, decode, drafter_of, random_prompt, tiny_draft, tiny_heads
from tests.lossless.models import ExactOnDevice, exact_target
from tswift.attention.sdpa import ChunkedAttention
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.engine import begin
from tswift.models.config import DEMO_DRAFT
from tswift.models.load import LoadedModel

NAMES = [name for name, method in METHODS.items() if name != "ar" and not method.reference]
NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"
TREES = {
    "medusa": DraftOptions(tree=(3, 2, 2), costs="nominal"),
    "tokenswift": DraftOptions(tree=(1, 3, 2, 2), budget=64, nodes=41),
    "reuse": DraftOptions(reuse_recent=True, nodes=12),
    "magicdec": DraftOptions(gamma=7, budget=64, kv="dynamic"),
    "standalone": DraftOptions(gamma=3, budget=64),
    "triforce": DraftOptions(gamma=5, inner_gamma=2, budget=64),
}


@functools.cache
def demo(dtype: str, exact: bool = True) -> LoadedModel:
    return tswift.load("demo", dtype=dtype, device="cpu", draft_model=DEMO_DRAFT, exact=exact)


@functools.cache
def novel(tokens: int) -> list[int]:
    return demo("float32").encode(NOVEL.read_text()[: 8 * tokens])[:tokens]


def text_of(model, prompt, length, method, params, seed=1, options=None, written=()) -> list[int]:
    options = options or DraftOptions(budget=64, costs="nominal")
    run = begin(model, prompt, length, method=method, params=params, seed=seed, options=options, written=written)
    return [token for step in run.steps() for token in step.tokens]


@pytest.mark.parametrize(
    ("dtype", "params", "seed", "trees"),
    [
        pytest.param("bfloat16", SamplingParams(), 1, {}, id="T 1, penalty, min-p"),
        pytest.param(
            "float16",
            SamplingParams(min_p=0, top_p=0.9, penalty=1.1, window=30),
            2,
            TREES,
            id="top-p",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_method_writes_the_text_of_plain_decoding(dtype, params, seed, trees) -> None:
    model, prompt = demo(dtype), novel(90)
    plain = text_of(model, prompt, 40, "ar", params, seed)
    for method in NAMES:
        assert text_of(model, prompt, 40, method, params, seed, trees.get(method)) == plain, method


def test_without_it_texts_part_in_bfloat16() -> None:
    """So the equality above is none that would hold anyway."""
    model, params = demo("bfloat16", exact=False), SamplingParams()
    plain = (text_of(model, novel(90), 120, "ar", params, seed) for seed in range(8))
    assert any(text_of(model, novel(90), 120, "medusa", params, seed) != text for seed, text in enumerate(plain))


def test_a_text_cut_anywhere_goes_on_the_same() -> None:
    """By another method even, as no token depends on it."""
    model, prompt, random, params = demo("bfloat16"), novel(70), Random(1), SamplingParams()
    plain = text_of(model, prompt, 90, "ar", params)
    for method in NAMES:
        cut = random.randrange(1, 80)
        assert text_of(model, prompt, cut + 10, method, params, written=plain[:cut]) == plain[cut : cut + 10], method


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Llama, GQA", torch.bfloat16), ("Gemma 2 (windows, soft caps)", torch.float16)]
)
def test_a_prompt_may_be_a_text_written_before(kind: str, dtype: torch.dtype) -> None:
    """Where it is cut into prompt and text decides nothing, although it is then prefilled or decoded."""
    target, params, prompt = exact_target(kind, dtype), SamplingParams(min_p=0.02, window=24), random_prompt(9)
    whole = [*prompt, *decode(target, drafter_of("ar", target, DraftOptions()), prompt, params, 4, 90)]
    for cut in (1, 2, 15, 16, 17, 33, 70):
        drafter = drafter_of("medusa", target, DraftOptions(tree=(2, 2, 1)))
        written = whole[cut:-20] if cut < len(prompt) else whole[cut:75]
        decoding = Decoding(target, whole[:cut], params, 4, drafter, len(written) + 9, written=written)
        found = [token for step in decoding.steps() for token in step.tokens]
        at = cut + len(written)
        assert found == whole[at : at + 9]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Llama, GQA", torch.float32), ("Gemma 2 (windows, soft caps)", torch.bfloat16)]
)
def test_steps_on_the_device(kind: str, dtype: torch.dtype) -> None:
    """The same tokens, keys and values as one by one by the host."""
    prompt, params, found = random_prompt(50, 3), SamplingParams(min_p=0.02, window=24), []
    for attention, method in ((ChunkedAttention, "ar"), (ExactOnDevice, "ar"), (ExactOnDevice, "tokenswift")):
        target = exact_target(kind, dtype, attention)
        drafter = make_drafter(method, target, tiny_heads(dtype), TREES.get(method, DraftOptions()), tiny_draft(dtype))
        decoding = Decoding(target, prompt, params, 4, drafter, 60)
        tokens = [token for step in decoding.steps() for token in step.tokens]
        assert (decoding._stepper is None) == (attention is ChunkedAttention)
        kv = decoding._kv
        found.append((torch.tensor(tokens), kv.keys[:, :, :109], kv.values[:, :, :109]))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True))


def test_log_probabilities_are_the_same_bytes_by_any_method_cut_anywhere() -> None:
    model, prompt, params = demo("bfloat16"), novel(90), SamplingParams(window=30, logit_bias={261: 2.0})
    asked = {"params": params, "seed": 5, "logprobs": 3}
    plain = list(begin(model, prompt, 40, method="ar", **asked).steps())
    tokens, rows = [step.tokens[0] for step in plain], [step.logprobs.tobytes() for step in plain]
    for method, cut in (("tokenswift", 0), ("recall", 17), ("ar", 30)):
        options = DraftOptions(budget=64, costs="nominal") if method == "tokenswift" else DraftOptions()
        run = begin(model, prompt, 40, method=method, written=tokens[:cut], options=options, **asked)
        assert b"".join(step.logprobs.tobytes() for step in run.steps()) == b"".join(rows[cut:]), (method, cut)
