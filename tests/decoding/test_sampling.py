"""The sampling rule: its noise, the penalty window, and draws against exact probabilities."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.helpers import PLAIN, random_tree
from tswift.decoding.noise import gumbel
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler

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
