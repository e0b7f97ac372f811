"""The history of a text's logits: draft from what the model computed where the text stood like this
before.

The paper reuses n-grams of the text: what was drawn. That was one draw with its own noise; here the
noise is another, and logits, given the noise that is coming, tell what will be drawn. No model is
asked, so it reaches as deep as it holds; and the longer the text, the longer its matches.

Matches are found by chains of equal hashes, as in LZ77 compressors. A suffix automaton would know
the longest match of any length, for about a kilobyte of Python objects a token, but not which of
its occurrences are the last ones. Chains are arrays: 52 to 104 bytes a token, and the last ones
come first. C functions look, average and rank: up to eight guesses together take about a tenth of a
millisecond.
"""

from __future__ import annotations

import ctypes
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.drafter import Context, Source
from tswift.decoding.pass_costs import PassCosts
from tswift.drafting.dynamic_tree import CandidateTree, TreeBudget
from tswift.forward.passes import Forwarded
from tswift.forward.target import Target
from tswift.native_build import Unbuilt, build, structures
from tswift.sampling.parameters import LogitBias, bias, constants
from tswift.sampling.rule import Sampler, seed_stream
from tswift.sampling.sampler_c import CSampler, library

_SOURCE = Path(__file__).with_name("history.c")
_C = structures(_SOURCE)
_LEAST = 1 << 10  # places of an empty table
# lengths of context that are looked up; a match counts up to the largest
_ORDERS = (1, 2, 3, 4, 6, 12)
# links of a chain that are followed: a context met a thousand times costs no more than one met 16
# times
_REACH = 16
_PATHS_TOGETHER = 8  # paths asked about at a time
_PLACES = 4  # averaged; eight are hardly better
_WEIGHT_PER_TOKEN = 2.0  # a place weighs e^2 times one whose match is a token shorter
_TOKENS_TOGETHER = 8  # tokens that are taken in at once, where logits are not worth keeping
_PROMPT_ROWS = 64  # logits of a prompt that are computed at a time


def _point(call: ctypes.Structure, arrays: Mapping[str, np.ndarray]) -> None:
    """Let a structure's pointers point to arrays of these names,
    which have to be kept elsewhere.
    """
    for name in arrays.keys() & {each[0] for each in call._fields_}:
        setattr(call, name, arrays[name].ctypes.data)


def unbuilt() -> str | None:
    """Why a text cannot be recalled on this machine; None if it can."""
    try:
        build(_SOURCE)
        library()
    except Unbuilt as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Candidates:
    """What may be drawn at a node."""

    tokens: list[int]  # the likeliest draws, best first
    scores: list[float]  # of each, noise included
    match: int  # tokens of the longest match; 0 for none
    place: int  # position of its last token


class LogitHistory:
    """What the target thought after each token of a text, to be found by the tokens before.

    Of each distribution its likeliest tokens are kept, by their log-probabilities; tokens that are
    never drawn are not.

    Args:
        target: the model.
        shared_noise: as for :class:`~tswift.drafting.heads.HeadSource`.
        kept: tokens kept of each distribution.

    Attributes:
        costs: what passes cost, if logits are to be kept only where drafts of them can pay, and
            keeping them is nothing beside a pass or the text repeats itself; elsewhere it is known
            what came.
    """

    costs: PassCosts | None = None

    def __init__(self, target: Target, shared_noise: bool, kept: int = 64) -> None:
        self._library = build(_SOURCE)
        self._orders = np.array(_ORDERS)
        self._target = target
        self._on_host = not target.on_cuda
        self._shared_noise = shared_noise
        kept, self._kind = _kept_as(target.vocab_size, kept)
        self._index = _C.Index(orders=self._orders.ctypes.data, kinds=len(_ORDERS), reach=_REACH)
        self.columns = 2 * kept + 1
        self._logits = _C.Logits(
            kept=kept, wide=self._kind == np.int32, vocabulary=target.vocab_size
        )
        self._known = 0  # tokens of which it is known what follows, or which of them came
        self._tables: dict[str, np.ndarray] = {}
        self._grow(_LEAST)
        # the arguments of a guess; the sampling rule is known with the first tokens
        self._ask: Any = None

    def __len__(self) -> int:
        """After how many tokens of the text it is known what comes: all but the last one."""
        return int(self._index.count)

    @property
    def repeats(self) -> float:
        """The share of late tokens that came as they had come last after the same three."""
        return float(self._index.repeats)

    def pays(self, costs: PassCosts, keys: int, least: float = 0.0) -> bool:
        """Whether drafts may be worth their time over so many keys: they save it where the text
        repeats itself, late or, if it does less, in so large a share (``least``) of it.
        """
        repeats = max(self.repeats, least)
        return repeats >= _REPEATS and repeats * costs.saved(keys, _RIGHT) > _SAVED

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """Bytes of the machine's own memory that a text of so many tokens takes, prompt included.

        With 64 tokens kept of each distribution, 312 to 364 a token, or 128 more with over 65,536
        token ids: with up to 65,536 ids ``4 * kept + 4`` of a distribution, the text, and by order
        a link for each token and a table.
        """
        kept, kind = _kept_as(vocab_size, kept)
        index = 4 * (2 * len(_ORDERS) + 1) * max(_LEAST, 1 << (tokens - 1).bit_length())
        return tokens * (kept * (np.dtype(kind).itemsize + 2) + 4) + index + 8 * vocab_size

    def _grow(self, room: int) -> None:
        """Make room for so many tokens, and index the text anew in larger tables;
        untouched memory is not taken yet.
        """
        old = self._tables
        count = len(self)
        kept = self._logits.kept
        kinds = len(_ORDERS)
        rows = {
            "text": np.empty(room, np.int32),
            "ids": np.empty((room, kept), self._kind),
            "logs": np.empty((room, kept), np.float16),  # log-probabilities
            "scales": np.empty(room, np.float32),  # what to add to get logits
        }
        for name in old.keys() & rows.keys():
            rows[name][: len(old[name])] = old[name]
        links = {
            "last": np.full((kinds, room), -1, np.int32),
            "before": np.empty((kinds, room), np.int32),
        }
        self._tables = rows | links
        for call in (self._index, self._logits):
            _point(call, self._tables)
        self._index.count = 0
        self._index.room = room
        self._index.bits = room.bit_length() - 1
        self._library.tswift_index(ctypes.byref(self._index), ctypes.c_int64(count))

    def _next(self, more: int) -> slice:
        """The rows of the next distributions."""
        start = self._known
        self._known = self._known + more
        if self._known > len(self._tables["text"]):
            self._grow(1 << (self._known - 1).bit_length())
        return slice(start, self._known)

    def digest(self, logits: Tensor) -> Tensor:
        """What :meth:`_keep` takes of logits ``[n, V]``, on their device: ``[n, columns]`` float64.

        The ids of the likeliest tokens, their log-probabilities, and what to add to get logits.
        """
        kept = self._logits.kept
        known = logits.float()
        known = bias(known.where(known.isfinite(), -inf), self._params, self._constants)
        best = known.topk(kept)
        scales = known.logsumexp(1, keepdim=True)
        scales = scales.where(scales.isfinite(), 0.0)
        return torch.cat(
            [best.indices.double(), (best.values - scales).double(), scales.double()], 1
        )

    def _keep_digest(self, digest: np.ndarray) -> None:
        """Keep the distributions of the next positions, of which this is known."""
        kept = self._logits.kept
        rows = self._next(len(digest))
        self._tables["ids"][rows] = digest[:, :kept]
        self._tables["logs"][rows] = digest[:, kept : 2 * kept]
        self._tables["scales"][rows] = digest[:, -1]

    def _keep(self, logits: Tensor) -> None:
        """Keep the distributions of the next positions, whose logits ``[n, V]`` are known."""
        if not self._on_host:
            self._keep_digest(self.digest(logits).cpu().numpy())
            return
        rows = logits.float().contiguous()
        first = self._next(len(rows)).start
        count = len(rows)
        where = ctypes.c_void_p(rows.data_ptr())
        self._library.tswift_append_logits(
            ctypes.byref(self._logits), where, ctypes.c_int64(count), ctypes.c_int64(first)
        )

    def _begin(self, sampler: Sampler) -> None:
        """Get ready for guesses by a sampling rule."""
        vocab_size = self._target.vocab_size
        params = sampler.params
        width = _PLACES * self._logits.kept
        self._params = params
        self._constants = constants(params, sampler.newest.device)
        biases = (each.numpy() for each in constants(params, "cpu"))
        self._fixed: dict[str, np.ndarray] = {
            "newest": np.full(vocab_size, -(1 << 62), np.int64),
            "slots": np.zeros(vocab_size, np.int32),
            "space": np.empty(vocab_size, np.float32),
            **dict(zip(("biased", "bias", "banned"), biases, strict=True)),
        }
        self._logits.biases = len(params.logit_bias)
        self._logits.bans = len(params.banned)
        _point(self._logits, self._fixed)
        self._asked: dict[str, np.ndarray] = {
            "ends": np.empty(_PATHS_TOGETHER, np.int64),
            "depths": np.empty(_PATHS_TOGETHER, np.int64),
            "positions": np.empty(_PATHS_TOGETHER, np.int64),
            "matches": np.empty((_PATHS_TOGETHER, 2), np.int64),
            "ids": np.empty((_PATHS_TOGETHER, width), np.int32),
            "logits": np.empty((_PATHS_TOGETHER, width), np.float32),
        } | ({"seen": np.empty((_PATHS_TOGETHER, width), np.uint8)} if params.penalises else {})
        self._ask = _C.Recall(
            width=width, most=_PLACES, window=params.window, favour=_WEIGHT_PER_TOKEN
        )
        self._ask.index = ctypes.addressof(self._index)
        self._ask.kept = ctypes.addressof(self._logits)
        _point(self._ask, self._fixed | self._asked)
        # biases are in what is kept already, and an unusual order of filters makes guesses a bit
        # worse
        rule = replace(params, logit_bias=LogitBias(), banned=(), order="", min_tokens=0)
        program = CSampler(rule, seed_stream(sampler.seed), width)
        noisy = self._shared_noise
        given = self._asked["ids"], self._asked["logits"], self._asked.get("seen")
        # on a device they are not looked at
        self._rank = program.row_ranker(
            *given,
            self._asked["positions"] if noisy else None,
            sampler.counts.numpy() if sampler.counting and self._on_host else None,
            sampler.newest.numpy() if params.repeats and self._on_host else None,
        )

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Take in the pass over the next chunk of the prompt."""
        if self._ask is None:
            self._begin(context.sampler)
        if self.costs and not self.pays(self.costs, context.kv.length, _REPEATS):
            return
        parts = (self._target.logits(part) for part in forwarded.hidden.split(_PROMPT_ROWS))
        if self._on_host:
            for part in parts:
                self._keep(part)
        else:  # one wait for the whole chunk
            self._keep_digest(torch.cat([*map(self.digest, parts)]).cpu().numpy())

    def committed(self, context: Context) -> None:
        """Take in what has been committed since the last call: the text, and the last pass over it.

        Where nobody asked during other passes, nothing is known but the tokens that came.
        """
        if self._ask is None:
            self._begin(context.sampler)
        text = context.text
        known = len(self)
        end = len(text) - 1  # what comes after the last token is not known yet
        late = end - self._known
        worth = self._worth_keeping(context)
        if not worth and 0 < late < _TOKENS_TOGETHER:  # a few tokens later they are all taken in
            return
        seen = min(late, len(context.path)) if worth else 0
        if seen < late:
            came = text[self._known + 1 :][: late - seen]
            rows = self._next(late - seen)
            for name, nothing in (("ids", 0), ("logs", -inf), ("scales", 0)):
                self._tables[name][rows] = nothing
            self._tables["ids"][rows, 0] = came
            self._tables["logs"][rows, 0] = 0
        if seen and context.digest is not None:
            self._keep_digest(context.digest[-seen:])
        elif seen and context.logits is not None:
            nodes = list(context.path)[-seen:]
            if self._on_host:
                for node in nodes:
                    # no copy: PyTorch's threads would wake, and be in the way of the program's
                    self._keep(context.logits[node : node + 1])
            else:
                self._keep(
                    context.logits[torch.tensor(nodes).to(context.logits.device, non_blocking=True)]
                )
        self._tables["text"][known:end] = text[known:end]
        self._library.tswift_index(ctypes.byref(self._index), ctypes.c_int64(end))
        for position in range(max(0, known, end + 1 - self._ask.window), end + 1):
            self._fixed["newest"][text[position]] = position

    def _worth_keeping(self, context: Context) -> bool:
        """Whether the logits of the last pass are there, and worth the time that it takes."""
        if context.logits is None or self.costs is None or context.digest is not None:
            return context.logits is not None
        keys = context.kv.length
        slow = self.costs.seconds(1, keys) > _SLOW_PASS
        return self.pays(self.costs, keys, _REPEATS if slow else 0.0)

    def guess(self, paths: Sequence[Sequence[int]], count: int) -> list[Candidates]:
        """What may be drawn after the text and each of some paths below it.

        Args:
            paths: the root, the text's last token, and drafted tokens below it.
            count: tokens wanted for each, up to 16.
        """
        guesses: list[Candidates] = []
        longest = _ORDERS[-1]
        text = self._tables["text"][max(0, len(self) - longest) : len(self)].tolist()
        for start in range(0, len(paths), _PATHS_TOGETHER):
            asked = paths[start : start + _PATHS_TOGETHER]
            contexts = [[*text, *path][-max(longest, len(path)) :] for path in asked]
            size = len(asked)
            tokens = np.array([token for context in contexts for token in context], np.int32)
            self._asked["ends"][:size] = [*accumulate(map(len, contexts))]
            self._asked["depths"][:size] = [*map(len, asked)]
            self._ask.paths = tokens.ctypes.data
            self._ask.count = size
            self._library.tswift_recall(ctypes.byref(self._ask))
            matches = self._asked["matches"][:size].tolist()
            for (position, length), ids, scores in zip(
                matches, *self._rank(size, count), strict=True
            ):
                likely = sum(score > -inf for score in scores)
                guesses.append(Candidates(ids[:likely], scores[:likely], length, position))
        return guesses


def _kept_as(vocab_size: int, kept: int) -> tuple[int, type[np.uint16] | type[np.int32]]:
    """How many tokens are kept of a distribution, and as what."""
    return min(kept, vocab_size), np.uint16 if vocab_size <= 1 << 16 else np.int32


_WIDTH = 3  # candidates offered below a node
_FOLLOWED_MATCH = 12  # a match from which on the text is followed
_FOLLOWED_TOGETHER = 8  # tokens that it is followed at a time
# gaps between scores are told apart by this much, and up to so many times
_STEP = 0.5
_FAR = 4
# chances of the first guess by match and lead, and of the others by how far they are behind,
# measured on texts of the bundled model
_FIRST = {
    1: (0.28, 0.34, 0.42, 0.50, 0.56),
    2: (0.42, 0.53, 0.68, 0.73, 0.83),
    3: (0.44, 0.62, 0.77, 0.80, 0.88),
    4: (0.56, 0.76, 0.86, 0.90, 0.95),
    _FOLLOWED_MATCH: (0.70, 0.90, 0.95, 0.97, 0.98),
}
_OTHERS = ((0.26, 0.17, 0.10, 0.07, 0.06), (0.13, 0.09, 0.05, 0.04, 0.02))
_CHANCE_BORDERS = (0.3, 0.6, 0.85)  # chances that others give are told apart by these
_UNNAMED, _ALONE = -1, -2  # others name other tokens; there are no others
_DOUBT = 0.3  # what it does to the odds that others name other tokens
_GUESS_SECONDS = 1e-4  # that a guess takes on the host
_SLOW_PASS = 8e-3  # seconds of a pass beside which those of keeping its logits are nothing
# share of late tokens from which on guesses may pay, and tokens of which that need not be known
_REPEATS = 0.15
_RIGHT = 0.98  # chance of a guess where the text repeats itself
_SAVED = 0.1  # share of the time that guesses are to save there
_UNKNOWN = 64
# tokens that a guess gains if the text goes through its node; where a node costs more than so much
# of a plain step, guesses are asked for where the text repeats itself, and gain as often as it does
_GAIN = 0.4


class HistorySource(Source):
    """Guesses below the likeliest nodes of a tree.

    It comes after the other sources, as it knows other things than they do: where it agrees with
    one of them both are right far more often (84% of such tokens were drawn, of the bundled model),
    and where not, far less. The budget says whether a guess pays; the tree has at most ``limit``
    nodes.
    """

    name = "recall"

    def __init__(self, recall: LogitHistory, budget: TreeBudget, limit: int) -> None:
        self._recall = recall
        self._budget = budget
        self._limit = limit
        self._seconds = 0.0  # of the last draft

    def propose(self, tree: CandidateTree, context: Context) -> None:
        """Offer candidates below the likeliest nodes,
        and then below the likeliest of those that came of it.
        """
        self._seconds = 0.0
        asked: set[int] = set()
        while nodes := self._pay(tree, asked, context):
            guesses = self._candidates([tree.path(node) for node in nodes], context)
            asked.update(nodes)
            for node, guess in zip(nodes, guesses, strict=True):
                self._offer(tree, node, guess)
            for node, guess in zip(nodes, guesses, strict=True):
                if guess.match == _FOLLOWED_MATCH:
                    self._follow(tree, node, guess, asked, context)

    def _pay(self, tree: CandidateTree, asked: set[int], context: Context) -> list[int]:
        """The likeliest nodes to guess below, those left out that were asked or do not pay."""
        node_s = self._budget.costs.node(context.kv.length)
        plain = self._budget.costs.seconds(1, context.kv.length)
        gain = _GAIN if node_s < _GAIN * plain else max(_GAIN, self._recall.repeats)
        price = _GUESS_SECONDS + node_s
        nodes: list[int] = []
        for node in tree.likeliest(self._limit):
            if len(nodes) == _PATHS_TOGETHER or not self._budget.pays_off(
                gain * tree.path_prob[node], price
            ):
                break
            if node not in asked and tree.depths[node] < tree.depth:
                nodes.append(node)
        return nodes

    def _candidates(self, paths: Sequence[Sequence[int]], context: Context) -> list[Candidates]:
        """What may be drawn below paths from the root."""
        self._seconds += _GUESS_SECONDS * len(paths)
        # the root, and what was drafted of a text that is itself a draft
        unknown = context.text[len(self._recall) :]
        return self._recall.guess([[*unknown, *path] for path in paths], _WIDTH)

    def _offer(self, tree: CandidateTree, node: int, guess: Candidates) -> None:
        named = {
            token: tree.path_prob[child] / tree.path_prob[node]
            for token, child in tree.children[node].items()
        }
        match = guess.match if guess.match == _FOLLOWED_MATCH else min(guess.match, 4)
        for rank, (token, score) in enumerate(zip(guess.tokens, guess.scores, strict=True)):
            rival = guess.scores[0] if rank else guess.scores[1] if len(guess.scores) > 1 else -1e9
            step = round(min(abs(score - rival) / _STEP, _FAR))
            chance = _OTHERS[rank - 1][step] if rank else _FIRST[match][step]
            opinion = _ALONE
            if named:
                theirs = named.get(token)
                opinion = _UNNAMED if theirs is None else bisect(_CHANCE_BORDERS, theirs)
                odds = chance / (1 - chance) * (_DOUBT if theirs is None else theirs / (1 - theirs))
                chance = odds / (1 + odds)
            tree.propose(node, token, self.name, (match, rank, step, opinion), chance)

    def _follow(
        self, tree: CandidateTree, node: int, guess: Candidates, asked: set[int], context: Context
    ) -> None:
        """Offer along what followed a long match, at once, as long as that is what is guessed."""
        ahead = context.text[
            guess.place + 1 : guess.place
            + 1
            + min(_FOLLOWED_TOGETHER, tree.depth - tree.depths[node] - 1)
        ]
        path = tree.path(node)
        paths = [[*path, *ahead[:count]] for count in range(1, len(ahead) + 1)]
        for token, further in zip(ahead, self._candidates(paths, context), strict=True):
            child = tree.children[node].get(token) if guess.tokens[:1] == [token] else None
            if child is None or child in asked:
                return
            asked.add(child)
            self._offer(tree, child, further)
            node = child
            guess = further

    def may_pay(self, costs: PassCosts, context: Context) -> bool:
        """Whether the text repeats itself enough; what came meanwhile is taken in first."""
        if len(context.text) - len(self._recall) > _UNKNOWN:
            self._recall.committed(context)
        return self._recall.pays(costs, context.kv.length)

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the last draft's guesses."""
        return self._seconds
