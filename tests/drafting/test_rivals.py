"""Rivals: the fastest drafts, the others are heard now and then, and the text is plain decoding's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import few
from tests.helpers import decode_method, decode_steps, random_prompt, tiny_heads, tiny_target, tokens_of
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.drafting.adaptive import AdaptiveDrafter, Arm
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.kv.cache import FullKV

PARAMS = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=5)


class Paced(Drafter):
    """Takes so long, and adds so many tokens."""

    def __init__(self, clock: list[float], seconds: float, tokens: int) -> None:
        super().__init__(depth=tokens, limit=tokens)
        self.clock, self.seconds, self.tokens = clock, seconds, tokens
        self.learned, self.kept_up = 0, 0

    def propose(self, context: Context, wanted: int) -> DraftTree:
        self.clock[0] += self.seconds
        return DraftTree(context.text[-1], self.limit, wanted)

    def learn(self, context: Context) -> None:
        self.learned += 1

    def keep_up(self, context: Context, most: int) -> None:
        self.kept_up += 1


def raced(monkeypatch: pytest.MonkeyPatch, paces: list[tuple[float, int]], steps: int, change: int = 0) -> list[str]:
    """Who took each step, of rivals that take so many seconds and add so many tokens; paces swap at ``change``."""
    clock = [0.0]
    monkeypatch.setattr("tswift.drafting.adaptive.time.perf_counter", lambda: clock[0])
    drafters = [Paced(clock, *pace) for pace in paces]
    rivals = [Arm(str(index), each) for index, each in enumerate(drafters)]
    drafter = AdaptiveDrafter(depth=9, limit=9, rivals=rivals)
    target = tiny_target()
    context = Context([1], Sampler(PARAMS, 1, target.vocab_size, target.device), FullKV(target.kv_shape, 8))
    took = []
    for step in range(steps):
        if step == change and change:
            for each, (seconds, tokens) in zip(drafters, reversed(paces), strict=True):
                each.seconds, each.tokens = seconds, tokens
        drafter.propose(context, 100)
        took.append(drafter.choice)
        context.text += [1] * drafters[int(drafter.choice)].tokens
        drafter.committed(context)
    assert all(each.kept_up == steps for each in drafters)
    assert [each.learned for each in drafters] == [took.count(str(index)) for index in range(len(drafters))]
    return took


def test_the_usual_tree_is_medusas() -> None:
    for kind in ("chained", "conditioned"):
        drafter = make_drafter("auto", tiny_target(), tiny_heads(kind=kind), DraftOptions(budget=64))
        medusa = make_drafter("medusa", tiny_target(), tiny_heads(kind=kind), DraftOptions())
        assert isinstance(drafter, AdaptiveDrafter)
        usual = drafter.rivals[0].drafter
        assert (usual.depth, usual.limit) == (medusa.depth, medusa.limit)
        assert usual.sources[0]._paths == medusa.sources[0]._paths


def test_the_fastest_takes_most_steps_and_the_slower_the_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    took = Counter(raced(monkeypatch, [(1.0, 2), (1.0, 4), (1.0, 1), (0.9, 3)], 1200)[-1000:])
    assert took["1"] > 800
    assert took["3"] > took["0"] > took["2"] > 0


def test_tokens_per_second_count_not_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Counter(raced(monkeypatch, [(9.0, 9), (1.0, 2)], 300)).most_common(1)[0][0] == "1"


def test_when_the_text_changes_another_one_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    took = raced(monkeypatch, [(1.0, 4), (1.0, 2)], 3000, change=1000)
    assert Counter(took[:1000]).most_common(1)[0][0] == "0"
    assert Counter(took[-1000:]).most_common(1)[0][0] == "1"


def test_a_pause_is_no_pace() -> None:
    rivals = [Arm("fast", Drafter()), Arm("slow", Drafter())]
    for _ in range(200):
        rivals[0].learn(4, 1.0)
        rivals[1].learn(2, 1.0)
    rivals[0].learn(4, 3600.0)
    assert rivals[0].rate > rivals[1].rate


def test_the_first_step_does_not_count() -> None:
    rival = Arm("late", Drafter())
    rival.learn(4, 3600.0)
    for _ in range(10):
        rival.learn(4, 1.0)
    assert rival.rate == pytest.approx(4.0)


def test_the_slowest_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    took = raced(monkeypatch, [(1.0, 50), (1.0, 1)], 3000)
    assert took[-2000:].count("1") >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "recall"), [("nominal", 0), ("measured", 8)])
def test_the_text_is_plain_decodings(costs: str, recall: int) -> None:
    prompt = random_prompt(90, 3)
    wanted = decode_method("ar", tiny_target(), prompt, PARAMS, 5, 300)
    options = DraftOptions(budget=64, costs=costs, recall=recall)
    drafter = make_drafter("auto", tiny_target(), tiny_heads(kind="conditioned"), options)
    steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, 5, 300)
    assert tokens_of(steps) == wanted
    assert {step.choice for step in steps} == {"fixed tree", "tree auto", "cascade"}


@few
@given(
    st.sampled_from(["chained", "conditioned"]),
    st.sampled_from([1, 3]),
    st.sampled_from(["streaming", "dynamic", "partial", "snapkv"]),
    st.sampled_from([2, 5, 32]),
    st.sampled_from([0, 8]),
    st.sampled_from([1, 24]),
    st.integers(0, 99),
    st.integers(1, 80),
)
def test_any_rivals_write_plain_decodings_text_and_repeat_their_choices(
    kind: str, levels: int, kv: str, nodes: int, recall: int, gamma: int, seed: int, length: int
) -> None:
    prompt = random_prompt(40, 3)
    options = DraftOptions(budget=64, costs="nominal", kv=kv, nodes=nodes, recall=recall, gamma=gamma)
    runs = []
    for _ in range(2):
        drafter = make_drafter("auto", tiny_target(), tiny_heads(kind=kind, count=levels), options)
        steps = decode_steps(tiny_target(), drafter, prompt, PARAMS, seed, length)
        runs.append([(step.choice, step.nodes, step.tokens) for step in steps])
        assert max(step.nodes for step in steps) <= nodes
    assert runs[0] == runs[1]
    assert tokens_of(steps) == decode_method("ar", tiny_target(), prompt, PARAMS, seed, length)
