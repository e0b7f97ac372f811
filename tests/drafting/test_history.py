"""Matches in the text so far, the logits kept of it and its n-grams, against brute force;
what is drafted from them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import (
    CPU,
    PLAIN,
    VOCAB,
    context_of,
    decode,
    needs_program,
    path_to,
    refused,
    seeded,
    tiny_target,
)
from tswift.decoding.drafter import Drafter, DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL
from tswift.drafting.dynamic_tree import (
    AcceptanceEstimator,
    CandidateTree,
    DynamicTreeDrafter,
    TreeBudget,
)
from tswift.drafting.history import Candidates, HistorySource, LogitHistory
from tswift.drafting.methods import resolve
from tswift.drafting.ngrams import NgramTable, ReuseSource
from tswift.drafting.options import DraftOptions
from tswift.forward.passes import Forwarded
from tswift.native_build import Unbuilt
from tswift.sampling.parameters import SamplingParams, warp
from tswift.sampling.rule import Sampler

pytestmark = needs_program


def history(vocab: int, kept: int = 64, noise: bool = True) -> LogitHistory:
    """Of a model whose hidden states are its logits."""
    model = SimpleNamespace(
        device=CPU, on_cuda=False, vocab_size=vocab, logits=lambda hidden: hidden
    )
    return LogitHistory(model, noise, kept)


@pytest.mark.parametrize(("vocab", "bytes_of_one"), [(2048, 4 * 64 + 4), (70_000, 6 * 64 + 4)])
def test_a_text_takes_what_is_said(vocab, bytes_of_one):
    recall = history(vocab)
    context = context_of([0], PLAIN, vocab=vocab)
    for _ in range(32):
        recall.prefilled(context, Forwarded(torch.zeros(64, vocab), []))
    assert (
        sum(recall._tables[name].nbytes for name in ("ids", "logs", "scales"))
        == 2048 * bytes_of_one
    )
    held = sum(each.nbytes for each in recall._tables.values()) + recall._fixed["newest"].nbytes
    assert held == LogitHistory.bytes_for(2048, vocab, 64)


@pytest.mark.parametrize("program", ["build", "library"])
def test_without_a_compiler_nothing_is_recalled_and_asking_for_it_is_refused(monkeypatch, program):
    """Nor without the program that ranks what is recalled."""
    target = tiny_target()
    assert resolve("recall", target, None, DraftOptions()).recall == 64

    def missing(*given):
        raise Unbuilt("no cc")

    monkeypatch.setattr(f"tswift.drafting.history.{program}", missing)
    assert resolve("auto", target, None, DraftOptions()).recall == 0
    for name, options in (("auto", DraftOptions(recall=8)), ("recall", DraftOptions())):
        with refused(r"^recall: .*no cc"):
            resolve(name, target, None, options)


def words(count: int) -> list[int]:
    """A text that comes back to what it said."""
    return torch.randint(0, 5, (count,), generator=seeded(3)).tolist()


def thoughts(count: int, seed: int = 4, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab, generator=seeded(seed), dtype=torch.float64) * 2


def recalled(
    text, logits, pieces, params, *, kept: int = VOCAB, noise: bool = True, reach: int = 1 << 20
):
    """What is recalled of a text that came in pieces, and its sampler;
    a prompt is prefilled in two chunks.
    """
    vocab = logits.shape[1]
    known = pieces[0] - 1
    recall = history(vocab, kept, noise)
    context = context_of(text[: pieces[0]], params, 7, vocab)
    recall._index.reach = reach
    for chunk in (logits[: known // 2], logits[known // 2 : known]):
        recall.prefilled(context, Forwarded(chunk, []))
    recall.committed(context)
    for piece in pieces[1:]:
        done = len(context.text)
        context.text += text[done : done + piece]
        # the tree had a node more, which was not accepted, before the ones that were
        rows = torch.cat(
            [logits[done - 1 : done], torch.full((1, vocab), 99.0), logits[done : done + piece - 1]]
        )
        context.path = [0, *range(2, piece + 1)]
        context.last = Forwarded(rows, [])
        context.logits = rows
        recall.committed(context)
    assert context.text == text
    assert len(recall) == len(text) - 1
    return recall, context.sampler


def test_repeats_of_late_are_counted_and_logits_kept_where_they_pay():
    new = torch.randint(VOCAB, (200,), generator=seeded(4)).tolist()
    texts = {"new": new, "a loop": [*new, *[1, 2, 3, 4, 5, 6] * 9]}
    shares, kept = {}, {}
    for name, text in texts.items():
        for costs in (None, NOMINAL):
            recall = history(VOCAB)
            context = context_of(text[:1], PLAIN, vocab=VOCAB)
            recall.costs = costs
            for token in text[1:]:
                recall.committed(context)
                context.text.append(token)
                context.logits = torch.zeros(1, VOCAB)
                context.path = [0]
            recall.committed(context)
            shares[name] = recall.repeats
            kept[name, costs is None] = int(
                (recall._tables["logs"][: len(recall)] > -9).all(1).sum()
            )
            source = HistorySource(recall, TreeBudget(), 8)
            assert source.may_pay(NOMINAL, context) == (name == "a loop")
    assert shares["a loop"] > 0.8
    assert shares["new"] < 0.05
    assert kept["new", True] == len(texts["new"]) - 1
    assert kept["new", False] == 0 < kept["a loop", False] < kept["a loop", True]


def expected(
    text, logits, path, params, noise: Sampler | None, kept: int
) -> tuple[torch.Tensor, int, int]:
    """Scores ``[V]``, and the longest match and its place; by looking everywhere."""
    whole, matches = [*text[:-1], *path], []
    for end in range(len(text) - 1):
        length = 0
        while length < min(12, end + 1) and whole[end - length] == whole[-1 - length]:
            length += 1
        if length:
            matches.append((length, end))
    matches = sorted(matches, reverse=True)[:4] or [(0, -1)]
    weights = torch.tensor([2.0 * length for length, _ in matches], dtype=torch.float64).softmax(0)
    mean = torch.zeros(logits.shape[1], dtype=torch.float64)
    scale = 0.0
    for weight, (length, end) in zip(weights, matches, strict=True):
        if length:
            probs = logits[end].softmax(-1)
            mean += weight * probs.where(probs >= probs.topk(kept).values[-1], 0.0)
            scale += float(weight * logits[end].logsumexp(-1))
    row = (mean.log() + scale).unsqueeze(0)
    if noise and noise.counting:
        taken = params.frequency_penalty * noise.counts + params.presence_penalty * (
            noise.counts > 0
        )
        row -= taken
    seen = None
    if params.penalises:
        seen = torch.zeros(row.shape, dtype=torch.bool)
        seen[0, whole[-params.window :]] = True
    scores = warp(row, seen, params)[0]
    return scores + (noise.noise([len(whole)]).squeeze() if noise else 0.0), *matches[0]


def check_guesses(
    text, logits, pieces, paths, params, *, noise: bool = True, kept: int = VOCAB, clean=None
):
    recall, sampler = recalled(text, logits, pieces, params, noise=noise, kept=kept)
    if sampler.counting:
        sampler.counts.copy_(torch.arange(VOCAB) % 4)
    paths = [[text[-1], *path] for path in paths]
    for path, guess in zip(paths, recall.guess(paths, 3), strict=True):
        about = path, params, sampler if noise else None, kept
        scores, *match = expected(text, logits if clean is None else clean, *about)
        best = scores.topk(3).values
        assert [guess.match, guess.place] == match
        assert guess.scores == pytest.approx(best[best > -torch.inf].tolist(), abs=0.02)
        # half precision: of near-ties either may come first
        assert scores[guess.tokens].tolist() == pytest.approx(guess.scores, abs=0.02)
        assert len({*guess.tokens}) == len(guess.tokens)


RULES = {
    "penalty": SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=9),
    "plain": PLAIN,
    "greedy": SamplingParams(temperature=0.0, penalty=1.2, window=30),
    "filters": SamplingParams(top_k=9, eta=0.01, top_p=0.9, penalty=1.1),
    "counts": SamplingParams(penalty=1.0, presence_penalty=0.8, frequency_penalty=0.5),
}


@pytest.mark.parametrize("rule", RULES)
def test_guesses_are_those_of_all_that_was_thought(rule):
    pieces, paths = (
        [21, 1, 3, 40, *[2] * 27, 1],
        [[], [2], [4, 4, 1], [2, 0], *[[each % 5] for each in range(8)]],
    )
    check_guesses(words(120), thoughts(120), pieces, paths, RULES[rule])


token = st.integers(0, 3)


@given(
    st.lists(token, min_size=2, max_size=30) | st.lists(token, min_size=50, max_size=150),
    st.lists(st.integers(1, 40), min_size=150, max_size=150),
    st.lists(st.lists(token, max_size=14), min_size=1, max_size=3),
    st.sampled_from([8, VOCAB]),
    st.integers(0, 99),
)
def test_any_text_in_any_pieces_is_recalled_by_its_longest_and_then_latest_matches(
    text, pieces, paths, kept, seed
):
    """Which a mean of four distributions tells, each with its own weight."""
    cut = next(count for count in range(1, 151) if sum(pieces[:count]) >= len(text))
    pieces = [*pieces[: cut - 1], len(text) - sum(pieces[: cut - 1])]
    check_guesses(text, thoughts(len(text), seed), pieces, paths, PLAIN, noise=False, kept=kept)


def test_banned_tokens_and_impossible_ones_are_not_guessed():
    text = words(60)
    logits = thoughts(60)
    clean = logits.clone()
    clean[:, [11, 12, 13]] = -math.inf
    # nothing of a banned token is looked at
    logits[:, 11] = 50.0
    logits[:, 12] = math.nan
    logits[:, 13] = -math.inf
    params = SamplingParams(min_p=0.0, penalty=1.0, banned=(11, 12))
    check_guesses(text, logits, [2, *[2] * 29], [[], [1]], params, clean=clean)
    recall, _ = recalled(text, logits.nan_to_num(), [60], PLAIN)
    assert recall.guess([[text[-1]]], 1)[0].tokens == [11]


def test_of_many_matches_the_latest_are_looked_at_also_where_tables_grew():
    text = [1, 2, 3] * 500 + [7, 2, 3] + [9, 2, 3] * 100
    logits = thoughts(len(text))
    recall, _ = recalled(text, logits, [900, *[12] * 75, 3], PLAIN, reach=16)
    found = recall.guess([[3], [3, 1], [3, 9]], 1)
    assert [(each.match, each.place) for each in found] == [
        (12, len(text) - 4),
        (3, 1500 - 3),
        (12, len(text) - 3),
    ]
    assert recall._tables["scales"][: len(text) - 1] == pytest.approx(
        logits[:-1].logsumexp(-1).numpy(), abs=0.01
    )


def test_what_nobody_recorded_is_known_by_the_token_that_came():
    text = words(40)
    recall = history(VOCAB)
    context = context_of(text[:5], PLAIN)
    recall.prefilled(context, Forwarded(thoughts(4), []))
    recall.committed(context)
    context.text += text[5:]  # by other drafters; of the last pass two rows are known
    context.logits = thoughts(2, 9)
    context.path = [0, 1]
    recall.committed(context)
    assert recall._tables["ids"][4:37, 0].tolist() == text[5:38]
    assert recall._tables["logs"][4:37, :2].tolist() == [[0, -math.inf]] * 33
    assert recall._tables["ids"][37:39, 0].tolist() == context.logits.argmax(-1).tolist()


def test_a_large_vocabulary_and_nothing_where_nothing_was():
    logits = thoughts(9, vocab=70_000)
    recall, _ = recalled(
        [1, 2] * 4 + [1], logits, [9], SamplingParams(temperature=0.0, penalty=1.0), kept=64
    )
    assert recall.guess([[1]], 1)[0].tokens == [int(logits[6].argmax())]
    assert [len(guess.tokens) for guess in recall.guess([[3], [1, 2], [3, 50]], 3)] == [0, 3, 0]
    assert recall.guess([], 3) == []


NONE = Candidates([], [], 0, -1)


class Known:
    """Says what it was told, and remembers what it was asked."""

    def __init__(self, guesses: dict[tuple[int, ...], Candidates], length: int):
        self.guesses = guesses
        self.asked = list[tuple[int, ...]]()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def guess(self, paths, count) -> list[Candidates]:
        self.asked += map(tuple, paths)
        return [self.guesses.get(tuple(path), NONE) for path in paths]


def sketched(guesses, least: float, *, text=(9, 1), depth: int = 20, before=(), limit: int = 64):
    """A tree of guesses, of which those pay that are this likely."""
    sketch = CandidateTree(text[-1], depth, AcceptanceEstimator())
    known = Known(guesses, len(text) - 1)
    budget = None
    for path in before:
        sketch.add(path, "heads")
    budget = TreeBudget()
    budget.pays_off = lambda tokens, seconds: tokens >= 0.4 * least
    source, context = HistorySource(known, budget, limit), context_of(list(text), PLAIN)
    source.propose(sketch, context)
    assert source.draft_seconds(NOMINAL, context) == pytest.approx(1e-4 * len(known.asked))
    return sketch, known


def test_guesses_go_below_guesses_as_long_as_they_pay():
    guesses = {
        (1,): Candidates([2, 3], [5.0, 4.9], 3, 0),
        (1, 2): Candidates([4], [1.0], 1, 0),
        (1, 3): Candidates([5], [1.0], 4, 0),
        (1, 2, 4): Candidates([6], [1.0], 2, 0),
    }
    sketch, known = sketched(guesses, 0.22)
    assert known.asked == [(1,), (1, 2), (1, 3), (1, 3, 5), (1, 2, 4)]
    assert {tuple(sketch.path(node)) for node in range(1, len(sketch))} == {
        (2,),
        (3,),
        (2, 4),
        (3, 5),
        (2, 4, 6),
    }
    assert sketched(guesses, 0.3)[1].asked == [(1,), (1, 2)]
    # the root and the likeliest node
    assert sketched(guesses, 0.0, limit=2)[1].asked == [(1,), (1, 2)]
    sketch, known = sketched(guesses, 0.0, depth=2)
    assert max(sketch.depths) == 2
    assert (1, 2, 4) not in known.asked


def test_what_others_offered_is_guessed_below_and_agreement_counts():
    before = [[2, 7], [3]]
    guesses = {(1,): Candidates([2, 4], [5.0, 4.0], 3, 0)}
    (both, known), (plain, _), (alone, _) = (
        sketched(given, 0.05, before=offered)
        for given, offered in ((guesses, before), ({}, before), (guesses, ()))
    )
    assert set(known.asked) >= {(1,), (1, 2), (1, 3), (1, 2, 7)}

    def chance(sketch, token):
        return sketch.path_prob[sketch.children[0][token]]

    assert chance(both, 2) > chance(plain, 2)
    assert chance(both, 3) == chance(plain, 3)
    assert chance(both, 4) < chance(alone, 4)


def test_a_long_match_is_followed_many_tokens_at_once():
    text = [0, *range(20, 60), 1]
    guesses = {(1,): Candidates([20], [3.0], 12, 0)}
    for end in range(20, 45):
        guesses[(1, *range(20, end + 1))] = Candidates([end + 1], [3.0], 12, end - 19)
    sketch, _ = sketched(guesses, 0.3, text=text, depth=32)
    assert sketch.path(len(sketch) - 1) == list(range(20, 20 + len(sketch) - 1))
    assert max(sketch.depths) >= 20
    # where the guess is another one than what followed then, following ends
    guesses[1, 20, 21] = Candidates([50, 22], [3.0, 2.0], 12, 2)
    sketch, known = sketched(guesses, 0.3, text=text, depth=32)
    assert [20, 21, 50] in [sketch.path(node) for node in range(len(sketch))]
    assert (1, 20, 21, 22, 23) in known.asked
    assert [20, 21, 22, 23, 24] not in [sketch.path(node) for node in range(len(sketch))]
    for depth in (1, 2, 3, 9):
        assert max(sketched(guesses, 0.0, text=text, depth=depth)[0].depths) == depth


def test_a_text_that_stopped_and_goes_on_is_that_of_plain_decoding():
    target = tiny_target()
    params = SamplingParams(min_p=0.02, penalty=1.2, window=40)
    prompt = [3, 1, 4, 1, 5]
    written = list[int]()
    steps = []
    for piece in (40, 80, 120):  # each with less to recall
        budget = TreeBudget()
        memory = LogitHistory(target, True)
        drafter = DynamicTreeDrafter([HistorySource(memory, budget, 16)], 8, 16, [memory], budget)
        for step in Decoding(target, prompt, params, 5, drafter, piece, written=written).steps():
            written += step.tokens
            steps.append(step)
    assert written == decode(target, Drafter(), prompt, params, 5, 120)
    assert 120 / len(steps) > 1.05
    assert any(step.source == "recall" for step in steps)


class Counted:
    """What an n-gram table is to be, by sorting everything all the time."""

    def __init__(self, k: int, most: int = 1 << 18):
        self.k = k
        self.most = most
        self.now = 0
        self.counts: dict[tuple[int, ...], tuple[int, int]] = {}  # how often, and when last

    def count(self, gram: tuple[int, ...]):
        self.now += 1
        self.counts[gram] = (self.counts.get(gram, (0, 0))[0] + 1, self.now)
        if len(self.counts) > self.most:
            self.counts = dict(
                sorted(self.counts.items(), key=lambda item: item[1])[-(self.most // 2) :]
            )

    def check(self, table: NgramTable):
        assert len(table) == len(self.counts) <= self.most
        for first in range(4):
            ranked = sorted(
                (item for item in self.counts.items() if item[0][0] == first),
                key=lambda item: item[1],
            )
            assert table.continuations(first) == [gram[1:] for gram, _ in ranked[::-1][: self.k]]


texts = st.lists(token, min_size=60, max_size=200)  # else they would be of five tokens on average


@given(texts, st.integers(2, 4), st.integers(1, 8), st.integers(2, 40) | st.just(1 << 18))
def test_the_k_most_frequent_are_at_hand_and_a_full_table_forgets_the_rarest(text, n, k, most):
    table = NgramTable(n, k, most)
    wanted = Counted(k, most)
    for start in range(len(text) - n + 1):
        table.count(text[start : start + n])
        wanted.count(tuple(text[start : start + n]))
        wanted.check(table)


@given(
    texts,
    st.lists(st.integers(1, 9), max_size=30),
    st.integers(0, 60),
    st.booleans(),
    st.booleans(),
)
def test_only_what_left_the_penalty_window_is_counted(text, pieces, window, recent, penalises):
    """Counting as the text grows, in any pieces, equals counting at once."""
    table = NgramTable(4, 5)
    context = context_of([], SamplingParams(penalty=1.3 if penalises else 1.0, window=window))
    source = ReuseSource(table, 0, recent)
    wanted = Counted(5)
    end = 4
    for piece in [*pieces, len(text)]:
        context.text += text[len(context.text) : len(context.text) + piece]
        source.start(context)
        while end <= len(context.text) - (0 if recent or not penalises else window):
            wanted.count(tuple(text[end - 4 : end]))
            end += 1
        wanted.check(table)


def test_continuations_hang_below_the_nodes_of_the_chosen_depth():
    context = context_of([1, 2, 3, 0, 1, 3, 3, 0, 1], PLAIN)
    for below, expected in (
        (0, {(2, 3, 0), (3, 3, 0)}),
        (1, {(3, 0, 1, 3), (3, 3, 0, 1), (2, 3, 0, 1)}),
    ):
        source = ReuseSource(NgramTable(4, 20), below, False)
        tree = DraftTree(1, 64)
        source.start(context)
        for drafted in (3, 2) if below else ():
            tree.add([drafted], "heads")
        source.propose(tree, context)
        assert {
            path_to(tree, node) for node in range(1, len(tree)) if node not in tree.parents
        } == expected


@pytest.mark.parametrize(("vocab", "kept"), [(70_000, 64), (VOCAB, 200), (300, 64)])
def test_what_a_device_digests_is_what_is_kept_of_whole_rows(vocab, kept):
    params = SamplingParams(banned=(3, 9), logit_bias={5: 4.0, 11: -2.0})
    rows = thoughts(7, vocab=vocab).float()
    rows[1, 20:] = -math.inf
    rows[2, 7], rows[2, 8] = math.nan, math.inf
    rows[3] = -math.inf
    tables = []
    for digested in (False, True):
        recall = history(vocab, kept)
        recall.committed(context_of([0], params, vocab=vocab))
        if digested:
            found = recall.digest(rows)
            assert found.shape == (7, recall.columns)
            recall._keep_digest(found.numpy())
        else:
            recall._keep(rows)
        tables.append(
            {
                name: torch.from_numpy(recall._tables[name][:7].astype(float))
                for name in ("ids", "logs", "scales")
            }
        )
    whole, digest = tables
    known = whole["logs"] > -math.inf
    assert torch.equal(known, digest["logs"] > -math.inf)
    assert known.any(1).tolist() == [True, True, True, False, True, True, True]
    assert torch.equal(whole["ids"][known], digest["ids"][known])
    assert torch.allclose(whole["logs"][known], digest["logs"][known], rtol=2e-3, atol=1e-3)
    assert torch.allclose(whole["scales"], digest["scales"], atol=1e-3)
