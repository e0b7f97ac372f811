"""Medusa's rule: heads side by side."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import HIDDEN, VOCAB, medusa_heads
from tswift.models.heads import Heads


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hand(heads: Heads, start: torch.Tensor) -> torch.Tensor:
    """Logits of Medusa's heads from their weights."""
    weights, found = heads.state_dict(), []
    for head in range(heads.count):
        state = start
        for block in range(heads.layers):
            inner = (
                weights[f"heads.{head}.blocks.{block}.weight"] @ state + weights[f"heads.{head}.blocks.{block}.bias"]
            )
            state = state + inner / (1 + torch.exp(-inner))
        found.append(weights[f"heads.{head}.lm_head.weight"] @ state)
    return torch.stack(found)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_medusa_heads_side_by_side(layers: int) -> None:
    heads = medusa_heads(layers=layers)
    start = hidden()
    wanted = by_hand(heads, start)
    assert wanted.shape == (3, VOCAB)
    torch.testing.assert_close(heads.levels(start, F.linear), wanted)
    states = heads(start.expand(2, 4, HIDDEN))
    assert states.shape == (3, 2, 4, HIDDEN)
    torch.testing.assert_close(heads.heads[1].lm_head(states[1, 1, 2]), wanted[1])
