"""One method for everybody: the fastest arm drafts, trials of the others are cheap,
the text is plain decoding's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forward.test_passes import static_target
from tests.fuzzing import few
from tests.helpers import (
    NO_PROGRAM,
    VOCAB,
    context_of,
    decode_method,
    decode_steps,
    first,
    needs_program,
    random_prompt,
    take_turns,
    tiny_draft,
    tiny_heads,
    tiny_target,
    tokens_of,
)
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Drafter
from tswift.decoding.pass_costs import NOMINAL, PassCosts, PassTimes
from tswift.drafting.adaptive import AdaptiveDrafter, Bandit
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.sampling.parameters import SamplingParams

PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)


# so that all that comes is kept, and its logits; and so that neither is
SLOW, QUICK = (
    replace(NOMINAL, base=tuple(times * each for each in NOMINAL.base)) for times in (10, 0.1)
)


# ms of SmolLM2's steps over 100 and 4,096 keys, on an AMD Zen 3 with AVX2 alone, 2026-11-27:
# each node more costs most of a step
DEAR = PassCosts(
    nodes=(1, 2, 4, 8, 16),
    base=(5.11e-3, 8.20e-3, 15.0e-3, 28.4e-3, 59.4e-3),
    per_key=(1.51e-6, 1.83e-6, 2.95e-6, 7.38e-6, 14.8e-6),
    level=0.5e-3,
)


class World:
    """Arms on a simulated clock: seconds of a step, and tokens that it adds on average, by arm;
    they may change.
    """

    def __init__(self, *paces: list[tuple[float, float]], every: int = 1 << 60, seed: int = 1):
        self.paces = paces
        self.every = every
        self.random = Random(seed)

    def run(self, length: int) -> tuple[float, float, Counter[int]]:
        """Seconds that a text took, those of whoever is the fastest at each token,
        and who took how many steps.
        """
        bandit = Bandit(len(self.paces[0]))
        tokens = 0.0
        seconds = 0.0
        fastest = 0.0
        took = Counter[int]()
        while tokens < length:
            pace = self.paces[int(tokens) // self.every % len(self.paces)]
            step_s, mean = pace[bandit.chosen]
            took[bandit.chosen] += 1
            added = 1 if mean == 1 else max(1, round(self.random.gauss(mean, mean / 2)))
            step_s *= self.random.uniform(0.9, 1.2)
            bandit.learn(added, step_s)
            tokens, seconds = tokens + added, seconds + step_s
            fastest += added * min(1.05 * each / tokens_of_it for each, tokens_of_it in pace)
        return seconds, fastest, took


PLAIN_BEST = [(1.0, 1), (2.6, 1.5), (6.4, 3.0), (2.5, 1.2), (4.0, 1.6)]
HEADS_BEST = [(1.0, 1), (2.6, 4.0), (6.4, 5.0), (2.5, 2.0), (4.0, 3.0)]
RECALL_BEST = [(1.0, 1), (2.6, 4.0), (6.4, 8.0), (2.5, 9.0), (4.0, 3.0)]
HOPELESS = [(1.0, 1), *[(20.0, 1)] * 4]


@pytest.mark.parametrize("pace", first(1, [PLAIN_BEST, HEADS_BEST, RECALL_BEST, HOPELESS]))
def test_trials_cost_less_than_three_percent_of_the_best_arm_alone(
    pace,
):
    worlds = [World(pace, seed=seed).run(20_000) for seed in range(4)]
    assert sum(seconds for seconds, _, _ in worlds) <= 1.03 * sum(
        fastest for _, fastest, _ in worlds
    )
    assert all(len(took) == len(pace) for _, _, took in worlds)
    for length in (1500, 5000, 20_000):
        # plain decoding's
        assert World(pace).run(length)[0] <= (1.05 if pace is HOPELESS else 1.03) * 1.05 * length


@pytest.mark.parametrize(
    "worlds", [(PLAIN_BEST, HEADS_BEST), (HEADS_BEST, RECALL_BEST), (PLAIN_BEST, RECALL_BEST)]
)
def test_when_the_text_changes_another_arm_takes_over(worlds):
    seconds, fastest, _ = World(*worlds, every=10_000).run(60_000)
    assert seconds <= 1.1 * fastest
    alone = [
        sum(1.05 * pace[arm][0] / pace[arm][1] for pace in worlds) for arm in range(len(worlds[0]))
    ]
    assert seconds <= 1.03 * min(alone) * 60_000 / len(worlds)


def bandit_after(*steps: tuple[int, int, float]) -> Bandit:
    """A bandit of two arms that knows some steps: how many, tokens and seconds of each."""
    bandit = Bandit(2)
    for tokens, seconds in [step for count, *step in steps for _ in range(count)]:
        bandit.learn(tokens, seconds)
    return bandit


def test_it_begins_with_plain_decoding_and_a_pause_is_no_pace():
    bandit = bandit_after((1, 1, 9.0), (4, 1, 1.0))
    assert (bandit.chosen, bandit.arms[1].steps) == (0, 0)
    bandit.learn(1, 1.0)
    assert bandit.chosen == 1
    assert bandit.arms[0].rate == 1.0  # the first step does not count
    usual, paused = (
        bandit_after((6, 1, 1.0), (60, 4, 1.0), (count, 4, 3600.0)) for count in (0, 1)
    )
    assert paused.chosen == 1
    assert paused.arms[1].rate > 0.8 * usual.arms[1].rate


def test_what_slowed_passes_when_an_arm_was_tried_is_not_held_against_it():
    times = PassTimes(PassCosts((1, 8), (1.0, 1.2), (0.0, 0.0), 0.1), timed=True)
    bandit = Bandit(2, times=times)

    for step in range(100):
        slow = 2.0 if step < 9 else 1.0  # the machine has other work at first
        passing = times.costs.seconds(1, 9)
        times.learn(1, passing, slow * passing)
        bandit.learn(1, 0.1 * bandit.chosen, passing=passing)
    plain, other = bandit.arms
    assert other.steps >= 3
    assert plain.rate > 1.05 * other.rate
    assert bandit.chosen == 0


def test_no_trial_without_a_prospect_and_one_at_once_when_there_is_one():
    prospect = set()
    bandit = Bandit(2)
    may_pay = prospect.__contains__
    for _ in range(100):
        bandit.learn(1, 1.0, may_pay=may_pay)
        assert bandit.chosen == 0
    prospect.add(1)
    for _ in range(8):
        bandit.learn(4 if bandit.chosen else 1, 1.0, may_pay=may_pay)
    assert bandit.chosen == 1


def test_the_first_passes_after_a_prompt_correct_no_costs():
    times = PassTimes(timed=True)
    drafter = AdaptiveDrafter(arms={"ar": Drafter(), "two": Drafter()}, times=times, clock=True)
    context = context_of([1], PARAMS)
    drafter.committed(context)
    factors = []
    for _ in range(60):
        drafter.propose(context, 100)
        context.text.append(1)
        drafter.committed(context)
        factors.append(times.factor(0))
    assert {*factors[:8]} == {1.0}
    assert factors[-1] < 1.0  # these are quicker than any pass


def test_who_stands_aside_is_kept_up_when_it_drafts_again():
    class Noted(Drafter):
        def __init__(self):
            super().__init__()
            self.kept_up = []
            self.learned = 0

        def keep_up(self, context, most):
            self.kept_up.append(len(context.text))

        def learn(self, context):
            self.learned += 1

    arms = {name: Noted() for name in ("ar", "one", "two")}
    drafter = AdaptiveDrafter(depth=9, limit=9, arms=arms)
    context = context_of([1], PARAMS)
    took = []
    drafter.committed(context)
    for _ in range(200):
        drafter.propose(context, 100)
        took.append(drafter.choice)
        context.text.append(1)
        drafter.committed(context)
    assert {name: arm.learned for name, arm in arms.items()} == {
        name: took.count(name) for name in arms
    }
    assert min(map(took.count, arms)) > 0
    assert sum(len(arm.kept_up) for arm in arms.values()) == 203  # the prompt is for all
    assert arms["one"].kept_up[:2] == [1, 7]


@needs_program
def test_its_arms_are_what_is_there():
    def arms(*, heads=None, draft=None, costs=QUICK, **options):
        made = make_drafter(
            "auto", tiny_target(), heads, DraftOptions(budget=64, **options), draft, costs=costs
        )
        assert isinstance(made, AdaptiveDrafter)
        return list(made.arms)

    assert arms() == ["ar", "cascade", "recall"]
    assert arms(recall=0) == ["ar", "cascade"]
    assert arms(heads=tiny_heads()) == ["ar", "medusa", "cascade", "recall"]
    assert arms(draft=tiny_draft()) == ["ar", "cascade", "recall", "standalone"]
    assert arms(heads=tiny_heads(), costs=SLOW) == [
        "ar",
        "medusa, one token",
        "medusa, tree auto",
        "cascade",
        "recall",
    ]


@needs_program
@pytest.mark.parametrize("speculator", ["heads", "a smaller model"])
def test_where_every_node_costs_most_of_a_step_prose_is_decoded_plainly(speculator):
    heads, draft = (tiny_heads(), None) if speculator == "heads" else (None, tiny_draft())
    options = DraftOptions(budget=64, costs="nominal")
    params = SamplingParams(temperature=3.0, min_p=0.0)
    for costs, plain in ((DEAR, True), (SLOW, False)):
        target = tiny_target()
        drafter = make_drafter("auto", target, heads, options, draft, costs=costs)
        steps = decode_steps(target, drafter, random_prompt(30, 8), params, 5, 100)
        (history,) = drafter.histories
        kept = (history._tables["logs"][: len(history), 1:] > -inf).any(1).sum()
        assert (kept == 0) == plain
        assert ({(step.choice, step.nodes) for step in steps} == {("ar", 1)}) == plain


@needs_program
def test_a_text_that_repeats_itself_is_recalled_whatever_a_node_costs():
    target = tiny_target()
    params = SamplingParams(penalty=1.0, banned=tuple(range(1, VOCAB)))  # one token is left
    prompt = random_prompt(60, 8)
    options = DraftOptions(budget=64, costs="nominal")
    drafter = make_drafter("auto", target, tiny_heads(), options, costs=DEAR)
    steps = decode_steps(target, drafter, prompt, params, 5, 150)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, params, 5, 150)
    assert {step.choice for step in steps} == {"ar", "recall"}
    plain_s = sum(DEAR.seconds(1, len(prompt) + count) for count in range(150))
    assert drafter.bandit._now < 0.9 * plain_s


def test_the_text_is_plain_decodings():
    prompt, params = [5, 6, 7] * 20, SamplingParams(temperature=0.0, penalty=1.0)
    options = DraftOptions(budget=64)
    heads = tiny_heads(kind="conditioned")
    drafter = make_drafter("auto", tiny_target(), heads, options, costs=NOMINAL)
    take_turns(drafter)
    steps = decode_steps(tiny_target(), drafter, prompt, params, 5, 150)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, params, 5, 150)
    assert {step.choice for step in steps} == set(drafter.arms)


@pytest.mark.slow
@few
@given(
    st.sampled_from(["chained", "conditioned"]),
    st.sampled_from([1, 3]),
    st.sampled_from(["streaming", "dynamic", "partial", "snapkv"]),
    st.sampled_from([2, 5, 32]),
    st.sampled_from([0, 8] if NO_PROGRAM is None else [0]),
    st.sampled_from([1, 24]),
    st.integers(0, 99),
    st.integers(1, 80),
)
def test_any_arms_write_plain_decodings_text_and_repeat_their_choices(
    kind, levels, kv, nodes, recall, gamma, seed, length
):
    prompt = random_prompt(40, 3)
    options = DraftOptions(
        budget=64, costs="nominal", kv=kv, nodes=nodes, recall=recall, gamma=gamma
    )
    runs = []
    for _ in range(2):
        drafter = make_drafter("auto", tiny_target(), tiny_heads(kind=kind, count=levels), options)
        steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, seed, length)
        runs.append([(step.choice, step.nodes, step.tokens) for step in steps])
        assert max(step.nodes for step in steps) <= nodes
    assert runs[0] == runs[1]
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, seed, length)


def test_heads_among_other_arms_draft_on_the_device(monkeypatch):
    """Where passes are replayed: the host makes the other arms' trees, and the text is the same."""
    target = static_target()
    launched = []
    turn = itertools.count()
    drafter = make_drafter("auto", target, tiny_heads(), DraftOptions(costs="nominal", nodes=12))
    assert isinstance(drafter, AdaptiveDrafter)

    def choose(*given, **named):  # every arm in turn
        drafter.bandit.chosen = next(turn) // 2 % len(drafter.arms)
        drafter.bandit._unsettled = 7  # another one may be chosen after any step

    monkeypatch.setattr(drafter.bandit, "learn", choose)
    launch = DeviceStepper._launch_draft
    monkeypatch.setattr(
        DeviceStepper, "_launch_draft", lambda self: launched.append(1) or launch(self)
    )
    proposed = []
    for name, arm in drafter.arms.items():
        propose = arm.propose
        monkeypatch.setattr(
            arm,
            "propose",
            lambda *given, name=name, propose=propose: proposed.append(name) or propose(*given),
        )
    prompt = random_prompt(60)
    steps = decode_steps(target, drafter, prompt, PARAMS, 3, 60)
    plain = decode_steps(
        tiny_target(),
        make_drafter("ar", tiny_target(), None, DraftOptions()),
        prompt,
        PARAMS,
        3,
        60,
    )
    assert tokens_of(steps) == tokens_of(plain)
    choices = Counter(step.choice for step in steps)
    assert {"ar", "medusa", "cascade"} <= choices.keys()
    assert choices["medusa"] <= len(launched) <= choices["medusa"] + 1
    assert "medusa" not in proposed
    assert max(step.accepted for step in steps if step.choice == "medusa") > 0


def test_the_device_drafts_on_while_no_other_arm_is_due(monkeypatch):
    """As for a method that always drafts there: but for the step after which another arm may be
    chosen, of which there is one in eight.
    """
    target = static_target()
    drafter = make_drafter("auto", target, tiny_heads(), DraftOptions(costs="nominal", nodes=12))
    assert isinstance(drafter, AdaptiveDrafter)
    medusa = list(drafter.arms).index("medusa")
    settle = drafter.bandit._settle

    def choose(*given):
        settle(*given)
        drafter.bandit._trial, drafter.bandit.chosen = 0, medusa

    monkeypatch.setattr(drafter.bandit, "_settle", choose)
    asked = []
    ahead = DeviceStepper._drafts_ahead
    monkeypatch.setattr(
        DeviceStepper, "_drafts_ahead", lambda self: asked.append(ahead(self)) or asked[-1]
    )
    prompt = random_prompt(60)
    steps = decode_steps(target, drafter, prompt, PARAMS, 3, 120)
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, 3, 120)
    drafted = [step.choice == "medusa" and step.nodes > 1 for step in steps]
    assert sum(drafted) > 40
    assert sum(asked) >= 0.8 * sum(drafted)
    assert not all(asked)
