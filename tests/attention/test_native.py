"""The C kernel against the dense float64 oracle and, bit for bit, plain decoding;
what it leaves to sdpa.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.oracle import (
    HUGE,
    NOTHING,
    bears_huge_scores,
    by,
    case,
    chain,
    dense,
    odd_nodes,
    tree_of,
)
from tests.helpers import CPU, first, in_turns, needs_program
from tswift.attention import native
from tswift.attention.backends import choose
from tswift.attention.native import NativeAttention
from tswift.attention.sdpa import AttentionSpec, TreeAttention
from tswift.caches import KVShape
from tswift.native_build import Unbuilt, parallel_region

pytestmark = needs_program

TOLERANCE = 4e-6  # as for TreeAttention in float32
HALVES = (torch.bfloat16, torch.float16)
# Each head size in each dtype is a library of its own, which takes the compiler two seconds.
SIZES = [
    (16, torch.float32),
    (64, torch.float32),
    (16, torch.bfloat16),
    (80, torch.bfloat16),
    (16, torch.float16),
]
INTEGERS = [(16, torch.int16), (80, torch.int16), (16, torch.int8), (80, torch.int8)]
# those that other tests need, too, and one of a size that is no power of two
QUICK = [*SIZES[:3], (16, torch.int16), (16, torch.int8), (80, torch.int8)]
ALLOWED = {torch.int16: 4e-3, torch.int8: 4e-2}  # the query and weights are rounded, too
BYTES = KVShape(1, 1, 16, torch.int8, CPU)  # whose rows have their steps behind
STEP, KEY_STEP = 1 / 4000, 1.5 / 4000  # of values, and of keys


class Stepped(NativeAttention):
    """With the steps of :func:`made`, and a layer's spec."""

    def __call__(self, query, keys, values, scale, spec=NOTHING):
        self.spec = spec
        if keys.dtype == torch.int16:
            self.steps = torch.tensor([KEY_STEP, STEP])[:, None, None].repeat(
                1, len(keys), keys.shape[-1]
            )
        return super().__call__(query, keys, values, scale)


attend, stock = by(Stepped), by(TreeAttention)


@pytest.fixture
def never_stock(monkeypatch):
    def refuse(*args):
        raise AssertionError("left to the stock operators")

    monkeypatch.setattr(TreeAttention, "__init__", refuse)


def made(kv_heads, group, dim, prefix, nodes, dtype, seed=0, sharp=1.0):
    """A case; of integers, keys and values are some steps, with the query in float32."""
    if dtype not in ALLOWED:
        return case(kv_heads, group, dim, prefix, nodes, dtype, seed, sharp)
    query, keys, values, ancestors, scale = case(
        kv_heads, group, dim, prefix, nodes, torch.float32, seed, sharp
    )
    if dtype == torch.int8:
        return query, BYTES.narrowed(keys, 0, 0), BYTES.narrowed(values, 1, 0), ancestors, scale
    narrow = ((x / step).round().to(torch.int16) for x, step in ((keys, KEY_STEP), (values, STEP)))
    return query, *narrow, ancestors, scale


def widened(keys, values):
    """Keys and values as numbers."""
    if keys.dtype == torch.int8:
        return BYTES.widened(keys, 0, 0), BYTES.widened(values, 1, 0)
    return (keys * KEY_STEP, values * STEP) if keys.dtype == torch.int16 else (keys, values)


def check(*shape, seed=0, sharp=1.0, dtype=torch.float32):
    query, keys, values, ancestors, scale = made(*shape, dtype, seed, sharp)
    out = attend(query, keys, values, ancestors, scale)
    keys, values = widened(keys, values)
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    apart = (out.double() - dense(query, keys, values, ancestors, scale)).abs()
    if dtype in HALVES:  # all is computed in float32, and rounded once
        apart -= out.double().abs() * torch.finfo(dtype).eps / 2
    allowed = ALLOWED.get(dtype, TOLERANCE)
    assert apart.max() < allowed * max(1, sharp), apart.max()  # rounding grows with the scores


@pytest.mark.slow
@pytest.mark.usefixtures("never_stock")
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(SIZES + INTEGERS),
    st.one_of(st.integers(0, 700), st.integers(0, 4000)),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(0, 1000),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_a_row_has_the_bits_of_plain_decoding(
    kv_heads, group, size, prefix, nodes, reach, seed, sharp
):
    dim, dtype = size
    shape = kv_heads, group, dim
    assert (
        odd_nodes(attend, tree_of(nodes, reach, seed), prefix, dtype, shape, sharp=sharp, made=made)
        == []
    )


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(
    ("reach", "dtype"),
    first(1, [(1, torch.int8), (1, torch.float32), (3, torch.bfloat16), (2, torch.int16)]),
)
def test_the_bits_around_borders(reach, dtype):
    """Of blocks, of parts, and where tails begin."""
    for prefix in (0, 1, 7, 8, 56, *range(63, 67), *range(119, 122), 183, 184, 240, 544, 7800):
        assert odd_nodes(attend, tree_of(64, reach, prefix), prefix, dtype, made=made) == [], prefix
        assert (
            odd_nodes(attend, tree_of(2, reach, prefix), prefix, dtype, (2, 2, 16), made=made) == []
        ), prefix


@pytest.mark.slow
@pytest.mark.usefixtures("never_stock")
def test_the_bits_far_into_a_text():
    """Where parts become longer, and behind."""
    for prefix, nodes, dtype in product(
        (30_700, 30_784, 50_000), (3, 9), (torch.bfloat16, torch.int16, torch.int8)
    ):
        assert odd_nodes(attend, tree_of(nodes, 4, nodes), prefix, dtype, made=made) == []


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(("dim", "dtype"), first(3, SIZES))
def test_the_bits_in_chains_and_trees_of_any_size(dim, dtype):
    for (prefix, group), nodes in product(((3, 1), (180, 4), (1000, 8)), (1, 2, 7, 64)):
        for pass_ in (nodes, tree_of(nodes, 64, nodes)):
            some = {0, nodes // 2, nodes - 1}
            assert odd_nodes(attend, pass_, prefix, dtype, (2, group, dim), nodes=some) == []


@pytest.mark.slow
def test_halves_are_taken_by_choice():
    assert all(choose("auto", dtype, CPU, 16) == "native" for dtype in (torch.float32, *HALVES))


@pytest.mark.usefixtures("never_stock")
def test_any_number_of_rows():
    for prefix in (0, 7, 1500):
        for nodes in range(1, 71):
            check(1, 1, 16, prefix, nodes, seed=nodes)
        for group, nodes in ((2, 64), (8, 1), (8, 16), (3, 2), (5, 7), (8, 64), (1, 128)):
            check(2, group, 16, prefix, nodes, seed=nodes)


@pytest.mark.slow
@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(
    ("width", "dtype"), [(128, torch.float16), (256, torch.float32), (512, torch.float32)]
)
def test_head_sizes(width, dtype):
    for nodes in (1, 2, 3, 5, 16, 21):
        check(2, 1, width, 130, nodes, seed=width, dtype=dtype)


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("sizes", first(1, [QUICK, SIZES + INTEGERS]), ids=len)
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 1000),
    st.integers(0, 1300),
    st.integers(1, 64),
    st.integers(0, 1000),
    st.sampled_from([0.1, 1.0, 5.0]),
)
def test_any_shape(sizes, kv_heads, group, at, prefix, nodes, seed, sharp):
    dim, dtype = sizes[at % len(sizes)]
    check(kv_heads, group, dim, prefix, nodes, seed=seed, sharp=sharp, dtype=dtype)


@pytest.mark.usefixtures("never_stock")
def test_a_long_text():
    for nodes in (1, 8, 13):
        check(1, 1, 64, 40_001, nodes)


WINDOWS = [
    AttentionSpec(1),
    AttentionSpec(9),
    AttentionSpec(200),
    AttentionSpec(1000),
    AttentionSpec(None, 1.5),
]


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize(
    ("spec", "dtype"),
    first(
        1,
        in_turns(
            [*WINDOWS, AttentionSpec(130, 2.5)],
            [torch.float32, torch.float16, torch.int16, torch.int8],
        ),
    ),
    ids=str,
)
def test_windows_and_soft_caps(spec, dtype):
    """The numbers, and the bits of plain decoding; keys before all windows may be anything."""
    for prefix, nodes in ((0, 1), (7, 64), (130, 5), (1500, 1), (1500, 33), (6000, 9)):
        query, keys, values, ancestors, scale = made(2, 2, 16, prefix, nodes, dtype, sharp=2.0)
        out = attend(query, keys, values, ancestors, scale, spec)
        apart = (
            (out.double() - dense(query, *widened(keys, values), ancestors, scale, spec))
            .abs()
            .max()
        )
        assert apart < (
            2e-5 if dtype == torch.float32 else 1e-1 if dtype == torch.int8 else 1e-2
        ), (prefix, nodes, apart)
    for prefix, reach in ((0, 3), (57, 2), (119, 1), (700, 5), (5003, 64)):
        assert (
            odd_nodes(
                attend, tree_of(33, reach, prefix), prefix, dtype, (1, 2, 16), spec, 2.0, made=made
            )
            == []
        )
        assert odd_nodes(attend, 9, prefix, dtype, (2, 1, 64), spec, made=made) == []


@pytest.mark.usefixtures("never_stock")
def test_a_long_windows_bits_far_into_a_text():
    for spec in (AttentionSpec(4096), AttentionSpec(1024, 50.0)):
        assert (
            odd_nodes(attend, tree_of(7, 3, 1), 40_003, torch.int16, (1, 2, 16), spec, made=made)
            == []
        )


@pytest.mark.usefixtures("never_stock")
def test_the_result_is_the_same_with_any_number_of_threads():
    given = case(2, 1, 64, 3000, 9, torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(attend(*given))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("never_stock")
def test_huge_scores():
    for nodes, size in product((1, 4, 5, 12, 30), HUGE):
        bears_huge_scores(attend, nodes, size)


@pytest.mark.usefixtures("never_stock")
def test_the_largest_integers():
    """No sum of products overflows, whether one number is as large as all
    others or all are alike.
    """
    for nodes, (dims, many) in product((1, 5, 12), ((1, 1), (16, 1), (16, 1000))):
        query = torch.zeros(1, nodes, 16)
        query[..., :dims] = 1
        keys = torch.full((1, 1000 + nodes, 16), -(2**15), dtype=torch.int16)
        keys[:, :many] = 2**15 - 1
        values = torch.full_like(keys, 2**15 - 1)
        out = attend(query, keys, values, chain(nodes), 1.0)
        torch.testing.assert_close(out / STEP, torch.full_like(out, 2**15 - 1), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("never_stock")
def test_bytes_of_every_size():
    """A step of nothing, keys and values as large as can be,
    and those that are far larger than all others.
    """
    for nodes, size in product((1, 5, 12), (0.0, 1e-30, 1e36)):
        query, keys, values, ancestors, scale = case(1, 1, 16, 500, nodes, torch.float32)
        keys, values = keys * size, values * size
        values[:, 300] *= 8
        query = query / max(size, 1e-30)
        out = attend(
            query, BYTES.narrowed(keys, 0, 0), BYTES.narrowed(values, 1, 0), ancestors, scale
        )
        apart = (out.double() - dense(query, keys, values, ancestors, scale)).abs().max()
        assert apart <= 4e-2 * size, (nodes, size)


@pytest.mark.usefixtures("never_stock")
def test_a_broken_query_of_integers_is_not_hidden():
    for nodes, bad, dtype in product((1, 5, 12), (torch.nan, torch.inf), ALLOWED):
        query, keys, values, ancestors, scale = made(1, 1, 16, 300, nodes, dtype)
        query[:, -1, 3] = bad
        out = attend(query, keys, values, ancestors, scale)
        assert out[:, :-1].isfinite().all()
        assert not out[:, -1].isfinite().all()


@pytest.mark.usefixtures("never_stock")
def test_a_broken_key_is_not_hidden():
    for nodes, place, bad in product((1, 5, 12), (3, 700, 1000), (torch.nan, torch.inf)):
        query, keys, values, _, scale = case(1, 1, 16, 1000, nodes, torch.float32)
        keys = keys.clone()
        keys[:, place] = bad
        assert not attend(query, keys, values, chain(nodes), scale).isfinite().any()


@pytest.mark.usefixtures("never_stock")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_broken_beside_a_node_is_not_its_own(bad):
    """In the newest node, which no other sees; and far behind,
    where not all nodes have it in their tails.
    """
    for nodes, (group, prefix) in product((3, 6, 40), ((1, 30), (2, 230), (1, 300))):
        query, keys, values, _, scale = case(1, group, 16, prefix, nodes, torch.float32)
        ancestors = tree_of(nodes, 3, nodes)
        ancestors[-1, 1:-1] = False
        before = attend(query, keys, values, ancestors, scale)
        keys = keys.clone()
        values = values.clone()
        keys[:, -1, 0] = values[:, -1, 0] = bad
        after = attend(query, keys, values, ancestors, scale)
        assert torch.equal(before[:, :-1], after[:, :-1])
        assert not after[:, -1].isfinite().all()
        values[:, prefix // 2, 3] = bad
        for node in range(nodes):
            path = torch.cat([torch.arange(prefix), prefix + ancestors[node].nonzero().flatten()])
            alone = attend(query[:, node : node + 1], keys[:, path], values[:, path], None, scale)
            together = attend(query, keys, values, ancestors, scale)[:, node : node + 1]
            torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("never_stock")
def test_a_mask_may_be_laid_out_in_any_way():
    query, keys, values, ancestors, scale = case(1, 1, 16, 30, 9, torch.float32)
    turned = ancestors.T.contiguous().T
    assert torch.equal(
        attend(query, keys, values, turned, scale), attend(query, keys, values, ancestors, scale)
    )


@pytest.mark.parametrize(
    ("dtype", "width", "group", "nodes"),
    [
        (torch.float64, 16, 1, 5),
        (torch.float32, 24, 1, 5),
        (torch.float32, 16, 2, 65),
        (torch.bfloat16, 16, 1, 129),
    ],
)
def test_what_is_left_to_the_stock_operators(dtype, width, group, nodes):
    given = case(2, group, width, 300, nodes, dtype)
    assert torch.equal(attend(*given), stock(*given))


def test_a_head_size_that_cannot_be_built_is_left_to_them_too(monkeypatch):
    given = case(2, 1, 16, 300, 5, torch.float32)
    left = stock(*given)
    assert not torch.equal(attend(*given), left)

    def full(width, dtype):
        raise Unbuilt("no space left")

    monkeypatch.setattr(native, "library", full)
    native._kernel.cache_clear()
    try:
        assert torch.equal(attend(*given), left)
    finally:
        native._kernel.cache_clear()


def test_keys_that_are_no_rows_of_memory():
    query, keys, values, ancestors, scale = case(2, 1, 16, 300, 5, torch.float32)
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        attend(query, turned, values, ancestors, scale),
        attend(query, keys, values, ancestors, scale),
    )


def test_there_is_a_gradient():
    query, keys, values, ancestors, scale = case(1, 1, 16, 30, 5, torch.float32)
    query.requires_grad_()
    attend(query, keys, values, ancestors, scale).sum().backward()
    assert query.grad.isfinite().all()


# -------------------------------------------------------------------------------------------------
# Threads that share work: all of it is done once, whoever helps


WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
REGION = ctypes.CFUNCTYPE(None, WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def share(tasks: int, threads: int) -> tuple[list[int], set[int]]:
    """Which tasks were done, in order, and by which threads."""
    left = list(range(tasks))[::-1]
    done = list[int]()
    who = set[int]()

    @WORK
    def work(given):
        while True:
            try:
                task = left.pop()  # one thread at a time holds Python's lock
            except IndexError:
                return
            who.add(threading.get_native_id())
            done.append(task)

    REGION(parallel_region())(work, None, threads, 0)
    return sorted(done), who


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_everything_is_done_once(threads):
    for tasks in (0, 1, 3, 50):
        for _ in range(100):
            done, who = share(tasks, threads)
            assert done == list(range(tasks))
            assert len(who) <= threads


def test_several_callers_at_a_time():
    found: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: found.extend(share(30, 3)[0] for _ in range(50)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [list(range(30))] * 200


def test_after_a_fork():
    share(10, 3)
    child = os.fork()
    if child == 0:
        os._exit(int(share(10, 3)[0] != list(range(10))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def meet() -> bool:
    """Whether two threads are at work at a time."""
    here = threading.Barrier(2)
    met = list[int]()

    @WORK
    def work(given):
        with suppress(threading.BrokenBarrierError):
            met.append(here.wait(timeout=20))

    REGION(parallel_region())(work, None, 2, 0)
    return len(met) == 2


def test_a_child_that_was_forked_amid_a_job_is_helped():
    children = list[int]()
    caller = threading.get_native_id()

    @WORK
    def work(given):
        if threading.get_native_id() == caller:
            child = os.fork()
            if child == 0:
                os._exit(int(not meet()))
            children.append(child)

    REGION(parallel_region())(work, None, 2, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
