"""Trees that pay, and cascades: the same tokens as plain decoding, and drafts that learn."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import (
    PLAIN,
    decode_method,
    decode_steps,
    medusa_heads,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions

PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)
GREEDY = SamplingParams(temperature=0)
KINDS = ("chained", "conditioned", "medusa")
AUTO = DraftOptions(tree="auto", budget=64)


def heads_of(kind: str):
    return medusa_heads() if kind == "medusa" else tiny_heads(kind=kind)


def drafter(method: str, kind: str = "conditioned", options: DraftOptions = AUTO):
    return make_drafter(method, tiny_target(), heads_of(kind), options, tiny_draft())


@functools.cache
def plain(params: SamplingParams) -> list[int]:
    return decode_method("ar", tiny_target(), random_prompt(90, 3), params, 5, 120)


@pytest.mark.parametrize(
    ("kind", "method", "params"),
    [
        *((kind, method, PARAMS) for kind in KINDS for method in ("medusa", "tokenswift")),
        *((kind, "tokenswift", PLAIN) for kind in KINDS),
        *((kind, "medusa", GREEDY) for kind in KINDS),
    ],
)
def test_trees_that_pay_change_no_token(kind: str, method: str, params: SamplingParams) -> None:
    prompt = random_prompt(90, 3)
    steps = decode_steps(tiny_target(), drafter(method, kind), prompt, params, 5, 120)
    assert tokens_of(steps) == plain(params)
    assert len({step.nodes for step in steps}) > 1  # chosen anew in every step


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["streaming", "dynamic", "partial", "snapkv"]),
    st.integers(1, 12),
    st.integers(2, 20),
    st.booleans(),
    st.integers(0, 1000),
)
def test_cascades_change_no_token(kv: str, gamma: int, nodes: int, shared: bool, seed: int) -> None:
    prompt = random_prompt(70, seed)
    options = DraftOptions(kv=kv, budget=64, gamma=gamma, nodes=nodes, shared_noise=shared)
    wanted = decode_method("ar", tiny_target(), prompt, PARAMS, seed, 40)
    steps = decode_steps(tiny_target(), drafter("cascade", options=options), prompt, PARAMS, seed, 40)
    assert tokens_of(steps) == wanted


def test_a_cascade_over_everything_drafts_what_will_be_drawn() -> None:
    prompt = random_prompt(40, 4)
    options = DraftOptions(budget=256, recall=0)
    steps = decode_steps(tiny_target(), drafter("cascade", options=options), prompt, PARAMS, 2, 100)
    # it goes on as long as that pays, which with these random heads is not long; and all of its chain is accepted
    chains = [step.accepted for step in steps[:-1]]
    assert min(chains) >= 1
    assert sum(chains) / len(chains) > 1.5
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, 2, 100)


def test_a_cascade_leaves_no_trace() -> None:
    prompt = random_prompt(90, 4)
    made = drafter("cascade", options=DraftOptions(budget=64))
    decoding = Decoding(tiny_target(), prompt, PARAMS, 3, made, 50)
    decoding.prefill()
    context = decoding._context
    level = made.offering[0]._level
    before = (list(context.text), context.kv.length, level.kv.length, context.sampler.length)
    newest = context.sampler.newest.clone()
    with torch.inference_mode():
        made.propose(context, 50)
    assert (context.text, context.kv.length, level.kv.length, context.sampler.length) == before
    assert torch.equal(context.sampler.newest, newest)


def test_nothing_to_draw_ends_the_chain_and_no_more(monkeypatch) -> None:
    made = drafter("cascade", options=DraftOptions(budget=64))
    prompt = random_prompt(90, 4)
    decoding = Decoding(tiny_target(), prompt, PARAMS, 3, made, 50)
    decoding.prefill()
    target, calls = tiny_target(), []

    def broken(hidden):
        calls.append(len(hidden))
        return type(target).logits(target, hidden) * (float("nan") if len(calls) > 3 else 1)

    monkeypatch.setattr(target, "logits", broken, raising=False)
    with torch.inference_mode():
        made.propose(decoding._context, 50)
    assert len(calls) > 3
    assert len(decoding._context.text) == 90


@pytest.mark.parametrize("method", ["medusa", "tokenswift", "cascade"])
def test_no_more_is_drafted_than_is_wanted(method: str) -> None:
    options = DraftOptions(budget=64) if method == "cascade" else AUTO
    for length in (1, 2, 3):
        found = decode_method("ar", tiny_target(), prompt := random_prompt(70, 1), PARAMS, 1, length)
        steps = decode_steps(tiny_target(), drafter(method, options=options), prompt, PARAMS, 1, length)
        assert tokens_of(steps) == found
        assert all(len(step.tokens) <= length for step in steps)


def test_drafting_learns() -> None:
    """A draft that is always right is trusted, so that trees grow; one that is never right is given up."""
    prompt = random_prompt(70, 1)
    full = DraftOptions(tree="auto", kv="full")
    steps = decode_steps(tiny_target(), drafter("tokenswift", options=full), prompt, PARAMS, 1, 300)
    # the first drafted token is the target's own; what the random heads say is nearly never right
    late = steps[len(steps) // 2 :]
    assert all(step.accepted >= 1 for step in late[:-1])
    assert sum(step.nodes for step in late) / len(late) < sum(step.nodes for step in steps[:5]) / 5
