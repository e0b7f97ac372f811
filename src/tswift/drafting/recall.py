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
from torch import Tensor

from tswift.decoding.drafter import Context
from tswift.decoding.sampling import Sampler
from tswift.decoding.warping import warp
from tswift.drafting.contexts import Contexts
from tswift.drafting.thoughts import Thoughts
from tswift.models.target import Target

_PLACES = 4  # averaged; eight are hardly better
_FAVOUR = 2.0  # a place weighs e^2 times one whose match is a token shorter
_ROWS = 64  # logits of a prompt that are computed at a time


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

    @staticmethod
    def bytes_for(tokens: int, vocab_size: int, kept: int) -> int:
        """Bytes of the machine's own memory that a text of so many tokens takes, prompt included.

        With 64 tokens kept of each distribution, 316 to 340 a token, or 128 more with over 65,536 token ids.
        """
        newest = vocab_size * np.dtype(np.int64).itemsize
        return Thoughts.bytes_for(tokens, vocab_size, kept) + Contexts.bytes_for(tokens) + newest

    def prefilled(self, hidden: Tensor, sampler: Sampler) -> None:
        """Take in the next chunk of the prompt's last hidden states ``[n, H]``."""
        for part in hidden.split(_ROWS):
            self._begun(sampler).think(self._target.logits(part))

    def _begun(self, sampler: Sampler) -> Thoughts:
        if self._thoughts is None:
            self._thoughts = Thoughts(self._target.vocab_size, self._kept, sampler.params.banned)
            self._newest = np.full(self._target.vocab_size, -(1 << 62), np.int64)
            self._params = replace(sampler.params, banned=())
        return self._thoughts

    def committed(self, context: Context) -> None:
        """Take in what has been committed since the last call: the text, and the last pass over it."""
        text, thoughts = context.text, self._begun(context.sampler)
        known = len(self._contexts)
        fresh = text[known:-1]  # what comes after the last token is not known yet
        late = len(text) - 1 - len(thoughts)
        if late:
            assert context.logits is not None
            nodes = torch.tensor(list(context.path)[-late:]).to(context.logits.device, non_blocking=True)
            thoughts.think(context.logits[nodes])
        self._contexts.extend(fresh)
        for position in range(max(0, known, len(text) - self._params.window), len(text)):
            self._newest[text[position]] = position

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
