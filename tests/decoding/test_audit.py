"""The audit: clean on every text that the rule drew, and it sees every mistake, where it was made;
its margins.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tswift
from tests.decoding.test_loop import parameters
from tests.fuzzing import few
from tests.helpers import (
    CPU,
    decode_method,
    near_tie,
    random_prompt,
    seeded,
    tiny_llama,
    tiny_target,
    tokens_of,
)
from tswift.caches import FullKV
from tswift.decoding import audit as module
from tswift.decoding.audit import VIOLATION, WITHIN, Audit, RoundingMargin, Rows, audit, near_ties
from tswift.engine import Request, begin
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler


@st.composite
def rows(draw: st.DrawFn) -> tuple[Sampler, Tensor, Tensor | None, list[int], Tensor]:
    """A sampler with any parameters, and rows of logits, windows,
    positions and tokens in question.
    """
    vocab, count = draw(st.integers(3, 24)), draw(st.integers(1, 4))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 2, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        eta=draw(st.sampled_from([0.0, 0.01, 0.3])),
        penalty=draw(st.sampled_from([1.0, 1.2, 3.0])),
        banned=draw(st.sampled_from([(), (1,), (0, 2)])),
    )
    generator = seeded(draw(st.integers(0, 10_000)))
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * draw(
        st.sampled_from([0.1, 1, 6])
    )
    seen = torch.rand(count, vocab, generator=generator) < 0.4 if params.penalises else None
    tokens = torch.randint(vocab, (count,), generator=generator)
    positions = draw(st.lists(st.integers(0, 500), min_size=count, max_size=count))
    return Sampler(params, draw(st.integers(0, 99)), vocab, CPU), logits, seen, positions, tokens


def noise_of(sampler: Sampler, logits: Tensor, positions: Sequence[int]) -> Tensor:
    return sampler.noise(positions).expand(logits.shape)


@given(case=rows(), near=st.sampled_from([0.0, 1e-9, 0.01, 5.0]))
def test_a_change_of_the_margin_s_size_makes_the_rule_draw_the_token(case, near):
    sampler, logits, seen, positions, tokens = case
    before = logits.clone()
    doubt = RoundingMargin(
        Rows(sampler, logits, seen, noise_of(sampler, logits, positions)), tokens
    )
    margins = doubt.margins(near)
    assert torch.equal(logits, before)
    assert set(doubt.patterns.unique().tolist()) <= {-1, 0, 1}
    for row, (token, margin) in enumerate(zip(tokens.tolist(), margins.tolist(), strict=True)):
        if token in sampler.params.banned:
            assert margin == math.inf
            continue
        assert math.isfinite(margin)
        window = None if seen is None else seen[row : row + 1]
        for size in (margin, margin * (1 + 1e-9) + 1e-12):
            changed = [
                logits[row : row + 1] + size * signs[row].double() for signs in doubt.patterns
            ]
            assert all(
                float((other - logits[row]).abs().max()) <= size + 1e-12 for other in changed
            )
            assert token in [
                sampler.draw(other, window, positions[row : row + 1])[0] for other in changed
            ]


@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    near=st.sampled_from([1e-6, 0.3, 40]),
)
def test_without_filters_it_is_half_the_gap(seed, temperature, near):
    logits = torch.randn(3, 12, generator=seeded(seed), dtype=torch.float64) * 3
    sampler = Sampler(SamplingParams(temperature=temperature, min_p=0, penalty=1), seed, 12, CPU)
    scores = sampler.scores(logits, None, [7, 8, 9])
    tokens = torch.tensor([2, 5, 11])
    gaps = scores.amax(-1) - scores.gather(1, tokens[:, None]).squeeze(1)
    found = RoundingMargin(
        Rows(sampler, logits, None, noise_of(sampler, logits, [7, 8, 9])), tokens
    ).margins(near)
    assert found.tolist() == pytest.approx(
        (gaps * (temperature or 1) / 2).tolist(), rel=1e-5, abs=near * 1e-5
    )


def test_a_gap_that_the_penalty_shrinks():
    sampler = Sampler(SamplingParams(temperature=0, penalty=2.0), 0, 3, CPU)
    logits, seen = torch.tensor([[4.0, 1.5, 0.0]]), torch.tensor([[True, False, False]])
    # the first token counts 2, and half of any change; 2 - e/2 = 1.5 + e
    margins = RoundingMargin(
        Rows(sampler, logits, seen, torch.zeros(1, 3)), torch.tensor([1])
    ).margins(0.01)
    assert margins.tolist() == pytest.approx([1 / 3], rel=1e-5)


@pytest.mark.parametrize(
    "filters",
    [
        {"min_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.5},
        {"top_k": 20},
        {"eta": 0.02},
        {"temperature": 0.0},
        {},
    ],
    ids=str,
)
def test_what_a_random_change_of_the_logits_has_turned_is_explained_by_one_of_about_its_size(
    filters,
):
    size, count, vocab = 0.2, 600, 300
    generator = seeded(3)
    sampler = Sampler(SamplingParams(**{"min_p": 0.0, **filters}), 5, vocab, CPU)
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * 2.5
    seen = torch.rand(count, vocab, generator=generator) < 0.2
    changed = (
        logits + (torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 2 - 1) * size
    )
    before, after = (
        torch.tensor(sampler.draw(rows, seen, range(count))) for rows in (logits, changed)
    )
    turned = (before != after).nonzero().squeeze(1)
    assert len(turned) > 20
    noise = noise_of(sampler, logits, range(count))
    doubt = RoundingMargin(
        Rows(sampler, logits[turned], seen[turned], noise[turned]), after[turned]
    )
    margins = doubt.margins(size)
    assert float((margins <= size).double().mean()) > 0.9
    assert float(margins.max()) <= 2 * size  # the bound is twice what was measured
    assert float(margins.min()) > 0
    # and by none much smaller: what it takes is the distance, not something that always suffices
    assert bool((~doubt.explained(margins * 0.98)).float().mean() > 0.9)
    # the row was known to be open to that before anything was turned
    open_ = near_ties(Rows(sampler, logits, seen, noise), before, size)
    assert float(open_[turned].double().mean()) > 0.97
    far = near_ties(Rows(sampler, logits, seen, noise), before, 1e-9)
    assert not bool(far.any())
    assert bool(
        (open_ <= near_ties(Rows(sampler, logits, seen, noise), before, 4 * size)).double().mean()
        > 0.97
    )


NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"


demo = functools.cache(tswift.load)


def logits_of(target: Target, text: list[int]) -> torch.Tensor:
    forwarded = prefill(target, text, FullKV(target.kv_shape, len(text)))
    assert forwarded is not None
    return target.logits(forwarded.hidden).double()


def clean(found: Audit, tokens: int) -> bool:
    return found.ok and found.tokens == tokens and found.exact + len(found.within) == tokens


# -------------------------------------------------------------------------------------------------
# what the rule drew is found clean; tests/decoding/test_loop.py audits all of its texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "prefill"),
    [(SamplingParams(), 300), (SamplingParams(min_p=0, eta=0.002, top_k=50, window=2), 1)],
)
def test_the_bundled_model(params, prefill):
    model = demo()
    prompt = model.encode(NOVEL.read_text())[:prefill]
    run = begin(model, Request(prompt=prompt, length=200, params=params, seed=7))
    tokens = tokens_of(run.steps())
    found = audit(model.target, prompt, tokens, run.params, 7)
    assert clean(found, 200)
    assert found.exact >= 199


def test_rounding_of_a_short_text_is_not_that_of_its_first_tokens(
    monkeypatch,
):
    """With nothing in the cache, passes of all widths may round alike: here they do,
    up to the middle of the prompt.
    """
    target = tiny_target()
    prompt = random_prompt(90)
    params = SamplingParams()
    right = Target.forward
    tokens = decode_method("ar", target, prompt, params, 4, 100)
    assert audit(target, prompt, tokens, params, 4).measured < 1e-9

    def rounded(self, nodes):
        out = right(self, nodes)
        return (
            out
            if len(nodes) > 32 or nodes.positions[0] < 45
            else replace(out, hidden=out.hidden * (1 + 1e-6))
        )

    monkeypatch.setattr(Target, "forward", rounded)
    assert audit(target, prompt, tokens, params, 4).measured > 1e-7


@pytest.mark.slow
def test_bfloat16_on_the_bundled_model():
    model = tswift.load(dtype="bfloat16", exact=False, attention="sdpa")
    prompt = model.encode(NOVEL.read_text())[:512]
    run = begin(model, Request(prompt=prompt, length=300, seed=11))
    tokens = tokens_of(run.steps())
    found = audit(model.target, prompt, tokens, run.params, 11)
    assert clean(found, 300)
    assert len(found.within) < 30
    assert 0.01 < found.measured < 1
    assert found.width is None
    assert len(found.within) < found.near_ties < 250
    shifted = audit(model.target, prompt, tokens, run.params, 12)
    assert len(shifted.violations) > 100


@pytest.mark.slow
def test_exact_passes_leave_nothing_to_rounding():
    """In bfloat16 every token of an exact text is drawn exactly,
    and the closest of all changes is a violation.
    """
    model = tswift.load(dtype="bfloat16", exact=True, attention="sdpa")
    prompt = model.encode(NOVEL.read_text())[:300]
    run = begin(model, Request(prompt=prompt, length=150, method="medusa", seed=3))
    tokens = tokens_of(run.steps())
    found = audit(model.target, prompt, tokens, run.params, 3)
    assert (found.ok, found.exact, found.width) == (True, 150, model.target.fixed_rows)
    assert (found.measured, found.bound, found.near_ties) == (0, 0, 0)

    greedy = replace(run.params, temperature=0, penalty=1)
    tokens = [
        token
        for step in begin(model, Request(prompt=prompt, length=40, params=greedy)).steps()
        for token in step.tokens
    ]
    token = next(token for token in tokens if tokens.count(token) == 1)
    index = tokens.index(token)
    other = 1
    assert other not in {*tokens, *model.eos_ids}
    with near_tie(model.target.model, token, other, rows=model.target.fixed_rows):
        found = audit(model.target, prompt, tokens, greedy, 0)
        assert (found.exact, found.measured) == (40, 0)
        changed = audit(model.target, prompt, [*tokens[:index], other], greedy, 0)
        model.target.fixed_rows = None
        near = audit(model.target, prompt, tokens, greedy, 0)  # the same text by other passes
    assert near.ok
    assert (token, other) in [(finding.token, finding.drawn) for finding in near.within]
    (violation,) = changed.violations
    assert (violation.index, violation.drawn) == (index, token)
    assert violation.margin is not None
    assert 0 < violation.margin < near.bound


@pytest.mark.slow
def test_lengths_about_those_of_chunks_and_stretches():
    target = tiny_target()
    prompt = random_prompt(30)
    params = parameters(temperature=0.7, penalty=1.3, window=7)
    tokens = decode_method("ar", target, prompt, params, 3, 520)
    for length in (1, 31, 32, 33, 257, 520):
        assert audit(target, prompt, tokens[:length], params, 3).exact == length


@pytest.mark.slow
def test_a_large_vocabulary_is_judged_in_parts(monkeypatch):
    target = tiny_target()
    prompt = random_prompt(20)
    params = parameters(penalty=1.5, window=5)
    tokens = decode_method("ar", target, prompt, params, 3, 300)
    tokens[150] = (tokens[150] + 1) % 97
    whole = audit(target, prompt, tokens, params, 3)
    for rows in (3, 100):
        monkeypatch.setattr(module, "_ELEMENTS", rows * 97)
        parts = audit(target, prompt, tokens, params, 3)
        assert parts.findings == whole.findings != ()
        assert (parts.least_lead, parts.greatest_lead) == (whole.least_lead, whole.greatest_lead)


def test_leads():
    target = tiny_target()
    prompt = random_prompt(9)
    params = parameters(temperature=0)
    tokens = decode_method("ar", target, prompt, params, 3, 80)
    best = logits_of(target, [*prompt, *tokens[:-1]])[8:].topk(2).values
    found = audit(target, prompt, tokens, params, 3)
    assert found.least_lead == pytest.approx(float((best[:, 0] - best[:, 1]).min()), rel=1e-6)
    assert found.greatest_lead == pytest.approx(float((best[:, 0] - best[:, 1]).max()), rel=1e-6)
    alone = audit(target, prompt, tokens, parameters(temperature=1, top_k=1), 3)
    assert (alone.least_lead, alone.greatest_lead) == (None, None)
    assert alone.exact == 80


def test_what_cannot_be_audited_is_refused():
    for prompt, tokens in (([], [1]), ([1], []), ([97], [1]), ([1], [-1])):
        with pytest.raises(ValueError, match=r"token"):
            audit(tiny_target(), prompt, tokens, parameters(), 1)


# -------------------------------------------------------------------------------------------------
# mistakes are found, all of them and where they are


def check(
    target: Target, prompt: list[int], tokens: list[int], params: SamplingParams, seed: int
) -> Audit:
    """The audit finds what one decode of one token for every position finds."""
    found = audit(target, prompt, tokens, params, seed)
    drawn = [
        decode_method("ar", target, [*prompt, *tokens[:index]], params, seed, 1)[0]
        for index in range(len(tokens))
    ]
    differ = [index for index, token in enumerate(tokens) if drawn[index] != token]
    assert found.exact == len(tokens) - len(differ)
    for finding, index in zip(found.findings, differ, strict=True):
        assert (finding.index, finding.position, finding.kind) == (
            index,
            len(prompt) + index,
            VIOLATION,
        )
        assert (finding.token, finding.drawn) == (tokens[index], drawn[index])
        assert finding.margin is not None
        assert finding.margin > found.bound
    return found


def test_passes_that_do_not_compute_the_same(monkeypatch):
    target = tiny_target()
    prompt = random_prompt(60)
    tokens = decode_method("ar", target, prompt, parameters(), 3, 200)
    assert audit(target, prompt, tokens, parameters(), 3).ok
    right = Target.forward
    monkeypatch.setattr(
        Target,
        "forward",
        lambda self, nodes: right(
            self,
            replace(
                nodes,
                ancestors=torch.ones(len(nodes), len(nodes)).bool()
                if 1 < len(nodes) < 20
                else None,
            ),
        ),
    )
    found = audit(target, prompt, tokens, parameters(), 3)
    assert not found.violations  # the bound covers everything, so it must not count
    assert found.measured > found.limit
    assert not found.ok


@pytest.mark.parametrize(
    ("made", "asked"),
    [((0.3, 1.0, 0), (0.3, 1.3, 30)), ((0.7, 2.0, 8), (0.7, 2.0, 9)), ((0, 1.3, 5), (0, 1.0, 5))],
    ids=["a penalty", "a longer window", "no penalty"],
)
def test_other_parameters(made, asked):
    target = tiny_target()
    prompt = random_prompt(50, 1)
    params = [
        parameters(heat, penalty=penalty, window=window) for heat, penalty, window in (made, asked)
    ]
    tokens = decode_method("ar", target, prompt, params[0], 5, 60)
    assert not check(target, prompt, tokens, params[1], 5).ok


def test_another_seed_and_the_limit_of_the_search(monkeypatch):
    target = tiny_target()
    prompt = random_prompt(50, 1)
    params = parameters()
    tokens = decode_method("ar", target, prompt, params, 5, 40)
    whole = check(target, prompt, tokens, params, 6)
    assert len(whole.violations) > 24
    monkeypatch.setattr(module, "SEARCHED", 7)
    limited = audit(target, prompt, tokens, params, 6)
    assert limited.findings[:7] == whole.findings[:7]
    assert limited.findings[7:] == tuple(
        replace(finding, margin=None) for finding in whole.findings[7:]
    )


# -------------------------------------------------------------------------------------------------
# near-ties are no violations


def test_an_exact_tie_is_within_rounding():
    network = tiny_llama("gqa", torch.float32)
    with torch.no_grad():
        tokens = decode_method("ar", Target(network), [1, 2], parameters(temperature=0), 1, 60)
        first = tokens[30]
        second = next(token for token in range(97) if token not in tokens)
        for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
            layer.weight[second] = layer.weight[first]
    target = Target(network)
    tokens = decode_method("ar", target, [1, 2], parameters(temperature=0), 1, 60)
    swapped = [{first: second, second: first}.get(token, token) for token in tokens]
    found = audit(target, [1, 2], swapped, parameters(temperature=0), 1)
    assert found.ok
    assert found.within
    assert {(finding.token, finding.drawn) for finding in found.within} <= {
        (first, second),
        (second, first),
    }
    assert all(finding.margin is not None and finding.margin < 1e-5 for finding in found.within)


def at_the_edge(target: Target, prompt: list[int]) -> tuple[int, int, float, int]:
    """A seed, the token it draws without filters, that token's share of the likeliest,
    and what is drawn without it.
    """
    logits = logits_of(target, prompt)[-1] / 0.7
    for seed in range(500):
        (token,) = decode_method("ar", target, prompt, parameters(0.7), seed, 1)
        share = float((logits[token] - logits.max()).exp())
        if 0.02 < share < 0.5:
            (other,) = decode_method(
                "ar", target, prompt, parameters(0.7, min_p=share * 1.001), seed, 1
            )
            return seed, token, share, other
    raise AssertionError("no such seed")


@pytest.mark.parametrize(("bounds", "kind"), [(1, WITHIN), (1000, VIOLATION)])
@pytest.mark.parametrize("kept", [False, True], ids=["the text's token", "its competitor"])
def test_a_token_at_the_edge_of_min_p(kept, bounds, kind):
    """One pass keeps it and the other drops it: an infinite gap in the draw,
    a tiny one at the threshold.
    """
    target = tiny_target(dtype=torch.float32)
    prompt = random_prompt(60, 4)
    seed, token, share, other = at_the_edge(target, prompt)
    bound = audit(target, prompt, [token], parameters(0.7), seed).bound
    change = bounds * bound * (-1 if kept else 1)  # of the threshold, in the logarithm
    text, drawn = (other, token) if kept else (token, other)
    found = audit(target, prompt, [text], parameters(0.7, min_p=share * math.exp(change)), seed)
    assert found.bound == bound
    (finding,) = found.findings
    assert (finding.kind, finding.drawn) == (kind, drawn)
    # the threshold and the token at the edge move towards each other, at temperature 0.7
    assert finding.margin == pytest.approx(0.7 * abs(change) / 2, abs=bound / 2)


# -------------------------------------------------------------------------------------------------
# what is reported


def test_a_banned_token_and_json():
    target = tiny_target()
    prompt = random_prompt(9)
    tokens = decode_method("ar", target, prompt, parameters(), 3, 40)
    params = parameters(banned=(tokens[20],))
    found = audit(target, prompt, tokens, params, 3)
    (finding,) = [finding for finding in found.findings if finding.index == 20]
    assert finding.kind == VIOLATION
    assert finding.margin == float("inf")
    written = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (written["ok"], written["violations"]) == (False, len(found.violations))
    assert written["exact"] == found.exact == 40 - len(written["findings"])
    (entry,) = [entry for entry in written["findings"] if entry["index"] == 20]
    assert (entry["position"], entry["token"], entry["drawn"]) == (29, tokens[20], finding.drawn)
    assert (entry["margin"], entry["kind"]) == (None, VIOLATION)
    assert written["bound"] == 2 * written["measured"]


@few
@given(at=st.integers(0, 59), token=st.integers(0, 96))
def test_whatever_is_altered_is_found_there_first(at, token):
    target = tiny_target()
    prompt = [3]
    params = parameters(penalty=1.2, window=10, min_p=0.05)
    tokens = decode_method("ar", target, prompt, params, 8, 60)
    altered = [*tokens[:at], token, *tokens[at + 1 :]]
    found = audit(target, prompt, altered, params, 8)
    assert [finding.index for finding in found.violations[:1]] == (
        [] if altered == tokens else [at]
    )
