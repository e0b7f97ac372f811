"""Chains: what is drafted is what the drafting model would have written,
and nothing of it stays behind.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers import (
    PLAIN,
    context_of,
    decode_method,
    decode_steps,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.caches import POLICIES, FullKV, PartialKV, StreamingKV
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL
from tswift.drafting.chains import CAUGHT_UP_TOGETHER, ChainSource, DraftModel, SmallDraftModel
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import METHODS, DraftOptions
from tswift.forward.text import chunks
from tswift.sampling.parameters import SamplingParams

PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)


def prefilled(
    prompt: list[int], params: SamplingParams = PARAMS, drafter: Drafter | None = None
) -> Context:
    """The context of a decode of the tiny target, after its prefill."""
    decoding = Decoding(tiny_target(), prompt, params, 3, drafter or Drafter(), 60)
    decoding.prefill()
    return decoding._context


def own_level() -> SmallDraftModel:
    return SmallDraftModel(
        tiny_draft(), StreamingKV(tiny_draft().kv_shape, 4096, 4, 12, CAUGHT_UP_TOGETHER + 12)
    )


def proposed(source: ChainSource, context: Context, wanted: int = 100) -> list[int]:
    tree = DraftTree(context.text[-1], 64, wanted)
    with torch.inference_mode():
        source.committed(context, 5)
        source.start(context)
        source.propose(tree, context)
    assert tree.parents[1:] == list(range(len(tree) - 1))  # a chain
    assert set(tree.sources[1:]) <= {"it"}
    return tree.tokens[1:]


@pytest.mark.parametrize(("temperature", "shared"), [(0.0, True), (0.8, True), (0.8, False)])
def test_a_small_model_drafts_what_it_would_write(temperature, shared):
    """With the same noise, or without any."""
    params = SamplingParams(temperature=temperature, min_p=0, penalty=1.3, window=5)
    prompt = random_prompt(300, 2)
    context = prefilled(prompt, params)
    source = ChainSource("it", own_level(), 7, Drafter(), shared)
    likeliest = SamplingParams(temperature=0, min_p=0, penalty=1.3, window=5)
    wanted = decode_method("ar", tiny_draft(), prompt, params if shared else likeliest, 3, 7)
    held = context.kv.length
    for _ in range(2):  # nothing of the first stays behind
        assert proposed(source, context) == wanted
        assert context.text == prompt
        assert context.kv.length == held
    assert proposed(source, context, 3) == wanted[:3]  # no more than the tree takes
    assert source.draft_model.kv.seen == len(prompt) + 2
    assert proposed(source, context, 0) == []


def test_a_chain_that_is_drafted_is_the_same_chain():
    prompt = random_prompt(90, 4)
    wanted = decode_method("ar", tiny_target(), prompt, PARAMS, 3, 9)
    inner = Drafter([ChainSource("small", own_level(), 2, Drafter(), True)], 2, 3)
    for drafter in (Drafter(), inner):
        assert (
            proposed(
                ChainSource("it", DraftModel(tiny_target()), 9, drafter, True), prefilled(prompt)
            )
            == wanted
        )


def test_a_model_keeps_up_with_a_text_that_goes_on_otherwise(monkeypatch):
    prompt = random_prompt(150, 5)
    level = own_level()
    passes = list[int]()
    text = list(prompt)
    context = prefilled(prompt, PLAIN)
    source = ChainSource("it", level, 6, Drafter(), True)
    right = level.target.forward

    def forward(nodes):
        passes.append(len(nodes))
        return right(nodes)

    monkeypatch.setattr(level.target, "forward", forward, raising=False)
    # of what was drafted none, some or all may be kept; and the text may grow by other tokens than
    # those
    unknown = 149
    for new in ([1], [5, 6, 7], [], [9, 3, 3, 1, 4, 2, 8], [12, 60], [7], [80, 3], []):
        passes.clear()
        drafted = proposed(source, context)
        # nothing that stays is forwarded twice, and nothing is left out
        assert sum(passes) == unknown + 6
        assert drafted == decode_method("ar", tiny_draft(), text, PLAIN, 3, 6)
        kept = drafted[: len(new)] if len(new) == 3 else new
        unknown = 0 if len(new) == 3 else max(0, len(new) - 1)
        text += kept
        context.text += kept
        context.sampler.extend(kept)


def test_nothing_to_draw_ends_the_chain_and_no_more(monkeypatch):
    context = prefilled(random_prompt(20))
    level = own_level()
    calls = []
    right = level.target.logits

    def broken(hidden):
        calls.append(len(hidden))
        return right(hidden) if len(calls) < 3 else right(hidden) * float("nan")

    monkeypatch.setattr(level.target, "logits", broken, raising=False)
    assert len(proposed(ChainSource("it", level, 6, Drafter(), True), context)) == 2
    assert len(context.text) == 20


def test_a_cascade_leaves_no_trace():
    drafter = make_drafter(
        "cascade", tiny_target(), tiny_heads(kind="conditioned"), DraftOptions(budget=64)
    )
    context = prefilled(random_prompt(90, 4), drafter=drafter)
    level, newest = drafter.sources[0].draft_model, context.sampler.newest.clone()

    def held():
        return list(context.text), context.kv.length, level.kv.length, context.sampler.length

    before = held()
    with torch.inference_mode():
        assert len(drafter.propose(context, 50)) > 1
    assert held() == before
    assert torch.equal(context.sampler.newest, newest)


@pytest.mark.parametrize(
    ("keys", "heads", "pays"),
    [(100, False, False), (20_000, False, True), (100, True, False), (20_000, True, True)],
)
def test_a_cascade_has_no_prospect_where_its_passes_cost_as_much_as_the_texts(keys, heads, pays):
    options = DraftOptions(budget=64, recall=0)
    drafter = make_drafter(
        "cascade", tiny_target(), tiny_heads() if heads else None, options, costs=NOMINAL
    )
    context = context_of([1], PARAMS)
    context.kv.length = keys
    assert drafter.may_pay(NOMINAL, context) == pays


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(kv, marks=[] if kv in ("full", "snapkv") else pytest.mark.slow)
        for kv in METHODS["magicdec"].kv
    ],
)
def test_the_target_over_its_own_cache(kv):
    prompt = random_prompt(80, 6)
    options = DraftOptions(kv=kv, budget=64, gamma=5)
    drafter = make_drafter("magicdec", tiny_target(), None, options)
    steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, 1, 90)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, 1, 90)
    accepted = sum(step.accepted for step in steps)
    if kv == "full":  # it drafts what it will draw
        assert (len(steps), accepted) == (15, 75)
        return
    assert 0 < accepted < 75
    assert {step.source for step in steps} == {"", "self"}
    cache = drafter.sources[0].draft_model.kv
    assert cache.selections >= 3 if POLICIES[kv].renews else cache.selections == 1
    assert cache.length <= cache.budget  # what was drafted is forgotten


@pytest.mark.parametrize(("kv", "observed"), [("dynamic", 1), ("snapkv", 32)])
def test_what_is_kept_is_chosen_by_the_newest_queries_of_the_text(kv, observed, monkeypatch):
    """Of committed tokens alone, in their order, though trees bring others:
    seen by plain passes over the text.
    """
    target = tiny_target()
    prompt = random_prompt(80, 6)
    given = []
    select = PartialKV.select

    def seen(self, full, queries):
        given.append((full.length, queries))
        select(self, full, queries)

    monkeypatch.setattr(PartialKV, "select", seen)
    options = DraftOptions(kv=kv, budget=64, tree=(2, 2, 2), nodes=12)
    steps = decode_steps(
        target, make_drafter("tokenswift", target, tiny_heads(), options), prompt, PARAMS, 1, 100
    )
    assert max(step.accepted for step in steps) > 0
    text = [*prompt, *tokens_of(steps)]
    parts = chunks(target, text, FullKV(target.kv_shape, len(text)))
    queries = torch.cat(
        [torch.stack(part.queries_of(range(len(part.hidden)))) for part in parts], dim=2
    )
    assert len(given) >= 3
    for length, used in given:
        torch.testing.assert_close(torch.stack([*used]), queries[:, :, length - observed : length])
