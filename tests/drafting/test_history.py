"""Matches in the text so far and the logits kept of it, against brute force; texts are those of plain decoding."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN, VOCAB, tiny_target
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams, warp
from tswift.decoding.sampling import Sampler
from tswift.drafting import methods
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, DynamicTreeDrafter, TreeBudget
from tswift.drafting.history import Candidates, HistorySource, LogitHistory, SuffixIndex, TopKLogits
from tswift.drafting.methods import resolve
from tswift.drafting.ngrams import NgramTable, ReuseSource
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.models.passes import NOMINAL, Forwarded

texts = st.lists(st.integers(0, 3), min_size=1, max_size=200)
EVERYWHERE = 1 << 20


def search(text: list[int], context: list[int], most: int, longest: int) -> list[tuple[int, int]]:
    """The same by looking everywhere."""
    found = []
    for end in range(len(text)):
        length = 0
        while length < min(longest, len(context), end + 1) and text[end - length] == context[-1 - length]:
            length += 1
        if length:
            found.append((end, length))
    return sorted(found, key=lambda match: (match[1], match[0]), reverse=True)[:most]


@given(texts, texts, st.lists(st.integers(1, 40), max_size=20), st.integers(1, 6))
def test_the_longest_and_then_the_latest_matches_are_found(text, context, pieces, most) -> None:
    """Whatever the pieces in which the text came."""
    contexts = SuffixIndex((1, 2, 4, 7), reach=EVERYWHERE)
    done = 0
    for piece in [*pieces, len(text)]:
        contexts.extend(text[done : done + piece])
        done = min(len(text), done + piece)
        assert len(contexts) == done
        assert contexts.find(context, most) == search(text[:done], context, most, 7)


def test_a_short_reach_finds_true_matches_and_the_latest_of_the_longest_order() -> None:
    text = [1, 2, 3] * 500 + [7, 2, 3] + [9, 2, 3] * 100
    contexts = SuffixIndex((1, 2, 4), reach=4)
    contexts.extend(text)
    for context in ([3, 1, 2, 3], [5, 2, 3], [9, 2, 3]):
        found = contexts.find(context, 3)
        everywhere = dict(search(text, context, EVERYWHERE, 4))
        assert len(found) == 3
        assert all(everywhere[end] == length for end, length in found)
    assert contexts.find([3, 1, 2, 3], 3) == [(1499, 4), (1496, 4), (1493, 4)]


SMALL = 50


def logits_of(count: int, seed: int = 1, vocab: int = SMALL) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def averaged(thoughts: TopKLogits, places, shares, vocab: int = SMALL) -> torch.Tensor:
    """``[n, V]``, minus infinity where nothing is kept."""
    whole = torch.full((len(places), vocab), -torch.inf, dtype=torch.float64)
    for row, each in enumerate(zip(places, shares, strict=True)):
        ids, logits = thoughts.average(*each)
        assert len({*ids.tolist()}) == len(ids)
        whole[row, ids.tolist()] = torch.from_numpy(logits).double()
    return whole


@pytest.mark.parametrize("kept", [SMALL, 200, 8])
def test_the_mean_is_that_of_the_distributions(kept: int) -> None:
    logits = logits_of(300)
    thoughts = TopKLogits(SMALL, kept)
    for start in (0, 1, 100, 299):  # pieces of any size
        thoughts.think(logits[start : {0: 1, 1: 100, 100: 299, 299: 300}[start]])
    assert len(thoughts) == 300
    places, shares = [[0, 7, 7], [299, 150, 0], [12, 0, 0]], [[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    found = averaged(thoughts, places, shares)
    for row, share, mean in zip(places, shares, found, strict=True):
        probabilities = logits[row].double().softmax(-1)
        probabilities[probabilities < probabilities.topk(min(kept, SMALL)).values[:, -1:]] = 0
        weights = torch.tensor(share)
        expected = (probabilities * weights[:, None]).sum(0).log()
        expected += (logits[row].double().logsumexp(-1) * weights).sum()
        assert torch.equal(mean == -torch.inf, expected == -torch.inf)
        finite = expected > -torch.inf
        assert (mean - expected)[finite].abs().max() < 0.01  # half precision, of logarithms down to -20


def test_banned_tokens_and_impossible_ones_are_not_kept() -> None:
    logits = logits_of(3)
    logits[:, 5] = torch.nan  # nothing of a banned token is looked at
    logits[:, 6] = 100.0
    logits[:, 7] = -torch.inf
    thoughts = TopKLogits(SMALL, SMALL, SamplingParams(banned=(5, 6)))
    thoughts.think(logits)
    found = averaged(thoughts, [[0], [1], [2]], [[1.0]] * 3)
    assert (found[:, [5, 6, 7]] == -torch.inf).all()
    rest = [token for token in range(SMALL) if token not in (5, 6, 7)]
    assert (found[:, rest] - logits[:, rest]).abs().max() < 0.01


@pytest.mark.parametrize(("vocab", "bytes_of_one"), [(2048, 4 * 64 + 4), (70_000, 6 * 64 + 4)])
def test_a_distribution_takes_what_is_said(vocab: int, bytes_of_one: int) -> None:
    thoughts = TopKLogits(vocab)
    logits = logits_of(64, vocab=vocab)
    for _ in range(32):
        thoughts.think(logits)
    held = sum(rows.nbytes for rows in (thoughts._ids, thoughts._logs, thoughts._scales))
    assert len(thoughts) == 2048
    assert held == 2048 * bytes_of_one == TopKLogits.bytes_for(2048, vocab, 64)
    assert averaged(thoughts, [[2047]], [[1.0]], vocab)[0].argmax() == logits[63].argmax()


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
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 5, (count,), generator=generator).tolist()


def thoughts(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2


def recalled(text, logits, pieces, params, *, kept: int = VOCAB, noise: bool = True) -> tuple[LogitHistory, Sampler]:
    """What is recalled of a text that came in pieces; the first is the prompt, which is prefilled in two chunks."""
    sampler = Sampler(params, 7, VOCAB, torch.device("cpu"))
    recall = LogitHistory(SimpleNamespace(vocab_size=VOCAB, logits=lambda hidden: hidden), noise, kept)
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
        rows = torch.cat([logits[done - 1 : done], torch.full((1, VOCAB), 99.0), logits[done : done + piece - 1]])
        context.path = [0, *range(2, piece + 1)]
        context.last, context.logits = Forwarded(rows, []), rows
        recall.committed(context)
    assert context.text == text
    return recall, sampler


def expected(text, logits, path, params, noise: Sampler | None) -> tuple[torch.Tensor, int]:
    """Scores ``[V]``, and the longest match."""
    whole = [*text[:-1], *path]
    matches = []
    for end in range(len(text) - 1):
        length = 0
        while length < min(12, end + 1) and whole[end - length] == whole[-1 - length]:
            length += 1
        if length:
            matches.append((length, end))
    matches = sorted(matches, reverse=True)[:4]
    weights = torch.tensor([math.exp(2.0 * (length - matches[0][0])) for length, _ in matches])
    weights = (weights / weights.sum()).double()
    mean, scale = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for weight, (_, end) in zip(weights, matches, strict=True):
        mean += weight * logits[end].softmax(-1)
        scale += float(weight * logits[end].logsumexp(-1))
    row = (mean.log() + scale).unsqueeze(0)
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    if params.penalises:
        seen[0, whole[-params.window :]] = True
    scores = warp(row, seen if params.penalises else None, params)[0]
    return scores + (noise.noise([len(whole)]).squeeze() if noise else 0.0), matches[0][0]


@pytest.mark.parametrize(
    ("params", "noise"),
    [
        (PENALTY, True),
        (PENALTY, False),
        (SamplingParams(min_p=0.0, penalty=1.0), True),
        (SamplingParams(temperature=0.0, penalty=1.2, window=30), True),
        (SamplingParams(top_k=9, eta=0.01, top_p=0.9, penalty=1.1), True),
    ],
)
def test_guesses_are_those_of_all_that_was_thought(params: SamplingParams, noise: bool) -> None:
    text, logits = words(120), thoughts(120)
    recall, sampler = recalled(text, logits, [21, 1, 3, 40, *[2] * 27, 1], params, noise=noise)
    assert len(recall) == 119
    paths = [[text[-1]], [text[-1], 2], [text[-1], 4, 4, 1], [text[-1], 2, 0]]
    guesses = recall.guess(paths, 3)
    assert len(guesses) == len(paths)
    for path, guess in zip(paths, guesses, strict=True):
        scores, match = expected(text, logits, path, params, sampler if noise else None)
        best = scores.topk(3)
        finite = int((best.values > -torch.inf).sum())
        assert guess.match == match
        assert guess.tokens == best.indices[:finite].tolist()
        assert guess.scores == pytest.approx(best.values[:finite].tolist(), abs=0.02)


def test_banned_tokens_are_not_guessed() -> None:
    text, logits = words(60), thoughts(60)
    logits[:, 11] = 50.0
    params = SamplingParams(min_p=0.0, penalty=1.0, banned=(11,))
    recall, _ = recalled(text, logits, [2, *[2] * 29], params)
    assert all(11 not in guess.tokens for guess in recall.guess([[text[-1]], [text[-1], 1]], 16))
    recall, _ = recalled(text, logits, [2, *[2] * 29], SamplingParams(min_p=0.0, penalty=1.0))
    assert recall.guess([[text[-1]]], 1)[0].tokens == [11]


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


@pytest.mark.parametrize(
    ("params", "pieces"),
    [
        (PARAMS, 3),
        (SamplingParams(temperature=0.0, penalty=1.0), 2),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=20, penalty=1.1, window=5), 1),
    ],
)
def test_texts_are_those_of_plain_decoding(params: SamplingParams, pieces: int) -> None:
    target, prompt, length = tiny_target(), [3, 1, 4, 1, 5], 120
    plain = [t for s in Decoding(target, prompt, params, 5, Drafter(), length).steps() for t in s.tokens]
    written: list[int] = []
    steps = []
    for piece in range(1, pieces + 1):  # a decode that stopped goes on, with less to recall
        plan = TreeBudget()
        memory = LogitHistory(target, True)
        source = HistorySource(memory, plan, 16)
        drafter = DynamicTreeDrafter([source], 8, 16, [memory], plan)
        decoding = Decoding(target, prompt, params, 5, drafter, length * piece // pieces, written=written)
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


def test_what_is_frequent_is_not_forgotten() -> None:
    table = NgramTable(2, 3, 100)
    for number in range(10, 5000):
        table.count((number % 7, number % 3))
        table.count((number, number + 1))
    assert 50 <= len(table) <= 100
    assert [len(table.continuations(first)) for first in range(7)] == [3] * 7
    assert set(table._best) == {gram[0] for gram in table._counts}  # no empty lists are left


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
        leaves = {n for n in range(1, len(tree)) if n not in tree.parents}
        spelled = set()
        for leaf in leaves:
            path, node = [], leaf
            while node:
                path.insert(0, tree.tokens[node])
                node = tree.parents[node]
            spelled.add(tuple(path))
        assert spelled == expected - ({(2,)} if below else set())
