"""A given acceptance: met to the token, whatever is drawn, at the cost of a real decode."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN, drafter_of, random_prompt, random_tree, tiny_target
from tswift.benchmarking.lineup import Entry, line_up
from tswift.benchmarking.simulated import SimulatedWalk, refuse_share
from tswift.decoding.loop import Decoding
from tswift.decoding.stats import DecodeStats
from tswift.decoding.tree import DraftTree
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError


def chain(depth: int) -> DraftTree:
    tree = DraftTree(0)
    tree.add(range(1, depth + 1), "chain")
    return tree


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 60))
def test_the_share_is_met_to_the_token(percent: int, depth: int, steps: int) -> None:
    walk = SimulatedWalk(percent / 100, depth)
    accepted = 0
    for step in range(1, steps + 1):
        accepted += len(walk(chain(depth), [])) - 1
        assert accepted == percent * depth * step // 100


def test_what_a_shallow_tree_could_not_give_later_ones_do() -> None:
    walk = SimulatedWalk(0.5, 4)
    given_up = [len(walk(chain(depth), [])) - 1 for depth in (4, 1, 0, 4, 4, 4)]
    assert given_up == [2, 1, 0, 4, 3, 2]  # two are owed at every step


@given(st.integers(0, 1000), st.integers(1, 30), st.floats(0.01, 1))
def test_the_path_leads_from_the_root_to_the_first_node_deep_enough(seed: int, nodes: int, alpha: float) -> None:
    tree = random_tree(nodes, Random(seed))
    path = SimulatedWalk(alpha, 5)(tree, [])
    assert path[0] == 0
    assert [tree.parents[node] for node in path[1:]] == path[:-1]
    assert len(path) - 1 == min(math.floor(5 * alpha + 1e-9), max(tree.depths))
    assert not any(depth == len(path) - 1 for depth in tree.depths[: path[-1]])


def test_the_draws_decide_nothing() -> None:
    assert SimulatedWalk(1, 3)(chain(3), [9, 9, 9, 9]) == SimulatedWalk(1, 3)(chain(3), [1, 2, 3, 4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("alpha", [0.25, 0.9, 1.0])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_a_decode_has_the_alpha_that_was_given(method: str, alpha: float) -> None:
    target = tiny_target()
    drafter = drafter_of(method, target, DraftOptions(budget=64, tree=(1, 2, 2, 2)))
    walk = SimulatedWalk(alpha, drafter.depth)
    stats = DecodeStats(drafter.depth)
    for step in Decoding(target, random_prompt(40), PLAIN, 3, drafter, 300, walk).steps():
        stats.add(step)
    assert stats.tokens == 300
    # the last step may be cut short, and what is owed is less than a token
    assert stats.alpha == pytest.approx(alpha, abs=(drafter.depth + 1) / (drafter.depth * stats.passes))


def test_plain_steps_aside_are_plain() -> None:
    target = tiny_target()

    def decoding(walk: SimulatedWalk | None) -> Decoding:
        drafter = drafter_of("medusa", target, DraftOptions(tree=(2, 2)))
        return Decoding(target, random_prompt(40), PLAIN, 3, drafter, 50, walk)

    counted, real = SimulatedWalk(1, 2), decoding(None)
    simulated = decoding(counted)
    real.prefill()
    simulated.prefill()
    assert [step.tokens for step in simulated.plain(8)] == [step.tokens for step in real.plain(8)]
    assert counted._steps == 0


def test_lanes_that_draft_are_simulated_and_the_others_are_not(checkpoint) -> None:  # type: ignore[no-untyped-def]
    entry = Entry(("ar", "medusa", "reuse", "ar-reference"), model=str(checkpoint), simulate_alpha=0.5)
    lineup = line_up(entry)
    assert lineup.simulated == {"weights": False, "alpha": 0.5}
    lanes = {lane.name: lane for lane in lineup.lanes([1, 2, 3], 40, 0)}
    assert {name: lane.simulated for name, lane in lanes.items()} == {
        "ar": False,
        "medusa": True,
        "reuse": True,
        "ar-reference": False,
    }
    lanes["medusa"].prefill()
    lanes["medusa"].advance(40)
    assert lanes["medusa"].stats.alpha == pytest.approx(0.5, abs=0.1)


def test_nothing_is_simulated_by_default(checkpoint) -> None:  # type: ignore[no-untyped-def]
    lineup = line_up(Entry(("ar", "medusa"), model=str(checkpoint)))
    assert lineup.simulated is None
    assert not any(lane.simulated for lane in lineup.lanes([1, 2, 3], 10, 0))


@pytest.mark.parametrize("alpha", [0, -0.1, 1.01, math.nan, math.inf])
def test_shares_that_are_none(alpha: float) -> None:
    with pytest.raises(InputError, match=r"^--simulate-alpha: must be above 0 and at most 1, got "):
        refuse_share(alpha, ["medusa"])


@pytest.mark.parametrize(
    ("methods", "trees", "named"),
    [
        (("ar", "medusa", "cascade"), {}, "cascade"),
        (("ar", "recall"), {}, "recall"),
        (("ar", "tokenswift"), {"": "auto"}, "tokenswift"),
        (("ar", "medusa", "tokenswift"), {"medusa": (2, 2), "tokenswift": "auto"}, "tokenswift"),
    ],
)
def test_a_share_that_chosen_trees_would_not_meet(checkpoint, methods, trees, named) -> None:  # type: ignore[no-untyped-def]
    entry = Entry(methods, trees=trees, model=str(checkpoint), simulate_alpha=0.5)
    with pytest.raises(InputError, match=f"^--simulate-alpha: goes with trees of one shape; {named} chooses here"):
        line_up(entry)
    line_up(dataclasses.replace(entry, simulate_alpha=None))


def test_a_share_of_nothing() -> None:
    with pytest.raises(InputError, match=r"^--simulate-alpha: none of the methods drafts"):
        refuse_share(0.5, [])
    refuse_share(None, [])
