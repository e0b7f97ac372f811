"""KV caches: what full, partial and streaming ones hold after any moves,
and what policies find important.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers import CPU, random_prompt, random_tree, seeded, tiny_target
from tswift.caches import (
    POLICIES,
    RETRIEVED_TOGETHER,
    FullKV,
    KVShape,
    PartialKV,
    StreamingKV,
    by_attention,
    by_chunk,
    by_query,
)
from tswift.forward.passes import Nodes
from tswift.forward.text import prefill

FULL = KVShape(2, 3, 4, torch.float32, CPU)


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 999).map(Random)), max_size=8),
)
def test_commit_keeps_the_chosen_slots_in_order(start, passes):
    kv = FullKV(FULL, 64)
    kept: list[float] = []
    stamp = 0.0
    for nodes, random in [(max(start, 1), Random(0)), *passes]:
        stamps = torch.arange(nodes) + stamp
        stamp += nodes
        for layer in range(2):
            new = stamps.view(1, -1, 1).expand(3, nodes, 4) * 10 + layer
            keys, values = kv.write(layer, new, -new)
            assert keys.shape == values.shape == (3, kv.length + nodes, 4)
            assert torch.equal(keys[:, kv.length :], new)
        slots = sorted(random.sample(range(nodes), random.randint(0, nodes)))
        kv.commit(slots)
        kept += [float(stamps[slot]) for slot in slots]
        assert kv.length == len(kept)
        for layer in range(2):
            expected = torch.tensor(kept).view(1, -1, 1).expand(3, len(kept), 4) * 10 + layer
            assert torch.equal(kv.buffers[0][layer, :, : kv.length], expected)
            assert torch.equal(kv.buffers[1][layer, :, : kv.length], -expected)


@pytest.mark.parametrize("kind", ["gqa", "mha", "mqa"])
def test_tree_passes_and_commits_leave_what_a_straight_prefill_leaves(kind):
    target = tiny_target(kind)
    random = Random(3)
    text = random_prompt(30, 1)
    kv = FullKV(target.kv_shape, 300)
    prefill(target, text, kv)
    for _ in range(15):
        tree = random_tree(random.randint(1, 14), random)
        positions = torch.tensor(tree.depths) + kv.length
        hidden = target.forward(
            Nodes(torch.tensor(tree.tokens), positions, kv, tree.ancestors())
        ).hidden
        path = [random.randrange(len(tree))]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        kv.commit(path)
        text += [tree.tokens[node] for node in path]
    straight = FullKV(target.kv_shape, len(text))
    last = prefill(target, text, straight)
    assert kv.length == straight.length == len(text)
    torch.testing.assert_close(
        kv.buffers[0][:, :, : kv.length], straight.buffers[0], rtol=0, atol=1e-11
    )
    torch.testing.assert_close(
        kv.buffers[1][:, :, : kv.length], straight.buffers[1], rtol=0, atol=1e-11
    )
    torch.testing.assert_close(hidden[path[-1]], last.hidden[-1], rtol=0, atol=1e-11)


def test_slots_are_positions():
    kv = FullKV(FULL, 10)
    kv.commit(range(7))
    assert kv.positions(0).tolist() == [list(range(7))]
    # the next token, at 7, sees itself and two before it in a window of three
    assert [kv.first_visible_slot(window) for window in (1, 3, 7, 8, 9)] == [7, 5, 1, 0, 0]


LAYERS, HEADS, GROUP, DIM = 2, 2, 3, 4
SHAPE = KVShape(LAYERS, HEADS, DIM, torch.float64, CPU, keeps_positions=True)


class Growing:
    """A full cache that grows by tokens whose values say layer, head and position."""

    def __init__(self, capacity: int, seed: int):
        self.full = FullKV(SHAPE, capacity)
        self.generator = seeded(seed)

    def grow(self, count: int):
        for layer in range(LAYERS):
            positions = torch.arange(self.full.length, self.full.length + count).double()
            keys = torch.randn(HEADS, count, DIM, generator=self.generator, dtype=torch.float64)
            tags = (
                positions.view(1, -1, 1)
                + 10_000 * torch.arange(HEADS).view(-1, 1, 1)
                + 100_000 * layer
            )
            self.full.write(layer, keys, tags.expand(HEADS, count, DIM))
        self.full.commit(range(count))

    def query(self, observes: int = 1) -> torch.Tensor:
        shape = LAYERS, HEADS * GROUP, observes, DIM
        self.queries = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return self.queries


def held(partial: PartialKV, full: FullKV, layer: int, head: int) -> set[int]:
    """Positions held by one KV head; fails where an entry is not a copy of its position's,
    or is there twice.
    """
    positions = (
        partial.buffers[1][layer, head, : partial.length, 0] - 10_000 * head - 100_000 * layer
    ).long()
    assert ((positions >= 0) & (positions < full.length)).all()
    assert torch.equal(
        partial.buffers[0][layer, head, : partial.length], full.buffers[0][layer, head, positions]
    )
    assert torch.equal(
        partial.buffers[1][layer, head, : partial.length], full.buffers[1][layer, head, positions]
    )
    assert len(set(positions.tolist())) == partial.length
    assert torch.equal(partial.positions(layer)[head], positions)
    return set(positions.tolist())


def followed(
    policy: str,
    budget: int,
    sinks: int,
    prompt: int,
    steps: list[int],
    seed: int = 0,
    most: int = 5,
):
    """A cache that follows one that grows, and the growing one;
    what it holds is checked by a model of it.

    Without a prompt there are no queries for the first call.
    """
    growing = Growing(prompt + sum(steps) + 1, seed)
    full = growing.full
    partial = PartialKV(SHAPE, budget, sinks, POLICIES[policy], scratch=4)
    # the text's length when it was selected
    since = 0
    selections = 0
    ranked = {head: list[int]() for head in ROWS}
    for number, new in enumerate([prompt, *steps]):
        growing.grow(new)
        partial.follow(
            full,
            (lambda: growing.query(partial.policy.observes)) if prompt or number else None,
            most,
        )
        text = full.length
        rows = {head: held(partial, full, *head) for head in ROWS}
        assert partial.copied == text
        if partial.selections > selections and partial.policy.score is not None:
            middle = range(min(sinks, text), text - min(partial.recent, text - min(sinks, text)))
            for layer, head in ROWS:
                keys = full.buffers[0][layer, :, middle.start : middle.stop]
                group = growing.queries.unflatten(1, (HEADS, -1))
                score = partial.policy.score(keys, group[layer])[head].tolist() if middle else []
                ranked[layer, head] = sorted(middle, key=lambda place: -score[place - middle.start])
        if partial.selections > selections:
            since = text
            selections = partial.selections
        if partial.policy.renews:
            assert partial.room >= most
        for head, positions in rows.items():
            first = {*range(min(sinks, text))}
            if partial.policy.renews and since:
                # all tokens since the selection, and the most important before
                always = first | {*range(max(0, since - partial.recent), text)}
                wanted = always | {*ranked[head][: budget - len(always)]}
            else:  # what was selected once stays
                chosen = (
                    max(0, min(since, budget) - min(sinks, since) - partial.recent)
                    if selections
                    else 0
                )
                fixed = {*range(sinks)} | {*ranked[head][:chosen]}
                wanted = {place for place in fixed if place < text}
                wanted |= {*range(max(0, text - (budget - len(fixed))), text)}
            assert positions == wanted, (number, text, head)
    return partial, growing


ROWS = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


@given(
    st.sampled_from(["dynamic", "partial", "streaming", "snapkv"]),
    st.integers(64, 90),
    st.sampled_from([0, 1, 16]),
    st.integers(0, 200),
    st.lists(st.integers(1, 5), max_size=60),
    st.integers(0, 1000),
)
# the text begins shorter than the sinks, and outgrows the budget
@example("streaming", 64, 16, 3, [1] * 90, 0)
@example("dynamic", 64, 16, 17, [3], 0)
@example("partial", 64, 16, 64, [5] * 30, 0)
@example("streaming", 64, 4, 5, [300], 3)  # more at once than there is room for
def test_what_a_policy_holds_after_any_steps(policy, budget, sinks, prompt, steps, seed):
    partial, _ = followed(policy, budget, sinks, prompt, steps, seed)
    if not partial.policy.renews:
        assert partial.selections <= 1


def test_it_is_selected_anew_again_and_again_and_not_before_it_has_to():
    assert followed("dynamic", 64, 16, 100, [5, 1, 3, 5, 4] * 12)[0].selections >= 4
    assert followed("dynamic", 64, 0, 1, [1] * 160)[0].selections >= 3
    partial, _ = followed("dynamic", 64, 16, 0, [5, 4, 3, 2, 1] * 3)
    assert (partial.selections, partial.length, partial.room) == (0, 45, 19)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_forwarded_over_it_is_forgotten(policy):
    partial, growing = followed("dynamic", 64, 4, 90, [3, 2])
    partial = PartialKV(SHAPE, 64, 4, POLICIES[policy], scratch=4)
    partial.follow(growing.full, lambda: growing.query(partial.policy.observes), 5)
    length = partial.length
    kept = [held(partial, growing.full, *head) for head in ROWS]
    new = torch.ones(HEADS, 3, DIM, dtype=torch.float64)
    for layer in range(LAYERS):
        keys, _ = partial.write(layer, new, new)
        assert keys.shape[1] == length + 3 <= 68
        assert torch.equal(keys[:, -3:], new)
    partial.commit([0, 2])
    assert partial.length == length + 2
    assert partial.positions(1)[:, -2:].tolist() == [[95, 96]] * HEADS
    partial.clear()
    assert [held(partial, growing.full, *head) for head in ROWS] == kept


def random(count: int, observed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(seed)
    keys = torch.randn(HEADS, count, DIM, generator=generator, dtype=torch.float64)
    return keys, torch.randn(HEADS, GROUP, observed, DIM, generator=generator, dtype=torch.float64)


def dot(ours, theirs) -> float:
    return sum(a * b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


COUNTS = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000))


@given(COUNTS)
def test_by_query(drawn):
    keys, queries = random(*drawn)
    wanted = [
        [sum(dot(q[-1], key) for q in queries[head]) for key in keys[head]] for head in range(HEADS)
    ]
    assert by_query(keys, queries).tolist() == [pytest.approx(row) for row in wanted]


@given(COUNTS)
def test_by_attention(drawn):
    keys, queries = random(*drawn)
    count = keys.shape[1]
    found = by_attention(keys, queries)
    for head in range(HEADS):
        paid = [0.0] * count
        for row in queries[head].flatten(0, 1):
            weights = [math.exp(dot(row, key) / math.sqrt(DIM)) for key in keys[head]]
            paid = [
                each + weight / sum(weights) for each, weight in zip(paid, weights, strict=True)
            ]
        near = [paid[max(0, at - 3) : at + 4] for at in range(count)]
        assert found[head].tolist() == pytest.approx(
            [sum(each) / len(each) for each in near], rel=1e-4
        )


@given(COUNTS)
def test_by_chunk(drawn):
    keys, queries = random(*drawn)
    found = by_chunk(keys, queries)
    for head in range(HEADS):
        for start in range(0, keys.shape[1], RETRIEVED_TOGETHER):
            chunk = keys[head, start : start + RETRIEVED_TOGETHER]
            wanted = sum(dot(q[-1], chunk.mean(0)) for q in queries[head])
            assert found[head, start : start + RETRIEVED_TOGETHER].tolist() == pytest.approx(
                [wanted] * len(chunk)
            )


SLACK, SCRATCH = 6, 20


def commit(kv: StreamingKV, count: int, skip: bool):
    """Forward tokens whose values say layer, head and position, one of them for nothing."""
    slots = [0, *range(2, count + 1)] if skip else list(range(count))
    tags = torch.full((max(slots) + 1,), -1.0, dtype=torch.float64)
    tags[slots] = torch.arange(kv.seen, kv.seen + count).double()
    for layer in range(LAYERS):
        by_head = (
            tags.view(1, -1, 1) + 10_000 * torch.arange(HEADS).view(-1, 1, 1) + 100_000 * layer
        )
        new = by_head.expand(HEADS, len(tags), DIM)
        kv.write(layer, new, new + 0.5)
    kv.commit(slots)


def check(kv: StreamingKV):
    ring = kv.budget - kv.sinks
    places = kv.positions(0)[0].tolist()
    assert len(places) == kv.length == len(set(places))
    if kv.settled <= kv.budget:
        assert set(places) == set(range(kv.seen))
    else:
        assert set(places) == {*range(kv.sinks), *range(kv.settled - ring, kv.seen)}
    for layer in range(LAYERS):
        for head in range(HEADS):
            wanted = torch.tensor(places).double() + 10_000 * head + 100_000 * layer
            for buffer, more in zip(kv.buffers, (0, 0.5), strict=True):
                assert torch.equal(
                    buffer[layer, head, : kv.length], (wanted + more).unsqueeze(-1).expand(-1, DIM)
                )


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, SCRATCH - 1)),
        st.tuples(st.just("back"), st.integers(0, SLACK)),
    ),
    max_size=40,
)


@given(st.sampled_from([8, 16, 33]), st.sampled_from([0, 1, 4]), MOVES)
def test_any_moves(budget, sinks, moves):
    kv = StreamingKV(SHAPE, budget, sinks, SLACK, SCRATCH)
    for kind, count in moves:
        if kind == "commit":
            kv.settle()
            check(kv)
            commit(kv, count, skip=count > 2 and count % 2 == 1)
        else:
            kv.trim_to(max(kv.settled, kv.seen - count))
        check(kv)
        assert kv.length <= kv.budget + SLACK + SCRATCH
    kv.settle()
    check(kv)
    assert kv.seen - kv.settled <= SLACK


def test_settled_tokens_stay():
    kv = StreamingKV(SHAPE, 8, 2, SLACK, SCRATCH)
    commit(kv, 15, skip=False)
    kv.settle()
    assert kv.settled == 15 - SLACK
    kv.trim_to(kv.settled)
    for seen in (kv.settled - 1, kv.seen + 1):
        with pytest.raises(ValueError, match="can be kept"):
            kv.trim_to(seen)
    assert kv.first_visible_slot(3) == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)
def test_keys_and_values_may_lie_in_huge_pages():
    buffer = KVShape(1, 1, 64, torch.float32, CPU).allocate(1 << 16)[0]
    place = buffer.data_ptr() + buffer.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif line.startswith("VmFlags:") and inside:
            assert "hg" in line.split()
            return
    pytest.fail("it is mapped nowhere")
