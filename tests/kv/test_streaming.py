"""A small model's own cache: after any commits, withdrawals and settlings it holds the first and the newest tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tswift.kv.buffer import KVShape
from tswift.kv.streaming import StreamingKV

LAYERS, HEADS, DIM = 2, 2, 3
SHAPE = KVShape(LAYERS, HEADS, DIM, torch.float64, torch.device("cpu"), placed=True)
SLACK, SCRATCH = 6, 20


def commit(kv: StreamingKV, count: int, skip: bool) -> None:
    """Forward tokens whose values say layer, head and position, one of them for nothing."""
    slots = [0, *range(2, count + 1)] if skip else list(range(count))
    tags = torch.full((max(slots) + 1,), -1.0, dtype=torch.float64)
    tags[slots] = torch.arange(kv.seen, kv.seen + count).double()
    for layer in range(LAYERS):
        by_head = tags.view(1, -1, 1) + 10_000 * torch.arange(HEADS).view(-1, 1, 1) + 100_000 * layer
        new = by_head.expand(HEADS, len(tags), DIM)
        kv.write(layer, new, new + 0.5)
    kv.commit(slots)


def check(kv: StreamingKV) -> None:
    ring = kv.budget - kv.sinks
    places = kv.places(0)[0].tolist()
    assert len(places) == kv.length == len(set(places))
    if kv.settled <= kv.budget:
        assert set(places) == set(range(kv.seen))
    else:
        assert set(places) == {*range(kv.sinks), *range(kv.settled - ring, kv.seen)}
    for layer in range(LAYERS):
        for head in range(HEADS):
            wanted = torch.tensor(places).double() + 10_000 * head + 100_000 * layer
            for buffer, more in ((kv.keys, 0), (kv.values, 0.5)):
                assert torch.equal(buffer[layer, head, : kv.length], (wanted + more).unsqueeze(-1).expand(-1, DIM))


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, SCRATCH - 1)),
        st.tuples(st.just("back"), st.integers(0, SLACK)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([8, 16, 33]), st.sampled_from([0, 1, 4]), MOVES)
def test_any_moves(budget: int, sinks: int, moves: list[tuple[str, int]]) -> None:
    kv = StreamingKV(SHAPE, budget, sinks, SLACK, SCRATCH)
    for kind, count in moves:
        if kind == "commit":
            kv.settle()
            check(kv)
            commit(kv, count, skip=count > 2 and count % 2 == 1)
        else:
            kv.take_back(max(kv.settled, kv.seen - count))
        check(kv)
        assert kv.length <= kv.budget + SLACK + SCRATCH
    kv.settle()
    check(kv)
    assert kv.seen - kv.settled <= SLACK


def test_settled_tokens_stay() -> None:
    kv = StreamingKV(SHAPE, 8, 2, SLACK, SCRATCH)
    commit(kv, 15, skip=False)
    kv.settle()
    assert kv.settled == 15 - SLACK
    kv.take_back(kv.settled)
    for seen in (kv.settled - 1, kv.seen + 1):
        with pytest.raises(ValueError, match="can be kept"):
            kv.take_back(seen)
    assert kv.before(3) == 0
