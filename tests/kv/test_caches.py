"""KV caches: what full, partial and streaming ones hold after any moves, and what policies find important."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers import random_prompt, random_tree, tiny_target
from tswift.kv import CHUNK, POLICIES, FullKV, KVShape, PartialKV, StreamingKV, by_attention, by_chunk, by_query

FULL = KVShape(2, 3, 4, torch.float32, torch.device("cpu"))


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 999).map(Random)), max_size=8))
def test_commit_keeps_the_chosen_slots_in_order(start: int, passes) -> None:
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
            assert torch.equal(kv.keys[layer, :, : kv.length], expected)
            assert torch.equal(kv.values[layer, :, : kv.length], -expected)


@pytest.mark.parametrize("kind", ["gqa", "mha", "mqa"])
def test_tree_passes_and_commits_leave_what_a_straight_prefill_leaves(kind: str) -> None:
    target, random = tiny_target(kind), Random(3)
    text = random_prompt(30, 1)
    kv = FullKV(target.kv_shape, 300)
    target.prefill(text, kv)
    for _ in range(15):
        tree = random_tree(random.randint(1, 14), random)
        positions = torch.tensor(tree.depths) + kv.length
        hidden = target.forward(torch.tensor(tree.tokens), positions, kv, tree.ancestors()).hidden
        path = [random.randrange(len(tree))]
        while path[0]:
            path.insert(0, tree.parents[path[0]])
        kv.commit(path)
        text += [tree.tokens[node] for node in path]
    straight = FullKV(target.kv_shape, len(text))
    last = target.prefill(text, straight)
    assert kv.length == straight.length == len(text)
    torch.testing.assert_close(kv.keys[:, :, : kv.length], straight.keys, rtol=0, atol=1e-11)
    torch.testing.assert_close(kv.values[:, :, : kv.length], straight.values, rtol=0, atol=1e-11)
    torch.testing.assert_close(hidden[path[-1]], last.hidden[-1], rtol=0, atol=1e-11)


def test_slots_are_positions() -> None:
    kv = FullKV(FULL, 10)
    kv.commit(range(7))
    assert kv.places(0).tolist() == [list(range(7))]
    # the next token, at 7, sees itself and two before it in a window of three
    assert [kv.before(window) for window in (1, 3, 7, 8, 9)] == [7, 5, 1, 0, 0]


LAYERS, HEADS, GROUP, DIM = 2, 2, 3, 4
SHAPE = KVShape(LAYERS, HEADS, DIM, torch.float64, torch.device("cpu"), placed=True)


class Growing:
    """A full cache that grows by tokens whose values say layer, head and position."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.full, self.generator = FullKV(SHAPE, capacity), torch.Generator().manual_seed(seed)

    def grow(self, count: int) -> None:
        for layer in range(LAYERS):
            positions = torch.arange(self.full.length, self.full.length + count).double()
            keys = torch.randn(HEADS, count, DIM, generator=self.generator, dtype=torch.float64)
            tags = positions.view(1, -1, 1) + 10_000 * torch.arange(HEADS).view(-1, 1, 1) + 100_000 * layer
            self.full.write(layer, keys, tags.expand(HEADS, count, DIM))
        self.full.commit(range(count))

    def query(self) -> torch.Tensor:
        return torch.randn(LAYERS, HEADS * GROUP, 1, DIM, generator=self.generator, dtype=torch.float64)


def held(partial: PartialKV, full: FullKV, layer: int, head: int) -> set[int]:
    """Positions held by one KV head; fails where an entry is not a copy of its position's, or is there twice."""
    positions = (partial.values[layer, head, : partial.length, 0] - 10_000 * head - 100_000 * layer).long()
    assert ((positions >= 0) & (positions < full.length)).all()
    assert torch.equal(partial.keys[layer, head, : partial.length], full.keys[layer, head, positions])
    assert torch.equal(partial.values[layer, head, : partial.length], full.values[layer, head, positions])
    assert len(set(positions.tolist())) == partial.length
    assert torch.equal(partial.places(layer)[head], positions)
    return set(positions.tolist())


def most_important(partial: PartialKV, full: FullKV, queries, layer: int, head: int) -> list[int]:
    """What a selection keeps beside sinks and recents, most important first, by brute force."""
    middle = range(min(partial.sinks, full.length), full.length - min(partial.recent, full.length))
    group = queries[layer, head * GROUP : (head + 1) * GROUP, -1]
    score = [sum(row) for row in (full.keys[layer, head, : full.length] @ group.T).tolist()]
    return sorted(middle, key=lambda position: -score[position])


def run(budget: int, sinks: int, prompt: int, steps: list[int], most: int, seed: int = 0) -> PartialKV:
    growing = Growing(prompt + sum(steps) + 1, seed)
    full, partial = growing.full, PartialKV(SHAPE, budget, sinks)
    since: int | None = None  # text length at the last selection
    for new in [prompt, *steps]:
        growing.grow(new)
        if full.length - partial.copied + most <= partial.room:
            partial.append(full)
        else:
            queries = growing.query()
            partial.select(full, queries)
            since = full.length
            ranked = {
                (layer, head): most_important(partial, full, queries, layer, head)
                for layer in range(LAYERS)
                for head in range(HEADS)
            }
        text = full.length
        assert partial.copied == text
        assert partial.length <= budget
        assert partial.room >= most
        first, newest = set(range(min(partial.sinks, text))), set(range(max(0, text - partial.recent), text))
        for layer in range(LAYERS):
            for head in range(HEADS):
                positions = held(partial, full, layer, head)
                if since is None:
                    assert positions == set(range(text))
                    continue
                # sinks, the recents of the selection and all tokens since, and of the selected the most important
                always = first | set(range(max(0, since - partial.recent), text))
                room = budget - len(always)
                assert positions == always | set(ranked[layer, head][:room])
                assert newest <= positions
    return partial


@given(
    st.integers(64, 90),
    st.sampled_from([0, 1, 16, 50]),
    st.integers(0, 200),
    st.lists(st.integers(1, 5), max_size=60),
    st.integers(0, 1000),
)
def test_any_sequence_of_steps(budget: int, sinks: int, prompt: int, steps: list[int], seed: int) -> None:
    run(budget, sinks, prompt, steps, 5, seed)


def test_it_is_selected_anew_again_and_again() -> None:
    assert run(64, 16, 100, [5, 1, 3, 5, 4] * 12, 5).selections >= 4
    assert run(64, 0, 1, [1] * 160, 5).selections >= 3


def test_nothing_is_selected_while_the_text_fits() -> None:
    partial = run(64, 16, 0, [5, 4, 3, 2, 1] * 3, 5)
    assert (partial.selections, partial.length, partial.room) == (0, 45, 19)


def test_selecting_from_a_text_within_the_budget_keeps_all_of_it() -> None:
    for text in (1, 5, 15, 16, 17, 28, 29, 63, 64):
        growing = Growing(80, text)
        growing.grow(text)
        partial = PartialKV(SHAPE, 64, 16)
        partial.select(growing.full, growing.query())
        assert partial.length == text
        assert held(partial, growing.full, 1, 1) == set(range(text))
        growing.grow(3)
        if partial.room >= 3:
            partial.append(growing.full)
            assert held(partial, growing.full, 0, 1) >= set(range(text, text + 3))
            assert partial.length == min(64, text + 3)


def test_the_pass_at_hand_has_its_scratch_slot() -> None:
    partial = run(64, 16, 100, [4] * 4, 5)
    new = torch.ones(HEADS, 1, DIM, dtype=torch.float64)
    keys, _ = partial.write(1, new, new)
    assert keys.shape[1] == partial.length + 1 <= 65
    assert torch.equal(keys[:, -1:], new)


def followed(policy: str, budget: int, sinks: int, prompt: int, steps: list[int], seed: int = 0):
    """A cache that follows one that grows, the growing one, and after each growth what is held, as sets by head."""
    growing = Growing(prompt + sum(steps) + 1, seed)
    partial = PartialKV(SHAPE, budget, sinks, POLICIES[policy], scratch=4)
    kept = []
    for number, new in enumerate([prompt, *steps]):
        growing.grow(new)
        partial.follow(growing.full, growing.query if prompt or number else None, 5)
        kept.append([held(partial, growing.full, layer, head) for layer in range(LAYERS) for head in range(HEADS)])
        assert partial.copied == growing.full.length
    return partial, growing, kept


STEPS = st.lists(st.integers(1, 5), max_size=60)


@given(st.integers(64, 90), st.sampled_from([0, 1, 16]), st.integers(0, 200), STEPS)
@example(64, 16, 3, [1] * 90)  # the text begins shorter than the sinks, and outgrows the budget
def test_streaming_holds_the_first_and_the_newest(budget: int, sinks: int, prompt: int, steps: list[int]) -> None:
    _, _, kept = followed("streaming", budget, sinks, prompt, steps)
    for number, each in enumerate(kept):
        text = prompt + sum(steps[:number])
        wanted = {*range(min(sinks, text)), *range(max(0, text - (budget - sinks)), text)}
        assert all(positions == wanted for positions in each), (number, text)


@given(st.integers(64, 90), st.sampled_from([0, 1, 16]), st.integers(1, 200), STEPS, st.integers(0, 1000))
def test_partial_keeps_what_was_selected_once(
    budget: int, sinks: int, prompt: int, steps: list[int], seed: int
) -> None:
    partial, _, kept = followed("partial", budget, sinks, prompt, steps, seed)
    assert partial.selections == 1
    fixed = budget - min(sinks, prompt) - partial.recent  # most that can be selected
    for number, each in enumerate(kept):
        text = prompt + sum(steps[:number])
        for first, positions in zip(kept[0], each, strict=True):
            oldest_recent = prompt - min(partial.recent, prompt - min(sinks, prompt))
            selected = {position for position in first if position < oldest_recent}
            assert len(selected) <= fixed + sinks
            assert selected <= positions
            assert positions >= set(range(min(sinks, text)))
            newest = range(max(0, text - partial.recent), text)
            assert set(newest) <= positions
            assert len(positions) == min(text, budget)


def test_room_is_made_for_the_next_step() -> None:
    growing = Growing(400, 3)
    growing.grow(90)
    partial = PartialKV(SHAPE, 64, 4, POLICIES["dynamic"])
    for new in (5, 3, 4, 1, 5) * 12:
        partial.follow(growing.full, growing.query, 5)
        assert partial.room >= 5
        growing.grow(new)
    assert partial.selections >= 3


def test_more_tokens_at_once_than_there_is_room_for() -> None:
    partial, growing, _ = followed("streaming", 64, 4, 100, [])
    growing = Growing(400, 3)
    growing.grow(5)
    partial = PartialKV(SHAPE, 64, 4, POLICIES["streaming"])
    partial.follow(growing.full, growing.query, 5)
    growing.grow(300)
    partial.follow(growing.full, growing.query, 5)
    assert held(partial, growing.full, 1, 1) == {*range(4), *range(305 - 60, 305)}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_forwarded_over_it_is_forgotten(policy: str) -> None:
    partial, growing, kept = followed(policy, 64, 4, 90, [3, 2])
    length = partial.length
    new = torch.ones(HEADS, 3, DIM, dtype=torch.float64)
    for layer in range(LAYERS):
        partial.write(layer, new, new)
    partial.commit([0, 2])
    assert partial.length == length + 2
    assert partial.places(1)[:, -2:].tolist() == [[95, 96]] * HEADS
    partial.forget()
    assert [held(partial, growing.full, layer, head) for layer in range(LAYERS) for head in range(HEADS)] == kept[-1]


def random(count: int, observed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, count, DIM, generator=generator, dtype=torch.float64)
    return keys, torch.randn(HEADS, GROUP, observed, DIM, generator=generator, dtype=torch.float64)


def dot(ours, theirs) -> float:
    return sum(a * b for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


COUNTS = st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000))


@given(COUNTS)
def test_by_query(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    wanted = [[sum(dot(q[-1], key) for q in queries[head]) for key in keys[head]] for head in range(HEADS)]
    assert by_query(keys, queries).tolist() == [pytest.approx(row) for row in wanted]


@given(COUNTS)
def test_by_attention(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    count = keys.shape[1]
    found = by_attention(keys, queries)
    for head in range(HEADS):
        paid = [0.0] * count
        for row in queries[head].flatten(0, 1):
            weights = [math.exp(dot(row, key) / math.sqrt(DIM)) for key in keys[head]]
            paid = [each + weight / sum(weights) for each, weight in zip(paid, weights, strict=True)]
        near = [paid[max(0, at - 3) : at + 4] for at in range(count)]
        assert found[head].tolist() == pytest.approx([sum(each) / len(each) for each in near], rel=1e-4)


@given(COUNTS)
def test_by_chunk(drawn: tuple[int, int, int]) -> None:
    keys, queries = random(*drawn)
    found = by_chunk(keys, queries)
    for head in range(HEADS):
        for start in range(0, keys.shape[1], CHUNK):
            chunk = keys[head, start : start + CHUNK]
            wanted = sum(dot(q[-1], chunk.mean(0)) for q in queries[head])
            assert found[head, start : start + CHUNK].tolist() == pytest.approx([wanted] * len(chunk))


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


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_keys_and_values_may_lie_in_huge_pages() -> None:
    buffer = KVShape(1, 1, 64, torch.float32, torch.device("cpu")).allocate(1 << 16)
    place = buffer.data_ptr() + buffer.nbytes // 2
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif line.startswith("VmFlags:") and inside:
            assert "hg" in line.split()
            return
    pytest.fail("it is mapped nowhere")
