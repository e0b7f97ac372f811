"""The C kernel against the dense float64 oracle and, bit for bit, plain decoding; what it leaves to sdpa."""

from __future__ import annotations

import ctypes
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.oracle import blind_to_siblings, case, chain, dense, other_bits
from tests.helpers import random_tree
from tswift.attention import native
from tswift.attention.backends import choose, why_not
from tswift.attention.building import Unbuilt
from tswift.attention.layout import Layout
from tswift.attention.native import NativeAttention
from tswift.attention.sdpa import TreeAttention
from tswift.kv.cache import FullKV
from tswift.models.load import load

CPU = torch.device("cpu")
REASON = why_not("native", torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOLERANCE = 4e-6  # as for TreeAttention in float32
HALVES = (torch.bfloat16, torch.float16)
# Each head size in each dtype is a library of its own, which takes the compiler two seconds.
SIZES = [(16, torch.float32), (64, torch.float32), (16, torch.bfloat16), (80, torch.bfloat16), (16, torch.float16)]


@pytest.fixture
def never_stock(monkeypatch) -> None:
    def refuse(*args) -> None:
        raise AssertionError("left to the stock operators")

    monkeypatch.setattr(TreeAttention, "__init__", refuse)


def attend(query, keys, values, ancestors, scale, nodes=None, prefix=None):
    nodes = nodes or len(ancestors)
    layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
    prefix = keys.shape[1] - nodes if prefix is None else prefix
    return NativeAttention(layout, prefix, nodes, ancestors)(query, keys, values, scale)


def check(*shape, seed=0, sharp=1.0, dtype=torch.float32) -> None:
    query, keys, values, ancestors, scale = case(*shape, dtype, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    apart = (out.double() - dense(query, keys, values, ancestors, scale)).abs()
    if dtype in HALVES:  # all is computed in float32, and rounded once
        apart -= out.double().abs() * torch.finfo(dtype).eps / 2
    assert apart.max() < TOLERANCE * max(1, sharp), apart.max()  # rounding grows with the scores


def tree_of(nodes: int, reach: int, seed: int) -> torch.Tensor:
    """Ancestors in a tree whose parents are at most ``reach`` nodes before their children; 1 is a chain."""
    random, ancestors = Random(seed), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[max(0, node - random.randint(1, reach))]
    return ancestors


def plain(query, keys, values, ancestors, scale):
    """One pass of one node for each, as plain decoding has them: its ancestors committed, one after another."""
    nodes, rows = len(ancestors), []
    prefix = keys.shape[1] - nodes
    for node in range(nodes):
        path = torch.cat([torch.arange(prefix), prefix + ancestors[node].nonzero().flatten()])
        rows.append(attend(query[:, node : node + 1], keys[:, path], values[:, path], None, scale, 1))
    return torch.cat(rows, dim=1)


def differ(kv_heads, group, dim, prefix, ancestors, dtype, seed=0, sharp=1.0) -> list[int]:
    """The nodes of a tree that have other bits than by plain decoding."""
    nodes = len(ancestors)
    query, keys, values, _, scale = case(kv_heads, group, dim, prefix, nodes, dtype, seed, sharp)
    same = attend(query, keys, values, ancestors, scale) == plain(query, keys, values, ancestors, scale)
    return (~same.all(-1).all(0)).nonzero().flatten().tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("never_stock")
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(SIZES),
    st.one_of(st.integers(0, 700), st.integers(0, 4000)),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(0, 1000),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_a_row_has_the_bits_of_plain_decoding(kv_heads, group, size, prefix, nodes, reach, seed, sharp) -> None:
    dim, dtype = size
    assert differ(kv_heads, group, dim, prefix, tree_of(nodes, reach, seed), dtype, seed, sharp) == []


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(("reach", "dtype"), [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_the_bits_around_borders(reach: int, dtype: torch.dtype) -> None:
    """Of blocks, of parts, and where tails begin."""
    edges = [*range(63, 67), *range(119, 122), *range(183, 186), 240, 304, 424, *range(543, 546), 7800]
    for prefix in (0, 1, 7, 8, 56, *edges):
        assert differ(1, 1, 16, prefix, tree_of(64, reach, prefix), dtype) == [], prefix
        assert differ(2, 2, 16, prefix, tree_of(2, reach, prefix), dtype) == [], prefix


@pytest.mark.usefixtures("never_stock")
def test_the_bits_far_into_a_text() -> None:
    """Where parts become longer, and behind."""
    for prefix in (30_700, 30_784, 50_000):
        for nodes in (3, 9):
            assert differ(1, 1, 16, prefix, tree_of(nodes, 4, nodes), torch.bfloat16) == []


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(("dim", "dtype"), SIZES)
def test_the_bits_beside_other_nodes(dim: int, dtype: torch.dtype) -> None:
    """Of paths with anything beside and behind them, and nothing that is no number read behind the pass."""
    for start, group in ((3, 1), (180, 2), (500, 4), (1000, 8)):
        assert other_bits(attend, start, group, dim, dtype, 5, (1, 2, 7, 16, 64)) == []


@pytest.mark.usefixtures("never_stock")
def test_siblings_may_stand_in_any_order() -> None:
    for prefix in (5, 235, 1000):
        query, keys, values, _, scale = case(1, 2, 16, prefix, 40, torch.float32)
        ancestors, places = tree_of(40, 12, prefix), Random(prefix).sample(range(40), 40)
        order = sorted(range(40), key=lambda node: (int(ancestors[node].sum()), places[node]))
        assert order != sorted(order)  # parents first, siblings as it comes
        slots = torch.cat([torch.arange(prefix), prefix + torch.tensor(order)])
        turned = attend(query[:, order], keys[:, slots], values[:, slots], ancestors[order][:, order], scale)
        assert torch.equal(turned, attend(query, keys, values, ancestors, scale)[:, order])


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("threads", [1, 2])
def test_chains_over_a_text_from_any_start(threads: int) -> None:
    query, keys, values, _, scale = case(2, 1, 16, 0, 700, torch.float32)
    before, rows = torch.get_num_threads(), torch.empty_like(query)
    torch.set_num_threads(threads)
    try:
        for end in range(64, 701, 53):
            at = slice(end - 64, end)
            rows[:, at] = attend(query[:, at], keys[:, :end], values[:, :end], None, scale, 64)
        for start, nodes in ((0, 3), (17, 64), (40, 33), (150, 64), (290, 9), (430, 64), (636, 1)):
            end = start + nodes
            out = attend(query[:, start:end], keys[:, :end], values[:, :end], None, scale, nodes)
            torch.testing.assert_close(out, rows[:, start:end], rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("dtype", HALVES)
def test_halves(dtype: torch.dtype) -> None:
    for prefix in (0, 5, 250, 2000):
        for kv_heads, group, nodes in ((1, 1, 1), (1, 2, 1), (2, 1, 3), (1, 4, 1), (1, 1, 7), (2, 3, 5), (1, 8, 64)):
            check(kv_heads, group, 16, prefix, nodes, seed=prefix, dtype=dtype)


def test_halves_are_taken_by_choice() -> None:
    assert all(choose("auto", dtype, CPU, 16) == "native" for dtype in (torch.float32, *HALVES))


@pytest.mark.usefixtures("never_stock")
def test_any_number_of_rows() -> None:
    for prefix in (0, 7, 1500):
        for nodes in range(1, 71):
            check(1, 1, 16, prefix, nodes, seed=nodes)
        for group, nodes in ((2, 64), (8, 1), (8, 16), (3, 2), (5, 7), (8, 64), (1, 128)):
            check(2, group, 16, prefix, nodes, seed=nodes)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_prefixes_and_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for prefix in (0, 1, 119, 120, 121, 479, 480, 481, 959, 961, 5000):
            for kv_heads, group, nodes in ((1, 1, 1), (1, 1, 8), (3, 2, 2), (2, 1, 20)):
                check(kv_heads, group, 64, prefix, nodes, seed=prefix)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (80, torch.bfloat16),
        pytest.param(128, torch.float16, marks=pytest.mark.slow),
        pytest.param(256, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_head_sizes(width: int, dtype: torch.dtype) -> None:
    for nodes in (1, 2, 3, 5, 16, 21):
        check(2, 1, width, 130, nodes, seed=width, dtype=dtype)


@pytest.mark.usefixtures("never_stock")
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
def test_huge_scores() -> None:
    """They rise and fall along the text, so that what was added up before has to shrink to nothing and to stay."""
    for nodes, size in product((1, 4, 5, 12, 30), (1e4, -1e4, 3e37)):
        query, keys, values, ancestors, _ = case(1, 1, 16, 1000, nodes, torch.float32)
        query, keys = torch.zeros_like(query), torch.zeros_like(keys)
        query[..., 0] = 1
        keys[..., 0] = torch.sin(torch.arange(keys.shape[1]) / 50) * size
        out = attend(query, keys, values, ancestors, 1.0)
        torch.testing.assert_close(out.double(), dense(query, keys, values, ancestors, 1.0), rtol=0, atol=2e-3)


@pytest.mark.usefixtures("never_stock")
def test_a_broken_key_is_not_hidden() -> None:
    for nodes, place, bad in product((1, 5, 12), (3, 700, 1000), (torch.nan, torch.inf)):
        query, keys, values, _, scale = case(1, 1, 16, 1000, nodes, torch.float32)
        keys = keys.clone()
        keys[:, place] = bad
        assert not attend(query, keys, values, chain(nodes), scale).isfinite().any()


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_broken_beside_a_node_is_not_its_own(bad: float) -> None:
    """In the newest node, which no other sees; and far behind, where not all nodes have it in their tails."""
    for nodes, (group, prefix) in product((3, 6, 40), ((1, 30), (2, 230), (1, 300))):
        query, keys, values, _, scale = case(1, group, 16, prefix, nodes, torch.float32)
        ancestors = tree_of(nodes, 3, nodes)
        ancestors[-1, 1:-1] = False
        before = attend(query, keys, values, ancestors, scale)
        keys, values = keys.clone(), values.clone()
        keys[:, -1, 0] = values[:, -1, 0] = bad
        after = attend(query, keys, values, ancestors, scale)
        assert torch.equal(before[:, :-1], after[:, :-1])
        assert not after[:, -1].isfinite().all()
        values[:, prefix // 2, 3] = bad
        broken = [f(query, keys, values, ancestors, scale) for f in (attend, plain)]
        torch.testing.assert_close(*broken, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("never_stock")
def test_what_lies_behind_the_text_is_not_read() -> None:
    for nodes in (1, 3, 7, 12):
        query, keys, values, ancestors, scale = case(2, 1, 16, 500, nodes, torch.float32)
        wholes = torch.full((2, 2, 520, 16), torch.nan)
        wholes[0, :, : 500 + nodes], wholes[1, :, : 500 + nodes] = keys, values
        out = attend(query, *wholes[:, :, : 500 + nodes], ancestors, scale)
        assert torch.equal(out, attend(query, keys, values, ancestors, scale))


@pytest.mark.usefixtures("never_stock")
def test_no_ancestors_mean_a_chain() -> None:
    for prefix in (0, 5, 470, 2000):
        query, keys, values, _, scale = case(2, 2, 16, prefix, 20, torch.float32)
        out = attend(query, keys, values, None, scale, 20)
        assert torch.equal(out, attend(query, keys, values, chain(20), scale))


@pytest.mark.usefixtures("never_stock")
def test_a_mask_may_be_laid_out_in_any_way() -> None:
    query, keys, values, ancestors, scale = case(1, 1, 16, 30, 9, torch.float32)
    turned = ancestors.T.contiguous().T
    assert torch.equal(attend(query, keys, values, turned, scale), attend(query, keys, values, ancestors, scale))


def test_the_check_sees_a_wrong_mask() -> None:
    for nodes in (4, 6, 20):
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
    [(torch.float64, 16, 1, 5), (torch.float32, 24, 1, 5), (torch.float32, 16, 2, 65), (torch.bfloat16, 16, 1, 129)],
)
def test_what_is_left_to_the_stock_operators(dtype, width: int, group: int, nodes: int) -> None:
    query, keys, values, ancestors, scale = case(2, group, width, 300, nodes, dtype)
    stock = TreeAttention(Layout(2, group, dtype, CPU), 300, nodes, ancestors)(query, keys, values, scale)
    assert torch.equal(attend(query, keys, values, ancestors, scale), stock)


def test_a_head_size_that_cannot_be_built_is_left_to_them_too(monkeypatch) -> None:
    query, keys, values, ancestors, scale = case(2, 1, 16, 300, 5, torch.float32)
    stock = TreeAttention(Layout(2, 1, torch.float32, CPU), 300, 5, ancestors)(query, keys, values, scale)
    assert not torch.equal(attend(query, keys, values, ancestors, scale), stock)

    def full(width: int, dtype: torch.dtype) -> None:
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


def test_parts_grow_with_the_text() -> None:
    kernel, parts = native.library(16, torch.float32), []
    for prefix in (0, 183, 184, 663, 664, 100_000, 1_000_000):
        call = native._Call(kv_heads=1, rows=1, prefix=prefix, nodes=1, threads=1)
        parts.append((kernel.tswift_scratch(ctypes.byref(call)) - 16 * 16) / (2 * 16 + 16))
    assert parts == [1, 1, 2, 2, 3, 59, 294]


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
