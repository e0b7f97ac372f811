"""The claim of the project: whatever is drafted, the text is plain decoding's;
and plain decoding draws exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from scipy import stats

from tests.helpers import (
    METHODS,
    PLAIN,
    VOCAB,
    Proposals,
    decode,
    decode_method,
    decode_steps,
    drafter_of,
    exact_joint,
    first,
    needs_program,
    random_prompt,
    tiny_target,
    tokens_of,
    toy_target,
)
from tswift.decoding.audit import audit
from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.loop import Decoding
from tswift.drafting.options import DraftOptions
from tswift.sampling.parameters import SamplingParams

# -------------------------------------------------------------------------------------------------
# every method's text is plain decoding's text

CHAIN = DraftOptions(tree=(1, 1, 1), nodes=2, budget=64)
PAPER = DraftOptions(tree=(1, 3, 3, 3), nodes=41, budget=64)
WIDE = DraftOptions(tree=(5, 3, 2), nodes=128, budget=64, ngrams=3, reuse_recent=True)
BLIND = DraftOptions(tree=(4, 2, 2), nodes=9, budget=64, sinks=0, shared_noise=False)
LARGE = DraftOptions(tree=(2, 2), nodes=16, budget=4096, ngrams=1, shared_noise=False)


def parameters(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    eta=0.0,
    penalty=1.0,
    window=1024,
    banned=(),
    bias=(),
):
    return SamplingParams(
        temperature, top_k, top_p, min_p, eta, penalty, window, banned=banned, logit_bias=dict(bias)
    )


# sampling parameters, draft options, seed, prompt length, tokens, kind of model
TEXTS = {
    "greedy, small penalty": (
        parameters(temperature=0, penalty=1.05, window=2),
        WIDE,
        2,
        2,
        150,
        "mha",
    ),
    "T 1": (parameters(), PAPER, 3, 60, 80, "mqa"),
    "greedy": (parameters(temperature=0), PAPER, 1, 40, 90, "gqa"),
    "T 1, seldom surprised": (parameters(temperature=0.3), BLIND, 4, 120, 110, "gqa"),
    "top-p": (parameters(temperature=0.7, top_p=0.8), WIDE, -5, 1, 164, "mha"),
    "min-p": (parameters(temperature=0.7, min_p=0.2), CHAIN, 6, 2, 150, "gqa"),
    "eta": (parameters(temperature=0.7, eta=0.05), PAPER, 2**63 + 7, 70, 110, "gqa"),
    "top-k": (parameters(temperature=0.7, top_k=5), BLIND, 8, 1, 164, "mqa"),
    "window 1": (parameters(temperature=0.5, penalty=1.5, window=1), PAPER, 9, 80, 110, "mqa"),
    "window 2": (
        parameters(temperature=0.7, min_p=0.05, penalty=1.5, window=2),
        WIDE,
        10,
        64,
        110,
        "gqa",
    ),
    "window 3": (parameters(temperature=0.4, penalty=2.0, window=3), BLIND, 11, 80, 110, "mha"),
    "window above the text": (
        parameters(min_p=0.1, penalty=1.2, window=10**6),
        PAPER,
        12,
        90,
        110,
        "gqa",
    ),
    "window and budget above the text": (
        parameters(temperature=0.5, penalty=1.1, window=30),
        LARGE,
        13,
        2,
        120,
        "gqa",
    ),
    "all at once, banned ids": (
        parameters(0.7, 20, 0.9, 0.02, 0.001, 1.3, 5, banned=(0, 3, 50)),
        PAPER,
        14,
        65,
        110,
        "gqa",
    ),
    "biases": (
        parameters(0.7, min_p=0.1, penalty=1.2, window=9, bias={3: 4.0, 11: -100, 40: 0.5}),
        PAPER,
        15,
        65,
        110,
        "gqa",
    ),
}

CASES = [*((name, torch.float64) for name in TEXTS), ("window 2", torch.float32)]

# what drafts a chain: one of these beside the others, for each text another
SYSTEMS = [
    *(("magicdec", kv) for kv in METHODS["magicdec"].kv),
    *(("standalone", kv) for kv in METHODS["standalone"].kv),
    ("triforce", None),
]


@pytest.mark.parametrize(("name", "dtype"), [*first(2, CASES[:-1]), CASES[-1]], ids=str)
def test_every_method_writes_the_text_of_plain_decoding(name, dtype):
    params, options, seed, prompt_length, length, kind = TEXTS[name]
    target = tiny_target(kind, dtype, layers=2)
    prompt = random_prompt(prompt_length, seed % 1000)
    plain = decode_method("ar", target, prompt, params, seed, length)
    assert len(plain) == length
    number = list(TEXTS).index(name)
    system, kv = SYSTEMS[number % len(SYSTEMS)]
    chains = replace(options, tree=None, kv=kv, gamma=1 + number % 6)
    found = audit(target, prompt, plain, params, seed)
    assert found.exact == found.tokens == length, found.findings
    assert 0 < found.measured < (1e-12 if dtype == torch.float64 else 1e-3)
    asks = {"tokenswift": options}
    if dtype == torch.float64:  # how passes round is no matter of the method
        asks |= {("medusa", "reuse")[number % 2]: options, system: chains}
    for method, asked in asks.items():
        drafter = drafter_of(method, target, asked)
        # a chain takes a pass for every token of it
        wanted = plain if method == "tokenswift" else plain[: 30 if asked is chains else 100]
        steps = decode_steps(target, drafter, prompt, params, seed, len(wanted))
        assert tokens_of(steps) == wanted, method
        assert max(step.nodes for step in steps) <= (
            options.nodes if asked is options else chains.gamma + 1
        )
        if method == "tokenswift":
            # else next to nothing was tested
            assert sum(step.accepted for step in steps) > length // 8
            selections = drafter.sources[0].draft_model.kv.selections
            assert selections >= 3 if options.budget < 100 else selections == 0


@pytest.mark.slow
def test_a_long_prompt():
    target = tiny_target("gqa")
    prompt = random_prompt(2200)
    params = parameters(min_p=0.1, penalty=1.2, window=1024)
    plain = decode_method("ar", target, prompt, params, 21, 60)
    budgets = (
        ("medusa", 64),
        ("tokenswift", 64),
        ("tokenswift", 1024),
        ("reuse", 64),
        ("magicdec", 300),
    )
    for method, budget in (*budgets, ("standalone", 80), ("triforce", 2400)):
        options = DraftOptions(tree=(1, 3, 3), nodes=24, budget=budget)
        assert decode_method(method, target, prompt, params, 21, 60, options) == plain, (
            method,
            budget,
        )


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_of_one_token_and_lengths_that_cut_a_step(method):
    target = tiny_target()
    params = parameters(temperature=0.3)
    whole = decode_method("ar", target, [5], params, 3, 24)
    for length in (1, 2, 5, 24):
        assert decode_method(method, target, [5], params, 3, length, PAPER) == whole[:length]


# -------------------------------------------------------------------------------------------------
# drafts that lie, and drafts that know


def test_no_draft_changes_the_text_however_it_lies():
    """Long accepted paths among lies: the true continuation, cut at random, with siblings,
    repeated, out of order.
    """
    target = tiny_target()
    prompt = random_prompt(20, 3)
    random = Random(1)
    for params in (
        parameters(penalty=1.4, window=1),
        parameters(penalty=1.4, window=3),
        parameters(temperature=0.7, top_p=0.9, penalty=1.2, window=9),
        parameters(temperature=0, penalty=1.3, window=4),
    ):
        plain = decode_method("ar", target, prompt, params, 17, 60)

        def lies(context, plain=plain):
            done = len(context.text) - len(prompt)
            truth = plain[done : done + random.randrange(12)]
            root = context.text[-1]
            paths = [
                [*truth[:cut], *(random.randrange(VOCAB) for _ in range(random.randrange(4)))]
                for cut in range(len(truth) + 1)
            ]
            paths += [
                truth,
                truth,
                [root] * 6,
                truth[::-1],
                truth[1:],
                [],
                plain[:40],
                [*truth, root, root],
            ]
            random.shuffle(paths)
            return paths

        for limit in (2, 64):
            steps = decode_steps(
                target, Drafter([Proposals(lies)], 2, limit), prompt, params, 17, 60
            )
            assert tokens_of(steps) == plain, (params, limit)
            assert max(step.nodes for step in steps) <= limit
            assert max(step.accepted for step in steps) > (0 if limit == 2 else 3)


def knowing(plain: list[int], prompt: list[int], depth: int) -> Drafter:
    def truth(context: Context) -> list[list[int]]:
        done = len(context.text) - len(prompt)
        return [plain[done : done + depth]]

    return Drafter([Proposals(truth)], depth, depth + 1)


def test_the_length_is_exact_in_the_middle_of_an_accepted_path():
    target = tiny_target()
    prompt = [1, 2]
    params = parameters()
    plain = decode_method("ar", target, prompt, params, 4, 40)
    for length in (1, 4, 5, 6, 11, 20):
        steps = decode_steps(target, knowing(plain, prompt, 4), prompt, params, 4, length)
        assert tokens_of(steps) == plain[:length]
        assert [len(step.tokens) for step in steps] == [5] * (length // 5) + (
            [length % 5] if length % 5 else []
        )
        assert all(step.accepted == len(step.tokens) - 1 for step in steps)
        # no more is drafted than is wanted
        assert all(step.nodes == len(step.tokens) for step in steps)


def test_a_stop_token_is_the_last_one():
    target = tiny_target()
    prompt = [1, 2]
    params = parameters()
    plain = decode_method("ar", target, prompt, params, 4, 40)
    for at in (0, 1, 4, 5, 13):
        stop = plain[at]
        until = plain[: plain.index(stop) + 1]
        assert decode_method("ar", target, prompt, params, 4, 20, stop={stop}) == until
        assert (
            decode(target, knowing(plain, prompt, 4), prompt, params, 4, 20, {stop, VOCAB + 1})
            == until
        )
        assert decode_method("tokenswift", target, prompt, params, 4, 20, stop=(stop,)) == until


def test_the_same_decode_twice_and_no_global_random_state():
    target = tiny_target()
    prompt = random_prompt(9)
    params = parameters(penalty=1.2, window=8)
    torch.manual_seed(1)
    first = decode_method("tokenswift", target, prompt, params, 8, 40)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert decode_method("tokenswift", target, prompt, params, 8, 40) == first
    assert torch.equal(torch.random.get_rng_state(), before)
    assert decode_method("tokenswift", target, prompt, params, 9, 40) != first


# a job's whole state is the tokens so far and the seed

CUTS = {  # sampling parameters, draft options, seed, prompt length, tokens
    "penalty, small budget": (
        parameters(0.7, min_p=0.05, penalty=1.3, window=20),
        PAPER,
        8,
        9,
        120,
    ),
    "greedy, no penalty": (parameters(temperature=0), BLIND, 9, 70, 150),
    "window above the text": (parameters(min_p=0.1, penalty=1.2, window=10**6), WIDE, 10, 1, 150),
}


@pytest.mark.parametrize("name", first(1, list(CUTS)[:2]))
def test_a_text_goes_on_where_it_was_cut(name):
    params, options, seed, prompt_length, length = CUTS[name]
    target = tiny_target()
    prompt = random_prompt(prompt_length, seed)
    whole = decode_method("ar", target, prompt, params, seed, length)
    random = Random(name)
    for method, cut in [
        *(("tokenswift", cut) for cut in (1, 66)),
        *(
            (method, random.randrange(67, length - 1))
            for method in ("ar", "medusa", "tokenswift", "reuse")
        ),
        *((method, length - 1) for method in ("medusa", "reuse")),
    ]:
        drafter = drafter_of(method, target, options)
        run = Decoding(target, prompt, params, seed, drafter, length, written=whole[:cut])
        assert whole[:cut] + tokens_of(list(run.steps())) == whole, (method, cut)
        # the written tokens count once
        assert run._context.kv.capacity == len(prompt) + length + drafter.limit
        if cut == 1:
            assert drafter.sources[0].draft_model.kv.selections >= 3


def test_what_was_written_in_the_shadow_of_a_stop_token_still_ends_the_text():
    target = tiny_target()
    prompt = [1, 2]
    params = parameters()
    plain = decode_method("ar", target, prompt, params, 4, 40)
    stop = plain[13]
    until = plain.index(stop)
    assert until > 2
    run = Decoding(
        target, prompt, params, 4, drafter_of("tokenswift", target, PAPER), 40, written=plain[:2]
    )
    assert tokens_of(list(run.steps({stop}))) == plain[2 : until + 1]


def test_what_cannot_be_decoded_is_refused():
    for prompt, length, written, about in (
        *((prompt, 4, [], "prompt") for prompt in ([], [VOCAB], [3, -1])),
        *(([1], 4, written, "length") for written in ([1, 2, 3, 4], [1, 2, 3, 4, 5])),
        ([1], 4, [VOCAB], "written"),
    ):
        with pytest.raises(ValueError, match=about):
            Decoding(tiny_target(), prompt, PLAIN, 1, Drafter(), length, written=written)


def test_a_long_prefill_shows_how_far_it_is():
    seen = []
    run = Decoding(
        tiny_target(), random_prompt(700), PLAIN, 1, Drafter(), 900, written=random_prompt(400, 1)
    )
    run.prefill(lambda done, total: seen.append((done, total)))
    assert seen == [(512, 1099), (1024, 1099), (1099, 1099)]
    Decoding(tiny_target(), [1], PLAIN, 1, Drafter(), 9).prefill(
        lambda done, total: seen.append((done, total))
    )
    assert len(seen) == 3  # there was nothing to forward


# -------------------------------------------------------------------------------------------------
# the joint distribution of decoded texts against exact probabilities

PROMPT = [2, 0, 1]
TOY = {
    "T 1": parameters(),
    "penalty shorter than the path": parameters(penalty=2.5, window=1),
    "penalty over the path": parameters(temperature=0.8, penalty=1.8, window=2),
    "min-p": parameters(temperature=0.7, min_p=0.35, penalty=1.5, window=3),
}
LEAVES = [[3, 1, 0], [3, 1, 2], [3, 0, 0], [3, 2, 1], [3, 3, 3], [0, 0, 0], [0, 1, 3], [1, 1, 1]]


def noise_peeking(context: Context) -> list[list[int]]:
    # a drafter that knows the noise and nothing of the model, as far from independent of the draws
    # as can be
    best = context.sampler.noise(range(context.position + 1, context.position + 4))
    if best.dim() == 0:
        return [[0, 0, 0]]
    first, second, third = best.topk(2).indices.tolist()
    return [[a, b, c] for a in first for b in second for c in third]


DRAFTS = {
    "leaves": lambda context: LEAVES,
    "noise": noise_peeking,
    "siblings": lambda context: [[0], [3], [2], [1]],
    "nothing": lambda context: [],
}


def joint_p_value(params: SamplingParams, paths, texts: int = 450, length: int = 3) -> float:
    """Chi-square p-value of decoded texts over many seeds;
    0 where a text of no probability came out.
    """
    target = toy_target()
    exact = exact_joint(target.table, PROMPT, params, length)
    drafter = Drafter([Proposals(paths)], 3, 16)
    seen = Counter(
        tuple(decode(target, drafter, PROMPT, params, seed, length)) for seed in range(texts)
    )
    if set(seen) - set(exact):
        return 0.0
    rare = [text for text, probability in exact.items() if probability * texts < 5]
    common = [text for text in exact if text not in set(rare)]
    observed = [seen[text] for text in common] + [sum(seen[text] for text in rare)]
    expected = [exact[text] * texts for text in common] + [
        sum(exact[text] for text in rare) * texts
    ]
    if expected[-1] < 1e-9:
        observed = observed[:-1]
        expected = expected[:-1]
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize(
    ("name", "draft"),
    first(
        2,
        [
            ("T 1", "noise"),
            ("penalty shorter than the path", "leaves"),
            ("T 1", "siblings"),
            ("penalty over the path", "nothing"),
            ("min-p", "leaves"),
        ],
    ),
)
def test_decoded_texts_have_their_exact_joint_distribution(name, draft):
    assert joint_p_value(TOY[name], DRAFTS[draft]) > 1e-3


RECALL = DraftOptions(costs="nominal")  # the same trees whatever the clock says


@needs_program
def test_decodes_of_the_same_text_are_prefilled_together():
    target = tiny_target()
    prompt = random_prompt(50, 2)
    wanted = decode_method("ar", target, prompt, PLAIN, 3, 40)
    options = {"tokenswift": DraftOptions(budget=64), "medusa": DraftOptions(), "recall": RECALL}
    first, *others = (
        Decoding(target, prompt, PLAIN, 3, drafter_of(method, target, each), 40)
        for method, each in options.items()
    )
    first.prefill(others=others)
    for decoding in (first, *others):
        assert tokens_of(list(decoding.steps())) == wanted
    apart = decode_steps(target, drafter_of("recall", target, RECALL), prompt, PLAIN, 3, 40)
    again = Decoding(target, prompt, PLAIN, 3, drafter_of("recall", target, RECALL), 40)
    Decoding(target, prompt, PLAIN, 3, Drafter(), 40).prefill(others=[again])
    assert [step.accepted for step in again.steps()] == [step.accepted for step in apart]
    with pytest.raises(RuntimeError, match="already"):
        Decoding(target, prompt, PLAIN, 3, Drafter(), 40).prefill(others=[again])
    other = Decoding(target, prompt[:-1], PLAIN, 3, Drafter(), 40)
    with pytest.raises(ValueError, match="not of the same text"):
        Decoding(target, prompt, PLAIN, 3, Drafter(), 40).prefill(others=[other])
