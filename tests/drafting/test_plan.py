"""The plan: as many nodes as promise most tokens per second."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tswift.drafting.dynamic_tree import Plan
from tswift.models.passes import NOMINAL, PassCosts

CHANCES = st.lists(st.floats(0.01, 1), max_size=20).map(lambda found: [1.0, *sorted(found, reverse=True)])
COSTS = PassCosts((1, 8, 16), (1.0, 1.5, 4.0), (0.001, 0.001, 0.002), 0.2)


@given(CHANCES, st.integers(0, 100_000), st.floats(0, 10))
def test_no_other_number_of_nodes_promises_more(reach: list[float], keys: int, spent: float) -> None:
    size = Plan(COSTS).size(reach, keys, spent)
    rates = [sum(reach[:n]) / (spent + COSTS.seconds(n, keys)) for n in range(1, len(reach) + 1)]
    assert math.isclose(rates[size - 1], max(rates))


def test_trees_are_smaller_where_nodes_cost_more_and_larger_where_drafting_did() -> None:
    reach = [0.8**n for n in range(30)]
    short, long = (Plan(NOMINAL).size(reach, keys, 3e-3) for keys in (100, 100_000))
    assert 1 < long < short
    assert Plan(NOMINAL).size(reach, 100_000, 50e-3) > long


def test_worth_is_judged_by_the_rate_of_late() -> None:
    plan = Plan(COSTS)
    assert plan.worth(0.001, 100)  # nothing is known yet
    plan.size([1.0], 0, 1.0)  # two seconds
    plan.learn(3)
    rate = plan.rate
    assert rate == 1.5  # of what came, not of what was promised
    assert plan.worth(1.01 * rate, 1)
    assert not plan.worth(0.99 * rate, 1)


def test_costs_between_and_beyond_the_known() -> None:
    assert COSTS.seconds(1, 0) == 1
    assert COSTS.seconds(8, 1000) == 2.5
    assert COSTS.seconds(12, 1000) == pytest.approx((2.5 + 6) / 2)
    assert COSTS.seconds(24, 0) == pytest.approx(6.5)
    assert COSTS.node(0) == pytest.approx(2.5 / 8)


@pytest.mark.parametrize(
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
