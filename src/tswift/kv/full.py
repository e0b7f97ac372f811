"""The full KV cache: every token of the text, drafted ones in the slots after it."""

from __future__ import annotations

import torch
from torch import Tensor

from tswift.kv.buffer import KVBuffer


class FullKV(KVBuffer):
    """Keys and values of a whole text, a token's slot being its position."""

    def places(self, layer: int) -> Tensor:
        """``[1, length]``: the slots."""
        return torch.arange(self.length, device=self.shape.device).unsqueeze(0)

    def take(self, other: FullKV) -> None:
        """Hold what another cache of the same model holds."""
        self.length = other.length
        self.keys[:, :, : self.length] = other.keys[:, :, : self.length]
        self.values[:, :, : self.length] = other.values[:, :, : self.length]

    def before(self, window: int) -> int:
        """The slots that are too far back for the next token, and so for those after it."""
        return max(0, self.length - window + 1)
