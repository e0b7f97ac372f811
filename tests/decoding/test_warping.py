"""Filters and the penalty, held against those of transformers."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.helpers import PLAIN
from tswift.decoding import warping
from tswift.decoding.params import SamplingParams, warp


def transformers_warp(logits, text: list[int], params: SamplingParams):
    """The same filters by transformers, in our order."""
    ids = torch.tensor([text] * len(logits))
    chain = []
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.penalty))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.eta:
        chain.append(EtaLogitsWarper(params.eta))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    for warper in chain:
        logits = warper(ids, logits)
    return logits


def check_warp(params: SamplingParams, seed: int, vocab: int, scale: float) -> None:
    random = Random(seed)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    text = [random.randrange(vocab) for _ in range(random.randrange(1, 30))]
    seen = None
    if params.penalises:
        seen = torch.zeros(3, vocab, dtype=torch.bool)
        seen[:, text] = True
    theirs = transformers_warp(logits.clone(), text, params)
    ours = warp(logits.clone(), seen, params)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


temperatures = st.floats(0.05, 3)
FILTERS = {
    "temperature": {"temperature": temperatures},
    "penalty": {"penalty": st.floats(1.01, 3)},
    "min_p": {"min_p": st.floats(0.001, 0.999)},
    "eta": {"eta": st.floats(1e-5, 0.5)},
    "top_k": {"top_k": st.integers(1, 40)},
    "top_p": {"top_p": st.floats(0.01, 0.999)},
}
FILTERS["all"] = {name: strategy for one in FILTERS.values() for name, strategy in one.items()}


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_filters_are_those_of_transformers(name: str, data) -> None:
    options = {option: data.draw(strategy) for option, strategy in FILTERS[name].items()}
    if name == "all":
        options = {option: value for option, value in options.items() if data.draw(st.booleans())}
    vocab = data.draw(st.sampled_from([41, 97, 300, 2000]))
    check_warp(
        dataclasses.replace(PLAIN, window=10**6, **options), data.draw(st.integers(0, 10**6)), vocab,
        data.draw(st.sampled_from([0.1, 1.0, 4.0])),
    )  # fmt: skip


def test_flat_distributions_need_more_of_the_vocabulary_than_top_p_sorts_first() -> None:
    for vocab in (129, 1025, 5000):
        for top_p in (0.5, 0.9, 0.9999):
            check_warp(dataclasses.replace(PLAIN, top_p=top_p), vocab, vocab, 0.01)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 127, 128, 129, 1500]),
    st.floats(0.0, 6.0),
    st.sampled_from([1, 2, 16]),
    st.one_of(st.sampled_from([1e-12, 0.1, 0.25, 0.5, 0.999999]), st.floats(1e-6, 0.9999)),
)
def test_top_p_keeps_the_same_with_all_probabilities_sorted(seed, vocab, scale, steps, top_p) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    logits = (logits * steps).round() / steps  # ties
    logits[3, seed % vocab] = math.nan if seed % 2 else -math.inf
    probs = logits.softmax(-1)
    some, every = warping._enough(probs, top_p), warping._sorted(probs)
    dropped = warping._too_much(probs, top_p, some)
    assert torch.equal(dropped, warping._too_much(probs, top_p, every))
    warped = warp(logits.clone(), None, dataclasses.replace(PLAIN, top_p=top_p))
    torch.testing.assert_close(warped, logits.masked_fill(dropped, -math.inf), rtol=0, atol=0, equal_nan=True)


def test_something_is_always_kept() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for params in (
        SamplingParams(min_p=1.0, penalty=1),
        SamplingParams(top_p=1e-12, min_p=0, penalty=1),
        SamplingParams(top_k=1, min_p=0, penalty=1),
    ):
        kept = warp(logits.clone(), None, params)
        assert torch.equal((kept > -torch.inf).sum(-1), torch.ones(4, dtype=torch.int64))
        assert torch.equal(kept.argmax(-1), logits.argmax(-1))


def test_a_row_is_warped_alike_alone_and_among_others() -> None:
    params = SamplingParams(0.7, 30, 0.9, 0.01, 0.001, 1.3, 5)
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = torch.rand(7, 500, generator=torch.Generator().manual_seed(3)) < 0.2
    together = warp(logits.clone(), seen, params)
    for row in range(7):
        assert torch.equal(together[row], warp(logits[row : row + 1].clone(), seen[row : row + 1], params)[0])


@pytest.mark.parametrize("temperature", [1e-100, 1e-12, 1e100])
@pytest.mark.parametrize("penalty", [1.0, 1e100])
def test_nothing_overflows_within_the_ranges(temperature: float, penalty: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 7.0, -7.0, 0.0, 1e-30]], dtype=torch.float64)
    params = SamplingParams(temperature=temperature, penalty=penalty, min_p=0.0, window=9, banned=(4,))
    warped = warp(logits.clone(), torch.ones(1, 6, dtype=torch.bool), params)
    assert warped[0, [0, 1, 2, 3, 5]].isfinite().all()
    assert warped[0, 4] == -math.inf
