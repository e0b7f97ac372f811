"""Attention with exact rows: the same bits in every pass,
and right against a dense computation in float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.oracle import (
    HUGE,
    bears_huge_scores,
    by,
    case,
    chain,
    dense,
    odd_nodes,
    tree_of,
)
from tswift.attention.sdpa import MAX_WIDTH, AttentionSpec, BatchInvariantAttention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BORDERS = [0, *(border + MAX_WIDTH for border in (0, 256, 512, 768, 1024, 2048, 4096))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

attend = by(BatchInvariantAttention)
lengths = st.builds(
    lambda border, by: max(0, border + by), st.sampled_from(BORDERS), st.integers(-40, 40)
)
windows = st.one_of(
    st.none(), st.integers(1, 200), st.sampled_from([255, 256, 320, 321, 1000, 2047, 2048, 4000])
)
shapes = st.tuples(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([16, 24, 64, 80])
)


@st.composite
def passes(draw: st.DrawFn):
    """KV heads, groups and head size; dtype; keys before; what layers want;
    spread of the scores.
    """
    shape = draw(shapes)
    sinks = torch.linspace(-1, 2, shape[0] * shape[1]) if draw(st.booleans()) else None
    spec = AttentionSpec(draw(windows), draw(st.sampled_from([None, 2.0])), sinks)
    return (
        shape,
        draw(st.sampled_from(DTYPES)),
        draw(lengths),
        spec,
        draw(st.sampled_from([0.1, 1.0, 3.0])),
    )


@given(passes(), st.sampled_from([1, 2, 7, 30, 64]), st.sampled_from([0, 1, 3, 64]))
def test_rows_have_the_same_bits_in_every_pass(drawn, nodes, reach):
    shape, dtype, prefix, spec, sharp = drawn
    tree = tree_of(nodes, reach, prefix) if reach else nodes
    some = {0, nodes // 2, nodes - 1}
    assert odd_nodes(attend, tree, prefix, dtype, shape, spec, sharp, some) == []


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_path_of_the_greatest_depth_across_each_border(dtype):
    for border in BORDERS:
        for tree in (MAX_WIDTH, tree_of(MAX_WIDTH, 2, border)):
            assert (
                odd_nodes(
                    attend, tree, max(0, border - 30), dtype, (2, 3, 16), nodes=range(0, 64, 7)
                )
                == []
            ), border


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "groups"), [(torch.bfloat16, 1, 1), (torch.float32, 2, 3)]
)
def test_two_threads(dtype, kv_heads, groups):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert odd_nodes(attend, tree_of(20, 3, 1), 2112, dtype, (kv_heads, groups, 64)) == []
    finally:
        torch.set_num_threads(before)


def test_sharp_rows_have_the_same_bits():
    """The highest score rises along the text, and weights vanish beside it."""

    def rising(*shape):
        query, keys, *rest = case(*shape)
        return query, keys * torch.linspace(1, 100, keys.shape[1]).unsqueeze(-1), *rest

    assert odd_nodes(attend, tree_of(40, 2, 1), 660, torch.float32, (1, 2, 16), made=rising) == []


def test_a_long_chain_is_cut_into_passes():
    spec = AttentionSpec(100, 3.0)
    assert (
        odd_nodes(attend, 200, 300, torch.float32, (2, 2, 16), spec, nodes=range(0, 200, 13)) == []
    )


def test_what_is_broken_beside_a_node_is_not_its_own():
    for prefix, window in ((30, None), (230, 9), (230, None)):
        query, keys, values, _, scale = case(1, 2, 16, prefix, 9, torch.float32)
        ancestors = tree_of(9, 3, 9)
        spec = AttentionSpec(window)
        ancestors[-1, 1:-1] = False
        before = attend(query, keys, values, ancestors, scale, spec)
        keys[:, -1], values[:, -1] = torch.nan, torch.nan
        assert torch.equal(
            attend(query, keys, values, ancestors, scale, spec)[:, :-1], before[:, :-1]
        )


def test_a_wide_tree_is_refused():
    with pytest.raises(ValueError, match="65 nodes"):
        attend(*case(1, 1, 16, 9, 65, torch.float32)[:3], chain(65), 1.0)


@given(passes(), st.integers(1, MAX_WIDTH))
def test_against_a_dense_computation(drawn, nodes):
    shape, dtype, prefix, spec, sharp = drawn
    given = case(*shape, prefix, nodes, dtype, prefix, sharp)
    found = attend(*given, spec)
    wanted = dense(*given, spec)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


def test_huge_scores():
    for size in HUGE:
        bears_huge_scores(attend, 9, size)
