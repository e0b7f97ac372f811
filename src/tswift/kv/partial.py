"""The dynamic partial KV cache that drafting reads (paper, section 3.3).

A fixed budget holds the first tokens (sinks), those that matter most to the newest query (selected) and the newest ones
(recent). Keys are cached rotated, so their order in the buffer is free: a new token overwrites the least important
selected one in place. When the selected ones are used up, everything is selected anew from the full cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tswift.kv.buffer import KVBuffer, KVShape
from tswift.kv.full import FullKV


class PartialKV(KVBuffer):
    """A budget of keys and values copied from a full cache.

    Args:
        shape: what one token takes.
        budget: most tokens held; at least 8.
        sinks: how many of the first tokens always stay; at most a quarter of the budget.

    Attributes:
        copied: tokens of the full cache that were taken notice of: held, or passed over by a selection.
        selections: how often everything was selected anew.
    """

    SCRATCH = 1  # a drafting pass forwards the root alone

    def __init__(self, shape: KVShape, budget: int = 4096, sinks: int = 16) -> None:
        super().__init__(shape, budget + self.SCRATCH)
        self.budget = budget
        self.sinks = sinks
        self.recent = (budget - self.sinks) // 4  # newest tokens that every selection takes
        self.selections = 0
        self.copied = 0
        self._free = list(range(budget))[::-1]  # slots for new tokens, the next one last
        slots = budget if shape.placed else 0
        self._places = torch.zeros(shape.layers, shape.heads, slots, dtype=torch.int64, device=shape.device)

    @property
    def room(self) -> int:
        """New tokens that fit before a selection is due."""
        return len(self._free)

    def places(self, layer: int) -> Tensor:
        """``[heads, length]``: every KV head has selected for itself."""
        return self._places[layer, :, : self.length]

    def before(self, window: int) -> int:
        """None: the slots are in no order."""
        return 0

    def append(self, full: FullKV) -> None:
        """Copy the tokens that the full cache has committed since the last call; at most ``room`` of them."""
        count = full.length - self.copied
        slots = [self._free.pop() for _ in range(count)]
        where = torch.tensor(slots, dtype=torch.int64).to(self.keys.device, non_blocking=True)
        self.keys.index_copy_(2, where, full.keys[:, :, self.copied : full.length])
        self.values.index_copy_(2, where, full.values[:, :, self.copied : full.length])
        if self.shape.placed:
            self._places[:, :, where] = torch.arange(self.copied, full.length, device=where.device)
        self.length = max(self.length, max(slots, default=-1) + 1)
        self.copied = full.length

    def select(self, full: FullKV, queries: Tensor) -> None:
        """Fill the budget anew: sinks, the newest tokens, and the keys the newest query scores highest.

        Args:
            full: the full cache.
            queries: ``[layers, query heads, head_dim]``, rotated, of the newest token. A key's importance is its dot
                product with the query, summed over the query heads of its KV head; each KV head selects for itself.
        """
        text = full.length
        held = min(text, self.budget)
        shape = self.shape
        grouped = queries.view(shape.layers, shape.heads, -1, shape.head_dim).sum(2)
        sinks = min(self.sinks, text)
        recent = min(self.recent, text - sinks)
        middle = full.keys[:, :, sinks : text - recent]
        importance = torch.matmul(middle, grouped.unsqueeze(-1)).squeeze(-1)
        best = importance.topk(held - sinks - recent).indices + sinks
        always = [*range(sinks), *range(text - recent, text)]
        fixed = torch.tensor(always, dtype=torch.int64).to(best.device, non_blocking=True)
        fixed = fixed.expand(shape.layers, shape.heads, -1)
        places = torch.cat([fixed, best], dim=-1)
        if shape.placed:
            self._places[:, :, :held] = places
        order = places.unsqueeze(-1).expand(-1, -1, -1, shape.head_dim)
        self.keys[:, :, :held] = full.keys.gather(2, order)
        self.values[:, :, :held] = full.values.gather(2, order)
        self.length, self.copied = held, text
        self._free = [*range(len(always), held), *range(held, self.budget)[::-1]]
        self.selections += 1
