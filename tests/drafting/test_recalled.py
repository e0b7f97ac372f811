"""Which nodes are guessed below, and what is offered; and that texts are those of plain decoding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.helpers import VOCAB, tiny_heads, tiny_target
from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, DynamicTreeDrafter, Plan
from tswift.drafting.history import Candidates, HistorySource, LogitHistory
from tswift.drafting.methods import make_drafter, resolve
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError

NONE = Candidates([], [], 0, -1)
PARAMS = SamplingParams(min_p=0.02, penalty=1.2, window=40)


class Known:
    """Says what it was told, and remembers what it was asked."""

    def __init__(self, guesses: dict[tuple[int, ...], Candidates], length: int) -> None:
        self.guesses, self.asked, self.length = guesses, list[tuple[int, ...]](), length

    def __len__(self) -> int:
        return self.length

    def guess(self, paths, sampler, most) -> list[Candidates]:
        self.asked += map(tuple, paths)
        return [self.guesses.get(tuple(path), NONE) for path in paths]


class Picky(Plan):
    """Worth it is what is this likely."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def worth(self, tokens: float, seconds: float) -> bool:
        return tokens >= 0.4 * self.least


def sketched(guesses, least: float, *, text=(9, 1), depth: int = 20, before=(), limit: int = 64):
    sketch, known = CandidateTree(text[-1], depth, AcceptanceEstimator()), Known(guesses, len(text) - 1)
    for path in before:
        sketch.add(path, "heads")
    source = HistorySource(known, Picky(least), limit)
    source.propose(
        sketch, Context(list(text), Sampler(PARAMS, 1, VOCAB, torch.device("cpu")), SimpleNamespace(length=9))
    )
    assert source.spent == pytest.approx(1e-4 * len(known.asked))
    return sketch, known


def test_guesses_go_below_guesses_as_long_as_they_pay() -> None:
    guesses = {
        (1,): Candidates([2, 3], [5.0, 4.9], 3, 0),
        (1, 2): Candidates([4], [1.0], 1, 0),
        (1, 3): Candidates([5], [1.0], 4, 0),
        (1, 2, 4): Candidates([6], [1.0], 2, 0),
    }
    sketch, known = sketched(guesses, 0.22)
    assert known.asked == [(1,), (1, 2), (1, 3), (1, 3, 5), (1, 2, 4)]
    assert {tuple(sketch.path(node)) for node in range(1, len(sketch))} == {(2,), (3,), (2, 4), (3, 5), (2, 4, 6)}
    sketch, known = sketched(guesses, 0.3)
    assert known.asked == [(1,), (1, 2)]
    sketch, known = sketched(guesses, 0.0, depth=2)
    assert max(sketch.depths) == 2
    assert (1, 2, 4) not in known.asked
    _, known = sketched(guesses, 0.0, limit=2)  # the root and the likeliest node
    assert known.asked == [(1,), (1, 2)]


def test_what_others_offered_is_guessed_below_and_agreement_counts() -> None:
    before = [[2, 7], [3]]
    sketch, known = sketched({(1,): Candidates([2, 4], [5.0, 4.0], 3, 0)}, 0.05, before=before)
    plain, _ = sketched({}, 0.05, before=before)
    assert set(known.asked) >= {(1,), (1, 2), (1, 3), (1, 2, 7)}
    agreed, alone = sketch.child(0, 2), sketch.child(0, 4)
    assert sketch.reach[agreed] > plain.reach[plain.child(0, 2)]
    assert sketch.reach[sketch.child(0, 3)] == plain.reach[plain.child(0, 3)]
    second, _ = sketched({(1,): Candidates([2, 4], [5.0, 4.0], 3, 0)}, 0.05)
    assert sketch.reach[alone] < second.reach[second.child(0, 4)]


def test_a_long_match_is_followed_many_tokens_at_once() -> None:
    text = [0, *range(20, 60), 1]
    guesses = {(1,): Candidates([20], [3.0], 12, 0)}
    for end in range(20, 45):
        guesses[(1, *range(20, end + 1))] = Candidates([end + 1], [3.0], 12, end - 19)
    guesses[(1, *range(20, 46))] = NONE
    sketch, _ = sketched(guesses, 0.3, text=text, depth=32)
    assert sketch.path(len(sketch) - 1) == list(range(20, 20 + len(sketch) - 1))
    assert max(sketch.depths) >= 20
    # where the guess is another one than what followed then, following ends
    guesses[1, 20, 21] = Candidates([50, 22], [3.0, 2.0], 12, 2)
    sketch, _ = sketched(guesses, 0.3, text=text, depth=32)
    assert sketch.path(sketch.child(sketch.child(sketch.child(0, 20), 21), 50)) == [20, 21, 50]
    for depth in (1, 2, 3, 9):
        assert max(sketched(guesses, 0.0, text=text, depth=depth)[0].depths) == depth


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("recall", DraftOptions(nodes=12)),
        ("recall", DraftOptions(nodes=40, recall=5, shared_noise=False)),
        ("medusa", DraftOptions(tree="auto", nodes=12)),
        ("tokenswift", DraftOptions(tree="auto", nodes=40, budget=64)),
        ("cascade", DraftOptions(nodes=12, gamma=5, budget=64)),
    ],
)
def test_texts_of_methods_that_recall_are_those_of_plain_decoding(method: str, options: DraftOptions) -> None:
    """Past what a partial cache holds, too."""
    target, prompt, length = tiny_target(), [3, 1, 4, 1, 5] * 4, 250
    drafter = make_drafter(method, target, tiny_heads(kind="conditioned"), options)
    assert isinstance(drafter, DynamicTreeDrafter)
    assert isinstance(drafter.offering[-1], HistorySource)
    texts = []
    for each in (Drafter(), drafter):
        steps = list(Decoding(target, prompt, PARAMS, 5, each, length).steps())
        texts.append([token for step in steps for token in step.tokens])
    assert texts[0] == texts[1]
    assert len(steps) < length


def test_what_does_not_go_with_recalling() -> None:
    target, heads = tiny_target(), tiny_heads()
    for method, options, words in (
        ("recall", {"recall": 0}, "recall: must be at least 1 for recall"),
        ("tokenswift", {"tree": "auto", "ngrams": 3}, "ngrams: goes with a tree of its own or --recall 0"),
        ("tokenswift", {"tree": "auto", "reuse_recent": True}, "reuse_recent: goes with a tree of its own"),
    ):
        with pytest.raises(InputError) as caught:
            resolve(method, target, heads, DraftOptions(**options))
        assert words in str(caught.value)
    assert resolve("tokenswift", target, heads, DraftOptions()).recall is None
    assert resolve("tokenswift", target, heads, DraftOptions(tree="auto")).recall == 64
    without = make_drafter("tokenswift", target, heads, DraftOptions(tree="auto", recall=0, ngrams=3))
    assert not any(isinstance(source, HistorySource) for source in without.offering)


@pytest.mark.parametrize(
    ("params", "pieces"),
    [
        (PARAMS, 3),
        (SamplingParams(min_p=0.0, penalty=1.0), 1),
        (SamplingParams(temperature=0.0, penalty=1.0), 2),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=20, penalty=1.1, window=5), 1),
    ],
)
def test_texts_are_those_of_plain_decoding(params: SamplingParams, pieces: int) -> None:
    target, prompt, length = tiny_target(), [3, 1, 4, 1, 5], 300
    plain = [t for s in Decoding(target, prompt, params, 5, Drafter(), length).steps() for t in s.tokens]
    written: list[int] = []
    steps = []
    for piece in range(1, pieces + 1):  # a decode that stopped goes on, with less to recall
        plan = Plan()
        memory = LogitHistory(target, True)
        source = HistorySource(memory, plan, 16)
        drafter = DynamicTreeDrafter(offering=[source], depth=8, limit=16, plan=plan, memory=memory)
        decoding = Decoding(target, prompt, params, 5, drafter, length * piece // pieces, written=written)
        for step in decoding.steps():
            written += step.tokens
            steps.append(step)
    assert written == plain
    assert length / len(steps) > 1.05
    assert any(step.source == "reuse" for step in steps)
