"""Attention by stock operators, plain and with windows, soft caps and sinks,
against a dense float64 oracle.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.oracle import DIM, GROUP, KV_HEADS, SPECS, by, case, chain, dense
from tests.helpers import CPU, seeded
from tswift.attention import sdpa
from tswift.attention.sdpa import (
    AttentionSpec,
    Layout,
    MaskedAttention,
    ReferenceAttention,
    TreeAttention,
)

attend = by(TreeAttention)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.5e-2}


def check(*shape, dtype, seed=0, sharp=1.0):
    query, keys, values, ancestors, scale = case(*shape, dtype, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    worst = (out.double() - dense(query, keys, values, ancestors, scale)).abs().max().item()
    assert worst < TOLERANCE[dtype] * max(1, sharp), worst  # rounding grows with the scores


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([8, 64]),
    st.sampled_from([0, 1, 2, 31, 255, 256, 257, 300, 1000]),
    st.integers(1, 41),
    st.integers(0, 1000),
    st.sampled_from([*TOLERANCE]),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(kv_heads, group, dim, prefix, nodes, seed, dtype, sharp):
    check(kv_heads, group, dim, prefix, nodes, dtype=dtype, seed=seed, sharp=sharp)


@pytest.mark.parametrize("prefix", [1, 300, 1000])
@pytest.mark.parametrize("block", [128, 8192])
def test_the_path_of_other_devices(monkeypatch, prefix, block):
    """Plain products for prefix and tail, run here on the CPU; one block and several."""

    of_cpu = property(lambda self: False, lambda *_: None)
    monkeypatch.setattr(TreeAttention, "_on_cpu", of_cpu, raising=False)
    monkeypatch.setattr(sdpa, "_BLOCK", block)
    monkeypatch.setattr(sdpa, "_OPERATOR", None)
    for dtype in TOLERANCE:
        check(2, 3, 8, prefix, 6, dtype=dtype)


def test_no_ancestors_mean_a_chain():
    for prefix in (0, 5, 300):
        query, keys, values, _, scale = case(2, 2, 8, prefix, 6, torch.float64)
        out = attend(query, keys, values, None, scale)
        assert torch.equal(out, attend(query, keys, values, chain(6), scale))


class Cache:
    """A cache that holds tokens from given positions; in order, unless they are given."""

    def __init__(self, length: int, places: torch.Tensor | None = None):
        self.length, self._places = length, places

    def positions(self, layer: int) -> torch.Tensor:
        return torch.arange(self.length)[None] if self._places is None else self._places[layer]

    def first_visible_slot(self, window: int) -> int:
        return max(0, self.length - window + 1) if self._places is None else 0


def run(
    spec: AttentionSpec,
    prefix: int,
    nodes: int,
    dtype=torch.float64,
    tree: bool = True,
    places=None,
):
    query, keys, values, ancestors, scale = case(
        KV_HEADS, GROUP, DIM, prefix, nodes, dtype, sharp=3.0
    )
    ancestors = ancestors if tree else chain(nodes)
    positions = ancestors.sum(1) - 1 + (prefix if places is None else int(places.max()) + 1)
    layout = Layout(KV_HEADS, GROUP, dtype, CPU)
    cache = Cache(prefix, places)
    ours = MaskedAttention(
        layout.dtype, [AttentionSpec(), spec], cache, positions, ancestors if tree else None
    )
    held = None if places is None else places[1]
    return ours(1, query, keys, values, scale), dense(
        query, keys, values, ancestors, scale, spec, held, positions
    )


@pytest.mark.parametrize("name", SPECS)
def test_against_a_dense_computation(monkeypatch, name):
    for block, tree in product((7, 2048), (True, False)):
        monkeypatch.setattr(sdpa, "_MASKED_BLOCK", block)
        for prefix, nodes in ((0, 1), (0, 30), (5, 12), (60, 1), (60, 12), (61, 40)):
            torch.testing.assert_close(
                *run(SPECS[name], prefix, nodes, tree=tree), rtol=0, atol=1e-12
            )


def test_a_cache_in_no_order():
    generator = seeded(3)
    places = torch.stack(
        [
            torch.stack([torch.randperm(50, generator=generator)[:20] for _ in range(KV_HEADS)])
            for _ in "ab"
        ]
    )
    for name in ("window", "all"):
        torch.testing.assert_close(*run(SPECS[name], 20, 1, places=places), rtol=0, atol=1e-12)


def test_other_dtypes():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        ours, wanted = run(SPECS["all"], 60, 12, dtype)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)


def test_keys_before_the_window_are_not_read():
    query, keys, values, ancestors, scale = case(KV_HEADS, GROUP, DIM, 60, 3, torch.float64)
    # the first position in the window of the next token, at 60, is 52
    keys[:, :52] = values[:, :52] = torch.nan
    ours = MaskedAttention(
        torch.float64, [SPECS["window"]], Cache(60), ancestors.sum(1) + 59, ancestors
    )
    assert ours(0, query, keys, values, scale).isfinite().all()


def test_a_layer_that_wants_nothing_gets_plain_attention():
    assert not AttentionSpec()
    assert all(SPECS.values())
    torch.testing.assert_close(*run(AttentionSpec(), 300, 6), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kv_heads", "group", "prefix"), [(4, 1, 1), (2, 2, 0), (1, 4, 700)])
def test_attention_of_reference_implementations(kv_heads, group, prefix):
    query, keys, values, ancestors, scale = case(kv_heads, group, 8, prefix, 5, torch.float64)
    for told in (ancestors, None):
        slow = by(ReferenceAttention)(query, keys, values, told, scale)
        torch.testing.assert_close(
            slow, dense(query, keys, values, told, scale), rtol=1e-10, atol=1e-12
        )
