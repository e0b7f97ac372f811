"""In passes of a fixed width every method writes plain decoding's text, in 16 bits too,
cut and resumed anywhere.
"""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random

import pytest
import torch

import tswift
from tests.helpers import (
    METHODS,
    decode,
    drafter_of,
    first,
    near_tie,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tokens_of,
)
from tests.lossless.models import ExactOnDevice, exact_target, network
from tswift.attention.sdpa import BatchInvariantAttention
from tswift.caches import FullKV
from tswift.decoding.audit import audit
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.loop import Decoding
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.engine import Request, begin
from tswift.forward.target import Target
from tswift.forward.text import chunks
from tswift.loading.model import LoadedModel
from tswift.models.config import DEMO_DRAFT
from tswift.sampling.parameters import SamplingParams

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
    # passes of one width by PyTorch, no C program
    attention = "auto" if dtype == "float32" else "sdpa"
    return tswift.load(
        "demo", dtype=dtype, device="cpu", draft_model=DEMO_DRAFT, exact=exact, attention=attention
    )


@functools.cache
def novel(tokens: int) -> list[int]:
    return demo("float32").encode(NOVEL.read_text()[: 8 * tokens])[:tokens]


def text_of(model, prompt, length, method, params, seed=1, options=None, written=()) -> list[int]:
    options = options or DraftOptions(budget=64, costs="nominal")
    run = begin(
        model,
        Request(
            prompt=prompt,
            length=length,
            method=method,
            params=params,
            seed=seed,
            options=options,
            written=written,
        ),
    )
    return tokens_of(run.steps())


@pytest.mark.slow
def test_every_method_writes_the_text_of_plain_decoding():
    model = demo("float16")
    prompt = novel(90)
    params = SamplingParams(min_p=0, top_p=0.9, penalty=1.1, window=30)
    plain = text_of(model, prompt, 20, "ar", params, 2)
    for method in NAMES:
        assert text_of(model, prompt, 20, method, params, 2, TREES.get(method)) == plain, method


@pytest.mark.parametrize("exact", first(1, [True, False]))
def test_a_near_tie_parts_texts_unless_passes_are_exact(exact):
    """So the equality above is none that would hold anyway: it is one ulp, and one drawn token,
    from failing.
    """
    model = demo("bfloat16") if exact else demo("bfloat16", exact=False)
    greedy = SamplingParams(temperature=0, penalty=1)
    token = text_of(model, novel(60), 10, "ar", greedy)[-1]
    other = next(
        each
        for each in range(1, model.target.vocab_size)
        if each not in model.eos_ids and each != token
    )
    with near_tie(model.target.model, token, other, rows=1):
        plain, drafted = (
            text_of(model, novel(60), 20, method, greedy) for method in ("ar", "medusa")
        )
    assert (drafted == plain) is exact


def test_a_text_cut_anywhere_goes_on_the_same():
    """By another method even, as no token depends on it."""
    model = demo("bfloat16")
    prompt = novel(66)
    random = Random(1)
    params = SamplingParams()
    plain = text_of(model, prompt, 30, "ar", params)
    for method in NAMES:
        cut = random.randrange(20)
        assert (
            text_of(model, prompt, cut + 10, method, params, written=plain[:cut])
            == plain[cut : cut + 10]
        ), method


@pytest.mark.parametrize(
    ("kind", "dtype"),
    first(1, [("Gemma 2 (windows, soft caps)", torch.float16), ("Llama, GQA", torch.bfloat16)]),
)
def test_a_prompt_may_be_a_text_written_before(kind, dtype):
    """Where it is cut into prompt and text decides nothing,
    although it is then prefilled or decoded.
    """
    target = exact_target(kind, dtype)
    params = SamplingParams(min_p=0.02, window=24)
    prompt = random_prompt(9)
    whole = [
        *prompt,
        *decode(target, drafter_of("ar", target, DraftOptions()), prompt, params, 4, 90),
    ]
    for cut in (1, 2, 15, 16, 17, 33, 70):
        drafter = drafter_of("medusa", target, DraftOptions(tree=(2, 2, 1)))
        written = whole[cut:-20] if cut < len(prompt) else whole[cut:75]
        decoding = Decoding(
            target, whole[:cut], params, 4, drafter, len(written) + 9, written=written
        )
        found = tokens_of(decoding.steps())
        at = cut + len(written)
        assert found == whole[at : at + 9]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    first(1, [("Llama, GQA", torch.float32), ("Gemma 2 (windows, soft caps)", torch.bfloat16)]),
)
def test_steps_on_the_device(kind, dtype):
    """The same tokens, keys and values as one by one by the host."""
    prompt = random_prompt(50, 3)
    params = SamplingParams(min_p=0.02, window=24)
    found = []
    for attention, method in (
        (BatchInvariantAttention, "ar"),
        (ExactOnDevice, "ar"),
        (ExactOnDevice, "tokenswift"),
    ):
        target = exact_target(kind, dtype, attention)
        drafter = make_drafter(
            method, target, tiny_heads(dtype), TREES.get(method, DraftOptions()), tiny_draft(dtype)
        )
        decoding = Decoding(target, prompt, params, 4, drafter, 60)
        tokens = tokens_of(decoding.steps())
        assert isinstance(decoding._stepper, DeviceStepper) == (attention is ExactOnDevice)
        kv = decoding._kv
        found.append((torch.tensor(tokens), kv.buffers[0][:, :, :109], kv.buffers[1][:, :, :109]))
    assert all(
        torch.equal(*pair) for other in found[1:] for pair in zip(other, found[0], strict=True)
    )


@pytest.mark.slow
def test_log_probabilities_are_the_same_bytes_by_any_method_cut_anywhere():
    model = demo("bfloat16")
    prompt = novel(90)
    params = SamplingParams(window=30, logit_bias={261: 2.0})
    asked = {"params": params, "seed": 5, "logprobs": 3}
    plain = list(begin(model, Request(prompt=prompt, length=40, method="ar", **asked)).steps())
    tokens, rows = [step.tokens[0] for step in plain], [step.logprobs.tobytes() for step in plain]
    for method, cut in (("tokenswift", 0), ("cascade", 17), ("ar", 30)):  # the second recalls
        options = DraftOptions() if method == "ar" else DraftOptions(budget=64, costs="nominal")
        run = begin(
            model,
            Request(
                prompt=prompt,
                length=40,
                method=method,
                written=tokens[:cut],
                options=options,
                **asked,
            ),
        )
        assert b"".join(step.logprobs.tobytes() for step in run.steps()) == b"".join(rows[cut:]), (
            method,
            cut,
        )


LONG = 600  # tokens of a prompt: a whole chunk, and a part of one


def wide_target(attention: type = BatchInvariantAttention) -> Target:
    """A model on whose products the number of rows shows, with prompts forwarded as on CUDA."""
    target = Target(network("Llama, GQA", torch.bfloat16), attention)
    for part in target.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda part, given, out: out * (1 + out.shape[-2] / 4096))
    target.fixed_rows = 16
    target.chunked_prompt = True
    return target


@pytest.mark.slow
@pytest.mark.parametrize("attention", [BatchInvariantAttention, ExactOnDevice])
def test_a_prompt_in_wide_chunks_is_the_same_for_every_method_resume_and_audit(
    attention,
):
    """And what was generated has the width however long it is:
    a resumed run is the undisturbed one, bit for bit.
    """
    target = wide_target(attention)
    params = SamplingParams(min_p=0.02, window=24)
    prompt = random_prompt(LONG)
    assert [len(part.hidden) for part in chunks(target, prompt, FullKV(target.kv_shape, LONG))] == [
        512,
        LONG - 512,
    ]
    plain = decode(target, drafter_of("ar", target, DraftOptions()), prompt, params, 4, 120)
    held = []
    for method, cut in (("ar", 0), ("medusa", 0), ("medusa", 1), ("reuse", 37), ("ar", 100)):
        options = TREES.get(method, DraftOptions())
        drafter = make_drafter(method, target, tiny_heads(torch.bfloat16), options)
        decoding = Decoding(target, prompt, params, 4, drafter, 120, written=plain[:cut])
        assert plain[:cut] + tokens_of(decoding.steps()) == plain
        kv = decoding._kv
        held.append(
            torch.stack([kv.buffers[0][:, :, : LONG + 119], kv.buffers[1][:, :, : LONG + 119]])
        )
    assert all(torch.equal(held[0], other) for other in held[1:])
    assert audit(target, prompt, plain, params, 4).exact == 120
    # the bits of another prompt
    assert not audit(target, [*prompt, *plain[:60]], plain[60:], params, 4).ok


def test_a_long_text_is_taken_up_by_a_program(monkeypatch):
    """Where passes can be replayed, those over what was generated are, all but the last;
    the bits are the same.
    """
    target = wide_target(ExactOnDevice)
    text = random_prompt(LONG)
    found = []
    captured: list[object] = []
    eager: list[int] = []
    monkeypatch.setattr(target, "capture", lambda run: captured.append(run) or run)
    monkeypatch.setattr(
        target, "forward", lambda *given: eager.append(1) or Target.forward(target, *given)
    )
    for replayed in (True, False):
        kv = FullKV(target.kv_shape, LONG)
        eager.clear()
        if not replayed:
            monkeypatch.setattr("tswift.forward.text._replayed", lambda target, kv: None)
        hidden = [part.hidden for part in chunks(target, text, kv, 200)]
        found.append((torch.cat(hidden), kv.buffers[0].clone(), kv.buffers[1].clone()))
        assert len(eager) == (1 if replayed else 25)  # 400 tokens after the prompt's 200
    assert len(captured) == 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
