"""The kinds of heads: levels of logits, and Medusa's rule. Chained and conditioned heads: see ``test_heads.py``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import HIDDEN, VOCAB, medusa_heads, tiny_heads
from tswift.models.heads import load_heads
from tswift.models.kinds import KINDS, Heads, build

LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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


@pytest.mark.parametrize("kind", [*KINDS, "medusa"])
@pytest.mark.parametrize("raw", [False, True])
def test_what_they_say_of_themselves_is_enough_to_rebuild_them(tmp_path, kind: str, raw: bool) -> None:
    heads = medusa_heads(layers=2) if kind == "medusa" else tiny_heads(kind=kind)
    if kind != "medusa":
        heads = type(heads)(HIDDEN, 2, 1e-3, raw).double()
    again = build(heads.about())
    assert again.about() == heads.about()
    assert {name: each.shape for name, each in again.state_dict().items()} == {
        name: each.shape for name, each in heads.state_dict().items()
    }
    heads.save(tmp_path / "heads.safetensors", torch.float64, "a fingerprint")
    loaded = load_heads(tmp_path / "heads.safetensors", HIDDEN, torch.float64, torch.device("cpu"))
    assert (loaded.about(), loaded.base) == (heads.about(), "a fingerprint")
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
