"""Hidden states, logits and KV of a text have the same bits however it is forwarded, in passes of a fixed width."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import random_prompt
from tests.lossless.models import DTYPES, KINDS, WRONG, by_chunks, by_trees, cache_of, exact_target, plainly
from tswift.models.target import Target

TEXT = 40
BORDERS = (0, 16, 64, 256, 1024, 2048)  # of chunks, tails and blocks
quick = settings(derandomize=True, deadline=None, database=None, max_examples=25)


def same(target: Target, held: int, seed: int, size: int | None = None) -> bool:
    """Whether three ways of forwarding a text behind ``held`` random keys and values give the same bits."""
    text, size = random_prompt(TEXT, seed, WRONG), size or target.width
    found = []
    for way in (plainly, by_trees, by_chunks):
        kv = cache_of(target, held + TEXT + 64, held, seed)
        given = () if way is plainly else (Random(seed), size)
        hidden, logits = way(target, text, kv, *given)
        assert kv.length == held + TEXT
        found.append((hidden, logits, kv.keys[:, :, : kv.length], kv.values[:, :, : kv.length]))
    assert all(part.isfinite().all() for part in found[0])
    return all(torch.equal(ours, plain) for other in found[1:] for ours, plain in zip(other, found[0], strict=True))


@quick
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    border=st.sampled_from(BORDERS),
    beyond=st.integers(-TEXT, 70),
    seed=st.integers(0, 1 << 16),
)
def test_plain_passes_trees_and_chunks_have_the_same_bits(kind, dtype, border, beyond, seed) -> None:
    assert same(exact_target(kind, dtype), max(0, border + beyond), seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind: str, dtype: torch.dtype) -> None:
    assert same(exact_target(kind, dtype), 0, 1)
    assert same(exact_target(kind, dtype), 300, 2)
