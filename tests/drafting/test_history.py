"""Matches in the text so far and the logits kept of it, against brute force; texts are those of plain decoding."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN, VOCAB, path_to, tiny_target
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams, warp
from tswift.decoding.sampling import Sampler
from tswift.drafting import methods
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, DynamicTreeDrafter, TreeBudget
from tswift.drafting.fixed_tree import NgramTable, ReuseSource
from tswift.drafting.history import Candidates, HistorySource, LogitHistory
from tswift.drafting.methods import resolve
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.models.passes import NOMINAL, Forwarded


@pytest.mark.parametrize(("vocab", "bytes_of_one"), [(2048, 4 * 64 + 4), (70_000, 6 * 64 + 4)])
def test_a_distribution_takes_what_is_said(vocab: int, bytes_of_one: int) -> None:
    recall = LogitHistory(SimpleNamespace(vocab_size=vocab, logits=lambda hidden: hidden), True)
    context = Context([0], Sampler(PLAIN, 1, vocab, torch.device("cpu")), None)
    for _ in range(32):
        recall.prefilled(context, Forwarded(torch.zeros(64, vocab), []))
    assert sum(recall._tables[name].nbytes for name in ("ids", "logs", "scales")) == 2048 * bytes_of_one
    held = sum(each.nbytes for each in recall._tables.values()) + recall._fixed["newest"].nbytes
    assert held == LogitHistory.bytes_for(2048, vocab, 64)


def test_without_a_compiler_nothing_is_recalled_and_asking_for_it_is_refused(monkeypatch) -> None:
    target = tiny_target()
    assert resolve("recall", target, None, DraftOptions()).recall == 64
    monkeypatch.setattr(methods, "unbuilt", lambda: "no cc")
    assert resolve("auto", target, None, DraftOptions()).recall == 0
    for name, options in (("auto", DraftOptions(recall=8)), ("recall", DraftOptions())):
        with pytest.raises(InputError, match="no cc") as error:
            resolve(name, target, None, options)
        assert error.value.field == "recall"


PENALTY = SamplingParams(temperature=0.8, min_p=0.02, penalty=1.3, window=9)


def words(count: int) -> list[int]:
    """A text that comes back to what it said."""
    return torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def thoughts(count: int, seed: int = 4, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def recalled(text, logits, pieces, params, *, kept: int = VOCAB, noise: bool = True, reach: int = 1 << 20):
    """What is recalled of a text that came in pieces, and its sampler; a prompt is prefilled in two chunks."""
    vocab = logits.shape[1]
    sampler = Sampler(params, 7, vocab, torch.device("cpu"))
    recall = LogitHistory(SimpleNamespace(vocab_size=vocab, logits=lambda hidden: hidden), noise, kept)
    recall._index.reach = reach
    known = pieces[0] - 1
    context = Context(text[: pieces[0]], sampler, None)
    for chunk in (logits[: known // 2], logits[known // 2 : known]):
        recall.prefilled(context, Forwarded(chunk, []))
    sampler.extend(context.text)
    recall.committed(context)
    for piece in pieces[1:]:
        done = len(context.text)
        context.text += text[done : done + piece]
        sampler.extend(text[done : done + piece])
        # the tree had a node more, which was not accepted, before the ones that were
        rows = torch.cat([logits[done - 1 : done], torch.full((1, vocab), 99.0), logits[done : done + piece - 1]])
        context.path = [0, *range(2, piece + 1)]
        context.last, context.logits = Forwarded(rows, []), rows
        recall.committed(context)
    assert context.text == text
    assert len(recall) == len(text) - 1
    return recall, sampler


def expected(text, logits, path, params, noise: Sampler | None, kept: int) -> tuple[torch.Tensor, int, int]:
    """Scores ``[V]``, and the longest match and its place; by looking everywhere."""
    whole = [*text[:-1], *path]
    matches = []
    for end in range(len(text) - 1):
        length = 0
        while length < min(12, end + 1) and whole[end - length] == whole[-1 - length]:
            length += 1
        if length:
            matches.append((length, end))
    matches = sorted(matches, reverse=True)[:4] or [(0, -1)]
    weights = torch.tensor([math.exp(2.0 * (length - matches[0][0])) for length, _ in matches])
    weights = (weights / weights.sum()).double()
    mean, scale = torch.zeros(logits.shape[1], dtype=torch.float64), 0.0
    for weight, (length, end) in zip(weights, matches, strict=True):
        if length:
            probs = logits[end].softmax(-1)
            mean += weight * probs.where(probs >= probs.topk(kept).values[-1], 0.0)
            scale += float(weight * logits[end].logsumexp(-1))
    row = (mean.log() + scale).unsqueeze(0)
    seen = torch.zeros(row.shape, dtype=torch.bool)
    if params.penalises:
        seen[0, whole[-params.window :]] = True
    scores = warp(row, seen if params.penalises else None, params)[0]
    return scores + (noise.noise([len(whole)]).squeeze() if noise else 0.0), *matches[0]


def check_guesses(text, logits, pieces, paths, params, *, noise: bool = True, kept: int = VOCAB, clean=None) -> None:
    recall, sampler = recalled(text, logits, pieces, params, noise=noise, kept=kept)
    paths = [[text[-1], *path] for path in paths]
    for path, guess in zip(paths, recall.guess(paths, 3), strict=True):
        about = path, params, sampler if noise else None, kept
        scores, *match = expected(text, logits if clean is None else clean, *about)
        best = scores.topk(4).values
        assert [guess.match, guess.place] == match
        assert guess.scores == pytest.approx(best[:3][best[:3] > -torch.inf].tolist(), abs=0.02)
        # half precision: of near-ties either may come first
        assert scores[guess.tokens].tolist() == pytest.approx(guess.scores, abs=0.02)
        assert len({*guess.tokens}) == len(guess.tokens)


RULES = {
    "penalty": PENALTY,
    "no noise": PENALTY,
    "plain": SamplingParams(min_p=0.0, penalty=1.0),
    "greedy": SamplingParams(temperature=0.0, penalty=1.2, window=30),
    "filters": SamplingParams(top_k=9, eta=0.01, top_p=0.9, penalty=1.1),
}


@pytest.mark.parametrize("rule", RULES)
def test_guesses_are_those_of_all_that_was_thought(rule: str) -> None:
    pieces, paths = [21, 1, 3, 40, *[2] * 27, 1], [[], [2], [4, 4, 1], [2, 0], *[[each % 5] for each in range(8)]]
    check_guesses(words(120), thoughts(120), pieces, paths, RULES[rule], noise=rule != "no noise")


token = st.integers(0, 3)


@given(
    st.lists(token, min_size=2, max_size=150),
    st.lists(st.integers(1, 40), min_size=150, max_size=150),
    st.lists(st.lists(token, max_size=14), min_size=1, max_size=3),
    st.sampled_from([8, VOCAB]),
    st.integers(0, 99),
)
def test_any_text_in_any_pieces_is_recalled_by_its_longest_and_then_latest_matches(
    text, pieces, paths, kept, seed
) -> None:
    """Which a mean of four distributions tells, each with its own weight."""
    cut = next(count for count in range(1, 151) if sum(pieces[:count]) >= len(text))
    pieces = [*pieces[: cut - 1], len(text) - sum(pieces[: cut - 1])]
    check_guesses(text, thoughts(len(text), seed), pieces, paths, RULES["plain"], noise=False, kept=kept)


def test_banned_tokens_and_impossible_ones_are_not_guessed() -> None:
    text, logits = words(60), thoughts(60)
    clean = logits.clone()
    clean[:, [11, 12, 13]] = -math.inf
    logits[:, 11], logits[:, 12], logits[:, 13] = 50.0, math.nan, -math.inf  # nothing of a banned token is looked at
    params = SamplingParams(min_p=0.0, penalty=1.0, banned=(11, 12))
    check_guesses(text, logits, [2, *[2] * 29], [[], [1]], params, clean=clean)
    recall, _ = recalled(text, logits.nan_to_num(), [60], RULES["plain"])
    assert recall.guess([[text[-1]]], 1)[0].tokens == [11]


def test_of_many_matches_the_latest_are_looked_at() -> None:
    text = [1, 2, 3] * 500 + [7, 2, 3] + [9, 2, 3] * 100
    recall, _ = recalled(text, thoughts(len(text)), [len(text)], PENALTY, reach=16)
    found = recall.guess([[3], [3, 1], [3, 9]], 1)
    assert [(each.match, each.place) for each in found] == [(12, len(text) - 4), (3, 1500 - 3), (12, len(text) - 3)]


def test_a_large_vocabulary() -> None:
    logits = thoughts(9, vocab=70_000)
    recall, _ = recalled([1, 2] * 4 + [1], logits, [9], SamplingParams(temperature=0.0, penalty=1.0), kept=64)
    assert recall.guess([[1]], 1)[0].tokens == [int(logits[6].argmax())]


def test_nothing_is_guessed_where_nothing_was() -> None:
    recall, _ = recalled([1, 2, 3], thoughts(3), [1, 1, 1], PENALTY)
    guesses = recall.guess([[3], [3, 2], [3, 50]], 3)
    assert [len(guess.tokens) > 0 for guess in guesses] == [False, True, False]
    assert recall.guess([], 3) == []


NONE = Candidates([], [], 0, -1)
PARAMS = SamplingParams(min_p=0.02, penalty=1.2, window=40)


class Known:
    """Says what it was told, and remembers what it was asked."""

    def __init__(self, guesses: dict[tuple[int, ...], Candidates], length: int) -> None:
        self.guesses, self.asked, self.length = guesses, list[tuple[int, ...]](), length

    def __len__(self) -> int:
        return self.length

    def guess(self, paths, most) -> list[Candidates]:
        self.asked += map(tuple, paths)
        return [self.guesses.get(tuple(path), NONE) for path in paths]


class Picky(TreeBudget):
    """Worth it is what is this likely."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def pays_off(self, tokens: float, seconds: float) -> bool:
        return tokens >= 0.4 * self.least


def sketched(guesses, least: float, *, text=(9, 1), depth: int = 20, before=(), limit: int = 64):
    sketch, known = CandidateTree(text[-1], depth, AcceptanceEstimator()), Known(guesses, len(text) - 1)
    for path in before:
        sketch.add(path, "heads")
    source = HistorySource(known, Picky(least), limit)
    context = Context(list(text), Sampler(PARAMS, 1, VOCAB, torch.device("cpu")), SimpleNamespace(length=9))
    source.propose(sketch, context)
    assert source.price(NOMINAL, context) == pytest.approx(1e-4 * len(known.asked))
    return sketch, known


def child(sketch: CandidateTree, node: int, token: int) -> int:
    return sketch.children[node][token]


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
    agreed, alone = child(sketch, 0, 2), child(sketch, 0, 4)
    assert sketch.path_prob[agreed] > plain.path_prob[child(plain, 0, 2)]
    assert sketch.path_prob[child(sketch, 0, 3)] == plain.path_prob[child(plain, 0, 3)]
    second, _ = sketched({(1,): Candidates([2, 4], [5.0, 4.0], 3, 0)}, 0.05)
    assert sketch.path_prob[alone] < second.path_prob[child(second, 0, 4)]


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
    assert sketch.path(child(sketch, child(sketch, child(sketch, 0, 20), 21), 50)) == [20, 21, 50]
    for depth in (1, 2, 3, 9):
        assert max(sketched(guesses, 0.0, text=text, depth=depth)[0].depths) == depth


def test_a_text_that_stopped_and_goes_on_is_that_of_plain_decoding() -> None:
    target, params, prompt, length = tiny_target(), PARAMS, [3, 1, 4, 1, 5], 120
    plain = [t for s in Decoding(target, prompt, params, 5, Drafter(), length).steps() for t in s.tokens]
    written: list[int] = []
    steps = []
    for piece in (1, 2, 3):  # each with less to recall
        plan = TreeBudget()
        memory = LogitHistory(target, True)
        source = HistorySource(memory, plan, 16)
        drafter = DynamicTreeDrafter([source], 8, 16, [memory], plan)
        decoding = Decoding(target, prompt, params, 5, drafter, length * piece // 3, written=written)
        for step in decoding.steps():
            written += step.tokens
            steps.append(step)
    assert written == plain
    assert length / len(steps) > 1.05
    assert any(step.source == "reuse" for step in steps)


# ---------------------------------------------------------------------------------------------------------------------
# N-gram counts against a brute-force count, and what may be reused when


texts_of_reuse = st.lists(st.integers(0, 3), max_size=120)


def grams_of(text, n):
    return [tuple(text[start : start + n]) for start in range(len(text) - n + 1)]


def check_table(table: NgramTable, grams: list[tuple[int, ...]], vocab: int = 4) -> None:
    counts = Counter(grams)
    last = {gram: when for when, gram in enumerate(grams)}
    for first in range(vocab):
        ranked = sorted((gram for gram in counts if gram[0] == first), key=lambda gram: (-counts[gram], -last[gram]))
        assert table.continuations(first) == [gram[1:] for gram in ranked[: table.k]]


def fill(table: NgramTable, grams) -> NgramTable:
    for gram in grams:
        table.count(gram)
    return table


@given(texts_of_reuse, st.integers(2, 4), st.integers(1, 8))
def test_the_k_best_are_those_of_a_full_count(text: list[int], n: int, k: int) -> None:
    grams = grams_of(text, n)
    for end in {len(grams), len(grams) // 2}:
        check_table(fill(NgramTable(n, k), grams[:end]), grams[:end])


class Forgetful:
    """What a table that forgets is to be, by sorting everything all the time."""

    def __init__(self, k: int, most: int) -> None:
        self.k, self.most, self.now = k, most, 0
        self.counted: dict[tuple[int, ...], tuple[int, int]] = {}  # how often, and when last

    def count(self, gram: tuple[int, ...]) -> None:
        self.now += 1
        self.counted[gram] = (self.counted.get(gram, (0, 0))[0] + 1, self.now)
        if len(self.counted) > self.most:
            kept = sorted(self.counted.items(), key=lambda item: item[1])[-(self.most // 2) :]
            self.counted = dict(kept)

    def continuations(self, first: int) -> list[tuple[int, ...]]:
        ranked = sorted((item for item in self.counted.items() if item[0][0] == first), key=lambda item: item[1])
        return [gram[1:] for gram, _ in ranked[::-1][: self.k]]


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(2, 4), st.integers(1, 5), st.integers(2, 40))
def test_a_full_table_forgets_the_rarest_and_then_the_oldest(text: list[int], n: int, k: int, most: int) -> None:
    table, wanted, forgot = NgramTable(n, k, most), Forgetful(k, most), False
    for gram in grams_of(text, n):
        before = len(table)
        table.count(gram)
        wanted.count(gram)
        forgot |= len(table) < before
        assert len(table) == len(wanted.counted) <= most
        for first in range(4):
            assert table.continuations(first) == wanted.continuations(first)
    if not forgot:
        check_table(table, grams_of(text, n))


def context_of(text: list[int], params: SamplingParams) -> Context:
    return Context(text, Sampler(params, 1, 4, torch.device("cpu")), None, None, 0)


@given(texts_of_reuse, st.lists(st.integers(1, 9), max_size=30), st.integers(0, 60), st.booleans(), st.booleans())
def test_only_what_left_the_penalty_window_is_counted(text, pieces, window, recent, penalises) -> None:
    """Counting as the text grows, in any pieces, equals counting at once."""
    params = SamplingParams(penalty=1.3 if penalises else 1.0, window=window)
    table = NgramTable(4, 5)
    source = ReuseSource(table, 0, recent)
    context = context_of([], params)
    hidden = 0 if recent or not penalises else window
    for piece in [*pieces, len(text)]:
        context.text += text[len(context.text) : len(context.text) + piece]
        source.start(context)
        usable = context.text[: max(0, len(context.text) - hidden)]
        check_table(table, grams_of(usable, 4))


def test_continuations_hang_below_the_nodes_of_the_chosen_depth() -> None:
    context = context_of([1, 2, 3, 0, 1, 3, 3, 0, 1], PLAIN)
    for below, expected in ((0, {(2, 3, 0), (3, 3, 0)}), (1, {(1, 2, 3, 0), (1, 3, 3, 0), (2,), (2, 3, 0, 1)})):
        source = ReuseSource(NgramTable(4, 20), below, False)
        source.start(context)
        tree = DraftTree(1, 64)
        if below:
            tree.add([1], "heads")
            tree.add([2], "heads")
        source.propose(tree, context)
        spelled = {path_to(tree, node) for node in range(1, len(tree)) if node not in tree.parents}
        assert spelled == expected - ({(2,)} if below else set())
