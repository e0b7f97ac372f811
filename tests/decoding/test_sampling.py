"""The sampling rule: its noise, the penalty window, and draws against exact probabilities."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import PLAIN, random_tree
from tswift.decoding.noise import gumbel
from tswift.decoding.params import SamplingParams, warp
from tswift.decoding.sampling import NO_TOKEN, Sampler

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])  # a device that is not the CPU is not asked
def test_noise_of_some_tokens_is_that_of_all(device: str) -> None:
    sampler, other = (Sampler(SamplingParams(), 5, 40, torch.device(kind)) for kind in ("cpu", device))
    tokens = torch.tensor([[3, 39, 3], [0, 7, 1], [2, 2, 5]])
    places = [15, 16, 3000]
    assert torch.equal(other.noise_of(places, tokens), sampler.noise(places).gather(1, tokens))
    greedy = Sampler(SamplingParams(temperature=0), 5, 40, torch.device("cpu"))
    assert torch.equal(tokens + greedy.noise_of(places, tokens), tokens.double())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12))
def test_a_sampler_gives_the_noise_of_a_position_whatever_was_asked_before(positions: list[int]) -> None:
    sampler = Sampler(PLAIN, 9, 11, CPU)
    for position in positions:
        sampler.noise([position])
    assert torch.equal(sampler.noise(positions), gumbel(9, positions, torch.arange(11)))


def test_no_noise_at_temperature_zero() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(dataclasses.replace(PLAIN, temperature=0), 4, 50, CPU)
    assert sampler.draw(logits, None, [4, 5, 6]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature: float) -> None:
    params = SamplingParams(temperature, min_p=0, penalty=1, banned=(0, 2, 3))
    logits = torch.tensor([[9.0, 1.0, 9.0, 9.0, 0.0]]).repeat(500, 1)
    drawn = Sampler(params, 1, 5, CPU).draw(logits, None, range(500))
    assert set(drawn) == ({1} if temperature == 0 else {1, 4})
    assert logits[0, 0] == 9  # the caller's logits are not touched


def check_window(text: list[int], pieces: list[int], nodes: int, window: int, seed: int) -> None:
    vocab = 12
    sampler = Sampler(SamplingParams(penalty=1.5, window=window), 1, vocab, CPU)
    start = 0
    for end in sorted({min(piece, len(text)) for piece in pieces} | {len(text)}):
        sampler.extend(text[start:end])
        start = end
    tree = random_tree(nodes, Random(seed), vocab)
    tree.tokens[0] = text[-1]
    positions = torch.tensor(tree.depths) + len(text) - 1
    seen = sampler.seen(torch.tensor(tree.tokens), positions, tree.ancestors())
    for node in range(nodes):
        path, at = [], node
        while at > 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        expected = set((text + path)[-window:])
        assert set(seen[node].nonzero().flatten().tolist()) == expected, (node, text, path)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=25),
    st.lists(st.integers(0, 25), max_size=4),
    st.integers(1, 20),
    st.integers(1, 30),
    st.integers(0, 10**6),
)
def test_the_window_at_a_node_is_the_last_tokens_on_its_path(text, pieces, nodes, window, seed) -> None:
    check_window(text, pieces, nodes, window, seed)


def test_the_window_check_sees_a_window_that_is_one_too_long(monkeypatch) -> None:
    right = Sampler.seen

    def longer(self, tokens, positions, ancestors):
        params, self.params = self.params, dataclasses.replace(self.params, window=self.params.window + 1)
        try:
            return right(self, tokens, positions, ancestors)
        finally:
            self.params = params

    monkeypatch.setattr(Sampler, "seen", longer)
    with pytest.raises(AssertionError):
        check_window([1, 2, 3, 4, 5, 6], [], 6, 2, 0)


def test_no_window_no_penalty() -> None:
    tokens = torch.tensor([1])
    for params in (SamplingParams(penalty=1), SamplingParams(window=0)):
        sampler = Sampler(params, 1, 5, CPU)
        sampler.extend([1, 1, 1])
        assert sampler.seen(tokens, tokens, torch.ones(1, 1, dtype=torch.bool)) is None


def drawn_node_by_node(text, tree, logits, params, seed) -> list[int]:
    """What plain decoding draws after every node: a text of its own for each, and one row."""
    drawn = []
    for node in range(len(tree)):
        path, at = [], node
        while at > 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        sampler = Sampler(params, seed, logits.shape[1], CPU)
        sampler.extend(text + path)
        place = torch.tensor([len(text) + len(path) - 1])
        seen = sampler.seen(torch.tensor([tree.tokens[node]]), place, torch.ones(1, 1, dtype=torch.bool))
        drawn += sampler.draw(logits[node : node + 1], seen, [int(place) + 1])
    return drawn


RULES = [
    SamplingParams(window=6),
    SamplingParams(temperature=0, penalty=1.5, window=4, banned=(3,)),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.8, eta=0.01, window=3, banned=(0, 11)),
    SamplingParams(min_p=0, penalty=1),
]


def in_a_tree(params: SamplingParams, seed: int, device: torch.device = CPU):
    random = Random(seed)
    text = [random.randrange(12) for _ in range(random.randrange(1, 20))]
    tree = random_tree(random.randrange(1, 12), random, 12)
    tree.tokens[0] = text[-1]
    logits = torch.randn(len(tree), 12, generator=torch.Generator().manual_seed(seed)) * 3
    sampler = Sampler(params, seed, 12, device)
    sampler.extend(text)
    return text, tree, logits, sampler, (torch.tensor(tree.depths) + len(text) - 1, tree.ancestors())


@pytest.mark.parametrize("params", RULES)
def test_tokens_drawn_in_a_tree_are_those_of_plain_decoding(params: SamplingParams) -> None:
    for seed in range(30):
        text, tree, logits, sampler, where = in_a_tree(params, seed)
        rows = logits.bfloat16() if seed % 2 else logits
        if seed % 3 == 0:
            rows[seed % len(tree), 5] = math.nan
        drawn = sampler.draw_rows(rows, torch.tensor(tree.tokens), *where)
        assert drawn.tolist() == drawn_node_by_node(text, tree, rows, params, seed)
        assert (drawn.dtype, drawn.shape) == (torch.int64, (len(tree),))


def test_candidates_that_do_not_exist_change_nothing_elsewhere() -> None:
    for seed in range(30):
        _, tree, logits, sampler, (positions, ancestors) = in_a_tree(RULES[0], seed)
        tokens = torch.tensor(tree.tokens)
        drawn = sampler.draw_rows(logits, tokens, positions, ancestors)
        tokens[-1] = NO_TOKEN  # a leaf
        assert torch.equal(sampler.draw_rows(logits, tokens, positions, ancestors)[:-1], drawn[:-1])


def test_appending_on_the_device_is_appending() -> None:
    random = Random(4)
    for _ in range(50):
        text, new = ([random.randrange(9) for _ in range(random.randrange(1, 12))] for _ in range(2))
        count = random.randrange(len(new) + 1)
        one, other = (Sampler(SamplingParams(), 1, 9, CPU) for _ in range(2))
        for sampler in (one, other):
            sampler.extend(text)
        one.extend(new[:count])
        late = [token if index < count else NO_TOKEN for index, token in enumerate(new)]
        for ignored in (new, late):
            places = torch.arange(len(text), len(text) + len(new))
            other.extend_rows(torch.tensor(ignored), places, torch.tensor(count))
            assert torch.equal(one.newest, other.newest)


def test_candidates_are_the_best_scores() -> None:
    sampler = Sampler(SamplingParams(banned=(2,), window=3), 5, 12, CPU)
    sampler.extend([1, 4, 4])
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    place = torch.tensor([2])
    seen = sampler.seen(place, place, torch.ones(1, 1, dtype=torch.bool))
    tokens, scores = sampler.candidates(logits, seen, torch.tensor([3, 4, 5]), 4)
    assert tokens[:, 0].tolist() == sampler.draw(logits, seen.expand(3, -1), [3, 4, 5])
    assert torch.equal(scores, sampler.scores(logits, seen, [3, 4, 5]).gather(1, tokens))
    assert torch.equal(scores, scores.sort(descending=True).values)
    plain, _ = sampler.candidates(logits, seen, None, 1)
    assert torch.equal(plain[:, 0], sampler.warp(logits, seen).argmax(-1))
    assert sampler.candidates(logits, seen, None, 99)[0].shape == (3, 12)


class OneDevice(TorchDispatchMode):
    """Sees to it that no tensor is anywhere but on one device. One on ``meta`` cannot be waited for anyway."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", func
        return out


@pytest.mark.parametrize("params", RULES)
def test_nothing_is_copied_to_a_device_or_waited_for(params: SamplingParams) -> None:
    meta = torch.device("meta")
    _, tree, logits, sampler, where = in_a_tree(params, 7, meta)
    tokens, logits, positions, ancestors = (each.to(meta) for each in (torch.tensor(tree.tokens), logits, *where))
    count = tokens.sum()
    with OneDevice():
        drawn = sampler.draw_rows(logits, tokens, positions, ancestors)
        assert drawn.shape == tokens.shape
        sampler.candidates(logits, sampler.seen(tokens, positions, ancestors), positions, 3)
        sampler.extend_rows(tokens, positions, count)
    with OneDevice(), pytest.raises(AssertionError):
        warp(logits.double(), None, SamplingParams(banned=(1,)))  # ids that are not held there


def draw_p_value(probabilities, seeds: int, by_position: bool) -> float:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    if by_position:
        drawn = Sampler(PLAIN, 77, logits.shape[-1], CPU).draw(logits.expand(seeds, -1), None, range(seeds))
    else:
        drawn = [Sampler(PLAIN, seed, logits.shape[-1], CPU).draw(logits, None, [5])[0] for seed in range(seeds)]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities))
    assert counts[[p == 0 for p in probabilities]].sum() == 0
    keep = [i for i, p in enumerate(probabilities) if p]
    return stats.chisquare(counts[keep].numpy(), [probabilities[i] * seeds for i in keep]).pvalue


@pytest.mark.parametrize("probabilities", [[0.5, 0.25, 0.125, 0.125], [0.0, 0.9, 0.0, 0.09, 0.01], [1 / 16] * 16])
def test_draws_have_their_exact_probabilities(probabilities: list[float]) -> None:
    assert draw_p_value(probabilities, 20_000, by_position=True) > 1e-3
    assert draw_p_value(probabilities, 2_000, by_position=False) > 1e-3


def test_the_draws_check_sees_a_tenth_too_little_noise(monkeypatch) -> None:
    right = Sampler.noise
    monkeypatch.setattr(Sampler, "noise", lambda self, positions: right(self, positions) * 0.9)
    assert draw_p_value([0.5, 0.25, 0.125, 0.125], 20_000, by_position=True) < 1e-6


def test_a_banned_id_outside_the_vocabulary_is_refused() -> None:
    for token in (5, -1):
        with pytest.raises(ValueError, match="banned"):
            Sampler(SamplingParams(banned=(token,)), 1, 5, CPU)
