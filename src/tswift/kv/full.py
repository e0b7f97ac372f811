"""The full KV cache: every token of the text, drafted ones in the slots after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tswift.kv.buffer import KVBuffer


class FullKV(KVBuffer):
    """Keys and values of a whole text, a token's slot being its position."""

    def places(self, layer: int) -> Tensor:
        """``[1, length]``: the slots."""
        return torch.arange(self.length, device=self.shape.device).unsqueeze(0)

    def before(self, window: int) -> int:
        """The slots that are too far back for the next token, and so for those after it."""
        return max(0, self.length - window + 1)

    def commit(self, slots: Sequence[int]) -> None:
        """Keep the drafted tokens in these scratch slots, counted from ``length``, in this order."""
        count = len(slots)
        if list(slots) != list(range(count)):
            chosen = torch.tensor(slots).to(self.keys.device, non_blocking=True) + self.length
            for buffer in (self.keys, self.values):
                buffer[:, :, self.length : self.length + count] = buffer.index_select(2, chosen)
        self.length += count
