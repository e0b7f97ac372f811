"""Dynamic trees and cascades: path probabilities, the size that pays,
the same tokens as plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    decode_method,
    decode_steps,
    path_to,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.decoding.pass_costs import NOMINAL, PassCosts
from tswift.drafting import chains
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, TreeBudget
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.sampling.parameters import SamplingParams

OFFERS = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 5), st.sampled_from(["a", "b"]), st.floats(0.01, 0.99)
    ),
    max_size=40,
)


def test_chances_multiply_and_the_highest_counts():
    sketch = CandidateTree(7, 3, AcceptanceEstimator())
    first = sketch.propose(0, 1, "a", "x", 0.5)
    second = sketch.propose(first, 2, "a", "y", 0.5)
    assert (first, sketch.path_prob[second]) == (1, 0.25)
    for guess, best, source in ((0.2, 0.5, "a"), (0.8, 0.8, "b")):
        assert sketch.propose(0, 1, "b", guess, guess) == first
        assert (sketch.path_prob[first], sketch.sources[first]) == (best, source)
    assert math.isclose(sketch.path_prob[second], 0.4)  # what is below it rises with it
    assert sketch.path(second) == [1, 2]
    third = sketch.propose(second, 3, "a", "x", 0.5)
    assert sketch.propose(third, 4, "a", "x", 0.5) is None  # too deep


@given(OFFERS, st.integers(1, 12))
def test_the_likeliest_nodes_are_a_tree(offers, limit):
    sketch = CandidateTree(7, 4, AcceptanceEstimator())
    for node, token, source, chance in offers:
        sketch.propose(node % len(sketch), token, source, chance, chance)
    probs = sketch.path_prob
    best = sketch.likeliest(limit)
    assert all(
        probs[node] <= probs[sketch.parents[node]] * (1 + 1e-9) for node in range(1, len(sketch))
    )
    assert len(best) == min(limit, len(sketch))
    assert all(sketch.parents[node] in best[:place] for place, node in enumerate(best) if place)
    least = min(probs[node] for node in best)
    assert all(probs[node] <= least * (1 + 1e-9) for node in range(len(sketch)) if node not in best)
    tree = sketch.prune(best)
    assert len(tree) == len(best)
    assert {path_to(tree, node) for node in range(len(tree))} == {
        tuple(sketch.path(node)) for node in best
    }


def test_what_came_teaches_only_where_the_text_went():
    acceptance = AcceptanceEstimator()
    for _ in range(200):
        sketch = CandidateTree(7, 3, acceptance)
        right, other = (
            sketch.propose(0, token, "a", kind, 0.5)
            for token, kind in ((1, "sure"), (2, "unlikely"))
        )
        sketch.propose(right, 3, "a", "later", 0.5)
        sketch.propose(other, 4, "a", "never", 0.5)
        sketch.learn([1, 9])
    found = {
        kind: acceptance.chance(("a", kind), 0.5) for kind in ("sure", "unlikely", "later", "never")
    }
    assert found["sure"] > 0.95
    assert max(found["unlikely"], found["later"]) < 0.05
    assert found["never"] == 0.5


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_a_chance_lies_between_the_guess_and_what_was_seen(seen, guess):
    acceptance = AcceptanceEstimator()
    for came_true in seen:
        acceptance.learn("kind", came_true)
    low, high = sorted((guess, sum(seen) / len(seen) if seen else guess))
    assert low - 1e-6 <= acceptance.chance("kind", guess) <= high + 1e-6


CHANCES = st.lists(st.floats(0.01, 1), max_size=20).map(
    lambda found: [1.0, *sorted(found, reverse=True)]
)
COSTS = PassCosts((1, 8, 16), (1.0, 1.5, 4.0), (0.001, 0.001, 0.002), 0.2)


@given(CHANCES, st.sampled_from([0, 300, 100_000]), st.floats(0, 10))
def test_no_other_number_of_nodes_promises_more(reach, keys, spent):
    size = TreeBudget(COSTS).size(reach, keys, spent)
    rates = [sum(reach[:n]) / (spent + COSTS.seconds(n, keys)) for n in range(1, len(reach) + 1)]
    assert math.isclose(rates[size - 1], max(rates))
    assert TreeBudget(COSTS, every=True).size(reach, keys, spent) == len(reach)


def test_worth_is_judged_by_the_rate_of_late():
    budget = TreeBudget(COSTS)
    assert budget.pays_off(0.001, 100)  # nothing is known yet
    assert [budget.size([1.0] + [0.06] * 7, keys, 0.0) for keys in (0, 100_000)] == [1, 8]
    budget = TreeBudget(COSTS)
    assert budget.size([1.0] * 8, 500, 1.0) == 8  # 1.5 + 0.5 + 1 seconds
    budget.learn(6, 9.0)
    assert budget.rate == 2  # of what came, not of what was promised
    assert budget.pays_off(2.01, 1)
    assert not budget.pays_off(1.99, 1)


def budget_after(steps: int, seconds: float, timed: bool = True) -> TreeBudget:
    """A budget after some steps: those over 16 nodes took so long,
    where 1.6 seconds were expected.
    """
    budget = TreeBudget(PassCosts((1, 8, 16), (1.0, 1.5, 1.6), (0.0, 0.0, 0.0), 0.2), timed=timed)
    for _ in range(steps):
        size = budget.size([1.0] * 16, 0, 0.5)
        budget.learn(size, 0.5 + (seconds if size == 16 else 1.6))
    return budget


def test_steps_that_take_longer_than_thought_make_smaller_trees():
    assert budget_after(0, 0.0).size([1.0] * 16, 0, 0.5) == 16
    assert budget_after(5, 3.2).size([1.0] * 16, 0, 0.5) < 16
    assert budget_after(5, 3.2, timed=False).size([1.0] * 16, 0, 0.5) == 16
    paused = budget_after(30, 1.6)
    paused.learn(16, 3600.0)  # the process was stopped
    assert paused.size([1.0] * 16, 0, 0.5) == 16


def test_costs_between_and_beyond_the_known():
    assert [COSTS.seconds(1, 0), COSTS.seconds(8, 1000)] == [1, 2.5]
    assert COSTS.seconds(12, 1000) == pytest.approx((2.5 + 6) / 2)
    assert COSTS.seconds(24, 0) == pytest.approx(6.5)
    assert COSTS.node(0) == pytest.approx(2.5 / 8)


def test_costs_of_nothing():
    sound = PassCosts((1, 8), (1.0, 2.0), (0.0, 0.0), 0.1)
    assert sound.sound
    for nodes in ((2, 8), (8, 1), (1, 8, 9)):
        assert not replace(sound, nodes=nodes).sound
    for base in ((1.0,), (1.0, 0.0), (1.0, math.nan)):
        assert not replace(sound, base=base).sound
    assert not replace(sound, per_key=(0.0, -1.0)).sound
    assert not PassCosts((1,), (1.0,), (0.0,), 0.1).sound


def test_what_chains_save_at_best_is_by_what_their_nodes_cost():
    costs = PassCosts((1, 2, 4), (1.0, 1.5, 1.5), (0.0, 0.5, 0.5), 0.2)
    assert costs.saved(0, 0.5) == pytest.approx(1 - 1.5 / 1.875)  # of four nodes
    assert costs.saved(0, 0.5, [2]) == 0  # half a token more for half a step more
    assert costs.saved(0, 0.5, [2], costs.level) == pytest.approx(1 - 1.7 / 1.5)
    assert costs.saved(1, 0.5) == pytest.approx(1 - 2 / 1.875)


PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)


def steps_of(
    method: str,
    prompt: list[int],
    seed: int,
    length: int,
    heads: bool = True,
    costs=NOMINAL,
    **options,
):
    """What a method takes to write plain decoding's text."""
    drafter = make_drafter(
        method,
        tiny_target(),
        tiny_heads(kind="conditioned") if heads else None,
        DraftOptions(**{"budget": 64, "costs": "nominal", **options}),
        tiny_draft(),
        costs=costs,
    )
    steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, seed, length)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, seed, length)
    assert all(len(step.tokens) <= length for step in steps)
    return steps


def test_a_cascade_over_everything_drafts_what_will_be_drawn():
    # it goes on as long as that pays, which with these random heads is not long; and all of its
    # chain is accepted
    chains = [
        step.accepted
        for step in steps_of("cascade", random_prompt(40, 4), 2, 100, budget=256, recall=0)[:-1]
    ]
    assert min(chains) >= 1
    assert sum(chains) / len(chains) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("heads", [True, False])
def test_a_cascade_decodes_more_where_its_passes_cost_less(heads, monkeypatch):
    """The tree that it is verified in costs what it did."""
    passes = list[int]()
    found = []

    class Counted(chains.HostStepper):
        def step(self, *given):
            passes.append(1)
            return super().step(*given)

    monkeypatch.setattr(chains, "HostStepper", Counted)
    for share in (0.02, 50.0):
        passes.clear()
        costs = replace(
            NOMINAL, base=tuple(share * each for each in NOMINAL.base), level=share * NOMINAL.level
        )
        steps = steps_of("cascade", random_prompt(80, 6), 1, 50, heads, costs, recall=0, nodes=24)
        found.append(len(passes) / len(steps))
    assert found[0] > found[1]


@pytest.mark.slow
def test_drafting_learns():
    """A draft that is always right is trusted, so that trees grow;
    one that is never right is given up.
    """
    steps = steps_of(
        "tokenswift", random_prompt(70, 1), 1, 300, tree="auto", kv="full", budget=None
    )
    # the first drafted token is the target's own; what the random heads say is nearly never right
    late = steps[len(steps) // 2 :]
    assert all(step.accepted >= 1 for step in late[:-1])
    assert sum(step.nodes for step in late) / len(late) < sum(step.nodes for step in steps[:5]) / 5
