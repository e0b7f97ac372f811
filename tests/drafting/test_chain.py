"""Chains: what is drafted is what the drafting model would have written, and nothing of it stays behind."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import (
    PLAIN,
    decode_method,
    decode_steps,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.dynamic_tree import CHUNK, ChainSource, DraftModel, SmallDraftModel
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import METHODS, DraftOptions
from tswift.kv import FullKV, PartialKV, StreamingKV

PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)


def prefilled(prompt: list[int], params: SamplingParams = PARAMS, seed: int = 3) -> Context:
    """The context of a decode of the tiny target, after its prefill."""
    decoding = Decoding(tiny_target(), prompt, params, seed, Drafter(), 60)
    decoding.prefill()
    return decoding._context


def own_level(budget: int = 4096, slack: int = 12) -> SmallDraftModel:
    return SmallDraftModel(tiny_draft(), StreamingKV(tiny_draft().kv_shape, budget, 4, slack, CHUNK + slack))


def proposed(source: ChainSource, context: Context, wanted: int = 100) -> list[int]:
    tree = DraftTree(context.text[-1], 64, wanted)
    with torch.inference_mode():
        source.committed(context, 5)
        source.start(context)
        source.propose(tree, context)
    assert tree.parents[1:] == list(range(len(tree) - 1))  # a chain
    assert set(tree.sources[1:]) <= {"it"}
    return tree.tokens[1:]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_small_model_drafts_what_it_would_write_with_the_same_noise(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_p=0, penalty=1.3, window=5)
    prompt = random_prompt(300, 2)
    context = prefilled(prompt, params)
    wanted = decode_method("ar", tiny_draft(), prompt, params, 3, 7)
    source = ChainSource("it", own_level(), 7, Drafter(), True)
    held = context.kv.length
    for _ in range(2):  # nothing of the first stays behind
        assert proposed(source, context) == wanted
        assert context.text == prompt
        assert context.kv.length == held
    assert proposed(source, context, 3) == wanted[:3]  # no more than the tree takes
    assert proposed(source, context, 0) == []


def test_without_shared_noise_the_likeliest_are_drafted() -> None:
    prompt = random_prompt(40, 2)
    greedy = SamplingParams(temperature=0, min_p=0.02, penalty=1.3, window=5)
    wanted = decode_method("ar", tiny_draft(), prompt, greedy, 3, 5)
    assert proposed(ChainSource("it", own_level(), 5, Drafter(), False), prefilled(prompt)) == wanted


def test_a_chain_that_is_drafted_is_the_same_chain() -> None:
    prompt = random_prompt(90, 4)
    wanted = decode_method("ar", tiny_target(), prompt, PARAMS, 3, 9)
    inner = Drafter([ChainSource("small", own_level(), 2, Drafter(), True)], 2, 3)
    for drafter in (Drafter(), inner):
        assert proposed(ChainSource("it", DraftModel(tiny_target()), 9, drafter, True), prefilled(prompt)) == wanted


def count(level: SmallDraftModel, passes: list[int], monkeypatch) -> None:
    """Note the tokens of every pass."""
    right = type(level.target).forward

    def forward(tokens, *rest):
        passes.append(len(tokens))
        return right(level.target, tokens, *rest)

    monkeypatch.setattr(level.target, "forward", forward, raising=False)


def test_a_model_keeps_up_with_a_text_that_goes_on_otherwise(monkeypatch) -> None:
    prompt = random_prompt(150, 5)
    context = prefilled(prompt, PLAIN)
    source = ChainSource("it", level := own_level(), 6, Drafter(), True)
    text = list(prompt)
    passes: list[int] = []
    count(level, passes, monkeypatch)
    # of what was drafted none, some or all may be kept; and the text may grow by other tokens than those
    for new in ([1], [5, 6, 7], [], [9, 3, 3, 1, 4, 2, 8], [2, 2], [7]):
        passes.clear()
        drafted = proposed(source, context)
        assert sum(passes) <= (6 + 8 if len(text) > 150 else 155)  # nothing that stays is forwarded twice
        assert drafted == decode_method("ar", tiny_draft(), text, PLAIN, 3, 6)
        kept = drafted[: len(new)] if len(new) == 3 else new
        text += kept
        context.text += kept
        context.sampler.extend(kept)
    assert level.kv.seen >= len(prompt)


def test_nothing_to_draw_ends_the_chain_and_no_more(monkeypatch) -> None:
    context = prefilled(random_prompt(20))
    level = own_level()
    calls = []

    def broken(hidden):
        calls.append(len(hidden))
        logits = type(level.target).logits(level.target, hidden)
        return logits if len(calls) < 3 else logits * float("nan")

    monkeypatch.setattr(level.target, "logits", broken, raising=False)
    assert len(proposed(ChainSource("it", level, 6, Drafter(), True), context)) == 2
    assert len(context.text) == 20


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kv", ["full", *(pytest.param(kv, marks=SLOW) for kv in METHODS["magicdec"].kv if kv != "full")]
)
def test_the_target_over_its_own_cache(kv: str) -> None:
    prompt, options = random_prompt(80, 6), DraftOptions(kv=kv, budget=64, gamma=5)
    drafter = make_drafter("magicdec", tiny_target(), None, options)
    steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, 1, 90)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, 1, 90)
    accepted = sum(step.accepted for step in steps)
    if kv == "full":  # it drafts what it will draw
        assert len(steps) == 15
        assert accepted == 75
    else:
        assert 0 < accepted < 75
        assert {step.source for step in steps} == {"", "self"}
        selections = drafter.sources[0].level.kv.selections
        assert selections >= 3 if kv in ("snapkv", "dynamic") else selections == 1


@pytest.mark.parametrize(("kv", "observed"), [("dynamic", 1), ("snapkv", 32)])
def test_what_is_kept_is_chosen_by_the_newest_queries_of_the_text(kv: str, observed: int, monkeypatch) -> None:
    """Of committed tokens alone, in their order, though trees bring others: seen by plain passes over the text."""
    target, prompt, given = tiny_target(), random_prompt(80, 6), []
    right = PartialKV.select
    monkeypatch.setattr(PartialKV, "select", lambda self, *each: (given.append(each), right(self, *each))[1])
    options = DraftOptions(kv=kv, budget=64, tree=(2, 2, 2), nodes=12)
    decoding = Decoding(target, prompt, PARAMS, 1, make_drafter("tokenswift", target, tiny_heads(), options), 100)
    lengths = []
    monkeypatch.setattr(
        PartialKV, "follow", lambda self, full, *rest, own=PartialKV.follow: (
            before := len(given), own(self, full, *rest), lengths.extend([full.length] * (len(given) - before))
        )
    )  # fmt: skip
    steps = list(decoding.steps())
    assert max(step.accepted for step in steps) > 0
    text = [*prompt, *tokens_of(steps)]
    kv_of_text = FullKV(target.kv_shape, len(text))
    whole = [part.queries_of(range(len(part.hidden))) for part in target.chunks(text, kv_of_text)]
    queries = torch.cat(whole, dim=2)
    assert len(given) == len(lengths) >= 3
    for (_, used), length in zip(given, lengths, strict=True):
        torch.testing.assert_close(used, queries[:, :, length - observed : length])
