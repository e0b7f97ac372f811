"""The sketch: chances multiply along a path, the likeliest nodes make a tree, and what came teaches."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree

OFFERS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 5), st.sampled_from(["a", "b"]), st.floats(0.01, 0.99)), max_size=40
)


def sketched(offers, depth: int = 4, calibration: AcceptanceEstimator | None = None) -> CandidateTree:
    sketch = CandidateTree(7, depth, calibration or AcceptanceEstimator())
    for node, token, source, chance in offers:
        sketch.offer(node % len(sketch), token, source, chance, chance)
    return sketch


def test_chances_multiply_and_the_highest_counts() -> None:
    sketch = CandidateTree(7, 3, AcceptanceEstimator())
    first = sketch.offer(0, 1, "a", "x", 0.5)
    assert first == 1
    second = sketch.offer(first, 2, "a", "y", 0.5)
    assert math.isclose(sketch.reach[second], 0.25)
    assert sketch.offer(0, 1, "b", "z", 0.2) == first
    assert (sketch.reach[first], sketch.sources[first]) == (0.5, "a")
    assert sketch.offer(0, 1, "b", "w", 0.8) == first
    assert (sketch.reach[first], sketch.sources[first]) == (0.8, "b")
    assert math.isclose(sketch.reach[second], 0.4)  # what is below it rises with it
    assert sketch.path(second) == [1, 2]
    third = sketch.offer(second, 3, "a", "x", 0.5)
    assert sketch.offer(third, 4, "a", "x", 0.5) is None  # too deep


@given(OFFERS, st.integers(1, 12))
def test_the_likeliest_nodes_are_a_tree(offers, limit: int) -> None:
    sketch = sketched(offers)
    assert all(sketch.reach[node] <= sketch.reach[sketch.parents[node]] * (1 + 1e-9) for node in range(1, len(sketch)))
    best = sketch.likeliest(limit)
    assert len(best) == min(limit, len(sketch))
    assert all(sketch.parents[node] in best[:place] for place, node in enumerate(best) if place)
    least = min(sketch.reach[node] for node in best)
    assert all(sketch.reach[node] <= least * (1 + 1e-9) for node in range(len(sketch)) if node not in best)
    tree = sketch.cut(best)
    assert len(tree) == len(best)
    paths = {tuple(sketch.path(node)) for node in best}
    found = {()}
    for node in range(1, len(tree)):
        path, at = [], node
        while at:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        found.add(tuple(path[::-1]))
    assert found == paths


def test_what_came_teaches_only_where_the_text_went() -> None:
    calibration = AcceptanceEstimator()
    for _ in range(200):
        sketch = CandidateTree(7, 3, calibration)
        right = sketch.offer(0, 1, "a", "sure", 0.5)
        sketch.offer(0, 2, "a", "unlikely", 0.5)
        sketch.offer(right, 3, "a", "later", 0.5)
        other = sketch.child(0, 2)
        sketch.offer(other, 4, "a", "never", 0.5)
        sketch.learn([1, 9])
    assert calibration.chance(("a", "sure"), 0.5) > 0.95
    assert calibration.chance(("a", "unlikely"), 0.5) < 0.05
    assert calibration.chance(("a", "later"), 0.5) < 0.05
    assert calibration.chance(("a", "never"), 0.5) == 0.5


def test_paths_of_which_nothing_is_known() -> None:
    sketch = CandidateTree(7, 2, AcceptanceEstimator())
    sketch.add([1, 2, 3], "reuse")
    sketch.add([1, 4], "reuse")
    assert [sketch.path(node) for node in range(len(sketch))] == [[], [1], [1, 2], [1, 4]]


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_a_chance_lies_between_the_guess_and_what_was_seen(seen: list[bool], guess: float) -> None:
    calibration = AcceptanceEstimator()
    for came_true in seen:
        calibration.learn("kind", came_true)
    share = sum(seen) / len(seen) if seen else guess
    low, high = sorted((guess, share))
    assert low - 1e-6 <= calibration.chance("kind", guess) <= high + 1e-6


def test_what_is_long_ago_is_forgotten() -> None:
    calibration = AcceptanceEstimator()
    for _ in range(10_000):
        calibration.learn("kind", True)
    for _ in range(10_000):
        calibration.learn("kind", False)
    assert calibration.chance("kind", 0.5) < 0.05
