"""The audit: clean on every text that the rule drew, and it sees every mistake, where it was made."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tswift
from tests.decoding import test_loop as loops
from tests.decoding.test_loop import DTYPES, PAPER, TEXTS, parameters
from tests.helpers import decode, decode_method, random_prompt, tiny_llama, tiny_target
from tswift.decoding import audit as module
from tswift.decoding.audit import VIOLATION, WITHIN, Audit, audit, stretches
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.engine import begin
from tswift.kv.full import FullKV
from tswift.models.target import Target

NOVEL = Path(__file__).parents[2] / "prompts" / "long-novel.txt"


demo = functools.cache(tswift.load)


def logits_of(target: Target, text: list[int]) -> torch.Tensor:
    forwarded = target.prefill(text, FullKV(target.kv_shape, len(text)))
    assert forwarded is not None
    return target.logits(forwarded.hidden).double()


def clean(found: Audit, tokens: int) -> bool:
    return found.ok and found.tokens == tokens and found.exact + len(found.within) == tokens


# ---------------------------------------------------------------------------------------------------------------------
# what the rule drew is found clean


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
@pytest.mark.parametrize("name", TEXTS)
def test_what_was_drawn_is_clean(name: str, dtype: torch.dtype) -> None:
    """The text of plain decoding, which the tests of the loop say is every method's."""
    params, _, seed, prompt_length, length, kind = TEXTS[name]
    target, prompt = tiny_target(kind, dtype), random_prompt(prompt_length, seed % 1000)
    text = decode_method("ar", target, prompt, params, seed, length)
    found = audit(target, prompt, text, params, seed)
    assert found.exact == found.tokens == length, found.findings
    assert 0 < found.measured < (1e-12 if dtype == torch.float64 else 1e-3)
    assert found.bound == 2 * found.measured


@pytest.mark.parametrize(
    ("params", "prefill"),
    [
        (SamplingParams(), 300),
        (SamplingParams(temperature=0, penalty=1.1, window=5000), 1),
        (SamplingParams(temperature=0.7, min_p=0, top_p=0.9, penalty=1), 300),
        (SamplingParams(min_p=0, eta=0.002, top_k=50, window=2), 1),
    ],
    ids=["defaults", "greedy", "top-p", "eta, top-k, short window"],
)
def test_the_bundled_model(params: SamplingParams, prefill: int) -> None:
    model = demo()
    prompt = model.encode(NOVEL.read_text())[:prefill]
    run = begin(model, prompt, 200, params=params, seed=7)
    tokens = [token for step in run.steps() for token in step.tokens]
    found = audit(model.target, prompt, tokens, run.params, 7)
    assert clean(found, 200)
    assert found.exact >= 199


def test_rounding_of_a_short_text_is_not_that_of_its_first_tokens() -> None:
    """With nothing in the cache, passes of all widths round nearly alike."""
    model = tswift.load("demo", device="cpu", dtype="bfloat16", exact=False)
    prompt = model.encode(NOVEL.read_text())[:90]
    tokens = [token for step in begin(model, prompt, 100, method="ar", seed=4).steps() for token in step.tokens]
    assert audit(model.target, prompt, tokens, SamplingParams(banned=model.eos_ids), 4).measured > 0.02


def test_bfloat16_on_the_bundled_model() -> None:
    model = tswift.load(dtype="bfloat16", exact=False)
    prompt = model.encode(NOVEL.read_text())[:512]
    run = begin(model, prompt, 300, seed=11)
    tokens = [token for step in run.steps() for token in step.tokens]
    found = audit(model.target, prompt, tokens, run.params, 11)
    assert clean(found, 300)
    assert len(found.within) < 30
    assert 0.01 < found.measured < 1
    assert found.width is None
    assert found.levels[0].observed == len(found.within)
    assert len(found.within) < found.contested < 250
    shifted = audit(model.target, prompt, tokens, run.params, 12)
    assert len(shifted.violations) > 100


def test_exact_passes_leave_nothing_to_rounding() -> None:
    """In bfloat16 every token of an exact text is drawn exactly, and the closest of all changes is a violation."""
    model = tswift.load(dtype="bfloat16", exact=True)
    prompt = model.encode(NOVEL.read_text())[:300]
    run = begin(model, prompt, 300, method="medusa", seed=3)
    tokens = [token for step in run.steps() for token in step.tokens]
    found = audit(model.target, prompt, tokens, run.params, 3)
    assert (found.ok, found.exact, found.width) == (True, 300, model.target.width)
    assert (found.measured, found.bound, found.levels, found.contested) == (0, 0, (), 0)
    model.target.width = None
    near = audit(model.target, prompt, tokens, run.params, 3)  # the same text by other passes
    assert near.ok
    assert near.within  # of these tokens the exact audit is to refuse the other one
    model.target.width = found.width
    for finding in near.within:
        changed = [*tokens[: finding.index], finding.drawn]
        (violation,) = audit(model.target, prompt, changed, run.params, 3).violations
        assert (violation.index, violation.drawn) == (finding.index, finding.token)
        assert violation.margin is not None
        assert 0 < violation.margin < near.bound


def test_a_token_is_no_violation_and_the_text_is_one() -> None:
    """Each token drawn with a slightly larger min-p is within the bound; that there are so many is not rounding."""
    model = tswift.load(dtype="bfloat16", exact=False)
    prompt, params = model.encode(NOVEL.read_text())[:256], SamplingParams(min_p=0.115)
    run = begin(model, prompt, 800, method="ar", params=params, seed=1)
    tokens = [token for step in run.steps() for token in step.tokens]
    asked = replace(run.params, min_p=0.1)
    assert audit(model.target, prompt, tokens, run.params, 1).ok
    found = audit(model.target, prompt, tokens, asked, 1)
    assert not found.ok
    assert not found.violations
    assert found.excess
    written = found.as_dict()
    assert written["ok"] is False
    assert [level["margin"] for level in written["levels"]] == [level.margin for level in found.levels]


@pytest.mark.parametrize("prompt_length", [1, 2, 30])
def test_lengths_about_those_of_chunks_and_stretches(prompt_length: int) -> None:
    target, prompt = tiny_target(), random_prompt(prompt_length)
    params = parameters(temperature=0.7, penalty=1.3, window=7)
    tokens = decode_method("ar", target, prompt, params, 3, 600)
    for length in (1, 2, 31, 32, 33, 63, 64, 256, 257, 600):
        assert audit(target, prompt, tokens[:length], params, 3).exact == length


@given(first=st.integers(0, 2000), length=st.integers(1, 3000))
def test_stretches_have_whole_chunks_behind_them(first: int, length: int) -> None:
    nodes = first + length
    starts = stretches(first, nodes)
    assert len(starts) == min(8, max(1, length // 256))
    assert starts[0] == min(first, max(0, nodes - 256))
    assert all(later - earlier >= 256 for earlier, later in pairwise(starts))
    assert starts[-1] + 256 <= max(256, nodes)
    assert length < 512 or starts[-1] + 256 == nodes


def test_a_large_vocabulary_is_judged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt, params = tiny_target(), random_prompt(20), parameters(penalty=1.5, window=5)
    tokens = decode_method("ar", target, prompt, params, 3, 300)
    tokens[150] = (tokens[150] + 1) % 97
    whole = audit(target, prompt, tokens, params, 3)
    for rows in (1, 3, 100):
        monkeypatch.setattr(module, "_ELEMENTS", rows * 97)
        parts = audit(target, prompt, tokens, params, 3)
        assert parts.findings == whole.findings != ()
        assert (parts.least_lead, parts.greatest_lead) == (whole.least_lead, whole.greatest_lead)


def test_progress() -> None:
    target, prompt, params = tiny_target(), random_prompt(1100), parameters()
    tokens = decode_method("ar", target, prompt, params, 3, 300)
    seen: list[tuple[int, int]] = []
    audit(target, prompt, tokens, params, 3, lambda done, total: seen.append((done, total)))
    done = [pair[0] for pair in seen]
    assert done == sorted(set(done))
    assert done[0] <= 512
    assert seen[-1] == (1399, 1399)
    assert {pair[1] for pair in seen} == {1399}


def test_leads() -> None:
    target, prompt, params = tiny_target(), random_prompt(9), parameters(temperature=0)
    tokens = decode_method("ar", target, prompt, params, 3, 80)
    best = logits_of(target, [*prompt, *tokens[:-1]])[8:].topk(2).values
    found = audit(target, prompt, tokens, params, 3)
    assert found.least_lead == pytest.approx(float((best[:, 0] - best[:, 1]).min()), rel=1e-6)
    assert found.greatest_lead == pytest.approx(float((best[:, 0] - best[:, 1]).max()), rel=1e-6)
    alone = audit(target, prompt, tokens, parameters(temperature=1, top_k=1), 3)
    assert (alone.least_lead, alone.greatest_lead) == (None, None)
    assert alone.exact == 80


def test_what_cannot_be_audited_is_refused() -> None:
    for prompt, tokens in (([], [1]), ([1], []), ([97], [1]), ([1], [-1])):
        with pytest.raises(ValueError, match=r"token"):
            audit(tiny_target(), prompt, tokens, parameters(), 1)


# ---------------------------------------------------------------------------------------------------------------------
# mistakes are found, all of them and where they are


def redrawn(
    target: Target, prompt: list[int], tokens: list[int], params: SamplingParams, seed: int, plain: Sequence[int] = ()
) -> dict[int, int]:
    """Place and token wherever plain decoding of one token, after the text before it, draws another one.

    As far as the text is ``plain``'s, that is known to be what plain decoding draws.
    """
    same = next((at for at, pair in enumerate(zip(plain, tokens, strict=False)) if pair[0] != pair[1]), len(plain))
    found = {same: plain[same]} if same < len(plain) else {}
    for index, token in enumerate(tokens):
        if index <= same and plain:
            continue
        (drawn,) = decode_method("ar", target, [*prompt, *tokens[:index]], params, seed, 1)
        if drawn != token:
            found[index] = drawn
    return found


def check(
    target: Target, prompt: list[int], tokens: list[int], params: SamplingParams, seed: int, plain: Sequence[int] = ()
) -> Audit:
    """The audit finds what one decode for every position finds."""
    found = audit(target, prompt, tokens, params, seed)
    expected = redrawn(target, prompt, tokens, params, seed, plain)
    assert {finding.index: finding.drawn for finding in found.findings} == expected
    assert found.exact == len(tokens) - len(expected)
    for finding in found.findings:
        assert finding.kind == VIOLATION
        assert finding.position == len(prompt) + finding.index
        assert finding.token == tokens[finding.index]
        assert finding.margin is not None
        assert finding.margin > found.bound
    return found


@pytest.mark.parametrize("name", ["greedy", "top-p", "min-p", "eta", "top-k", "window 2", "all at once, banned ids"])
def test_altered_tokens(name: str) -> None:
    params, _, seed, prompt_length, length, kind = TEXTS[name]
    target, prompt = tiny_target(kind), random_prompt(prompt_length, seed % 1000)
    plain = decode_method("ar", target, prompt, params, seed, length)
    allowed = [token for token in range(97) if token not in params.banned]
    for at, until in ((0, 35), (40, length), (length - 1, length)):
        altered = plain[:until]
        altered[at] = allowed[(allowed.index(altered[at]) + 1) % len(allowed)]
        found = check(target, prompt, altered, params, seed, plain[:until])
        assert found.violations[0].index == at


@pytest.mark.parametrize(
    "mistake",
    [
        loops.one_draw_per_leaf,
        loops.penalty_of_the_root_for_all,
        loops.window_that_does_not_slide,
        loops.noise_of_the_root_for_all,
        loops.slots_in_order,
        loops.position_of_the_root_for_all,
        loops.attends_to_all_nodes,
    ],
)
def test_a_biased_verifier(mistake) -> None:  # type: ignore[no-untyped-def]
    target, prompt, length = tiny_target(), random_prompt(50, 1), 120
    params = parameters(penalty=1.5, window=2)
    plain = decode_method("ar", target, prompt, params, 5, length)

    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        biased = decode(target, loops.right_among_wrong(plain, prompt), prompt, params, 5, length)
    if mistake in (loops.slots_in_order, loops.position_of_the_root_for_all, loops.attends_to_all_nodes):
        # what is wrong there lies in passes, which the one-token decodes of `redrawn` do not make
        assert not audit(target, prompt, biased, params, 5).ok
    else:
        assert not check(target, prompt, biased, params, 5).ok


def test_one_draw_per_leaf_with_the_drafts_of_the_heads() -> None:
    target, prompt, params = tiny_target(), random_prompt(40, 2), parameters(temperature=0.3)
    with pytest.MonkeyPatch.context() as patch:
        loops.one_draw_per_leaf(patch)
        biased = decode_method("tokenswift", target, prompt, params, 5, 200, PAPER)
    assert not check(target, prompt, biased, params, 5).ok


def test_passes_that_do_not_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = tiny_target(), random_prompt(60)
    tokens = decode_method("ar", target, prompt, parameters(), 3, 200)
    assert audit(target, prompt, tokens, parameters(), 3).ok
    right = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, tokens, positions, kv, ancestors: right(
        self, tokens, positions, kv, torch.ones(len(tokens), len(tokens)).bool() if 1 < len(tokens) < 20 else None
    ))  # fmt: skip
    found = audit(target, prompt, tokens, parameters(), 3)
    assert not found.violations  # the bound covers everything, so it must not count
    assert found.measured > found.limit
    assert not found.ok


def test_a_skipped_penalty() -> None:
    target, prompt = tiny_target(), random_prompt(50, 1)
    unpenalised = decode_method("ar", target, prompt, parameters(temperature=0.5), 5, 120)
    for window in (2, 30, 10**6):
        assert not check(target, prompt, unpenalised, parameters(temperature=0.5, penalty=1.3, window=window), 5).ok


def test_a_penalty_window_off_by_one() -> None:
    target, prompt = tiny_target(), random_prompt(50, 1)
    tokens = decode_method("ar", target, prompt, parameters(temperature=0.3, penalty=2.0, window=8), 5, 200)
    assert not check(target, prompt, tokens, parameters(temperature=0.3, penalty=2.0, window=9), 5).ok


def test_noise_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt, params = tiny_target(), random_prompt(50, 1), parameters()
    right = Sampler.noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "noise", lambda self, positions: right(self, [place + 1 for place in positions]))
        tokens = decode_method("ar", target, prompt, params, 5, 100)
    assert len(check(target, prompt, tokens, params, 5).violations) > 50


def test_another_seed_and_the_limit_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt, params = tiny_target(), random_prompt(50, 1), parameters()
    tokens = decode_method("ar", target, prompt, params, 5, 250)
    whole = check(target, prompt, tokens, params, 6)
    assert len(whole.violations) > 150
    monkeypatch.setattr(module, "SEARCHED", 7)
    limited = audit(target, prompt, tokens, params, 6)
    assert limited.findings[:7] == whole.findings[:7]
    assert limited.findings[7:] == tuple(replace(finding, margin=None) for finding in whole.findings[7:])


# ---------------------------------------------------------------------------------------------------------------------
# near-ties are no violations


def test_an_exact_tie_is_within_rounding() -> None:
    network = tiny_llama("gqa", torch.float32)
    with torch.no_grad():
        tokens = decode_method("ar", Target(network), [1, 2], parameters(temperature=0), 1, 60)
        first, second = tokens[30], next(token for token in range(97) if token not in tokens)
        for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
            layer.weight[second] = layer.weight[first]
    target = Target(network)
    tokens = decode_method("ar", target, [1, 2], parameters(temperature=0), 1, 60)
    swapped = [{first: second, second: first}.get(token, token) for token in tokens]
    found = audit(target, [1, 2], swapped, parameters(temperature=0), 1)
    assert found.ok
    assert found.within
    assert {(finding.token, finding.drawn) for finding in found.within} <= {(first, second), (second, first)}
    assert all(finding.margin is not None and finding.margin < 1e-5 for finding in found.within)


def at_the_edge(target: Target, prompt: list[int]) -> tuple[int, int, float, int]:
    """A seed, the token it draws without filters, that token's share of the likeliest, and what is drawn without it."""
    logits = logits_of(target, prompt)[-1] / 0.7
    for seed in range(500):
        (token,) = decode_method("ar", target, prompt, parameters(0.7), seed, 1)
        share = float((logits[token] - logits.max()).exp())
        if 0.02 < share < 0.5:
            (other,) = decode_method("ar", target, prompt, parameters(0.7, min_p=share * 1.001), seed, 1)
            return seed, token, share, other
    raise AssertionError("no such seed")


@pytest.mark.parametrize(("bounds", "kind"), [(1, WITHIN), (1000, VIOLATION)])
@pytest.mark.parametrize("kept", [False, True], ids=["the text's token", "its competitor"])
def test_a_token_at_the_edge_of_min_p(kept: bool, bounds: int, kind: str) -> None:
    """One pass keeps it and the other drops it: an infinite gap in the draw, a tiny one at the threshold."""
    target, prompt = tiny_target(dtype=torch.float32), random_prompt(60, 4)
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


# ---------------------------------------------------------------------------------------------------------------------
# what is reported


def test_a_banned_token_and_json() -> None:
    target, prompt = tiny_target(), random_prompt(9)
    tokens = decode_method("ar", target, prompt, parameters(), 3, 40)
    params = parameters(banned=(tokens[20],))
    found = audit(target, prompt, tokens, params, 3)
    (finding,) = [finding for finding in found.findings if finding.index == 20]
    assert finding.kind == VIOLATION
    assert finding.margin == float("inf")
    written = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert written["ok"] is False
    assert written["violations"] == len(found.violations)
    assert written["within_rounding"] == 0
    assert written["exact"] == found.exact == 40 - len(written["findings"])
    (entry,) = [entry for entry in written["findings"] if entry["index"] == 20]
    assert entry == {
        "index": 20,
        "position": 29,
        "token": tokens[20],
        "drawn": finding.drawn,
        "margin": None,
        "kind": VIOLATION,
    }
    assert written["bound"] == 2 * written["measured"]


@settings(deadline=None, max_examples=20)
@given(at=st.integers(0, 89), token=st.integers(0, 96))
def test_whatever_is_altered_is_found_there_first(at: int, token: int) -> None:
    target, prompt, params = tiny_target(), [3], parameters(penalty=1.2, window=10, min_p=0.05)
    tokens = decode_method("ar", target, prompt, params, 8, 90)
    altered = [*tokens[:at], token, *tokens[at + 1 :]]
    found = audit(target, prompt, altered, params, 8)
    assert [finding.index for finding in found.violations[:1]] == ([] if altered == tokens else [at])
