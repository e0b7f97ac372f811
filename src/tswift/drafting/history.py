"""The history of a text's logits: draft from what the model computed where the text stood like this before.

The paper reuses n-grams of the text: what was drawn. That was one draw with its own noise; here the noise is another,
and logits, given the noise that is coming, tell what will be drawn. No model is asked, so it reaches as deep as it
holds; and the longer the text, the longer its matches.

Matches are found by chains of equal hashes, as in LZ77 compressors. A suffix automaton would know the longest match of
any length, for about a kilobyte of Python objects a token, but not which of its occurrences are the last ones. Chains
are arrays: 56 to 80 bytes a token, and the last ones come first.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, repeat
from math import inf
from operator import mul
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.decoding.drafter import Context
from tswift.decoding.params import LogitBias, SamplingParams, bias, constants, warp
from tswift.decoding.sampling import Sampler
from tswift.drafting.dynamic_tree import CandidateTree, TreeBudget
from tswift.models.target import Target

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_LEAST = 1 << 10  # places of an empty table
_ORDERS = (1, 2, 3, 4, 6, 12)
_PARAMS = SamplingParams()


class SuffixIndex:
    """The positions of a text by the tokens up to them.

    Args:
        orders: lengths of context that are looked up, ascending. What a match has beyond one of them is counted up to
            the largest.
        reach: links of one chain that are followed at most, so that a context met a thousand times costs no more than
            one met sixteen times.
    """

    def __init__(self, orders: Sequence[int] = _ORDERS, reach: int = 16) -> None:
        self._orders, self._reach, self._longest = tuple(orders), reach, orders[-1]
        # one factor for each place of a context, counted from its end
        self._factors = list(
            islice(accumulate(repeat(_FACTOR), lambda power, factor: power * factor & _MASK), self._longest)
        )
        self._text: list[int] = []
        self._bits = _LEAST.bit_length() - 1
        self._allocate()

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._text)

    @staticmethod
    def bytes_for(tokens: int) -> int:
        """What a text of so many tokens takes: by order a link for each and a table, and pointers to the tokens."""
        places = max(_LEAST, 1 << tokens.bit_length())
        return len(_ORDERS) * array("i").itemsize * (tokens + places) + 8 * tokens

    def last(self) -> list[int]:
        """The text's last tokens, as many as count."""
        return self._text[-self._longest :]

    def _allocate(self) -> None:
        empty = array("i", [-1]) * (1 << self._bits)
        self._last = [array("i", empty) for _ in self._orders]  # the last position of a hash
        self._before = [array("i") for _ in self._orders]  # for each position the one before it of the same hash

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text: amortised constant time for each."""
        if len(self._text) + len(tokens) > 1 << self._bits:
            self._text += tokens
            self._bits = len(self._text).bit_length()
            self._rebuild()
            return
        for token in tokens:
            self._text.append(token)
            at = len(self._text) - 1
            places = self._places(self._text[-self._longest :])
            for last, before, place in zip(self._last, self._before, places, strict=True):
                before.append(last[place] if place >= 0 else -1)
                if place >= 0:
                    last[place] = at

    def _places(self, context: Sequence[int]) -> list[int]:
        """Where each order's hash of a context's end stands in its table; -1 for an order longer than the context."""
        values = list(accumulate(map(mul, reversed(context), self._factors)))
        shift, count = 64 - self._bits, len(values)
        return [(values[order - 1] & _MASK) >> shift if order <= count else -1 for order in self._orders]

    def _rebuild(self) -> None:
        """Fill larger tables from the whole text, as one token at a time would have filled them."""
        self._allocate()
        count = len(self._text)
        tokens = np.array(self._text, np.uint64)
        value, done = np.zeros(count, np.uint64), 0
        for index, order in enumerate(self._orders):
            for back in range(done, min(order, count)):
                value[back:] += tokens[: count - back] * np.uint64(self._factors[back])
            done = order
            places = (value >> np.uint64(64 - self._bits)).astype(np.int64)
            whole = np.argsort(places[order - 1 :], kind="stable") + order - 1  # positions by place, then in order
            before = np.full(count, -1, np.int32)
            same = places[whole[1:]] == places[whole[:-1]]
            before[whole[1:][same]] = whole[:-1][same]
            last = np.frombuffer(self._last[index], np.int32)
            last[places[whole]] = whole  # of equal places the last one counts
            self._before[index] = array("i", before.tobytes())

    def find(self, context: Sequence[int], most: int) -> list[tuple[int, int]]:
        """The positions whose tokens up to there end as a context does, those of the longest match first.

        Args:
            context: at least one token; its last ones count.
            most: positions wanted.

        Returns:
            Up to ``most`` pairs (position of the match's last token, length of the match, at most the longest order);
            of equal lengths the later first. Where no chain is longer than ``reach``, none is better.
        """
        text, context = self._text, list(context[-self._longest :])
        found: dict[int, int] = {}
        orders = range(len(self._orders))
        places = self._places(context)
        for index in reversed(orders):
            if places[index] < 0:
                continue
            order, before = self._orders[index], self._before[index]
            tail, at = context[-order:], self._last[index][places[index]]
            for _ in range(self._reach):
                if at < 0:
                    break
                if at not in found and text[at - order + 1 : at + 1] == tail:
                    length = order
                    while length < len(context) and length <= at and text[at - length] == context[-1 - length]:
                        length += 1
                    found[at] = length
                at = before[at]
            if len(found) >= most:
                break
        ranked = sorted(found.items(), key=lambda match: (match[1], match[0]), reverse=True)
        return ranked[:most]


_ROWS = 64  # of logits ranked at a time


class TopKLogits:
    """The distributions after each token of a text, each by its likeliest tokens.

    Args:
        vocab_size: number of token ids.
        kept: tokens kept of each distribution.
        params: with the biases of tokens, and those that are never drawn, which are not kept.
    """

    def __init__(self, vocab_size: int, kept: int = 64, params: SamplingParams = _PARAMS) -> None:
        kept, kind = _kept_as(vocab_size, kept)
        self._params = params
        self._constants: tuple[Tensor, Tensor, Tensor] | None = None
        self._count = 0
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
        for part in logits.split(_ROWS):
            rows = self._room(len(part))
            part = part.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)  # of a broken position
            if self._constants is None:  # sent to the device once, not in every step
                self._constants = constants(self._params, part.device)
            bias(part, self._params, self._constants)
            scales = part.logsumexp(-1)
            best = part.topk(self._ids.shape[1])
            told = torch.cat([best.values - scales[:, None], scales[:, None], best.indices.float()], -1).cpu().numpy()
            kept = self._ids.shape[1]
            self._logs[rows], self._scales[rows], self._ids[rows] = told[:, :kept], told[:, kept], told[:, kept + 1 :]

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
        return slice(start, self._count)

    def average(self, places: NDArray[np.int64], shares: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Weighted means of some distributions.

        Args:
            places: ``[n, k]`` positions, each below ``len``.
            shares: ``[n, k]``, of which those of a row add up to one.

        Returns:
            Token ids ``[n, m]``, and their logits ``[n, m]`` (float64): logarithms of the mean, moved by the mean of
            what the distributions' own logits were moved by, as a penalty looks at the sign. Rows are filled up with
            the id 0 and ``-inf``.
        """
        count = len(places)
        scale = (self._scales[places] * shares).sum(-1)
        rows = np.arange(count)[:, None, None]
        keys = (self._ids[places] + (rows << 32)).ravel()  # one number for a token of a row
        sums = (np.exp(self._logs[places], dtype=np.float32) * shares[:, :, None]).ravel()
        order = keys.argsort(kind="stable")
        keys, sums = keys[order], sums[order]
        fresh = np.empty(len(keys), bool)
        fresh[0] = True
        np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
        starts = fresh.nonzero()[0]
        keys, sums = keys[starts], np.add.reduceat(sums, starts)
        row = keys >> 32
        begins = row.searchsorted(np.arange(count + 1))
        column, width = np.arange(len(keys)) - begins[row], int((begins[1:] - begins[:-1]).max())
        ids, logits = np.zeros((count, width), np.int64), np.full((count, width), -np.inf)
        ids[row, column] = keys & 0xFFFFFFFF
        with np.errstate(divide="ignore"):
            logits[row, column] = np.log(sums) + scale[row]
        return torch.from_numpy(ids), torch.from_numpy(logits)


def _kept_as(vocab_size: int, kept: int) -> tuple[int, type[np.uint16] | type[np.int32]]:
    """How many tokens are kept of a distribution, and as what."""
    return min(kept, vocab_size), np.uint16 if vocab_size <= 1 << 16 else np.int32


def _grown(rows: NDArray[Any], size: int) -> NDArray[Any]:
    larger = np.empty((size, *rows.shape[1:]), rows.dtype)
    larger[: len(rows)] = rows
    return larger


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


_NONE = Candidates([], [], 0, -1)


class LogitHistory:
    """What the target thought after each token of a text, to be found by the tokens before.

    Args:
        target: the model.
        shared_noise: as for :class:`~tswift.drafting.heads.HeadSource`.
        kept: tokens kept of each distribution.
    """

    def __init__(self, target: Target, shared_noise: bool, kept: int = 64) -> None:
        self._target, self._shared_noise, self._kept = target, shared_noise, kept
        self._contexts = SuffixIndex()
        self._thoughts: TopKLogits | None = None

    def __len__(self) -> int:
        """After how many tokens of the text it is known what comes: all but the last one."""
        return len(self._contexts)

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """Bytes of the machine's own memory that a text of so many tokens takes, prompt included.

        With 64 tokens kept of each distribution, 316 to 340 a token, or 128 more with over 65,536 token ids.
        """
        newest = vocab_size * np.dtype(np.int64).itemsize
        return TopKLogits.bytes_for(tokens, vocab_size, kept) + SuffixIndex.bytes_for(tokens) + newest

    def prefilled(self, hidden: Tensor, sampler: Sampler) -> None:
        """Take in the next chunk of the prompt's last hidden states ``[n, H]``."""
        for part in hidden.split(_PROMPT_ROWS):
            self._begun(sampler).think(self._target.logits(part))

    def _begun(self, sampler: Sampler) -> TopKLogits:
        if self._thoughts is None:
            self._thoughts = TopKLogits(self._target.vocab_size, self._kept, sampler.params)
            self._newest = np.full(self._target.vocab_size, -(1 << 62), np.int64)
            self._params = replace(sampler.params, logit_bias=LogitBias(), banned=())
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
        for position in range(max(0, known, len(text) - self._params.window), len(text)):
            self._newest[text[position]] = position

    def guess(self, paths: Sequence[Sequence[int]], sampler: Sampler, most: int) -> list[Candidates]:
        """What may be drawn after the text and each of some paths below it.

        Args:
            paths: the root, the text's last token, and drafted tokens below it.
            sampler: the sampling rule.
            most: tokens wanted for each.
        """
        assert self._thoughts is not None
        text, held = self._contexts.last(), len(self._contexts)
        found = [self._contexts.find([*text, *path], _PLACES) for path in paths]
        rows = [index for index, places in enumerate(found) if places]
        guesses = [_NONE] * len(paths)
        if not rows:
            return guesses
        places = np.zeros((len(rows), _PLACES), np.int64)
        lengths = np.full((len(rows), _PLACES), -np.inf)
        for at, row in enumerate(rows):
            for column, (place, length) in enumerate(found[row]):
                places[at, column], lengths[at, column] = place, length
        shares = np.exp(_FAVOUR * (lengths - lengths[:, :1]))
        shares /= shares.sum(-1, keepdims=True)
        tokens, logits = self._thoughts.average(places, shares)
        positions = [held + len(paths[row]) for row in rows]
        seen = None
        if self._params.penalises:
            window, ids = self._params.window, tokens.numpy()
            near = self._newest[ids] >= np.array(positions)[:, None] - window
            for at, row in enumerate(rows):
                for token in paths[row][-window:]:
                    near[at] |= ids[at] == token
            seen = torch.from_numpy(near)
        scores = warp(logits, seen, self._params)
        if self._shared_noise:
            scores += sampler.noise_of(positions, tokens)
        best = scores.topk(min(most, scores.shape[1]))
        chosen = tokens.gather(1, best.indices).tolist()
        for row, ids, values in zip(rows, chosen, best.values.tolist(), strict=True):
            count = sum(value > -inf for value in values)
            guesses[row] = Candidates(ids[:count], values[:count], found[row][0][1], found[row][0][0])
        return guesses


_WIDTH = 3  # candidates offered below a node
_ROUND = 8  # nodes asked about at a time
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


class HistorySource:
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
        self.cost_s = 0.0

    def start(self, context: Context) -> None:
        """Nothing: which nodes are likely is not known yet."""

    def propose(self, tree: CandidateTree, context: Context) -> None:
        """Offer candidates below the likeliest nodes, and then below the likeliest of those that came of it."""
        self.cost_s = 0.0
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
        self.cost_s += _SECONDS * len(nodes)
        unknown = context.text[len(self._recall) :]  # the root, and what was drafted of a text that is itself a draft
        paths = [[*unknown, *tree.path(node)] for node in nodes]
        if ends:
            paths = [[*path, *end] for path, end in zip(paths, ends, strict=True)]
        return self._recall.guess(paths, context.sampler, _WIDTH)

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

    def committed(self, context: Context, most: int) -> None:
        """Nothing: whose memory it is takes in the text."""
