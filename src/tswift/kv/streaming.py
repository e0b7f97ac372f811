"""A small model's own cache: the first tokens and the newest ones (StreamingLLM, Xiao et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from tswift.kv.buffer import KVBuffer, KVShape


class StreamingKV(KVBuffer):
    """Keys and values of a text's first and newest tokens, forwarded over no more than these.

    Tokens are committed behind those held, where they can be taken back; :meth:`settle` lets all but the newest of them
    take the place of the oldest.

    Args:
        shape: what one token takes.
        budget: most tokens held for good.
        sinks: how many of the first tokens always stay; fewer than the budget.
        slack: how many of the newest tokens can always be taken back.
        scratch: most tokens that are forwarded before tokens are settled.

    Attributes:
        seen: tokens of the text that were committed, held still or not.
        settled: those of them that cannot be taken back.
    """

    def __init__(self, shape: KVShape, budget: int, sinks: int, slack: int, scratch: int) -> None:
        super().__init__(shape, budget + slack + scratch)
        self.budget, self.sinks, self.slack = budget, sinks, slack
        self.seen = self.settled = 0
        self._places = torch.zeros(budget, dtype=torch.int64, device=shape.device)

    def places(self, layer: int) -> Tensor:
        """``[1, length]``."""
        newer = torch.arange(self.settled, self.seen, device=self._places.device)
        return torch.cat([self._places[: self._held], newer]).unsqueeze(0)

    def before(self, window: int) -> int:
        """None: the slots are in no order once the oldest have been replaced."""
        return 0

    @property
    def _held(self) -> int:
        return min(self.settled, self.budget)

    def advance(self, count: int) -> None:
        """As for any cache; the tokens can be taken back until they are settled."""
        super().advance(count)
        self.seen += count

    def take_back(self, seen: int) -> None:
        """Forget all tokens of the text but the first ``seen``, of which none is settled that would go.

        Raises:
            ValueError: one is.
        """
        if not self.settled <= seen <= self.seen:
            raise ValueError(f"between {self.settled} and {self.seen} tokens can be kept, not {seen}")
        self.length -= self.seen - seen
        self.seen = seen

    def settle(self) -> None:
        """Let all but the newest ``slack`` tokens take their place in the budget."""
        before, after = self.settled, max(self.settled, self.seen - self.slack)
        if after == before:
            return
        offset = self._held - before  # from a token's place in the text to its slot
        ring = self.budget - self.sinks
        # of many at once the oldest are overwritten by the newest: they need not be moved
        staying = [place for place in range(before, after) if place < self.budget or place >= after - ring]
        kept = {self._slot(place): place for place in staying}
        self.settled = after
        newer = range(after, self.seen)
        moves = kept | {self._held + place - after: place for place in newer}
        moves = {slot: place + offset for slot, place in moves.items() if slot != place + offset}
        parts: list[list[int]] = [[*kept.keys()], [*kept.values()], [*moves.keys()], [*moves.values()]]
        packed = torch.tensor([each for part in parts for each in part])  # one copy to the device
        sent = packed.to(self.keys.device, non_blocking=True).split([*map(len, parts)])
        self._places.index_copy_(0, sent[0], sent[1])
        if moves:
            for buffer in (self.keys, self.values):
                buffer.index_copy_(2, sent[2], buffer.index_select(2, sent[3]))
        self.length = self._held + self.seen - after

    def _slot(self, place: int) -> int:
        return place if place < self.budget else self.sinks + (place - self.sinks) % (self.budget - self.sinks)
