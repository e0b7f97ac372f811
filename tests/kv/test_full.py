"""Commit against recomputing from scratch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import random_prompt, random_tree, tiny_target
from tswift.kv.buffer import KVShape
from tswift.kv.full import FullKV

SHAPE = KVShape(2, 3, 4, torch.float32, torch.device("cpu"))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 999).map(Random)), max_size=8))
def test_commit_keeps_the_chosen_slots_in_order(start: int, passes) -> None:
    kv = FullKV(SHAPE, 64)
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


def test_bytes() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 3 * 4 * 4
    assert FullKV(SHAPE, 10).nbytes == 10 * SHAPE.bytes_per_token


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
    kv = FullKV(SHAPE, 10)
    kv.commit(range(7))
    assert kv.places(0).tolist() == [list(range(7))]
    # the next token, at 7, sees itself and two before it in a window of three
    assert [kv.before(window) for window in (1, 3, 7, 8, 9)] == [7, 5, 1, 0, 0]
