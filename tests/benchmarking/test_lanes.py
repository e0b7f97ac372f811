"""Slices: everybody gets to the same place, in turns, and the goals hold what is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN, drafter_of, random_prompt, tiny_target
from tswift.benchmarking.lanes import Lane, interleave, slice_goals
from tswift.decoding.loop import Decoding
from tswift.drafting.options import DraftOptions
from tswift.engine import Generation, Need


def lane_of(method: str, length: int, seed: int = 3) -> Lane:
    target, options = tiny_target(), DraftOptions(budget=64, tree=(1, 2, 2, 2) if method == "tokenswift" else None)
    drafter = drafter_of(method, target, options)
    decoding = Decoding(target, random_prompt(40), PLAIN, seed, drafter, length)
    lane = Lane(method, Generation(decoding, drafter.depth, (), PLAIN, options, Need(0, 0, 0)))
    lane.prefill()
    return lane


def test_lanes_reach_the_end_with_the_same_tokens():
    lanes = [lane_of("ar", 60), lane_of("tokenswift", 60)]
    order = []
    interleave(lanes, [20, 40, 60], lambda lane: order.append((lane.name, lane.stats.tokens)))
    assert [len(lane.tokens) for lane in lanes] == [60, 60]
    assert lanes[0].tokens == lanes[1].tokens
    assert [name for name, _ in order] == ["ar", "tokenswift", "tokenswift", "ar", "ar", "tokenswift"]
    assert all(tokens >= goal for (_, tokens), goal in zip(order, [20, 20, 40, 40, 60, 60], strict=True))


def test_slices_are_cumulative():
    lane = lane_of("ar", 30)
    interleave([lane], [10, 20, 30], lambda lane: None)
    assert [tokens for tokens, _ in lane.slices] == [10, 20, 30]
    seconds = [seconds for _, seconds in lane.slices]
    assert seconds == sorted(seconds)
    assert lane.slices[-1] == (lane.stats.tokens, lane.stats.seconds)
    assert lane.prefill_seconds > 0


@given(st.integers(1, 10_000), st.lists(st.integers(1, 12_000), max_size=5), st.integers(1, 60))
def test_goals_rise_to_the_length_and_hold_every_stop(length, stops, slices):
    goals = slice_goals(length, stops, slices)
    assert goals == sorted(set(goals))
    assert goals[-1] == length
    assert goals[0] > 0
    assert set(goals) >= {stop for stop in stops if stop <= length}
    assert len(goals) <= slices + len(stops)
