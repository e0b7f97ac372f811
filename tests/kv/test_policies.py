"""What the policies of a partial cache find important, against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tswift.kv.policies import CHUNK, by_attention, by_chunk, by_query

HEADS, GROUP, DIM = 2, 3, 4


def random(count: int, observed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, count, DIM, generator=generator, dtype=torch.float64)
    return keys, torch.randn(HEADS, GROUP, observed, DIM, generator=generator, dtype=torch.float64)


def dot(ours, theirs) -> float:
    return sum(a * b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


COUNTS = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000))


@settings(max_examples=20, deadline=None)
@given(COUNTS)
def test_by_query(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    wanted = [[sum(dot(q[-1], key) for q in queries[head]) for key in keys[head]] for head in range(HEADS)]
    assert by_query(keys, queries).tolist() == [pytest.approx(row) for row in wanted]


@settings(max_examples=20, deadline=None)
@given(COUNTS)
def test_by_attention(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    count = keys.shape[1]
    found = by_attention(keys, queries)
    for head in range(HEADS):
        paid = [0.0] * count
        for row in queries[head].flatten(0, 1):
            weights = [math.exp(dot(row, key) / math.sqrt(DIM)) for key in keys[head]]
            paid = [each + weight / sum(weights) for each, weight in zip(paid, weights, strict=True)]
        near = [paid[max(0, at - 3) : at + 4] for at in range(count)]
        assert found[head].tolist() == pytest.approx([sum(each) / len(each) for each in near], rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(COUNTS)
def test_by_chunk(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    found = by_chunk(keys, queries)
    for head in range(HEADS):
        for start in range(0, keys.shape[1], CHUNK):
            chunk = keys[head, start : start + CHUNK]
            wanted = sum(dot(q[-1], chunk.mean(0)) for q in queries[head])
            assert found[head, start : start + CHUNK].tolist() == pytest.approx([wanted] * len(chunk))
