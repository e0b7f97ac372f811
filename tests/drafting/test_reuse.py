"""N-gram counts against a brute-force count, and what may be reused when."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import PLAIN
from tswift.decoding.drafter import Context, DraftTree
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.drafting.ngrams import NgramTable, ReuseSource

texts = st.lists(st.integers(0, 3), max_size=120)


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


@given(texts, st.integers(2, 4), st.integers(1, 8))
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


@given(texts, st.lists(st.integers(1, 9), max_size=30), st.integers(0, 60), st.booleans(), st.booleans())
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


def test_a_token_never_seen_has_no_continuations() -> None:
    source, tree = ReuseSource(NgramTable(), 0, False), DraftTree(3, 64)
    source.propose(tree, context_of([3], PLAIN))
    assert len(tree) == 1
