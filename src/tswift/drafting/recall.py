"""Drafting by recall: what the target thought where the text stood like this before, with the noise of this position.

The paper reuses n-grams of the text: what was drawn. That was one draw with its own noise; here the noise is another,
and what was thought, given the noise that is coming, tells what will be drawn. No model is asked, so it reaches as
deep as it holds; and the longer the text, the longer its matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch

from tswift.decoding.sampling import Sampler, warp
from tswift.drafting.contexts import Contexts
from tswift.drafting.source import Context
from tswift.drafting.thoughts import Thoughts
from tswift.models.target import Target

_PLACES = 4  # averaged; eight are hardly better
_FAVOUR = 2.0  # a place weighs e^2 times one whose match is a token shorter
_LATE = 512  # last tokens of a prompt whose logits are computed, as far as the last chunk of the prefill holds them


@dataclass(frozen=True)
class Guess:
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


_NONE = Guess([], [], 0, -1)


class Recall:
    """What the target thought after each token of a text, to be found by the tokens before.

    Args:
        target: the model.
        shared_noise: as for :class:`~tswift.drafting.heads.HeadSource`.
        kept: tokens kept of each distribution.
    """

    def __init__(self, target: Target, shared_noise: bool, kept: int = 64) -> None:
        self._target, self._shared_noise, self._kept = target, shared_noise, kept
        self._contexts = Contexts()
        self._thoughts: Thoughts | None = None

    def __len__(self) -> int:
        """After how many tokens of the text it is known what comes: all but the last one."""
        return len(self._contexts)

    def committed(self, context: Context) -> None:
        """Take in what has been committed since the last call: the text, and the last pass over it."""
        text, sampler = context.text, context.sampler
        if self._thoughts is None:
            banned = sampler.params.banned
            self._thoughts = Thoughts(self._target.vocab_size, self._kept, banned)
            self._newest = np.full(self._target.vocab_size, -(1 << 62), np.int64)
            self._params = replace(sampler.params, banned=())
        known = len(self._contexts)
        fresh = text[known:-1]  # what comes after the last token is not known yet
        logits = self._logits(context)
        late = 0 if logits is None else min(len(fresh), len(logits))
        self._thoughts.hear(text[known + 1 : len(text) - late])
        if logits is not None and late:
            self._thoughts.think(logits[len(logits) - late :])
        self._contexts.extend(fresh)
        for position in range(max(0, known, len(text) - self._params.window), len(text)):
            self._newest[text[position]] = position

    def _logits(self, context: Context) -> torch.Tensor | None:
        """``[n, V]`` after the last tokens of the text but the very last."""
        if context.last is None:
            return None
        nodes = list(context.path)[-_LATE:]
        if context.logits is None:
            rows = context.last.hidden[nodes[0] : nodes[-1] + 1]
            return torch.cat([self._target.logits(part) for part in rows.split(64)])
        return context.logits[torch.tensor(nodes).to(context.logits.device, non_blocking=True)]

    def guess(self, paths: Sequence[Sequence[int]], sampler: Sampler, most: int) -> list[Guess]:
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
            guesses[row] = Guess(ids[:count], values[:count], found[row][0][1], found[row][0][0])
        return guesses
