"""Decodes side by side: each text is the one that it is alone, and fails or ends alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    METHODS,
    PLAIN,
    decode_method,
    drafter_of,
    random_prompt,
    refused,
    tiny_llama,
    tiny_target,
)
from tswift.decoding.drafter import Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL
from tswift.decoding.work import Work, side_by_side, texts_at_once
from tswift.drafting.adaptive import Bandit
from tswift.drafting.options import DraftOptions
from tswift.errors import SlowWarning
from tswift.forward.target import Target
from tswift.sampling.parameters import SamplingParams

PENALTY = SamplingParams(temperature=0.8, top_p=0.9, penalty=1.1, window=20)


@functools.cache
def target_of_rows(rows: int = 64) -> Target:
    """A target whose texts share passes of so many rows."""
    target = Target(tiny_llama("gqa", torch.bfloat16))
    target.set_fixed_rows(rows)
    return target


class Wanted(NamedTuple):
    """A text, and how it is decoded."""

    method: str = "ar"
    prompt: int = 5
    length: int = 20
    seed: int = 1

    def decoding(self, target: Target, params: SamplingParams) -> Decoding:
        options = DraftOptions(budget=64, costs="nominal" if self.method == "auto" else None)
        drafter = drafter_of(self.method, target, options)
        prompt = random_prompt(self.prompt, self.seed)
        return Decoding(target, prompt, params, self.seed, drafter, self.length)

    def alone(self, target: Target, params: SamplingParams) -> list[int]:
        prompt = random_prompt(self.prompt, self.seed)
        return decode_method("ar", target, prompt, params, self.seed, self.length)


class Side(NamedTuple):
    """A text under way: its tokens, and how many texts shared each of its passes."""

    decoding: Decoding
    tokens: list[int]
    texts: list[int]

    def work(self) -> Work[None]:
        yield from self.decoding.prefilling()
        while not self.decoding.ended:
            step = yield from self.decoding.stepping()
            self.tokens.extend(step.tokens)
            self.texts.append(self.decoding._context.texts)


def sides(target: Target, wanted: Sequence[Wanted], params: SamplingParams = PLAIN) -> list[Side]:
    return [Side(each.decoding(target, params), [], []) for each in wanted]


def together(made: Sequence[Side], width: int = 8) -> None:
    works = iter([side.work() for side in made])
    side_by_side(lambda begun: next(works, None), width)


wanted = st.builds(
    Wanted,
    method=st.sampled_from(sorted(METHODS)),
    prompt=st.integers(1, 90),
    length=st.integers(1, 30),
    seed=st.integers(0, 50),
)


@given(
    texts=st.lists(wanted, min_size=2, max_size=5),
    width=st.integers(2, 5),
    params=st.sampled_from([PLAIN, PENALTY]),
)
def test_texts_side_by_side_are_those_alone(texts, width, params):
    """By every method, whichever join and leave."""
    target = target_of_rows()
    made = sides(target, texts, params)
    together(made, width)
    for text, side in zip(texts, made, strict=True):
        assert side.tokens == text.alone(target, params), text


def test_they_share_passes_as_long_as_they_last():
    made = sides(target_of_rows(), [Wanted(length=6), Wanted(length=20, seed=2)])
    together(made)
    assert made[0].texts[-3:] == [2, 2, 2]  # the other reads its prompt first
    assert {*made[1].texts} == {1, 2}
    # one at a time, and where texts are apart
    for target, width in ((target_of_rows(), 1), (tiny_target(), 2)):
        made = sides(target, [Wanted(length=6), Wanted(seed=2)])
        together(made, width)
        assert {*made[0].texts, *made[1].texts} == {1}


def test_a_pass_has_no_more_rows_than_keep_their_bits():
    target = target_of_rows(3)
    texts = [Wanted(seed=seed) for seed in range(7)]
    made = sides(target, texts)
    together(made)
    assert max(max(side.texts) for side in made) == 3
    assert [side.tokens for side in made] == [text.alone(target, PLAIN) for text in texts]


def test_texts_of_two_models_share_no_pass():
    text, target = Wanted(), target_of_rows()
    made = [*sides(target, [text]), *sides(tiny_target(), [text])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together(made)
    assert made[0].tokens == text.alone(target, PLAIN)
    assert made[1].tokens == text.alone(tiny_target(), PLAIN)
    assert {*made[0].texts, *made[1].texts} == {1}


def test_a_text_that_fails_fails_alone():
    target = target_of_rows()
    texts = [Wanted(), Wanted(seed=2), Wanted(seed=3)]
    made = sides(target, texts)
    begun = []

    def fails(side: Side) -> Work[None]:
        yield from side.decoding.prefilling()
        yield from side.decoding.stepping()
        raise ArithmeticError

    works = [made[0].work(), fails(made[1]), made[2].work()]

    def more(count: int) -> Work[None] | None:
        begun.append(count)
        return works.pop(0) if works else None

    with pytest.raises(ArithmeticError):
        side_by_side(more, 2)
    assert made[0].tokens == texts[0].alone(target, PLAIN)
    # nothing is begun after that
    assert len(works) == 1
    assert not made[2].tokens


@pytest.mark.parametrize("where", ["a text", "a pass"])
def test_an_interrupt_is_told_to_all(where, monkeypatch):
    told = []

    def work(side: Side, interrupts: bool) -> Work[None]:
        try:
            yield from side.decoding.prefilling()
            for _ in range(5):
                yield from side.decoding.stepping()
                if interrupts and where == "a text":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            told.append(side)
            raise

    target = target_of_rows()
    made = sides(target, [Wanted(seed=seed) for seed in range(3)])
    works = iter([work(side, side is made[1]) for side in made])
    if where == "a pass":

        def interrupted(self, texts):
            raise KeyboardInterrupt

        monkeypatch.setattr(type(target.runner), "forward_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(lambda begun: next(works, None), 3)
    assert len(told) == 3


def test_a_shared_pass_that_fails_is_made_alone(monkeypatch):
    """As that of a wide tree may for lack of memory; what fails alone fails its text alone."""

    def fails(self, texts):
        raise RuntimeError("out of memory")

    target = target_of_rows()
    texts = [Wanted(seed=seed) for seed in range(3)]
    monkeypatch.setattr(type(target.runner), "forward_together", fails)
    made = sides(target, texts)
    with pytest.warns(SlowWarning, match="out of memory.*each makes its own"):
        together(made)
    assert [side.tokens for side in made] == [text.alone(target, PLAIN) for text in texts]
    monkeypatch.setattr(type(target.runner), "forward", fails)
    made = sides(target, texts)
    with pytest.raises(RuntimeError, match="memory"):
        together(made)


def test_who_no_longer_reads_ends_all():
    target = target_of_rows()
    made = sides(target, [Wanted(), Wanted(length=200, seed=2)])

    def told(side: Side) -> Work[None]:
        yield from side.work()
        raise BrokenPipeError

    works = iter([told(made[0]), made[1].work()])
    with pytest.raises(BrokenPipeError):
        side_by_side(lambda begun: next(works, None), 2)
    assert len(made[1].tokens) < 100


def test_how_many_texts_share_passes():
    target = target_of_rows()
    assert [texts_at_once(target, asked) for asked in (None, 1, 3)] == [8, 1, 3]
    assert [texts_at_once(tiny_target(), asked) for asked in (None, 1)] == [1, 1]
    with refused("must be 1, as its passes are not exact"):
        texts_at_once(tiny_target(), 2)


def test_a_node_costs_more_where_texts_share_passes():
    alone = NOMINAL.alone
    shared = alone.alone
    shared.share(8)
    # a plain step is a part of a pass over 8, and reads all of its own keys
    base, per_key = shared.line(1)
    assert base == pytest.approx(alone.line(8)[0] / 8)
    assert per_key == alone.line(1)[1]
    assert shared.must_come_true(0) > 2 * alone.must_come_true(0)
    assert shared.alone.line(1) == alone.line(1)


def test_what_is_known_of_arms_follows_the_costs():
    bandit = Bandit(2)
    for _ in range(3):
        bandit.learn(1, 0.0, nodes=1, passing=1.0)
    before = bandit.arms[0].rate
    bandit.reprice([0.5] * 5)
    assert bandit.arms[0].rate == pytest.approx(2 * before)


def test_drafters_are_told_their_part_of_a_pass():
    """By rows; what went to other texts is not theirs."""
    told: list[tuple[float, int]] = []

    class Told(Drafter):
        def learn(self, context):
            told.append((context.passing, context.texts))

    target = target_of_rows()
    right = target.verify
    slow = [Decoding(target, [seed], PLAIN, seed, Told(), 4) for seed in (1, 2)]

    def verify(asks):
        return [found._replace(share=100.0) for found in right(asks)]

    target.verify = verify
    try:
        together([Side(decoding, [], []) for decoding in slow])
    finally:
        del target.verify
    assert all(99 < passing < 101 for passing, texts in told if texts == 2)
    assert sum(texts == 2 for _, texts in told) >= 4
