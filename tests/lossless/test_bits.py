"""Hidden states, logits and KV of a text have the same bits however it is forwarded, in passes of a fixed width."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import random_prompt
from tests.lossless.models import (
    DTYPES,
    KINDS,
    WIDE,
    WRONG,
    ExactOnDevice,
    by_chunks,
    by_trees,
    cache_of,
    exact_target,
    network,
    plainly,
)
from tswift.attention.backends import BACKENDS, why_not
from tswift.models.target import Target

CPU = torch.device("cpu")
TEXT = 40
BORDERS = (0, 16, 64, 256, 1024, 2048)  # of chunks, tails and blocks
quick = settings(derandomize=True, deadline=None, database=None, max_examples=20)


def same(target: Target, held: int, seed: int, length: int = TEXT, prepared: int = 0) -> bool:
    """Whether three ways of forwarding a text behind ``held`` random keys and values give the same bits.

    Where ``prepared`` is not 0, passes over up to so many nodes are replayed, if the attention can be.
    """
    text, found = random_prompt(length, seed, WRONG), []
    for way in (plainly, by_trees, by_chunks):
        kv = cache_of(target, held + length + 64, held, seed)
        if prepared and way is not by_chunks:
            target.prepare(kv, prepared)
        given = () if way is plainly else (Random(seed), prepared or target.width)
        hidden, logits = way(target, text, kv, *given)
        assert kv.length == held + length
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Llama, GQA", "Gemma 2 (windows, soft caps)"])
def test_replayed_passes(kind: str, dtype: torch.dtype) -> None:
    """Which take the length from the device, and are filled up with nodes of their own."""
    target = exact_target(kind, dtype, ExactOnDevice)
    assert target.replays
    assert same(target, 90, 3, prepared=11)


@pytest.mark.skipif(why_not("native", torch.float32, CPU) is not None, reason="no C compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [0, 250, 1000])
def test_native_attention(held: int, dtype: torch.dtype) -> None:
    target = exact_target(WIDE, dtype, BACKENDS["native"]())
    assert same(target, held, 5)


@pytest.mark.skipif(why_not("triton", torch.float32, CPU) is not None, reason="no interpreter")
def test_triton_attention() -> None:
    """Interpreted, which takes a tenth of a second for every layer of a pass."""
    target = Target(network("Gemma 2 (windows, soft caps)", torch.bfloat16), BACKENDS["triton"]())
    target.width = 5
    assert same(target, 61, 5, length=5, prepared=5)
