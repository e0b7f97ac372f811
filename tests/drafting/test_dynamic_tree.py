"""Dynamic trees and cascades: path probabilities, the size that pays, the same tokens as plain decoding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import few
from tests.helpers import (
    decode_method,
    decode_steps,
    medusa_heads,
    path_to,
    random_prompt,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tests.rows import every_row
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, TreeBudget
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.models.passes import NOMINAL, PassCosts

OFFERS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 5), st.sampled_from(["a", "b"]), st.floats(0.01, 0.99)), max_size=40
)


def sketched(offers, depth: int = 4, calibration: AcceptanceEstimator | None = None) -> CandidateTree:
    sketch = CandidateTree(7, depth, calibration or AcceptanceEstimator())
    for node, token, source, chance in offers:
        sketch.propose(node % len(sketch), token, source, chance, chance)
    return sketch


def test_chances_multiply_and_the_highest_counts() -> None:
    sketch = CandidateTree(7, 3, AcceptanceEstimator())
    first = sketch.propose(0, 1, "a", "x", 0.5)
    assert first == 1
    second = sketch.propose(first, 2, "a", "y", 0.5)
    assert math.isclose(sketch.path_prob[second], 0.25)
    assert sketch.propose(0, 1, "b", "z", 0.2) == first
    assert (sketch.path_prob[first], sketch.sources[first]) == (0.5, "a")
    assert sketch.propose(0, 1, "b", "w", 0.8) == first
    assert (sketch.path_prob[first], sketch.sources[first]) == (0.8, "b")
    assert math.isclose(sketch.path_prob[second], 0.4)  # what is below it rises with it
    assert sketch.path(second) == [1, 2]
    third = sketch.propose(second, 3, "a", "x", 0.5)
    assert sketch.propose(third, 4, "a", "x", 0.5) is None  # too deep


@given(OFFERS, st.integers(1, 12))
def test_the_likeliest_nodes_are_a_tree(offers, limit: int) -> None:
    sketch = sketched(offers)
    assert all(
        sketch.path_prob[node] <= sketch.path_prob[sketch.parents[node]] * (1 + 1e-9) for node in range(1, len(sketch))
    )
    best = sketch.likeliest(limit)
    assert len(best) == min(limit, len(sketch))
    assert all(sketch.parents[node] in best[:place] for place, node in enumerate(best) if place)
    least = min(sketch.path_prob[node] for node in best)
    assert all(sketch.path_prob[node] <= least * (1 + 1e-9) for node in range(len(sketch)) if node not in best)
    tree = sketch.prune(best)
    assert len(tree) == len(best)
    assert {path_to(tree, node) for node in range(len(tree))} == {tuple(sketch.path(node)) for node in best}


def test_what_came_teaches_only_where_the_text_went() -> None:
    calibration = AcceptanceEstimator()
    for _ in range(200):
        sketch = CandidateTree(7, 3, calibration)
        right = sketch.propose(0, 1, "a", "sure", 0.5)
        sketch.propose(0, 2, "a", "unlikely", 0.5)
        sketch.propose(right, 3, "a", "later", 0.5)
        other = sketch.children[0][2]
        sketch.propose(other, 4, "a", "never", 0.5)
        sketch.learn([1, 9])
    assert calibration.chance(("a", "sure"), 0.5) > 0.95
    assert calibration.chance(("a", "unlikely"), 0.5) < 0.05
    assert calibration.chance(("a", "later"), 0.5) < 0.05
    assert calibration.chance(("a", "never"), 0.5) == 0.5


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_a_chance_lies_between_the_guess_and_what_was_seen(seen: list[bool], guess: float) -> None:
    calibration = AcceptanceEstimator()
    for came_true in seen:
        calibration.learn("kind", came_true)
    share = sum(seen) / len(seen) if seen else guess
    low, high = sorted((guess, share))
    assert low - 1e-6 <= calibration.chance("kind", guess) <= high + 1e-6


CHANCES = st.lists(st.floats(0.01, 1), max_size=20).map(lambda found: [1.0, *sorted(found, reverse=True)])
COSTS = PassCosts((1, 8, 16), (1.0, 1.5, 4.0), (0.001, 0.001, 0.002), 0.2)


@given(CHANCES, st.integers(0, 100_000), st.floats(0, 10))
def test_no_other_number_of_nodes_promises_more(reach: list[float], keys: int, spent: float) -> None:
    size = TreeBudget(COSTS).size(reach, keys, spent)
    rates = [sum(reach[:n]) / (spent + COSTS.seconds(n, keys)) for n in range(1, len(reach) + 1)]
    assert math.isclose(rates[size - 1], max(rates))


def test_worth_is_judged_by_the_rate_of_late() -> None:
    plan = TreeBudget(COSTS)
    assert plan.pays_off(0.001, 100)  # nothing is known yet
    plan.size([1.0], 0, 1.0)  # two seconds
    plan.learn(3)
    rate = plan.rate
    assert rate == 1.5  # of what came, not of what was promised
    assert plan.pays_off(1.01 * rate, 1)
    assert not plan.pays_off(0.99 * rate, 1)


def test_costs_between_and_beyond_the_known() -> None:
    assert COSTS.seconds(1, 0) == 1
    assert COSTS.seconds(8, 1000) == 2.5
    assert COSTS.seconds(12, 1000) == pytest.approx((2.5 + 6) / 2)
    assert COSTS.seconds(24, 0) == pytest.approx(6.5)
    assert COSTS.node(0) == pytest.approx(2.5 / 8)


@every_row(
    "broken",
    [
        PassCosts((1,), (1.0,), (0.0,), 0.1),
        PassCosts((2, 8), (1.0, 2.0), (0.0, 0.0), 0.1),
        PassCosts((1, 8), (1.0,), (0.0, 0.0), 0.1),
        PassCosts((1, 8), (1.0, 0.0), (0.0, 0.0), 0.1),
        PassCosts((1, 8), (1.0, math.nan), (0.0, 0.0), 0.1),
        PassCosts((1, 8), (1.0, 2.0), (0.0, -1.0), 0.1),
        PassCosts((8, 1), (1.0, 2.0), (0.0, 0.0), 0.1),
    ],
)
def test_costs_of_nothing(broken: PassCosts) -> None:
    assert NOMINAL.sound
    assert not broken.sound


PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)
AUTO = DraftOptions(tree="auto", budget=64)


def heads_of(kind: str):
    return medusa_heads() if kind == "medusa" else tiny_heads(kind=kind)


def drafter(method: str, kind: str = "conditioned", options: DraftOptions = AUTO):
    return make_drafter(method, tiny_target(), heads_of(kind), options, tiny_draft())


@few
@given(
    st.sampled_from(["streaming", "dynamic", "partial", "snapkv"]),
    st.integers(1, 12),
    st.integers(2, 20),
    st.booleans(),
    st.integers(0, 1000),
)
def test_cascades_change_no_token(kv: str, gamma: int, nodes: int, shared: bool, seed: int) -> None:
    prompt = random_prompt(70, seed)
    options = DraftOptions(kv=kv, budget=64, gamma=gamma, nodes=nodes, shared_noise=shared)
    wanted = decode_method("ar", tiny_target(), prompt, PARAMS, seed, 40)
    steps = decode_steps(tiny_target(), drafter("cascade", options=options), prompt, PARAMS, seed, 40)
    assert tokens_of(steps) == wanted


def test_a_cascade_over_everything_drafts_what_will_be_drawn() -> None:
    prompt = random_prompt(40, 4)
    options = DraftOptions(budget=256, recall=0)
    steps = decode_steps(tiny_target(), drafter("cascade", options=options), prompt, PARAMS, 2, 100)
    # it goes on as long as that pays, which with these random heads is not long; and all of its chain is accepted
    chains = [step.accepted for step in steps[:-1]]
    assert min(chains) >= 1
    assert sum(chains) / len(chains) > 1.5
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, 2, 100)


def test_a_cascade_leaves_no_trace() -> None:
    prompt = random_prompt(90, 4)
    made = drafter("cascade", options=DraftOptions(budget=64))
    decoding = Decoding(tiny_target(), prompt, PARAMS, 3, made, 50)
    decoding.prefill()
    context = decoding._context
    level = made.sources[0].level
    before = (list(context.text), context.kv.length, level.kv.length, context.sampler.length)
    newest = context.sampler.newest.clone()
    with torch.inference_mode():
        made.propose(context, 50)
    assert (context.text, context.kv.length, level.kv.length, context.sampler.length) == before
    assert torch.equal(context.sampler.newest, newest)


@pytest.mark.parametrize("method", ["medusa", "tokenswift", "cascade"])
def test_no_more_is_drafted_than_is_wanted(method: str) -> None:
    options = DraftOptions(budget=64) if method == "cascade" else AUTO
    for length in (1, 2, 3):
        found = decode_method("ar", tiny_target(), prompt := random_prompt(70, 1), PARAMS, 1, length)
        steps = decode_steps(tiny_target(), drafter(method, options=options), prompt, PARAMS, 1, length)
        assert tokens_of(steps) == found
        assert all(len(step.tokens) <= length for step in steps)


def test_drafting_learns() -> None:
    """A draft that is always right is trusted, so that trees grow; one that is never right is given up."""
    prompt = random_prompt(70, 1)
    full = DraftOptions(tree="auto", kv="full")
    steps = decode_steps(tiny_target(), drafter("tokenswift", options=full), prompt, PARAMS, 1, 300)
    # the first drafted token is the target's own; what the random heads say is nearly never right
    late = steps[len(steps) // 2 :]
    assert all(step.accepted >= 1 for step in late[:-1])
    assert sum(step.nodes for step in late) / len(late) < sum(step.nodes for step in steps[:5]) / 5
