"""The Triton kernels, interpreted on the CPU, against a dense float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.architectures import ARCHITECTURES
from tests.attention.oracle import (
    DIM,
    GROUP,
    KV_HEADS,
    SPECS,
    by,
    case,
    chain,
    dense,
    error,
    odd_nodes,
)
from tests.fuzzing import few
from tests.helpers import CPU, first, needs_triton, random_tree, seeded
from tswift.attention.sdpa import Attention, AttentionSpec, Layout, MaskedAttention
from tswift.caches import FullKV
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import prefill

backend = pytest.importorskip("tswift.attention.triton", reason="triton is not installed")
kernels = pytest.importorskip("tswift.attention.triton")
pytestmark = needs_triton

# worst error over the largest output
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


attend = by(backend.TritonAttention)


def check(kv_heads, group, dim, prefix, nodes, dtype=torch.float16, seed=0, sharp=1.0):
    query, keys, values, ancestors, scale = case(
        kv_heads, group, dim, prefix, nodes, dtype, seed, sharp
    )
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    assert out.dtype == dtype
    worst = error(out, dense(query, keys, values, ancestors, scale))
    assert worst < TOLERANCE[dtype] * max(1, sharp), worst  # rounding grows with the scores


@pytest.mark.parametrize("prefix", first(1, [0, 16, 17, 129]))
def test_prefixes(prefix):
    check(1, 2, 64, prefix, 9, seed=prefix)
    check(*((2, 1, 64) if prefix % 2 else (1, 3, 8)), prefix, 1 + prefix % 2, seed=prefix)


@pytest.mark.slow
def test_more_query_heads_than_a_program_has_rows():
    check(1, 130, 8, 70, 3, torch.bfloat16)


@pytest.mark.slow
def test_a_path_of_more_nodes_than_are_exact():
    """Whose slots are not their positions: there is a node of another branch before it."""
    query, keys, values, _, scale = case(1, 1, 64, 200, 80, torch.float16)
    ancestors = chain(80)
    ancestors[2:, 1] = False
    assert (
        error(
            attend(query, keys, values, ancestors, scale),
            dense(query, keys, values, ancestors, scale),
        )
        < 2e-3
    )


@pytest.mark.slow
def test_any_mask():
    """Also one that no tree has, where the root is not everyone's ancestor."""
    for nodes in (5, 40):
        query, keys, values, _, scale = case(1, 2, 64, 40, nodes, torch.float16)
        seen = torch.rand(nodes, nodes, generator=seeded(nodes)).lt(0.5).fill_diagonal_(True)
        assert (
            error(attend(query, keys, values, seen, scale), dense(query, keys, values, seen, scale))
            < TOLERANCE[torch.float16]
        )


@few
@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([8, 64, 80]),
    st.sampled_from([0, 1, 31, 63, 64, 65, 300]),
    st.integers(1, 12),
    st.integers(0, 1000),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(kv_heads, group, dim, prefix, nodes, seed, dtype, sharp):
    check(kv_heads, group, dim, prefix, nodes, dtype, seed, sharp)


GENERATIONS = (8, 9, 12)  # major compute capabilities


@pytest.fixture
def unwritten() -> Iterator[None]:
    """Memory that nobody wrote is NaN, what kernels leave for each other included."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check_on(generation, kv_heads, group, dim, prefix, nodes, tree, window, dtype):
    """A pass in the layout that a device of this generation gets, over a cache that is NaN wherever
    nobody wrote."""
    query, keys, values, ancestors, scale = case(kv_heads, group, dim, prefix, nodes, dtype, nodes)
    ancestors = ancestors if tree else None
    spec = AttentionSpec(window)
    wholes = torch.full((2, kv_heads, prefix + nodes + 200, dim), torch.nan, dtype=dtype)
    wholes[0, :, : prefix + nodes], wholes[1, :, : prefix + nodes] = keys, values
    with patch.object(backend, "generation_of", lambda device: generation):
        out = attend(query, *wholes, ancestors, scale, spec, torch.tensor(prefix))
    worst = error(out, dense(query, keys, values, ancestors, scale, spec))
    assert worst < 2 * TOLERANCE[dtype], worst


@pytest.mark.parametrize(("group", "nodes"), first(1, [(1, 133), (3, 45)]))
def test_a_block_of_rows_reads_nothing_behind_the_last_node(unwritten, group, nodes):
    """Its last rows may be nobody's."""
    check_on(9, 1, group, 64, 37, nodes, False, None, torch.bfloat16)


@settings(few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    generation=st.sampled_from(GENERATIONS),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 8),
    dim=st.sampled_from([16, 64, 80, 128, 256]),
    prefix=st.sampled_from([0, 37, 63, 64, 129, 300, 517]),
    nodes=st.integers(0, 45).map(lambda half: 2 * half + 1),
    tree=st.booleans(),
    window=st.sampled_from([None, 1, 33, 270]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
@pytest.mark.slow
def test_every_layout_of_a_device_is_interpreted(unwritten, **drawn):
    check_on(**drawn)


def test_longer_chunks_of_a_long_chain(monkeypatch):
    """Of 512 keys."""
    monkeypatch.setattr(backend, "chunk_size", lambda kv_heads: 16)
    monkeypatch.setattr(backend, "_PROMPT", 5)
    query, keys, values, _, scale = case(1, 2, 256, 575, 6, torch.float16)
    out = attend(query, keys, values, None, scale)
    assert error(out, dense(query, keys, values, None, scale)) < TOLERANCE[torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float16, torch.int32), (torch.bfloat16, torch.int64)]
)
def test_the_length_is_read_on_the_device(dtype, kind):
    """One pass serves every length; slots past it may hold anything, NaN included."""
    length = torch.zeros((), dtype=kind)
    ancestors = random_tree(5, Random(3)).ancestors()
    pass_ = backend.TritonAttention(Layout(2, 2, dtype, CPU), length, 5, ancestors)
    for prefix in (0, 59, 64, 300):
        query, keys, values, _, scale = case(2, 2, 80, prefix, 5, dtype, seed=prefix)
        wholes = torch.full((2, 2, 400, 80), torch.nan, dtype=dtype)
        for whole, part in zip(wholes, (keys, values), strict=True):
            whole[:, : prefix + 5] = part
        length.fill_(prefix)
        out = pass_(query, *wholes, scale)
        assert error(out, dense(query, keys, values, ancestors, scale)) < TOLERANCE[dtype]


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="float64"):
        backend.TritonAttention(Layout(1, 1, torch.float64, CPU), 3, 1, None)


def test_layouts_of_one_model_differ_by_nothing_that_orders_a_sum():
    """A warp has 16 rows and all keys of a tile, or there is one layout only;
    tests/attention/test_offline_compile.py looks at the code."""
    for width, generation in product((16, 64, 128, 256), (8, 9, 10, 12)):
        found = {
            backend.configuration(rows, width, generation) for rows in (*range(1, 300), 1024, 2048)
        }
        (keys,) = {each.keys for each in found}
        assert 256 % keys == 0  # chunks begin with a tile
        assert len(found) == 1 or all(each.rows == 16 * each.warps for each in found)
        assert len(found) <= (2 if generation in (8, 9, 12) else 1)


SLOW = pytest.mark.slow
HALF, BRAIN = torch.float16, torch.bfloat16


def comb(nodes: int) -> torch.Tensor:
    """Ancestors in a path of every second node, each with a leaf beside its successor:
    nothing but gaps.
    """
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(2, nodes):
        ancestors[node] |= ancestors[(node - 1) // 2 * 2]
    ancestors[1, 0] = True
    return ancestors


RANDOM = random_tree(7, Random(5)).ancestors()
FILLED = torch.block_diag(comb(4), torch.eye(3)).bool()
SHAPE = 1, GROUP, 64


def slow(*case):
    return pytest.param(*case, marks=SLOW)


@pytest.mark.parametrize(
    ("prefix", "tree", "dtype", "shape"),
    [
        (3, comb(9), BRAIN, SHAPE),
        (318, comb(9), HALF, SHAPE),  # a chunk begins at 320
        slow(126, RANDOM, HALF, SHAPE),
        slow(0, RANDOM, HALF, SHAPE),
        slow(95, comb(9), HALF, SHAPE),  # a tile goes to the chunks at 96
        slow(126, comb(9), BRAIN, SHAPE),
        slow(318, FILLED, HALF, SHAPE),
        slow(575, comb(9), BRAIN, SHAPE),
        # in chains, told by giving no ancestors
        *(slow(0, nodes, HALF, (2, 2, 64)) for nodes in (4, 9)),
        *(
            slow(prefix, 7, dtype, (2, 2, 64))
            for prefix, dtype in ((30, HALF), (125, HALF), (317, BRAIN), (572, HALF))
        ),
        *(slow(317, nodes, dtype, (2, 2, 64)) for nodes, dtype in ((17, HALF), (33, HALF))),
        # in other layouts
        *(
            slow(575, comb(5), *layout)
            for layout in ((HALF, (2, 1, 80)), (HALF, (2, 4, 128)), (BRAIN, (2, 7, 256)))
        ),
    ],
)
def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass(prefix, tree, dtype, shape):
    """In trees and chains across the border of a tile or chunk,
    as where all of its path is committed.
    """
    assert odd_nodes(attend, tree, prefix, dtype, shape) == []


@SLOW
def test_so_it_has_in_the_widest_tree_that_is_exact():
    assert odd_nodes(attend, comb(64), 300, HALF, SHAPE, nodes=(1, 2, 31, 62, 63)) == []


@SLOW
def test_so_it_has_where_chunks_grow(monkeypatch):
    monkeypatch.setattr(backend, "chunk_size", lambda kv_heads: 16)
    assert odd_nodes(attend, 3, 64 + 16 * 64 - 1, HALF, (2, 1, 256)) == []


@SLOW
@pytest.mark.parametrize(("prefix", "dtype"), [(126, HALF), (318, BRAIN)])
def test_so_it_has_whatever_a_layer_wants(prefix, dtype):
    for spec in (
        *SPECS.values(),
        AttentionSpec(100),
        AttentionSpec(200, 1.5, SPECS["sinks"].sinks),
    ):
        shape = (1, 6 if spec.sinks is not None else GROUP, 64)
        assert odd_nodes(attend, comb(9), prefix, dtype, shape, spec, tile=128) == [], spec


def test_so_it_has_where_the_length_is_on_the_device():
    """And the cache has more room, or less."""
    query, keys, values, ancestors, scale = case(1, 2, 64, 318, 7, torch.float16)
    expected = attend(query, keys, values, ancestors, scale)
    for room in (1, 900):
        wholes = torch.full((2, 1, 325 + room, 64), torch.nan, dtype=torch.float16)
        wholes[0, :, :325], wholes[1, :, :325] = keys, values
        assert torch.equal(
            attend(query, *wholes, ancestors, scale, prefix=torch.tensor(318)), expected
        )


def test_store():
    for nodes, dim, dtype in (
        (1, 64, torch.float16),
        (5, 80, torch.bfloat16),
        (41, 8, torch.float16),
    ):
        keys, values = torch.randn(2, 3, 2, 60, dim).to(dtype)  # three layers each
        new = torch.randn(2, nodes, 2, dim).to(dtype).transpose(1, 2)
        for length in (torch.tensor(0), torch.tensor(13, dtype=torch.int32)):
            expected = [x.clone() for x in (keys, values)]
            for buffer, part in zip(expected, new, strict=True):
                buffer[1, :, length : length + nodes] = part
            backend.TritonAttention.store(keys[1], values[1], *new, length)
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_an_accepted_path_is_moved_behind_the_text(count):
    """By the kernel as by PyTorch; the nodes behind the accepted ones and all else stay where they
    are.
    """
    keys, values = torch.randn(2, 3, 2, 60, 80).bfloat16()  # three layers
    expected = [each.clone() for each in (keys, values)]
    accepted = 13 + torch.tensor([0, 1, 5, 9]), 13 + torch.arange(4), torch.tensor([count])
    text = keys[:, :, :13].clone()
    backend.TritonAttention.append((keys, values), (keys, values), *accepted)
    Attention.append(expected, expected, *accepted)
    assert torch.equal(keys[:, :, :13], text)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_an_accepted_path_goes_into_a_partial_cache(count):
    """By the kernel as by PyTorch."""
    full = torch.randn(2, 3, 2, 60, 80).bfloat16().unbind()
    own = torch.randn(2, 3, 2, 20, 80).bfloat16()
    places = torch.arange(31, 35)
    slots = torch.tensor([17, 4, 18, 5])
    left = []
    for attention in (backend.TritonAttention, Attention):
        mine = own.clone()
        length = torch.tensor(17, dtype=torch.int32)
        attention.append(mine.unbind(), full, places, slots, torch.tensor([count]), length)
        left.append((mine, length))
    assert torch.equal(left[0][0], left[1][0])
    assert left[0][1] == left[1][1] == (17, 18, 18, 19, 19)[count]


def test_store_keeps_within_the_capacity():
    keys, values = torch.zeros(2, 2, 10, 8)
    backend.TritonAttention.store(keys, values, *torch.ones(2, 2, 4, 8), torch.tensor(8))
    assert keys.sum((1, 2)).tolist() == values.sum((1, 2)).tolist() == [16, 16]
    assert keys[:, 8:].eq(1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Gemma 2 (windows, soft caps)",
        *(pytest.param(name, marks=SLOW) for name in ("Llama, GQA", "gpt-oss (windows, sinks)")),
    ],
)
def test_a_model_reads_the_same(monkeypatch, name):
    """A prompt and a draft tree through a whole model, with stock operators and with the kernel."""
    target = Target(ARCHITECTURES[name].make(97).half())
    tree = random_tree(7, Random(2))
    tokens, depths = torch.tensor(tree.tokens), torch.tensor(tree.depths)
    hidden = []
    for attention in (target.backend, backend.TritonAttention):
        target.backend = attention
        if attention.SPECS:
            monkeypatch.setattr(MaskedAttention, "__call__", None)  # all layers are the kernel's
        kv = FullKV(target.kv_shape, 100)
        prefill(target, list(range(40)), kv)
        hidden.append(target.forward(Nodes(tokens, 40 + depths, kv, tree.ancestors())).hidden)
    torch.testing.assert_close(*hidden, rtol=2e-2, atol=2e-2)


LONG = AttentionSpec(window=270)


@pytest.mark.parametrize(
    ("prefix", "nodes", "tree"),
    [
        # chunks in a window, beside the nodes' own paths; one window begins with a tile's last key
        (327, 3, True),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [(0, 1, True), (61, 5, False), (300, 1, False), (600, 3, True)]
        ),
    ],
)
@pytest.mark.parametrize("name", first(2, ["a long window", *SPECS]))
def test_what_layers_want_besides(name, prefix, nodes, tree):
    spec = SPECS.get(name, LONG)
    query, keys, values, ancestors, scale = case(
        KV_HEADS, GROUP, DIM, prefix, nodes, torch.float16, sharp=3.0
    )
    ancestors = ancestors if tree else chain(nodes)
    layout = Layout(KV_HEADS, GROUP, torch.float16, CPU)
    wholes = torch.full((2, KV_HEADS, prefix + nodes + 50, DIM), torch.nan, dtype=torch.float16)
    wholes[0, :, : prefix + nodes], wholes[1, :, : prefix + nodes] = keys, values
    if spec.window is not None:
        # nobody's, so not to be read, but for what shares a tile with the first key that is seen
        wholes[:, :, : max(0, prefix - spec.window + 1) // 128 * 128] = torch.nan
    run = backend.TritonAttention(layout, torch.tensor(prefix), nodes, ancestors if tree else None)
    exact = dense(query, keys, values, ancestors, scale, spec)
    worst = (run(query, *wholes, scale, spec).double() - exact).abs().max() / exact.abs().max()
    assert worst < 3 * TOLERANCE[torch.float16]
    plain = dense(query, keys, values, ancestors, scale)
    if spec.window is None:  # and the next layer may want nothing
        assert error(run(query, *wholes, scale), plain) < 3 * TOLERANCE[torch.float16]
