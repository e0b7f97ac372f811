"""What heads of any kind can do: levels of logits."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import HIDDEN, VOCAB, medusa_heads, tiny_heads

LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["chained", "medusa"])
@pytest.mark.parametrize("most", [1, 2, 3, 4, None])
def test_levels_begin_with_those_of_the_models_own_lm_head(kind: str, most: int | None) -> None:
    heads = medusa_heads() if kind == "medusa" else tiny_heads()
    start, first = hidden(2)
    calls = []

    def lm_head(states: torch.Tensor) -> torch.Tensor:
        calls.append(states.shape)
        return states @ LM_HEAD.T

    alone = heads.levels(start, lm_head)
    assert len(alone) == 3
    if kind == "chained":
        torch.testing.assert_close(alone, heads(start) @ LM_HEAD.T)
    calls.clear()
    levels = heads.levels(start, lm_head, first, most)
    assert len(calls) == 1
    torch.testing.assert_close(levels, torch.cat([(LM_HEAD @ first)[None], alone])[:most])
    torch.testing.assert_close(heads.levels(start, lm_head, None, 2), alone[:2])
