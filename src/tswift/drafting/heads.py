"""Drafting from heads: on the last verification pass (Medusa-style), or on a drafting pass over a partial cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from tswift.decoding.sampling import warp
from tswift.decoding.tree import DraftTree
from tswift.drafting.source import Context
from tswift.kv.partial import PartialKV
from tswift.models.heads import ChainedHeads
from tswift.models.target import Target


class LastPass:
    """States from the pass that drew the root: no pass of its own, but no knowledge of the root either."""

    def __init__(self, heads: ChainedHeads, count: int) -> None:
        self._heads, self._count = heads, count

    def states(self, context: Context) -> Tensor | None:
        """``[count, H]`` for the tokens after the root; None before the first pass."""
        if context.last is None:
            return None
        return self._heads(context.last.hidden[context.node])[: self._count]

    def committed(self, context: Context, most: int) -> None:
        """Nothing to keep up."""


class PartialPass:
    """A drafting pass of the target over a dynamic partial cache (paper, section 3.3), then the heads.

    The pass forwards the root, so its own LM head gives the first token. Its keys and values are not kept: the partial
    cache is filled with the exact ones of the verification pass.
    """

    def __init__(self, target: Target, heads: ChainedHeads, count: int, kv: PartialKV) -> None:
        self._target, self._heads, self._count, self.kv = target, heads, count, kv
        self._alone = torch.ones(1, 1, dtype=torch.bool, device=target.device)

    def states(self, context: Context) -> Tensor:
        """``[1 + count, H]`` for the tokens after the root."""
        root = torch.tensor([context.text[-1]], device=self._target.device)
        position = torch.tensor([context.position], device=self._target.device)
        hidden = self._target.forward(root, position, self.kv, self._alone).hidden[0]
        return torch.cat([hidden.unsqueeze(0), self._heads(hidden)[: self._count]])

    def committed(self, context: Context, most: int) -> None:
        """Copy the new tokens; select anew when they, or the next step's, do not fit."""
        new = context.kv.length - self.kv.copied
        if new + most <= self.kv.room:
            self.kv.append(context.kv)
        elif context.last is not None:
            self.kv.select(context.kv, context.last.queries_at(context.node))


class HeadSource:
    """Candidates from the states' logits, every level's best combined into a tree (paper, section 3.2).

    Args:
        target: for its LM head.
        reader: where the states come from.
        tree: candidates per level.
        shared_noise: rank candidates by what the target would draw with the noise of their position, not by what is
            likely. The noise is a pure function, so this is no peeking: it only makes for better guesses.
    """

    name = "heads"

    def __init__(self, target: Target, reader: LastPass | PartialPass, tree: Sequence[int], shared_noise: bool) -> None:
        self._target, self._reader, self._shared_noise = target, reader, shared_noise
        self._widths = tuple(tree)
        ranks = product(*(range(width) for width in tree))
        self._paths = sorted(ranks, key=lambda path: (sum(path), path))  # likely ones first, for trees with a limit

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add the combinations of every level's best candidates."""
        states = self._reader.states(context)
        if states is None:
            return
        levels = self._candidates(self._target.logits(states), context)
        for path in self._paths:
            tokens = []
            for level, rank in zip(levels, path, strict=True):
                if rank >= len(level):
                    break
                tokens.append(level[rank])
            else:
                tree.add(tokens, self.name)

    def _candidates(self, logits: Tensor, context: Context) -> list[list[int]]:
        sampler, root = context.sampler, context.position
        place = torch.tensor([root], device=logits.device)
        seen = sampler.seen(place, place, torch.ones(1, 1, dtype=torch.bool, device=logits.device))
        scores = warp(logits.to(torch.float64, copy=True), seen, sampler.params)
        if self._shared_noise:
            scores = scores + sampler.noise(range(root + 1, root + 1 + len(logits)))
        best = scores.topk(min(max(self._widths), scores.shape[-1]))
        return [
            [token for token, score in zip(tokens[:width], values[:width], strict=True) if score != -torch.inf]
            for tokens, values, width in zip(best.indices.tolist(), best.values.tolist(), self._widths, strict=True)
        ]

    def committed(self, context: Context, most: int) -> None:
        """Keep the reader's cache up."""
        self._reader.committed(context, most)
