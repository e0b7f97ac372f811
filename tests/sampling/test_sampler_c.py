"""The sampling rule as a C function draws what the rule by PyTorch draws,
near-ties and edges of filters included.
"""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import many
from tests.helpers import CPU, needs_program, random_tree, seeded
from tswift.decoding.drafter import DraftTree
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler, _drawn, gumbel, seed_stream
from tswift.sampling.sampler_c import c_sampler

pytestmark = needs_program

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 1.0]),
    eta=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.2, 3.0]),
    window=st.sampled_from([0, 1, 5, 1024]),
    banned=st.sampled_from([(), (0,), (1, 3)]),
    logit_bias=st.dictionaries(st.integers(0, 4), st.floats(-100, 100), max_size=3),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 0, 3, 20]),
    stop_token_ids=st.sampled_from([(), (2,), (4, 0)]),
    ends=st.sampled_from([(), (1,)]),
)


def by_torch(sampler: Sampler, logits, seen, positions) -> list[int]:
    return _drawn(*sampler._ranked(logits, seen, positions, 1)).tolist()


def rows(kind: str, count: int, vocab: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    random = seeded(seed)
    logits = torch.randn(count, vocab, generator=random) * {
        "flat": 0.01,
        "usual": 3.0,
        "peaked": 30.0,
    }.get(kind, 1.0)
    if kind == "ties":
        logits = (logits * 2).round()
    if kind == "equal":
        logits = torch.zeros_like(logits)
    if kind == "impossible":
        logits[:, ::3] = -torch.inf
    return logits.to(dtype)


@many
@given(
    PARAMS,
    st.sampled_from(["flat", "usual", "peaked", "ties", "equal", "impossible"]),
    st.sampled_from([5, 40, 300]),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_tree_draws_what_pytorch_draws(params, kind, vocab, nodes, seed, dtype):
    random = Random(seed)
    sampler = Sampler(params, seed, vocab, CPU, prompt=random.randrange(9))
    tree = random_tree(nodes, random, vocab)
    sampler.extend(
        [*(random.randrange(vocab) for _ in range(random.randrange(30))), tree.tokens[0]]
    )
    positions = torch.tensor(tree.depths) + sampler.length - 1
    where = torch.tensor(tree.tokens), positions, tree.ancestors()
    logits = rows(kind, nodes, vocab, seed, dtype)
    seen = sampler.seen(*where)
    lowered = sampler.lowered(logits, *where)
    wanted = by_torch(sampler, lowered, seen, positions + 1)
    assert sampler.draw_nodes(logits, where)[0] == wanted
    followed, _ = sampler.draw_nodes(logits, where, tree.parents)
    path = tree.walk(wanted)
    assert tree.walk(followed) == path
    assert [followed[node] for node in path] == [wanted[node] for node in path]
    drawn, others = sampler.draw_nodes(logits, where, with_runner_up=True)
    assert (
        lowered.dtype == torch.float64 or drawn == wanted
    )  # float64 is PyTorch's, which orders equals as it likes
    scores = sampler.scores(lowered, seen, positions + 1)
    best = scores.topk(2).values
    leads = (best[:, 0] - best[:, 1]).tolist()
    assert [lead for _, lead in others] == pytest.approx(leads, rel=1e-9, abs=1e-9, nan_ok=True)
    if sampler.program(dtype) is None:
        return
    found, others = sampler.draw_nodes(logits, where, tree.parents, with_runner_up=True)
    assert [found[node] for node in path] == [followed[node] for node in path]
    for node in path:
        assert others[node][1] == pytest.approx(leads[node], rel=1e-9, abs=1e-9, nan_ok=True)
        if leads[node] < math.inf:
            assert scores[node, others[node][0]] == best[node, 1]


COUNTED = {"presence_penalty": -0.7, "frequency_penalty": 0.9}
REPEATED = {"repetition_penalty": 2.0, "logit_bias": {1: 0.3}, "frequency_penalty": 0.4}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("named", [COUNTED, REPEATED], ids=["counted", "repeated"])
def test_what_a_path_of_drafts_counts_is_drawn_as_by_pytorch(seed, named):
    """Down a tree that has what is drawn after each node, and a sibling before it; of so few
    tokens that some are drawn again.
    """
    params = SamplingParams(penalty=1.0, min_p=0.0, **named)
    vocab = 12 if named is REPEATED else 4
    depth = 6
    random = Random(seed)
    sampler = Sampler(params, seed, vocab, CPU, prompt=1)
    sampler.extend([random.randrange(vocab) for _ in range(5)])
    logits = rows("flat", 1 + 2 * depth, vocab, seed, torch.float32)
    tree = DraftTree(random.randrange(vocab), len(logits))
    sampler.extend([tree.tokens[0]])
    at = 0
    for _ in range(depth + 1):
        count = len(tree)
        positions = torch.tensor(tree.depths) + sampler.length - 1
        nodes = torch.tensor(tree.tokens), positions, tree.ancestors()
        lowered = sampler.lowered(logits[:count], *nodes)
        wanted = by_torch(sampler, lowered, None, positions + 1)
        followed, _ = sampler.draw_nodes(logits[:count], nodes, tree.parents)
        path = tree.walk(wanted)
        assert path[-1] == at
        assert [followed[node] for node in path] == [wanted[node] for node in path]
        if len(tree) < len(logits):
            tree.grow(at, (wanted[at] + 1) % vocab, "beside")
            at = tree.grow(at, wanted[at], "drawn")


def test_a_node_with_the_drawn_token_below_another_one_is_not_followed():
    sampler = Sampler(SamplingParams(temperature=0, penalty=1), 1, 6, CPU)
    tree = DraftTree(0, 8)
    sampler.extend([0])
    for path in ([3, 4], [4]):
        tree.add(path, "it")
    logits = torch.zeros(4, 6)
    logits[0, 4] = logits[3, 2] = 1
    nodes = torch.tensor(tree.tokens), torch.tensor(tree.depths), tree.ancestors()
    drawn, _ = sampler.draw_nodes(logits, nodes, tree.parents)
    assert (drawn[0], drawn[3]) == (4, 2)


@many
@given(PARAMS, st.integers(1, 16), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_candidates_are_those_of_pytorch(params, count, seed, noisy, one_row):
    vocab = 60
    places = [7, 8, 9]
    logits = rows("usual", 3, vocab, seed, torch.float32)
    logits[:, :5] += 5  # ends, biased and banned tokens are likely
    seen = torch.rand(1 if one_row else 3, vocab, generator=seeded(seed)) < 0.3
    sampler = Sampler(params, seed, vocab, CPU)
    given = seen, places if noisy else None, count
    (tokens, found), (wanted, scores) = (
        # the program does not take float64
        sampler.candidates(each, *given)
        for each in (logits, logits.double())
    )
    assert torch.allclose(found, scores, rtol=1e-9, atol=1e-9)
    there = scores > -torch.inf
    assert torch.equal(tokens[there], wanted[there])


def test_near_ties_are_left_to_pytorch():
    """Logits made such that two scores tie but for the rounding of a float32:
    the program has to say so.
    """
    params = SamplingParams(min_p=0.0, penalty=1.0)
    vocab = 8
    seed = 3
    program = c_sampler(params, seed_stream(seed), vocab)
    assert program is not None
    noise = gumbel(seed, range(100_000), torch.arange(vocab))
    apart = noise[:, 0] - noise[:, 5]
    # a small float32 says it with more digits
    places = apart.abs().topk(200, largest=False).indices.tolist()
    logits = torch.full((len(places), vocab), -60.0)
    logits[:, 0] = 0.0
    logits[:, 5] = apart[places].float()
    sampler = Sampler(params, seed, vocab, CPU)
    wanted = by_torch(sampler, logits, None, places)
    assert {0, 5} == set(wanted)
    assert sampler.draw(logits, None, places) == wanted
    best = sampler.scores(logits, None, places).topk(2).values
    near = [row for row, (first, second) in enumerate(best.tolist()) if first - second < 1e-13]
    unsure = program.rank(logits, 1, places)[2]
    assert near
    assert set(near) <= set(unsure) < set(range(len(places)))


def test_noise_is_bounded_by_the_highest_bit_where_it_is_not_computed():
    """What is left out may be among the best by no means: flat logits,
    where noise alone decides.
    """
    params = SamplingParams(min_p=0.0, penalty=1.0)
    vocab = 5_000
    sampler = Sampler(params, 11, vocab, CPU)
    logits = rows("flat", 64, vocab, 2, torch.float32)
    assert sampler.draw(logits, None, range(64)) == by_torch(sampler, logits, None, range(64))


@pytest.mark.parametrize(("params", "edge"), [(SamplingParams(top_p=0.5, min_p=0, penalty=1), 2)])
def test_an_edge_of_top_p_is_left_to_pytorch(params, edge):
    logits = torch.zeros(1, 4)  # chances of 1/4 each: two of them reach 0.5, by rounding or not
    program = c_sampler(params, 0, 4)
    assert program is not None
    assert program.rank(logits, 1, [0])[2] == [0]
    assert program.rank(torch.tensor([[9.0, 8.0, 1.0, 0.0]]), 1, [0])[2] == []
    sampler = Sampler(params, 0, 4, CPU)
    assert sampler.draw(logits, None, [0]) == by_torch(sampler, logits, None, [0])


def test_a_filter_that_it_does_not_know_is_left_to_pytorch(monkeypatch):
    assert c_sampler(SamplingParams(top_k=3), 0, 4) is not None
    monkeypatch.setattr(SamplingParams, "filters", ("min_p", "another"))
    assert c_sampler(SamplingParams(), 0, 4) is None
    monkeypatch.setattr(SamplingParams, "filters", ("top_k", "min_p"))
    assert c_sampler(SamplingParams(), 0, 4) is None


def test_float64_is_left_to_pytorch(monkeypatch):
    sampler = Sampler(SamplingParams(), 1, 6, CPU)
    logits = torch.randn(2, 6, generator=seeded(0))
    assert sampler.program(torch.float64) is None
    assert sampler.program(torch.float32) is not None
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr("tswift.sampling.rule.c_sampler", lambda *given: None)
    other = Sampler(SamplingParams(), 1, 6, CPU)
    assert other.draw(logits, None, [3, 4]) == sampler.draw(logits, None, [3, 4])


def test_threads_draw_what_one_does():
    before = torch.get_num_threads()
    logits = rows("usual", 16, 2048, 3, torch.float32)
    drawn = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            sampler = Sampler(SamplingParams(eta=0.01, top_p=0.99), 5, 2048, CPU)
            drawn.append(
                [
                    sampler.draw(logits, None, torch.arange(start, start + 16))
                    for start in range(0, 1600, 16)
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1]
