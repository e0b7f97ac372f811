"""What clients of OpenAI, vLLM and transformers ask for: penalties of presence, frequency and
repetition, no end before so many tokens, token ids and loops that end the text. By every method as
plainly decoded, and as there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.helpers import (
    CPU,
    METHODS,
    first,
    options_for,
    path_to,
    random_tree,
    refused,
    seeded,
    tokens_of,
)
from tswift.decoding.audit import audit
from tswift.decoding.text import TextRules, TextStream, text_of
from tswift.engine import generate
from tswift.loading.model import LoadedModel, load
from tswift.sampling.parameters import SamplingParams, apply_eos_policy
from tswift.sampling.rule import Sampler

PROMPT = "The ship had lain three days"
LENGTH = 30
# what drafts in ways of its own: trees of heads, beside others, chains, arms
SOME = ("medusa", "tokenswift", "standalone", "auto")
COUNTED = SamplingParams(min_p=0.02, presence_penalty=0.7, frequency_penalty=-0.9, penalty=1.0)
BOTH = replace(COUNTED, presence_penalty=1.5, frequency_penalty=0.4, penalty=1.2, window=16)
REPEATED = SamplingParams(min_p=0.02, penalty=1.0, repetition_penalty=1.3)
REWARDED = SamplingParams(temperature=0.7, min_p=0.0, penalty=1.0, repetition_penalty=0.8)
ALL_OF_THEM = SamplingParams(
    min_p=0.02,
    penalty=1.2,
    window=8,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.2,
    logit_bias={5: 3.0, 40: -1.0},
)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load(str(checkpoint), draft_model=str(checkpoint))


def written(model: LoadedModel, method: str, params: SamplingParams, **asked) -> list[int]:
    options = options_for(method, budget=64)
    steps = generate(
        model, PROMPT, LENGTH, method=method, params=params, options=options, seed=3, **asked
    )
    return tokens_of(steps)


@pytest.mark.parametrize("seed", first(5, range(20)))
def test_nodes_are_penalised_as_by_transformers_and_vllm(seed):
    """For repetition all of the text counts, prompt and path; for presence and frequency
    what was generated alone; after the biases.
    """
    random = Random(seed)
    vocab = 12
    params = replace(ALL_OF_THEM, logit_bias={5: 3.0, 4: -1.0}, presence_penalty=0.7)
    text = [random.randrange(vocab) for _ in range(4 + random.randrange(6))]
    sampler = Sampler(params, 5, vocab, CPU, prompt=4)
    sampler.extend(text[:6])
    sampler.extend(text[6:])
    tree = random_tree(8, random, vocab)
    tree.tokens[0] = text[-1]
    logits = torch.randn(8, vocab, generator=seeded(seed))
    places = torch.tensor(tree.depths) + sampler.length - 1
    lowered = sampler.lowered(logits, torch.tensor(tree.tokens), places, tree.ancestors())
    theirs = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    for node in range(8):
        path = path_to(tree, node)
        wanted = logits[node].double()
        for token, bias in params.logit_bias.items():
            wanted[token] += bias
        wanted = theirs(torch.tensor([[*text, *path]]), wanted[None])[0]
        for token, count in Counter([*text[4:], *path]).items():
            wanted[token] -= params.presence_penalty + count * params.frequency_penalty
        torch.testing.assert_close(lowered[node], wanted, rtol=0, atol=1e-12)


def test_alone_it_is_the_contextual_penalty_without_an_end():
    """So whatever draws that draws it."""
    folded = REPEATED.folded()
    assert (folded.penalty, folded.repetition_penalty) == (1.3, 1.0)
    assert folded.window > 1 << 30
    for params in (ALL_OF_THEM, REWARDED, replace(REPEATED, presence_penalty=0.1)):
        assert params.folded() == params


@pytest.mark.parametrize("params", first(2, [ALL_OF_THEM, BOTH, REPEATED, COUNTED, REWARDED]))
def test_all_methods_give_the_tokens_of_plain_decoding(model, params):
    wanted = written(model, "ar", params)
    if params.repetition_penalty == 1:
        without = replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    else:
        without = replace(params, repetition_penalty=1.0)
    assert wanted != written(model, "ar", without)
    for method in METHODS:
        assert written(model, method, params) == wanted, method
    assert wanted[:20] + written(model, "auto", params, written=wanted[:20]) == wanted
    prompt = model.encode(PROMPT)
    for each, ok in ((params, True), (without, False)):
        drawn = apply_eos_policy(each, model.eos_ids, False)[0]
        assert audit(model.target, prompt, wanted, drawn, 3).ok == ok


def test_log_probabilities_are_of_what_is_drawn_from(model):
    def rows(method):
        steps = generate(model, PROMPT, 40, method=method, params=COUNTED, logprobs=2)
        return [row for step in steps for row in step.logprobs]

    plain, drafted = rows("ar"), rows("reuse")
    for ours, theirs in zip(plain, drafted, strict=True):
        assert abs(ours["warped"] - theirs["warped"]) < 1e-4


def test_no_end_comes_before_so_many_tokens(model):
    """End-of-text tokens and the ids that end a text are as if they were not there until then."""
    (eos,) = model.eos_ids
    likely = SamplingParams(min_p=0.0, penalty=1.0, logit_bias={eos: 6.0, 9: 6.0})
    stops = replace(likely, stop_token_ids=(9,))
    short = written(model, "ar", stops, stop_at_eos=True)
    assert len(short) < 21
    assert short[-1] in (eos, 9)
    late = replace(stops, min_tokens=21)
    wanted = written(model, "ar", late, stop_at_eos=True)
    assert 21 < len(wanted) < LENGTH
    assert not {eos, 9} & {*wanted[:21]}
    assert wanted[-1] in (eos, 9)
    for method in SOME:
        assert written(model, method, late, stop_at_eos=True) == wanted, method
    assert wanted[:8] + written(model, "auto", late, stop_at_eos=True, written=wanted[:8]) == wanted
    prompt = model.encode(PROMPT)
    drawn = apply_eos_policy(late, model.eos_ids, True)[0]
    assert audit(model.target, prompt, wanted, drawn, 3).ok
    assert not audit(model.target, prompt, wanted, replace(drawn, min_tokens=0), 3).ok
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), 21, [eos, 9], device="cpu")
    for count in (0, 20, 21):
        sampler = Sampler(drawn, 3, model.target.vocab_size, CPU, prompt=len(prompt))
        text = [*prompt, *wanted[:count]]
        sampler.extend(text)
        node = torch.tensor(text[-1:]), torch.tensor([len(text) - 1]), torch.ones(1, 1) > 0
        logits = torch.zeros(1, model.target.vocab_size)
        found = sampler.lowered(logits, *node)
        assert torch.equal(found, theirs(torch.tensor([text]), logits))


def test_ends_that_are_ignored(model):
    """They are drawn like any other token, and the text goes on; ids that end it still do."""
    (eos,) = model.eos_ids
    likely = SamplingParams(min_p=0.0, penalty=1.0, logit_bias={eos: 6.0})
    wanted = written(model, "ar", likely, ignore_eos=True)
    assert len(wanted) == LENGTH
    assert wanted.count(eos) > 2
    for method in SOME:
        assert written(model, method, likely, ignore_eos=True) == wanted, method
    other = next(token for token in wanted[5:] if token != eos)
    stopped = written(model, "auto", replace(likely, stop_token_ids=(other,)), ignore_eos=True)
    assert stopped == wanted[: wanted.index(other) + 1]
    with refused("ignore_eos: cannot be given together with stop_at_eos"):
        written(model, "ar", likely, ignore_eos=True, stop_at_eos=True)


def test_what_is_shown_of_an_end(model):
    (eos,) = model.eos_ids
    tokens = [*model.encode("three", bare=True), eos, *model.encode(" days", bare=True)]
    tokenizer = model.tokenizer

    def shown(stop=(), ends=(), **named):
        return text_of(tokenizer, tokens, TextRules(stop, ends=frozenset(ends), **named))

    assert shown() == "three days"
    assert shown(skip_special=False) == "three<|endoftext|> days"
    assert shown(ends=(eos,)) == shown(ends=(eos,), include_end=True) == "three"
    named = {"include_end": True, "skip_special": False}
    assert shown(ends=(eos,), **named) == "three<|endoftext|>"
    last = tokens[-1]
    assert shown(ends=(last,)) + tokenizer.decode([last]) == "three days"
    assert shown(ends=(last,), include_end=True) == "three days"
    assert (shown(("ee",)), shown(("ee",), include_stop=True)) == ("thr", "three")
    # a stop string that is a special token's text is that token, although nobody sees it
    stream = TextStream(tokenizer, TextRules(("<|endoftext|>",)))
    assert stream.add(tokens) + stream.finish() == "three"
    assert stream.stopped == "<|endoftext|>"


def test_a_stop_string_that_is_complete_too_early_ends_nothing(model):
    tokens = model.encode("one two one two one two", bare=True)
    texts = [text_of(model.tokenizer, tokens[:count]) for count in range(len(tokens) + 1)]
    for least in range(len(tokens)):
        stream = TextStream(model.tokenizer, TextRules(("two", "e t"), least=least))
        shown = stream.add(tokens) + stream.finish()
        whole = texts[-1]
        # the first occurrence whose last character comes with a token behind those
        ends = [
            (at + len(stop), at)
            for stop in ("two", "e t")
            for at in range(len(whole))
            if whole.startswith(stop, at) and at + len(stop) > len(texts[least])
        ]
        assert shown == (whole[: min(ends)[1]] if ends else whole), least


def looping(tokens: list[int], most: int, least: int = 1) -> int | None:
    """After how many tokens the newest, thrice ``most``, are a loop of ``least`` to ``most``."""
    for end in range(3 * most, len(tokens) + 1):
        last = tokens[end - 3 * most : end]
        if any(last[size:] == last[:-size] for size in range(least, most + 1)):
            return end
    return None


@pytest.mark.parametrize("most", [1, 2, 5, 20])
def test_a_loop_is_seen_where_it_is_complete(most, model):
    """Of any length up to ``most``, or of this one alone, as older runs have it."""
    random = Random(most)
    found = set()
    for _ in range(120):
        size = random.randrange(1, most + 2)
        piece = [random.randrange(1, 4) for _ in range(size)]
        before = [random.randrange(1, 3) for _ in range(random.randrange(9))]
        tokens = before + (piece * (4 * most))[: random.randrange(5 * most)]
        for least in (1, most):
            stream = TextStream(model.tokenizer, TextRules(loop=most, least_loop=least))
            seen = [
                at for at, token in enumerate(tokens, 1) if (stream.add([token]), stream.looped)[1]
            ]
            end = looping(tokens, most, least)
            assert (seen[0] if seen else None) == end
            found.add((least, end is None))
    assert len(found) == 2 * len({1, most})


def test_a_loop_ends_every_method_at_the_same_token(model):
    greedy = SamplingParams(temperature=0, penalty=1.0)
    whole = tokens_of(generate(model, PROMPT, 400, method="ar", params=greedy))
    size = next(size for size in range(1, 40) if (looping(whole, size) or 400) < 350)
    for most in (size, size + 3):
        end = looping(whole, most)
        assert end is not None
        for method in ("ar", "auto", "medusa"):
            steps = generate(model, PROMPT, 400, method=method, params=greedy, stop_on_loop=most)
            assert tokens_of(steps) == whole[:end]
        rest = generate(
            model, PROMPT, 400, params=greedy, stop_on_loop=most, written=whole[: end - 5]
        )
        assert tokens_of(rest) == whole[end - 5 : end]
    with refused("the text so far ends in a loop"):
        list(generate(model, PROMPT, 400, params=greedy, stop_on_loop=most, written=whole[:end]))
    with refused("must be at least 1"):
        list(generate(model, PROMPT, 400, stop_on_loop=0))


def test_what_is_asked_for_is_said():
    assert str(BOTH).endswith("presence penalty 1.5, frequency penalty 0.4")
    with refused("between -2 and 2"):
        SamplingParams(presence_penalty=2.5)
