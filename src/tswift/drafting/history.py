"""The history of a text's logits: draft from what the model computed where the text stood like this before.

The paper reuses n-grams of the text: what was drawn. That was one draw with its own noise; here the noise is another,
and logits, given the noise that is coming, tell what will be drawn. No model is asked, so it reaches as deep as it
holds; and the longer the text, the longer its matches.

Matches are found by chains of equal hashes, as in LZ77 compressors. A suffix automaton would know the longest match of
any length, for about a kilobyte of Python objects a token, but not which of its occurrences are the last ones. Chains
are arrays: 52 to 104 bytes a token, and the last ones come first. C functions look, average and rank: up to
eight guesses together take about a tenth of a millisecond.
"""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.attention.native import Unbuilt, build
from tswift.decoding.drafter import Context, Source
from tswift.decoding.drawing import DrawProgram
from tswift.decoding.params import LogitBias, SamplingParams, constants
from tswift.decoding.sampling import Sampler, seed_stream
from tswift.drafting.dynamic_tree import CandidateTree, TreeBudget
from tswift.models.passes import Forwarded, PassCosts
from tswift.models.target import Target

_LEAST = 1 << 10  # places of an empty table
_ORDERS = (1, 2, 3, 4, 6, 12)  # lengths of context that are looked up; a match counts up to the largest
_REACH = 16  # links of a chain that are followed: a context met a thousand times costs no more than one met 16 times


class _Index(ctypes.Structure):
    """``Index`` in history.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("text", "last", "before", "orders")),
        *((name, ctypes.c_int64) for name in ("count", "room", "bits", "kinds", "reach")),
    ]


class _Logits(ctypes.Structure):
    """``Logits`` in history.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("logs", "ids", "scales", "slots")),
        *((name, ctypes.c_void_p) for name in ("space", "biased", "bias", "banned")),
        *((name, ctypes.c_int64) for name in ("kept", "wide", "vocabulary", "biases", "bans")),
    ]


class _Guess(ctypes.Structure):
    """``Guess`` in history.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("index", "kept", "paths", "ends", "depths", "newest", "matches")),
        *((name, ctypes.c_void_p) for name in ("positions", "ids", "logits", "seen")),
        *((name, ctypes.c_int64) for name in ("count", "width", "most", "window")),
        ("favour", ctypes.c_double),
    ]


def _library() -> ctypes.CDLL:
    """What history.c is compiled to.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    return build(Path(__file__).with_name("history.c"))


def unbuilt() -> str | None:
    """Why a text cannot be recalled on this machine; None if it can."""
    try:
        _library()
    except Unbuilt as error:
        return str(error)
    return None


class SuffixIndex:
    """The positions of a text by the tokens up to them.

    Attributes:
        call: the same for C.
    """

    def __init__(self) -> None:
        self._library, self._orders = _library(), np.array(_ORDERS)
        self.call = _Index(orders=self._orders.ctypes.data, kinds=len(_ORDERS), reach=_REACH)
        self._text = np.empty(0, np.int32)
        self._grow(_LEAST)

    def __len__(self) -> int:
        """How many tokens there are."""
        return int(self.call.count)

    @staticmethod
    def bytes_for(tokens: int) -> int:
        """What a text of so many tokens takes: itself, and by order a link for each token and a table."""
        return np.dtype(np.int32).itemsize * (2 * len(_ORDERS) + 1) * max(_LEAST, 1 << (tokens - 1).bit_length())

    def last(self) -> list[int]:
        """The text's last tokens, as many as count."""
        return self._text[max(0, len(self) - _ORDERS[-1]) : len(self)].tolist()

    def _grow(self, room: int) -> None:
        """Make room, and index the text anew in larger tables."""
        text, kinds, count = self._text, len(self._orders), len(self)
        self._text = np.empty(room, np.int32)
        self._text[:count] = text[:count]
        self._last, self._before = np.full((kinds, room), -1, np.int32), np.empty((kinds, room), np.int32)
        call, self.call.count = self.call, 0
        call.text, call.last, call.before = (each.ctypes.data for each in (self._text, self._last, self._before))
        call.room, call.bits = room, room.bit_length() - 1
        self._library.tswift_index(ctypes.byref(call), ctypes.c_int64(count))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text: amortised constant time for each."""
        count = len(self) + len(tokens)
        if count > len(self._text):
            self._grow(1 << (count - 1).bit_length())
        self._text[len(self) : count] = tokens
        self._library.tswift_index(ctypes.byref(self.call), ctypes.c_int64(count))


class TopKLogits:
    """The distributions after each token of a text, each by its likeliest tokens.

    Args:
        vocab_size: number of token ids.
        kept: tokens kept of each distribution.
        params: with the biases of tokens, and those that are never drawn, which are not kept.

    Attributes:
        call: the same for C.
    """

    def __init__(self, vocab_size: int, kept: int, params: SamplingParams) -> None:
        kept, kind = _kept_as(vocab_size, kept)
        self._library = _library()
        self._count = 0
        self._slots, self._space = np.zeros(vocab_size, np.int32), np.empty(vocab_size, np.float32)
        self._constants = constants(params, "cpu")
        self.call = _Logits(
            slots=self._slots.ctypes.data,
            space=self._space.ctypes.data,
            kept=kept,
            wide=kind == np.int32,
            vocabulary=vocab_size,
            biases=len(params.logit_bias),
            bans=len(params.banned),
        )
        for name, each in zip(("biased", "bias", "banned"), self._constants, strict=True):
            setattr(self.call, name, each.data_ptr())
        self._ids = np.empty((0, kept), kind)
        self._logs = np.empty((0, kept), np.float16)  # log-probabilities
        self._scales = np.empty(0, np.float32)  # what to add to get logits

    def __len__(self) -> int:
        """Of how many tokens it is known what follows."""
        return self._count

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """What those of so many tokens take: ``6 * kept + 4`` bytes each, ``4 * kept + 4`` with up to 65,536 ids."""
        kept, kind = _kept_as(vocab_size, kept)
        return tokens * (kept * (np.dtype(kind).itemsize + 2) + 4)

    def think(self, logits: Tensor) -> None:
        """Append positions whose logits ``[n, V]`` are known."""
        rows = logits.float().cpu().contiguous()
        first, count = self._room(len(rows)).start, len(rows)
        where = ctypes.c_void_p(rows.data_ptr())
        self._library.tswift_think(ctypes.byref(self.call), where, ctypes.c_int64(count), ctypes.c_int64(first))

    def fill(self, came: Sequence[int]) -> None:
        """Append positions of which it is known only what token came after each."""
        rows = self._room(len(came))
        self._ids[rows], self._logs[rows], self._scales[rows] = 0, -np.inf, 0
        self._ids[rows, 0], self._logs[rows, 0] = came, 0

    def _room(self, more: int) -> slice:
        """The next places, with the arrays grown as needed; untouched memory is not taken yet."""
        start, self._count = self._count, self._count + more
        if self._count > len(self._scales):
            size = max(2 * start, self._count, 1024)
            self._ids, self._logs = _grown(self._ids, size), _grown(self._logs, size)
            self._scales = _grown(self._scales, size)
            for name, rows in (("ids", self._ids), ("logs", self._logs), ("scales", self._scales)):
                setattr(self.call, name, rows.ctypes.data)
        return slice(start, self._count)


def _kept_as(vocab_size: int, kept: int) -> tuple[int, type[np.uint16] | type[np.int32]]:
    """How many tokens are kept of a distribution, and as what."""
    return min(kept, vocab_size), np.uint16 if vocab_size <= 1 << 16 else np.int32


def _grown(rows: NDArray[Any], size: int) -> NDArray[Any]:
    larger = np.empty((size, *rows.shape[1:]), rows.dtype)
    larger[: len(rows)] = rows
    return larger


_ROUND = 8  # paths asked about at a time
_PLACES = 4  # averaged; eight are hardly better
_FAVOUR = 2.0  # a place weighs e^2 times one whose match is a token shorter
_PROMPT_ROWS = 64  # logits of a prompt that are computed at a time


@dataclass(frozen=True)
class Candidates:
    """What may be drawn at a node.

    Attributes:
        tokens: the likeliest draws, best first.
        scores: of each, noise included.
        match: tokens of the longest match; 0 for none.
        place: position of its last token.
    """

    tokens: list[int]
    scores: list[float]
    match: int
    place: int


class LogitHistory:
    """What the target thought after each token of a text, to be found by the tokens before.

    Args:
        target: the model.
        shared_noise: as for :class:`~tswift.drafting.heads.HeadSource`.
        kept: tokens kept of each distribution.
    """

    def __init__(self, target: Target, shared_noise: bool, kept: int = 64) -> None:
        self._library = _library()
        self._target, self._shared_noise, self._kept = target, shared_noise, kept
        self._contexts = SuffixIndex()
        self._thoughts: TopKLogits | None = None

    def __len__(self) -> int:
        """After how many tokens of the text it is known what comes: all but the last one."""
        return len(self._contexts)

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """Bytes of the machine's own memory that a text of so many tokens takes, prompt included.

        With 64 tokens kept of each distribution, 312 to 364 a token, or 128 more with over 65,536 token ids.
        """
        newest = vocab_size * np.dtype(np.int64).itemsize
        return TopKLogits.bytes_for(tokens, vocab_size, kept) + SuffixIndex.bytes_for(tokens) + newest

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Take in the pass over the next chunk of the prompt."""
        for part in forwarded.hidden.split(_PROMPT_ROWS):
            self._begun(context.sampler).think(self._target.logits(part))

    def _begun(self, sampler: Sampler) -> TopKLogits:
        """What is kept of the text; the sampling rule is known with its first tokens."""
        if self._thoughts is None:
            vocab_size, params = self._target.vocab_size, sampler.params
            self._thoughts = TopKLogits(vocab_size, self._kept, params)
            width = _PLACES * self._thoughts.call.kept
            self._newest = np.full(vocab_size, -(1 << 62), np.int64)
            self._ends, self._depths, self._positions = np.empty((3, _ROUND), np.int64)
            self._matches = np.empty((_ROUND, 2), np.int64)
            self._ids, self._logits = np.empty((_ROUND, width), np.int32), np.empty((_ROUND, width), np.float32)
            self._seen = np.empty((_ROUND, width), np.uint8) if params.penalises else None
            self._call = _Guess(
                index=ctypes.addressof(self._contexts.call),
                kept=ctypes.addressof(self._thoughts.call),
                ends=self._ends.ctypes.data,
                depths=self._depths.ctypes.data,
                newest=self._newest.ctypes.data,
                matches=self._matches.ctypes.data,
                positions=self._positions.ctypes.data,
                ids=self._ids.ctypes.data,
                logits=self._logits.ctypes.data,
                seen=None if self._seen is None else self._seen.ctypes.data,
                width=width,
                most=_PLACES,
                window=params.window,
                favour=_FAVOUR,
            )
            # biases are in what is kept already, and an unusual order of filters makes guesses a bit worse
            rule = replace(params, logit_bias=LogitBias(), banned=(), order="")
            noisy = self._positions if self._shared_noise else None
            program = DrawProgram(rule, seed_stream(sampler.seed), width)
            self._rank = program.rank_rows_of(self._ids, self._logits, self._seen, noisy)
        return self._thoughts

    def committed(self, context: Context) -> None:
        """Take in what has been committed since the last call: the text, and the last pass over it.

        Where nobody asked during other passes, nothing is known but the tokens that came.
        """
        text, thoughts = context.text, self._begun(context.sampler)
        known = len(self._contexts)
        fresh = text[known:-1]  # what comes after the last token is not known yet
        late = len(text) - 1 - len(thoughts)
        seen = 0 if context.logits is None else min(late, len(context.path))
        if seen < late:
            thoughts.fill(text[len(thoughts) + 1 :][: late - seen])
        if seen and context.logits is not None:
            nodes = torch.tensor(list(context.path)[-seen:]).to(context.logits.device, non_blocking=True)
            thoughts.think(context.logits[nodes])
        self._contexts.extend(fresh)
        for position in range(max(0, known, len(text) - self._call.window), len(text)):
            self._newest[text[position]] = position

    def guess(self, paths: Sequence[Sequence[int]], most: int) -> list[Candidates]:
        """What may be drawn after the text and each of some paths below it.

        Args:
            paths: the root, the text's last token, and drafted tokens below it.
            most: tokens wanted for each, up to 16.
        """
        guesses: list[Candidates] = []
        for start in range(0, len(paths), _ROUND):
            guesses += self._guess(paths[start : start + _ROUND], most)
        return guesses

    def _guess(self, paths: Sequence[Sequence[int]], most: int) -> list[Candidates]:
        text = self._contexts.last()
        whole = [[*text, *path][-max(_ORDERS[-1], len(path)) :] for path in paths]
        tokens, count = np.array([token for each in whole for token in each], np.int32), len(paths)
        self._ends[:count] = [*accumulate(map(len, whole))]
        self._depths[:count] = [*map(len, paths)]
        self._call.paths, self._call.count = tokens.ctypes.data, count
        self._library.tswift_recall(ctypes.byref(self._call))
        return [
            Candidates(ids[:likely], scores[:likely], length, place)
            for (place, length), ids, scores in zip(
                self._matches[:count].tolist(), *self._rank(count, most), strict=True
            )
            for likely in [sum(score > -inf for score in scores)]
        ]


_WIDTH = 3  # candidates offered below a node
_LONG = 12  # a match from which on the text is followed
_AHEAD = 8  # tokens that it is followed at a time
_STEP, _FAR = 0.5, 4  # gaps between scores are told apart by this much, and up to so many times
# chances of the first guess by match and lead, and of the others by how far they are behind, measured on texts of the
# bundled model
_FIRST = {
    1: (0.28, 0.34, 0.42, 0.50, 0.56),
    2: (0.42, 0.53, 0.68, 0.73, 0.83),
    3: (0.44, 0.62, 0.77, 0.80, 0.88),
    4: (0.56, 0.76, 0.86, 0.90, 0.95),
    _LONG: (0.70, 0.90, 0.95, 0.97, 0.98),
}
_OTHERS = ((0.26, 0.17, 0.10, 0.07, 0.06), (0.13, 0.09, 0.05, 0.04, 0.02))
_OPINIONS = (0.3, 0.6, 0.85)  # chances that others give are told apart by these
_UNNAMED, _ALONE = -1, -2  # others name other tokens; there are no others
_DOUBT = 0.3  # what it does to the odds that others name other tokens
_SECONDS = 1e-4  # that a guess takes on the host
_GAIN = 0.4  # tokens that a guess gains if the text goes through its node


class HistorySource(Source):
    """Guesses below the likeliest nodes of a tree.

    It comes after the other sources, as it knows other things than they do: where it agrees with one of them both are
    right far more often (84% of such tokens were drawn, of the bundled model), and where not, far less.

    Args:
        recall: of the text; nothing yet.
        budget: says whether a guess pays.
        limit: most nodes of the tree.

    Attributes:
        follows: whether the text is followed where a long match stood before.
    """

    name = "reuse"

    def __init__(self, recall: LogitHistory, budget: TreeBudget, limit: int) -> None:
        self._recall, self._budget, self._limit = recall, budget, limit
        self.follows = True
        self._seconds = 0.0  # of the last draft

    def propose(self, tree: CandidateTree, context: Context) -> None:
        """Offer candidates below the likeliest nodes, and then below the likeliest of those that came of it."""
        self._seconds = 0.0
        asked: set[int] = set()
        while nodes := self._pay(tree, asked, context):
            guesses = self._guess(tree, nodes, context)
            asked.update(nodes)
            for node, guess in zip(nodes, guesses, strict=True):
                self._offer(tree, node, guess)
            for node, guess in zip(nodes, guesses, strict=True):
                if guess.match == _LONG and self.follows:
                    self._follow(tree, node, guess, asked, context)

    def _pay(self, tree: CandidateTree, asked: set[int], context: Context) -> list[int]:
        """The likeliest nodes to guess below, those left out that were asked or do not pay."""
        price = _SECONDS + self._budget.costs.node(context.kv.length)
        nodes: list[int] = []
        for node in tree.likeliest(self._limit):
            if len(nodes) == _ROUND or not self._budget.pays_off(_GAIN * tree.path_prob[node], price):
                break
            if node not in asked and tree.depths[node] < tree.depth:
                nodes.append(node)
        return nodes

    def _guess(
        self, tree: CandidateTree, nodes: Sequence[int], context: Context, ends: Sequence[Sequence[int]] = ()
    ) -> list[Candidates]:
        """What may be drawn below nodes, or below so many tokens more."""
        self._seconds += _SECONDS * len(nodes)
        unknown = context.text[len(self._recall) :]  # the root, and what was drafted of a text that is itself a draft
        paths = [[*unknown, *tree.path(node)] for node in nodes]
        if ends:
            paths = [[*path, *end] for path, end in zip(paths, ends, strict=True)]
        return self._recall.guess(paths, _WIDTH)

    def _offer(self, tree: CandidateTree, node: int, guess: Candidates) -> None:
        named = {token: tree.path_prob[child] / tree.path_prob[node] for token, child in tree.children[node].items()}
        match = guess.match if guess.match == _LONG else min(guess.match, 4)
        for rank, (token, score) in enumerate(zip(guess.tokens, guess.scores, strict=True)):
            rival = guess.scores[0] if rank else guess.scores[1] if len(guess.scores) > 1 else -1e9
            step = round(min(abs(score - rival) / _STEP, _FAR))
            chance = _OTHERS[rank - 1][step] if rank else _FIRST[match][step]
            opinion = _ALONE
            if named:
                theirs = named.get(token)
                opinion = _UNNAMED if theirs is None else bisect(_OPINIONS, theirs)
                odds = chance / (1 - chance) * (_DOUBT if theirs is None else theirs / (1 - theirs))
                chance = odds / (1 + odds)
            tree.propose(node, token, self.name, (match, rank, step, opinion), chance)

    def _follow(self, tree: CandidateTree, node: int, guess: Candidates, asked: set[int], context: Context) -> None:
        """Offer along what followed a long match, at once, as long as that is what is guessed."""
        ahead = context.text[guess.place + 1 : guess.place + 1 + min(_AHEAD, tree.depth - tree.depths[node] - 1)]
        ends = [ahead[:count] for count in range(1, len(ahead) + 1)]
        for token, further in zip(ahead, self._guess(tree, [node] * len(ends), context, ends), strict=True):
            child = tree.children[node].get(token) if guess.tokens[:1] == [token] else None
            if child is None or child in asked:
                return
            asked.add(child)
            self._offer(tree, child, further)
            node, guess = child, further

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the last draft's guesses."""
        return self._seconds
