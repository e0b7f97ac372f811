"""Tree attention against a dense float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.oracle import blind_to_siblings, case, chain, dense
from tswift.attention import sdpa
from tswift.attention.layout import Layout
from tswift.attention.sdpa import TreeAttention


def attend(query, keys, values, ancestors, scale):
    prefix = keys.shape[1] - len(ancestors)
    layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
    return TreeAttention(layout, prefix, len(ancestors), ancestors)(query, keys, values, scale)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.5e-2}


def check(*shape, dtype, seed=0, sharp=1.0) -> None:
    query, keys, values, ancestors, scale = case(*shape, dtype, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    worst = (out.double() - dense(query, keys, values, ancestors, scale)).abs().max().item()
    assert worst < TOLERANCE[dtype] * max(1, sharp), worst  # rounding grows with the scores


@pytest.mark.parametrize("prefix", [0, 1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_prefixes_and_threads(prefix: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # decides into how many parts the prefix is cut
    try:
        for dtype in TOLERANCE:
            for kv_heads, group, dim, nodes in ((1, 1, 8, 1), (1, 8, 64, 5), (2, 3, 8, 41), (3, 2, 64, 2)):
                check(kv_heads, group, dim, prefix, nodes, dtype=dtype, seed=prefix)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([8, 64]),
    st.sampled_from([0, 1, 2, 31, 255, 256, 257, 300, 1000]),
    st.integers(1, 41),
    st.integers(0, 1000),
    st.sampled_from([torch.float64, torch.float32]),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(kv_heads, group, dim, prefix, nodes, seed, dtype, sharp) -> None:
    check(kv_heads, group, dim, prefix, nodes, dtype=dtype, seed=seed, sharp=sharp)


@pytest.mark.parametrize("prefix", [1, 300, 1000])
@pytest.mark.parametrize("block", [128, 8192])
def test_the_path_of_other_devices(monkeypatch, prefix: int, block: int) -> None:
    """Plain products for prefix and tail, run here on the CPU; one block and several."""
    taken = []
    monkeypatch.setattr(TreeAttention, "_tail", lambda self, *given: sdpa._masked(*given, self._bias))

    def elsewhere(self, rows, keys, values, scale):
        taken.append(keys.shape[1])
        return sdpa._blockwise(rows, keys, values, scale)

    monkeypatch.setattr(sdpa, "_BLOCK", block)
    monkeypatch.setattr(TreeAttention, "_split", lambda *args: 1)
    monkeypatch.setattr(TreeAttention, "_prefix", elsewhere)
    for dtype in TOLERANCE:
        check(2, 3, 8, prefix, 6, dtype=dtype)
    assert taken == [prefix] * 3


@pytest.mark.parametrize("prefix", [0, 5, 300])
def test_no_ancestors_mean_a_chain(prefix: int) -> None:
    query, keys, values, _, scale = case(2, 2, 8, prefix, 6, torch.float64)
    layout = Layout(2, 2, torch.float64, query.device)
    out = TreeAttention(layout, prefix, 6, None)(query, keys, values, scale)
    assert torch.equal(out, attend(query, keys, values, chain(6), scale))


def test_the_check_sees_a_wrong_mask() -> None:
    query, keys, values, ancestors, scale = case(2, 2, 8, 300, 6, torch.float32)
    wrong = ancestors.clone()
    wrong[5, 1:5] = ~wrong[5, 1:5]
    out = attend(query, keys, values, wrong, scale)
    assert (out.double() - dense(query, keys, values, ancestors, scale)).abs().max() > 1e-2


def test_nodes_do_not_see_what_is_beside_them() -> None:
    assert blind_to_siblings(attend, 8, torch.float64)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("prefix", [255, 256, 288, 300, 1000])
def test_one_row_in_bfloat16(kv_heads: int, prefix: int) -> None:
    """The operator is given the row twice."""
    check(kv_heads, 1, 64, prefix, 1, dtype=torch.bfloat16, seed=prefix)
    check(kv_heads, 1, 64, prefix, 1, dtype=torch.bfloat16, seed=prefix, sharp=3)
