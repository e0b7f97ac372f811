"""The Triton kernels, interpreted on the CPU, against a dense float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.oracle import blind_to_siblings, case, chain, dense
from tests.helpers import random_tree, tiny_llama
from tswift.attention.backends import why_not
from tswift.attention.layout import Layout
from tswift.kv.full import FullKV
from tswift.models.target import Target

backend = pytest.importorskip("tswift.attention.triton", reason="triton is not installed")
CPU = torch.device("cpu")
REASON = why_not("triton", torch.float32, CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# worst error over the largest output
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def attend(query, keys, values, ancestors, scale, nodes=None, prefix=None):
    nodes = nodes or len(ancestors)
    prefix = keys.shape[1] - nodes if prefix is None else prefix
    layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
    return backend.TritonAttention(layout, prefix, nodes, ancestors)(query, keys, values, scale)


def error(out, exact) -> float:
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def check(kv_heads, group, dim, prefix, nodes, dtype=torch.float32, seed=0, sharp=1.0) -> None:
    query, keys, values, ancestors, scale = case(kv_heads, group, dim, prefix, nodes, dtype, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    assert out.shape == query.shape
    assert out.dtype == dtype
    worst = error(out, dense(query, keys, values, ancestors, scale))
    assert worst < TOLERANCE[dtype] * max(1, sharp), worst  # rounding grows with the scores


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 127, 128, 129, 1000])
def test_prefixes(prefix: int) -> None:
    for kv_heads, group, dim, nodes in ((2, 1, 64, 1), (1, 3, 8, 2), (1, 2, 64, 41)):
        check(kv_heads, group, dim, prefix, nodes, seed=prefix)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        *((dim, torch.float32) for dim in (8, 16, 32, 64, 80, 96, 128, 256)),
        *((dim, dtype) for dim in (8, 80, 128, 256) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    check(2, 2, dim, 150, 9, dtype, seed=dim)


@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group: int) -> None:
    check(2, group, 64, 130, 41, torch.float16, seed=group)


@pytest.mark.parametrize(("nodes", "group"), [(63, 1), (64, 1), (65, 1), (121, 1), (128, 1), (65, 7), (128, 7)])
def test_trees_of_many_nodes(nodes: int, group: int) -> None:
    check(1, group, 64, 17, nodes, seed=nodes)


@pytest.mark.parametrize("nodes", [5, 128])
def test_any_mask(nodes: int) -> None:
    """Also one that no tree has, where the root is not everyone's ancestor."""
    query, keys, values, _, scale = case(1, 2, 64, 40, nodes, torch.float32)
    seen = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(nodes)).lt(0.5).fill_diagonal_(True)
    assert error(attend(query, keys, values, seen, scale), dense(query, keys, values, seen, scale)) < 4e-6


@pytest.mark.parametrize(("prefix", "nodes"), [(0, 1), (129, 1), (0, 200), (1, 200), (129, 200), (40, 520)])
def test_chunks_need_no_ancestors(prefix: int, nodes: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if nodes <= 200 else (torch.bfloat16,):
        query, keys, values, _, scale = case(1, 2, 64, prefix, nodes, dtype)
        out = attend(query, keys, values, None, scale, nodes)
        assert error(out, dense(query, keys, values, chain(nodes), scale)) < TOLERANCE[dtype]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([8, 64, 80]),
    st.sampled_from([0, 1, 31, 63, 64, 65, 300]),
    st.integers(1, 45),
    st.integers(0, 1000),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(kv_heads, group, dim, prefix, nodes, seed, dtype, sharp) -> None:
    check(kv_heads, group, dim, prefix, nodes, dtype, seed, sharp)


@pytest.mark.parametrize("parts", [1, 2, 40, 128])
def test_any_number_of_parts(monkeypatch, parts: int) -> None:
    """Also more than there are tiles: the rest find nothing and weigh nothing."""
    monkeypatch.setattr(backend, "splits", lambda *args: parts)
    for prefix in (0, 500):
        check(1, 2, 64, prefix, 5, seed=parts)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_length_is_read_on_the_device(dtype: torch.dtype, kind: torch.dtype) -> None:
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


def test_unused_slots_do_not_reach_a_chunk() -> None:
    query, keys, values, _, scale = case(1, 1, 64, 30, 70, torch.float32)
    wholes = torch.full((2, 1, 300, 64), torch.nan)
    wholes[0, :, :100], wholes[1, :, :100] = keys, values
    out = attend(query, *wholes, None, scale, 70, torch.tensor(30))
    assert error(out, dense(query, keys, values, chain(70), scale)) < TOLERANCE[torch.float32]


def test_the_check_sees_a_wrong_bit() -> None:
    query, keys, values, ancestors, scale = case(2, 2, 64, 100, 70, torch.float32)
    exact = dense(query, keys, values, ancestors, scale)
    for row, column in ((69, 3), (69, 66), (5, 69)):
        wrong = ancestors.clone()
        wrong[row, column] ^= True
        differs = (attend(query, keys, values, wrong, scale).double() - exact).abs().amax((0, 2)) > 1e-3
        assert differs.nonzero().flatten().tolist() == [row]


def test_nodes_do_not_see_what_is_beside_them() -> None:
    assert blind_to_siblings(attend, 64, torch.float32)


def test_bits_of_ancestors() -> None:
    ancestors = random_tree(128, Random(1)).ancestors() | chain(128).T.roll(1, 0)
    words = [[sum(1 << j for j in range(64) if row[64 * w + j]) for w in (0, 1)] for row in ancestors.tolist()]
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in words]
    assert backend.pack(ancestors).tolist() == signed
    assert backend.pack(ancestors[:3, :3]).tolist() == [[row[0] & 7, 0] for row in words[:3]]


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="float64"):
        backend.TritonAttention(Layout(1, 1, torch.float64, CPU), 3, 1, None)
    with pytest.raises(ValueError, match="128 nodes"):
        backend.TritonAttention(Layout(1, 1, torch.float32, CPU), 3, 129, chain(129))


@pytest.mark.parametrize(
    ("rows", "block"),
    [(1, 16), (4, 16), (16, 16), (17, 32), (41, 64), (4 * 41, 64), (6 * 41, 128), (7 * 41, 128), (4 * 512, 128)],
)
def test_blocks_of_rows_waste_little(rows: int, block: int) -> None:
    assert backend.row_block(rows, 128, 2) == block
    assert backend.row_block(rows, 256, 2) == min(block, 64)
    assert backend.row_block(rows, 128, 4) == min(block, 32)


def test_tiles_of_keys_take_little_shared_memory() -> None:
    assert [backend.key_tile(width, 2) for width in (16, 64, 128, 256)] == [128, 128, 64, 32]
    assert [backend.key_tile(width, 4) for width in (16, 64, 128, 256)] == [128, 32, 16, 16]


def test_splits_fill_the_processors_about_twice() -> None:
    assert backend.splits(132, kv_heads=8, row_blocks=1) == 33  # plain decoding
    assert backend.splits(132, kv_heads=8, row_blocks=3) == 11  # 41 nodes
    assert backend.splits(132, kv_heads=8, row_blocks=16) == 2  # a chunk of the prompt
    assert backend.splits(132, kv_heads=32, row_blocks=16) == 1
    assert backend.splits(132, kv_heads=1, row_blocks=1) == backend.MOST_PARTS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("nodes", "dim"), [(1, 64), (5, 80), (41, 8)])
def test_store(nodes: int, dim: int, dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 3, 2, 60, dim).to(dtype)  # three layers each
    new = torch.randn(2, nodes, 2, dim).to(dtype).transpose(1, 2)
    for length in (torch.tensor(0), torch.tensor(13, dtype=torch.int32)):
        expected = [x.clone() for x in (keys, values)]
        for buffer, part in zip(expected, new, strict=True):
            buffer[1, :, length : length + nodes] = part
        backend.TritonAttention.store(keys[1], values[1], *new, length)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])


def test_store_keeps_within_the_capacity() -> None:
    keys, values = torch.zeros(2, 2, 10, 8)
    backend.TritonAttention.store(keys, values, *torch.ones(2, 2, 4, 8), torch.tensor(8))
    assert keys.sum((1, 2)).tolist() == values.sum((1, 2)).tolist() == [16, 16]
    assert keys[:, 8:].eq(1).all()


def test_a_model_reads_the_same() -> None:
    """A prompt and a draft tree through a whole model, with stock operators and with the kernel."""
    target = Target(tiny_llama("gqa", torch.float32))
    tree = random_tree(7, Random(2))
    tokens, depths = torch.tensor(tree.tokens), torch.tensor(tree.depths)
    hidden = []
    for attention in (target._attention, backend.TritonAttention):
        target._attention = attention
        kv = FullKV(target.kv_shape, 100)
        target.prefill(list(range(60)), kv)
        hidden.append(target.forward(tokens, 60 + depths, kv, tree.ancestors()).hidden)
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-5)


def test_the_kernels_compile_for_cuda(tmp_path) -> None:
    """The interpreter takes more than the compiler does. 99 KB of shared memory is what small GPUs have."""
    shapes = ["80,bfloat16,8,4,128,41,tree", "90,float32,4,7,96,41,tree", "90,float16,2,1,256,1,chain"]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.compiled", *shapes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 3 * len(shapes)
    for kernel in kernels:
        assert kernel["shared"] <= 99 * 1024
    half, single, _ = [kernel for kernel in kernels if kernel["kernel"] == "attend_part"]
    assert half["mma"] > 0
    assert half["cp.async.cg"] > 0
    assert single["mma"] == 0  # that would be TF32
