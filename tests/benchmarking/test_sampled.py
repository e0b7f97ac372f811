"""Plain steps in between: they change nothing, they are plain decoding's, and their times add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarking.test_lanes import lane_of
from tswift.benchmarking.sampled import STEPS, Probe, integrate, probe, probes_differ


def test_probing_changes_neither_text_nor_acceptance():
    left, right = lane_of("tokenswift", 80), lane_of("tokenswift", 80)
    left.advance(80)
    probes = []
    for goal in range(0, 80, 7):
        right.advance(goal)
        probes.append(probe(right))
    right.advance(80)
    assert right.tokens == left.tokens
    assert right.stats.accepted == left.stats.accepted
    taken = [each for each in probes if each]
    assert len(taken) >= 8
    assert probes_differ(right.tokens, taken) is None


def test_a_probe_draws_what_plain_decoding_draws_there():
    plain, lane = lane_of("ar", 40), lane_of("tokenswift", 40)
    plain.advance(40)
    lane.advance(10)
    taken = probe(lane)
    assert taken is not None
    assert taken.position == lane.stats.tokens + 1
    assert list(taken.tokens) == plain.tokens[taken.position - 1 : taken.position - 1 + 1 + STEPS]
    assert len(taken.seconds) == STEPS
    assert min(taken.seconds) > 0


def test_no_probe_where_the_cache_is_full():
    lane = lane_of("ar", 5)
    lane.advance(5)
    assert probe(lane) is None


def test_a_differing_token_is_found_at_its_index():
    probes = [Probe(11, (5, 6, 7), (0.1, 0.1)), Probe(3, (1, 2, 3), (0.1, 0.1))]
    text = [0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 5, 6, 7]
    assert probes_differ(text, probes) is None
    assert probes_differ([*text[:11], 9, 7], probes) == 11
    assert probes_differ([*text[:4], 9, *text[5:11], 9, 7], probes) == 4
    assert probes_differ(text[:11], probes) is None  # the text has not got that far


@pytest.mark.parametrize("length", [1, 100, 1000])
def test_constant_steps_integrate_to_their_sum(length):
    probes = [Probe(at, (), (0.25, 0.25)) for at in (1, 50, 600)]
    assert integrate(probes, length) == pytest.approx(0.25 * length)


@given(st.floats(0.001, 1), st.floats(0, 0.01))
def test_linear_steps_integrate_exactly_inside_the_probes(base, slope):
    probes = [Probe(at, (), (base + slope * at, base + slope * (at + 1))) for at in (0, 10, 41, 99)]
    expected = sum(base + slope * max(place, 0.5) for place in range(100))
    assert integrate(probes, 100) == pytest.approx(expected, rel=1e-9)


def test_probes_at_the_same_place_are_averaged():
    assert integrate([Probe(1, (), (1.0,)), Probe(1, (), (3.0,))], 10) == pytest.approx(20.0)
