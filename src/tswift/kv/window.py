"""A drafter's own cache: the first tokens of a text and its newest ones, each in a slot of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tswift.kv.cache import KVBuffer, KVShape


class WindowKV(KVBuffer):
    """Keys and values that are made from committed tokens alone, and of no more than a budget of them.

    A token's slot follows from its place in the text, so that nothing is ever moved. Behind the budget are a slot for
    rows that stand for no token, and scratch slots for a round of drafting, which the next round overwrites.

    Args:
        shape: what one token takes.
        budget: most tokens held.
        sinks: how many of the first tokens always stay; fewer than the budget.
        scratch: scratch slots.

    Attributes:
        scratch: the first of them.
        held: ``[capacity]`` bool on the device: the slots of committed tokens.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, scratch: int) -> None:
        super().__init__(shape, budget + 1 + scratch)
        self.budget, self.sinks, self.scratch = budget, sinks, budget + 1
        self.keys.zero_()  # what nothing attends to is multiplied by 0, which it has to bear
        self.values.zero_()
        self.held = torch.zeros(self.capacity, dtype=torch.bool, device=shape.device)

    def slot(self, place: int) -> int:
        """Where the token at a place in the text goes; it takes the place of the oldest."""
        return place if place < self.budget else self.sinks + (place - self.sinks) % (self.budget - self.sinks)

    def staying(self, places: range) -> Sequence[int]:
        """Of tokens that are committed together, those that none of the others replaces."""
        ring = self.budget - self.sinks
        return [place for place in places if place < self.sinks or place >= places.stop - ring]

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values ``[heads, n, head_dim]`` into slots ``[n]``, none of them twice but the spare."""
        self.keys[layer].index_copy_(1, slots, keys.to(self.keys.dtype))
        self.values[layer].index_copy_(1, slots, values.to(self.values.dtype))

    def hold(self, slots: Tensor) -> None:
        """Committed tokens are in these slots now."""
        self.held.index_fill_(0, slots, True)
        self.held[self.budget] = False
