"""Noise: its bits, its distribution, and that nothing but three integers goes into it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tswift.decoding import noise as noises
from tswift.decoding.noise import gumbel, noise_bits

MASK = 2**64 - 1


def splitmix_stream(state: int):
    """SplitMix64 as published (Steele, Lea, Flood 2014; Vigna's splitmix64.c), a generator of its outputs."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def finalise(z: int) -> int:
    return next(splitmix_stream((z - 0x9E3779B97F4A7C15) & MASK))


def expected_bits(seed: int, position: int, token: int) -> int:
    stream = finalise((finalise(seed & MASK) + 0x9E3779B97F4A7C15 * (position + 1)) & MASK)
    return finalise((stream + 0x9E3779B97F4A7C15 * token) & MASK)


def test_the_reference_generator_is_splitmix64() -> None:
    stream = splitmix_stream(1234567)  # the published test vector of splitmix64.c
    assert [next(stream) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(max_examples=200, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**31))
def test_noise_bits_are_splitmix64_of_seed_position_and_token(seed: int, position: int, token: int) -> None:
    bits = int(noise_bits(seed, [position], torch.tensor([token]))) & MASK
    assert bits == expected_bits(seed, position, token)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(2**70), 2**70),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=5),
)
def test_noise_of_positions_on_the_device_is_that_of_integers(
    seed: int, positions: list[int], tokens: list[int]
) -> None:
    ids, places = torch.tensor(tokens), torch.tensor(positions)
    expected = [[expected_bits(seed, position, token) for token in tokens] for position in positions]
    assert [[bits & MASK for bits in row] for row in noise_bits(seed, places, ids).tolist()] == expected
    assert torch.equal(gumbel(seed, places, ids), gumbel(seed, positions, ids))


def test_noise_bits_are_pinned() -> None:
    """A text made with one version is made again with the next: these values never change."""
    bits = noise_bits(1, [0, 7, 100_000], torch.tensor([0, 1, 128_255]))
    assert bits.tolist() == PINNED


PINNED = [
    [-7182655497261256104, 6180444375122719049, 192328286537952395],
    [6376822021608685238, 3377271897212342752, 4311351605190112050],
    [-8527292294044955616, -2471243304597774426, 4884361545578897330],
]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=20), st.lists(st.integers(0, 10**6), min_size=1))
def test_noise_of_any_subset_in_any_order_is_the_same(tokens: list[int], positions: list[int]) -> None:
    together = noise_bits(3, positions, torch.tensor(tokens))
    for row, position in enumerate(positions):
        for column, token in enumerate(tokens):
            assert together[row, column] == noise_bits(3, [position], torch.tensor([token]))[0, 0]


def test_gumbel_is_finite_and_ordered_at_the_extreme_bit_patterns(monkeypatch) -> None:
    patterns = torch.tensor([[0, 1, (1 << 12) - 1, 1 << 12, 1 << 62, -(1 << 63), -(1 << 12) - 1, -(1 << 12), -1]])
    monkeypatch.setattr(noises, "noise_bits", lambda *args: patterns)
    noise = gumbel(0, [0], patterns[0])
    assert noise.isfinite().all()
    assert (noise.diff() >= 0).all()  # by unsigned value
    assert noise[0, 0] == pytest.approx(-math.log(53 * math.log(2)))
    assert noise[0, -1] == pytest.approx(53 * math.log(2))


def uniform(seeds, positions, tokens: int):
    rows = [noise_bits(seed, positions, torch.arange(tokens)) for seed in seeds]
    return (torch.stack(rows).double() / 2.0**64 + 0.5).numpy()


def test_noise_is_uniform_in_every_byte_and_gumbel_distributed() -> None:
    bits = noise_bits(5, range(40), torch.arange(5000)).flatten()
    for shift in range(0, 64, 8):
        counts = torch.bincount((bits >> shift) & 255, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4, shift
    assert stats.kstest(gumbel(5, range(4), torch.arange(5000)).flatten().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "tokens"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_noise_of_neighbouring_seeds_positions_and_tokens_is_independent(axis: int, lag: int) -> None:
    block = uniform(range(40), range(60), 80)
    size = block.shape[axis]
    first, second = block.take(range(size - lag), axis).ravel(), block.take(range(lag, size), axis).ravel()
    assert stats.pearsonr(first, second).pvalue > 1e-4
    grid = stats.contingency.crosstab((first * 8).astype(int), (second * 8).astype(int)).count
    assert stats.chi2_contingency(grid).pvalue > 1e-4


def test_noise_has_no_repeated_values_across_its_three_integers() -> None:
    bits = torch.cat([noise_bits(seed, range(50), torch.arange(2000)).flatten() for seed in (-1, 0, 1, 2, 1 << 40)])
    assert len(bits.unique()) == len(bits)


def test_the_independence_check_sees_noise_that_ignores_an_axis() -> None:
    block = uniform([1], range(60), 80)[0]
    first, second = block[:1].repeat(59, 0).ravel(), block[:1].repeat(59, 0).ravel()
    assert stats.pearsonr(first, second).pvalue < 1e-9


def test_noise_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    gumbel(1, range(5), torch.arange(100))
    assert torch.equal(torch.random.get_rng_state(), before)
