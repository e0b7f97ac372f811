"""Attention with windows, soft caps and sinks, against a dense computation in float64."""

from __future__ import annotations

import pytest
import torch

from tests.attention.oracle import case, chain
from tswift.attention import special
from tswift.attention.layout import Layout
from tswift.attention.sdpa import TreeAttention
from tswift.attention.special import AttentionSpec, SpecialAttention

CPU = torch.device("cpu")
KV_HEADS, GROUP, DIM = 2, 3, 8


class Cache:
    """A cache that holds tokens from given positions; in order, unless they are given."""

    def __init__(self, length: int, places: torch.Tensor | None = None) -> None:
        self.length, self._places = length, places

    def places(self, layer: int) -> torch.Tensor:
        return torch.arange(self.length)[None] if self._places is None else self._places[layer]

    def before(self, window: int) -> int:
        return max(0, self.length - window + 1) if self._places is None else 0


def dense(query, keys, values, ancestors, scale, wants: AttentionSpec, places, positions):
    """``places``: [kv heads, prefix]. Everything expanded, everything masked."""
    nodes, kv_heads, group = query.shape[1], len(keys), len(query) // len(keys)
    query, keys, values = query.double(), keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query @ keys.transpose(1, 2) * scale
    if wants.softcap is not None:
        scores = wants.softcap * torch.tanh(scores / wants.softcap)
    sees = torch.cat(
        [torch.ones(kv_heads, nodes, places.shape[1], dtype=torch.bool), ancestors.expand(kv_heads, -1, -1)], 2
    )
    if wants.window is not None:
        where = torch.cat([places, positions.expand(kv_heads, -1)], 1)
        sees &= positions[None, :, None] - where[:, None] < wants.window
    scores = scores.masked_fill(~sees.repeat_interleave(group, 0), -torch.inf)
    if wants.sinks is not None:
        scores = torch.cat([scores, wants.sinks.double()[:, None, None].expand(-1, nodes, 1)], 2)
    shares = scores.softmax(-1)[..., : keys.shape[1]]
    return shares @ values


def run(wants: AttentionSpec, prefix: int, nodes: int, dtype=torch.float64, tree: bool = True, places=None):
    query, keys, values, ancestors, scale = case(KV_HEADS, GROUP, DIM, prefix, nodes, dtype, sharp=3.0)
    if tree:
        depths = ancestors.sum(1) - 1
    else:
        ancestors, depths = chain(nodes), torch.arange(nodes)
    start = prefix if places is None else int(places.max()) + 1
    positions = depths + start
    layout = Layout(KV_HEADS, GROUP, dtype, CPU)
    cache = Cache(prefix, places)
    ours = SpecialAttention(layout, [AttentionSpec(), wants], cache, positions, ancestors if tree else None)
    held = torch.arange(prefix).expand(KV_HEADS, -1) if places is None else places[1]
    return ours(1, query, keys, values, scale), dense(query, keys, values, ancestors, scale, wants, held, positions)


SINKS = torch.linspace(-1, 2, KV_HEADS * GROUP)
WANTS = {
    "window": AttentionSpec(window=9),
    "a window of one": AttentionSpec(window=1),
    "soft cap": AttentionSpec(softcap=1.5),
    "sinks": AttentionSpec(sinks=SINKS),
    "all": AttentionSpec(9, 1.5, SINKS),
}


@pytest.mark.parametrize("block", [7, 2048])
@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize(("prefix", "nodes"), [(0, 1), (0, 30), (5, 12), (60, 1), (60, 12), (61, 40)])
@pytest.mark.parametrize("name", WANTS)
def test_against_a_dense_computation(monkeypatch, name: str, prefix: int, nodes: int, tree: bool, block: int) -> None:
    monkeypatch.setattr(special, "_BLOCK", block)
    ours, wanted = run(WANTS[name], prefix, nodes, tree=tree)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["window", "all"])
def test_a_cache_in_no_order(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    places = torch.stack(
        [torch.stack([torch.randperm(50, generator=generator)[:20] for _ in range(KV_HEADS)]) for _ in "ab"]
    )
    ours, wanted = run(WANTS[name], 20, 1, places=places)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    ours, wanted = run(WANTS["all"], 60, 12, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)


def test_keys_before_the_window_are_not_read() -> None:
    query, keys, values, ancestors, scale = case(KV_HEADS, GROUP, DIM, 60, 3, torch.float64)
    keys[:, :52] = torch.nan  # the first position in the window of the next token, at 60, is 52
    ours = SpecialAttention(
        Layout(KV_HEADS, GROUP, torch.float64, CPU), [WANTS["window"]], Cache(60), ancestors.sum(1) + 59, ancestors
    )
    assert ours(0, query, keys, values, scale).isfinite().all()


def test_a_layer_that_wants_nothing_gets_plain_attention() -> None:
    assert not AttentionSpec()
    assert all(WANTS.values())
    query, keys, values, ancestors, scale = case(KV_HEADS, GROUP, DIM, 300, 6, torch.float64)
    layout = Layout(KV_HEADS, GROUP, torch.float64, CPU)
    ours = SpecialAttention(layout, [AttentionSpec()], Cache(300), ancestors.sum(1) + 299, ancestors)(
        0, query, keys, values, scale
    )
    torch.testing.assert_close(ours, TreeAttention(layout, 300, 6, ancestors)(query, keys, values, scale))
