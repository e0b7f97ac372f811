"""Drafting from heads: on the last verification pass (Medusa-style), or on a drafting pass of the target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from tswift.decoding.tree import DraftTree
from tswift.decoding.warping import warp
from tswift.drafting.levels import Level
from tswift.drafting.source import Context
from tswift.models.base_heads import Heads
from tswift.models.costs import PassCosts
from tswift.models.passes import Forwarded
from tswift.models.target import Target

_Guess = tuple[Tensor, Tensor]  # [levels, k] tokens and their scores (float64), best first


class LastPass:
    """The state of the pass that drew the root: no pass of its own, but the state knows nothing of the root."""

    direct = False

    def read(self, context: Context) -> tuple[Forwarded, int] | None:
        """The pass and its node, of the token before the root; None before the first pass."""
        return None if context.last is None else (context.last, context.node)

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of reading it."""
        return 0.0

    def committed(self, context: Context, most: int) -> None:
        """Nothing to keep up."""


class DraftingPass:
    """A drafting pass of the target, over a partial cache as a rule (paper, section 3.3).

    The pass forwards the root, so its own LM head gives the first token. Its keys and values are not kept: the partial
    cache is filled with the exact ones of the verification pass.

    Args:
        level: the target, and what it reads.
    """

    direct = True

    def __init__(self, level: Level) -> None:
        self._level = level

    def read(self, context: Context) -> tuple[Forwarded, int]:
        """The pass and its node, of the root."""
        target = self._level.target
        root = torch.tensor([context.text[-1]]).to(target.device, non_blocking=True)
        position = torch.tensor([context.position]).to(target.device, non_blocking=True)
        return target.forward(root, position, self._level.cache(context), None), 0

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of the pass."""
        return costs.seconds(1, self._level.keys or context.kv.length)

    def committed(self, context: Context, most: int) -> None:
        """Keep the cache up."""
        self._level.committed(context, most)


class HeadSource:
    """Every level's best candidates, combined into a tree (paper, section 3.2).

    Chained and Medusa heads know no drafted token, so every candidate of a level may follow every one of the level
    before. Conditioned heads are told the best candidate of the level before, and theirs may follow that one only.

    Args:
        target: for its LM head and embeddings.
        heads: the heads.
        reader: where the state they start from comes from. If it is ``direct``, the LM head on it gives the first
            level, and the heads the others.
        tree: candidates per level.
        shared_noise: rank candidates by what the target would draw with the noise of their position, not by what is
            likely. The noise is a pure function, so this is no peeking: it only makes for better guesses.
    """

    name = "heads"

    def __init__(
        self, target: Target, heads: Heads, reader: LastPass | DraftingPass, tree: Sequence[int], shared_noise: bool
    ) -> None:
        self._target, self._heads, self._reader, self._shared_noise = target, heads, reader, shared_noise
        self._widths = tuple(tree)
        self._guessed: _Guess | None = None
        levels = range(len(tree))
        if heads.conditioned:
            ranks = [(0,) * level + (rank,) for level in levels for rank in range(tree[level])]
            # the path of best candidates first, then side steps from it: for trees with a limit
            self._paths = sorted(ranks, key=lambda path: (path[-1], -len(path) if path[-1] == 0 else len(path)))
        else:
            # few side steps first, and early ones: a late one is reached only if all before it was right
            self._paths = sorted(product(*map(range, tree)), key=lambda path: (sum(path), [-rank for rank in path]))

    def start(self, context: Context) -> None:
        """Have the device guess every level; nothing is waited for."""
        read = self._reader.read(context)
        if read is None:
            return
        forwarded, node = read
        hidden = forwarded.hidden[node]
        begin = forwarded.before_norm(node) if self._heads.raw else hidden
        place = torch.tensor([context.position]).to(hidden.device, non_blocking=True)
        seen = context.sampler.seen(place, place, torch.ones(1, 1, dtype=torch.bool, device=hidden.device))
        guess = self._told if self._heads.conditioned else self._untold
        self._guessed = guess(begin, hidden if self._reader.direct else None, seen, context)

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add the combinations of the levels' best candidates."""
        if self._guessed is None:
            return
        tokens, scores = self._guessed
        self._guessed = None
        found = torch.stack([tokens.double(), scores], dim=1).tolist()  # the one wait for the device
        levels = [
            [int(token) for token, score in zip(*level, strict=True) if score != -torch.inf][:width]
            for level, width in zip(found, self._widths, strict=True)
        ]
        for path in self._paths:
            if tree.full:
                break
            if all(rank < len(level) for rank, level in zip(path, levels, strict=False)):
                tree.add([level[rank] for rank, level in zip(path, levels, strict=False)], self.name)

    def _untold(self, hidden: Tensor, first: Tensor | None, seen: Tensor | None, context: Context) -> _Guess:
        logits = self._heads.levels(hidden, self._target.logits, first, len(self._widths))
        return self._best(logits, 0, seen, context)

    def _told(self, hidden: Tensor, first: Tensor | None, seen: Tensor | None, context: Context) -> _Guess:
        token: int | Tensor = context.text[-1]
        levels: list[_Guess] = []
        if first is not None:
            levels.append(self._best(self._target.logits(first.unsqueeze(0)), 0, seen, context))
            token = levels[0][0][0, 0]
        for index in range(len(self._widths) - len(levels)):
            embedding = self._target.embed(token)
            hidden, out = self._heads.step(index, hidden, embedding)
            levels.append(self._best(self._target.logits(out.unsqueeze(0)), len(levels), seen, context))
            token = levels[-1][0][0, 0]
        tokens, scores = zip(*levels, strict=True)
        return torch.cat(tokens), torch.cat(scores)

    def _best(self, logits: Tensor, first: int, seen: Tensor | None, context: Context) -> _Guess:
        """The best tokens of consecutive levels from ``first`` on, given their logits ``[levels, V]``; best first."""
        sampler, root = context.sampler, context.position
        scores = warp(logits.to(torch.float64, copy=True), seen, sampler.params)
        if self._shared_noise:
            scores = scores + sampler.noise(range(root + 1 + first, root + 1 + first + len(logits)))
        best = scores.topk(min(max(self._widths), scores.shape[-1]))
        return best.indices, best.values

    def committed(self, context: Context, most: int) -> None:
        """Keep the reader's cache up."""
        self._reader.committed(context, most)
