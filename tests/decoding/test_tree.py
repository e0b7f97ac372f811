"""The draft tree's invariants."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import path_to
from tswift.decoding.drafter import DraftTree

paths = st.lists(st.lists(st.integers(0, 4), max_size=7), max_size=25)


def grown(root: int, limit: int, all_paths) -> DraftTree:
    tree = DraftTree(root, limit)
    for number, path in enumerate(all_paths):
        tree.add(path, str(number))
    return tree


@given(st.integers(0, 4), st.integers(1, 60), paths)
def test_a_tree_is_a_trie_within_its_limit(root, limit, all_paths):
    tree = grown(root, limit, all_paths)
    assert (
        len(tree)
        == len(tree.tokens)
        == len(tree.parents)
        == len(tree.depths)
        == len(tree.sources)
        <= limit
    )
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.sources[0]) == (root, -1, 0, "")
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
    nodes = [path_to(tree, node) for node in range(len(tree))]
    assert len(set(nodes)) == len(nodes)  # a shared prefix is there once
    prefixes = {tuple(path[:end]) for path in all_paths for end in range(len(path) + 1)} | {()}
    assert set(nodes) <= prefixes
    if len(prefixes) <= limit:
        assert set(nodes) == prefixes
        for node in range(1, len(tree)):  # the source is the first that proposed the node
            first = next(
                str(n)
                for n, path in enumerate(all_paths)
                if tuple(path[: tree.depths[node]]) == nodes[node]
            )
            assert tree.sources[node] == first
    else:
        assert len(tree) == limit


@given(st.integers(1, 60), paths)
def test_ancestors_are_the_transitive_closure_of_parents(limit, all_paths):
    tree = grown(0, limit, all_paths)
    size = len(tree)
    closure = torch.eye(size, dtype=torch.int64)
    step = torch.zeros(size, size, dtype=torch.int64)
    for node in range(1, size):
        step[node, tree.parents[node]] = 1
    for _ in range(8):
        closure = ((closure + closure @ step) > 0).long()
    assert torch.equal(tree.ancestors(), closure.bool())


@given(st.integers(1, 60), paths, st.integers(0, 10**6))
def test_the_walk_follows_the_drawn_tokens_as_far_as_the_tree_goes(limit, all_paths, seed):
    tree = grown(0, limit, all_paths)
    random = Random(seed)
    drawn = [random.randrange(5) for _ in range(len(tree))]
    path = tree.walk(drawn)
    assert path[0] == 0
    nodes = {path_to(tree, node): node for node in range(len(tree))}
    for before, node in pairwise(path):
        assert tree.parents[node] == before
        assert tree.tokens[node] == drawn[before]
    assert (*path_to(tree, path[-1]), drawn[path[-1]]) not in nodes


def test_a_full_tree_still_finds_what_it_holds():
    tree = grown(9, 3, [[1, 2], [1, 3], [4]])
    assert tree.tokens == [9, 1, 2]
    assert tree.grow(0, 1, "again") == 1
    assert tree.grow(0, 4, "new") is None
    assert tree.sources == ["", "0", "0"]
    assert tree.walk([1, 2, 1]) == [0, 1, 2]
    assert tree.walk([4, 2, 1]) == [0]
