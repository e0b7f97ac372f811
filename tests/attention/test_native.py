"""The C kernel against the dense float64 oracle, and what it leaves to the stock operators."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.oracle import blind_to_siblings, case, chain, dense
from tests.helpers import random_tree
from tswift.attention import native
from tswift.attention.backends import why_not
from tswift.attention.building import Unbuilt
from tswift.attention.layout import Layout
from tswift.attention.native import NativeAttention
from tswift.attention.sdpa import TreeAttention
from tswift.kv.full import FullKV
from tswift.models.loading import load

CPU = torch.device("cpu")
REASON = why_not("native", torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOLERANCE = 4e-6  # as for TreeAttention in float32


@pytest.fixture
def never_stock(monkeypatch) -> None:
    def refuse(*args) -> None:
        raise AssertionError("left to the stock operators")

    monkeypatch.setattr(TreeAttention, "__init__", refuse)


def attend(query, keys, values, ancestors, scale, nodes=None):
    nodes = nodes or len(ancestors)
    layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
    return NativeAttention(layout, keys.shape[1] - nodes, nodes, ancestors)(query, keys, values, scale)


def check(*shape, seed=0, sharp=1.0) -> None:
    query, keys, values, ancestors, scale = case(*shape, torch.float32, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    worst = (out.double() - dense(query, keys, values, ancestors, scale)).abs().max().item()
    assert worst < TOLERANCE * max(1, sharp), worst  # rounding grows with the scores


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("prefix", [0, 7, 1500])
def test_any_number_of_rows(prefix: int) -> None:
    for nodes in range(1, 71):
        check(1, 1, 16, prefix, nodes, seed=nodes)
    for group, nodes in ((2, 64), (8, 1), (8, 16), (3, 2), (5, 7)):
        check(2, group, 16, prefix, nodes, seed=nodes)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("prefix", [0, 1, 119, 120, 121, 479, 480, 481, 959, 961, 5000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_prefixes_and_threads(prefix: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kv_heads, group, nodes in ((1, 1, 1), (1, 1, 8), (3, 2, 2), (2, 1, 20)):
            check(kv_heads, group, 64, prefix, nodes, seed=prefix)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("width", [48, 80, 128, 256])
def test_head_sizes(width: int) -> None:
    for nodes in (1, 2, 3, 5, 16, 21):
        check(2, 1, width, 130, nodes, seed=width)


@pytest.mark.usefixtures("never_stock")
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([16, 64]),
    st.integers(0, 1300),
    st.integers(1, 16),
    st.integers(0, 1000),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(kv_heads, group, dim, prefix, nodes, seed, sharp) -> None:
    check(kv_heads, group, dim, prefix, nodes, seed=seed, sharp=sharp)


@pytest.mark.usefixtures("never_stock")
def test_a_long_text() -> None:
    for nodes in (1, 8, 13):
        check(1, 1, 64, 40_001, nodes)


@pytest.mark.usefixtures("never_stock")
def test_the_result_is_the_same_with_any_number_of_threads() -> None:
    query, keys, values, ancestors, scale = case(2, 1, 64, 3000, 9, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attend(query, keys, values, ancestors, scale))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("nodes", [1, 4, 5, 12, 30])
@pytest.mark.parametrize("size", [1e4, -1e4, 3e37])
def test_huge_scores(nodes: int, size: float) -> None:
    """They rise and fall along the text, so that what was added up before has to shrink to nothing and to stay."""
    query, keys, values, ancestors, _ = case(1, 1, 16, 1000, nodes, torch.float32)
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0] = 1
    keys[..., 0] = torch.sin(torch.arange(keys.shape[1]) / 50) * size
    out = attend(query, keys, values, ancestors, 1.0)
    torch.testing.assert_close(out.double(), dense(query, keys, values, ancestors, 1.0), rtol=0, atol=2e-3)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("nodes", [1, 5, 12])
@pytest.mark.parametrize("place", [3, 700, 1000])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_key_is_not_hidden(nodes: int, place: int, bad: float) -> None:
    query, keys, values, _, scale = case(1, 1, 16, 1000, nodes, torch.float32)
    keys = keys.clone()
    keys[:, place] = bad
    assert not attend(query, keys, values, chain(nodes), scale).isfinite().any()


@pytest.mark.usefixtures("never_stock")
def test_what_lies_behind_the_text_is_not_read() -> None:
    for nodes in (1, 3, 7, 12):
        query, keys, values, ancestors, scale = case(2, 1, 16, 500, nodes, torch.float32)
        wholes = torch.full((2, 2, 520, 16), torch.nan)
        wholes[0, :, : 500 + nodes], wholes[1, :, : 500 + nodes] = keys, values
        out = attend(query, *wholes[:, :, : 500 + nodes], ancestors, scale)
        assert torch.equal(out, attend(query, keys, values, ancestors, scale))


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("prefix", [0, 5, 470, 2000])
def test_no_ancestors_mean_a_chain(prefix: int) -> None:
    query, keys, values, _, scale = case(2, 2, 16, prefix, 20, torch.float32)
    out = attend(query, keys, values, None, scale, 20)
    assert torch.equal(out, attend(query, keys, values, chain(20), scale))


@pytest.mark.usefixtures("never_stock")
def test_a_mask_may_be_laid_out_in_any_way() -> None:
    query, keys, values, ancestors, scale = case(1, 1, 16, 30, 9, torch.float32)
    turned = ancestors.T.contiguous().T
    assert torch.equal(attend(query, keys, values, turned, scale), attend(query, keys, values, ancestors, scale))


@pytest.mark.parametrize("nodes", [4, 6, 20])
def test_the_check_sees_a_wrong_mask(nodes: int) -> None:
    query, keys, values, ancestors, scale = case(2, 1, 16, 30, nodes, torch.float32)
    wrong = ancestors.clone()
    wrong[-1, 1:-1] = ~wrong[-1, 1:-1]
    out = attend(query, keys, values, wrong, scale)
    assert (out.double() - dense(query, keys, values, ancestors, scale)).abs().max() > 1e-2


@pytest.mark.usefixtures("never_stock")
def test_nodes_do_not_see_what_is_beside_them() -> None:
    assert blind_to_siblings(attend, 16, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "width", "group", "nodes"),
    [(torch.float64, 16, 1, 5), (torch.bfloat16, 16, 1, 5), (torch.float32, 24, 1, 5), (torch.float32, 16, 3, 50)],
)
def test_what_is_left_to_the_stock_operators(dtype, width: int, group: int, nodes: int) -> None:
    query, keys, values, ancestors, scale = case(2, group, width, 300, nodes, dtype)
    stock = TreeAttention(Layout(2, group, dtype, CPU), 300, nodes, ancestors)(query, keys, values, scale)
    assert torch.equal(attend(query, keys, values, ancestors, scale), stock)


def test_a_head_size_that_cannot_be_built_is_left_to_them_too(monkeypatch) -> None:
    query, keys, values, ancestors, scale = case(2, 1, 16, 300, 5, torch.float32)
    stock = TreeAttention(Layout(2, 1, torch.float32, CPU), 300, 5, ancestors)(query, keys, values, scale)
    assert not torch.equal(attend(query, keys, values, ancestors, scale), stock)

    def full(width: int) -> None:
        raise Unbuilt("no space left")

    monkeypatch.setattr(native, "library", full)
    native._kernel.cache_clear()
    try:
        assert torch.equal(attend(query, keys, values, ancestors, scale), stock)
    finally:
        native._kernel.cache_clear()


def test_keys_that_are_no_rows_of_memory() -> None:
    query, keys, values, ancestors, scale = case(2, 1, 16, 300, 5, torch.float32)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        attend(query, turned, values, ancestors, scale), attend(query, keys, values, ancestors, scale)
    )


def test_there_is_a_gradient() -> None:
    query, keys, values, ancestors, scale = case(1, 1, 16, 30, 5, torch.float32)
    query.requires_grad_()
    attend(query, keys, values, ancestors, scale).sum().backward()
    assert query.grad.isfinite().all()


def test_parts_are_bounded_in_number(monkeypatch) -> None:
    calls = []

    monkeypatch.setattr(native, "_kernel", lambda width: lambda call: calls.append(call._obj))
    for prefix in (1, 479, 480, 100_000, 1_000_000):
        empty = torch.empty(1).expand(1, 1, 16)
        keys = torch.empty_strided((1, prefix + 1, 16), (0, 16, 1))
        NativeAttention(Layout(1, 1, torch.float32, CPU), prefix, 1, None)(empty, keys, keys, 1.0)
    assert [call.parts for call in calls] == [1, 1, 2, 60, 64]
    assert all(call.part % 120 == 0 and call.part * (call.parts - 1) < call.prefix + 1 for call in calls)


def test_a_model_reads_the_same() -> None:
    """A prompt and a draft tree through the bundled model."""
    tree = random_tree(7, Random(2))
    tokens, depths = torch.tensor(tree.tokens), torch.tensor(tree.depths)
    hidden = []
    target = load(device="cpu", dtype="float32", attention="native").target
    assert target._attention is NativeAttention
    for attention in (NativeAttention, TreeAttention):
        target._attention = attention
        kv = FullKV(target.kv_shape, 700)
        target.prefill([token % 50 for token in range(600)], kv)
        hidden.append(target.forward(tokens, 600 + depths, kv, tree.ancestors()).hidden)
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)
    assert not torch.equal(*hidden)  # it was another computation
