"""Kept distributions against whole ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tswift.drafting.history import TopKLogits

VOCAB = 50


def logits_of(count: int, seed: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def averaged(thoughts: TopKLogits, places, shares, vocab: int = VOCAB) -> torch.Tensor:
    """``[n, V]``, minus infinity where nothing is kept."""
    ids, logits = thoughts.average(np.array(places), np.array(shares, np.float64))
    assert ids.dtype == torch.int64
    whole = torch.full((len(places), vocab), -torch.inf, dtype=torch.float64)
    for row in range(len(places)):
        kept = logits[row] > -torch.inf
        assert len(set(ids[row][kept].tolist())) == int(kept.sum())
        whole[row, ids[row][kept]] = logits[row][kept]
    return whole


@pytest.mark.parametrize("kept", [VOCAB, 200, 8])
def test_the_mean_is_that_of_the_distributions(kept: int) -> None:
    logits = logits_of(300)
    thoughts = TopKLogits(VOCAB, kept)
    for start in (0, 1, 100, 299):  # pieces of any size
        thoughts.think(logits[start : {0: 1, 1: 100, 100: 299, 299: 300}[start]])
    assert len(thoughts) == 300
    places, shares = [[0, 7, 7], [299, 150, 0], [12, 0, 0]], [[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    found = averaged(thoughts, places, shares)
    for row, share, mean in zip(places, shares, found, strict=True):
        probabilities = logits[row].double().softmax(-1)
        probabilities[probabilities < probabilities.topk(min(kept, VOCAB)).values[:, -1:]] = 0
        weights = torch.tensor(share)
        expected = (probabilities * weights[:, None]).sum(0).log()
        expected += (logits[row].double().logsumexp(-1) * weights).sum()
        assert torch.equal(mean == -torch.inf, expected == -torch.inf)
        finite = expected > -torch.inf
        assert (mean - expected)[finite].abs().max() < 0.01  # half precision, of logarithms down to -20


def test_banned_tokens_and_impossible_ones_are_not_kept() -> None:
    logits = logits_of(3)
    logits[:, 5] = torch.nan  # nothing of a banned token is looked at
    logits[:, 6] = 100.0
    logits[:, 7] = -torch.inf
    thoughts = TopKLogits(VOCAB, VOCAB, banned=(5, 6))
    thoughts.think(logits)
    found = averaged(thoughts, [[0], [1], [2]], [[1.0]] * 3)
    assert (found[:, [5, 6, 7]] == -torch.inf).all()
    rest = [token for token in range(VOCAB) if token not in (5, 6, 7)]
    assert (found[:, rest] - logits[:, rest]).abs().max() < 0.01


@pytest.mark.parametrize(("vocab", "bytes_of_one"), [(2048, 4 * 64 + 4), (100_000, 6 * 64 + 4)])
def test_a_distribution_takes_what_is_said(vocab: int, bytes_of_one: int) -> None:
    thoughts = TopKLogits(vocab)
    logits = logits_of(64, vocab=vocab)
    for _ in range(32):
        thoughts.think(logits)
    held = sum(rows.nbytes for rows in (thoughts._ids, thoughts._logs, thoughts._scales))
    assert len(thoughts) == 2048
    assert held == 2048 * bytes_of_one == TopKLogits.bytes_for(2048, vocab, 64)
    assert averaged(thoughts, [[2047]], [[1.0]], vocab)[0].argmax() == logits[63].argmax()
