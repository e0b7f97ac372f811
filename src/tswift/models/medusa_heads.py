"""Medusa's heads: side by side, none knows of another, and each has an LM head of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tswift.models.base_heads import Heads


class MedusaHead(nn.Module):
    """Residual blocks ``h <- h + silu(W h + b)``, and an LM head (Cai et al., 2024)."""

    def __init__(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The state for its LM head, same shape as ``hidden``."""
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return hidden


class MedusaHeads(Heads):
    """Medusa's heads: side by side, with LM heads of their own."""

    kind = "medusa"

    def __init__(self, hidden_size: int, count: int, vocab_size: int, layers: int = 1) -> None:
        super().__init__(hidden_size, (MedusaHead(hidden_size, vocab_size, layers) for _ in range(count)))
        self.vocab_size, self.layers = vocab_size, layers

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, most: int | None = None) -> Tensor:
        """As :meth:`Heads.forward`; a state is for its head's own LM head."""
        return torch.stack([head(hidden) for head in self.heads[:most]])

    def levels(
        self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], first: Tensor | None = None, most: int | None = None
    ) -> Tensor:
        """As :meth:`Heads.levels`."""
        before = [] if first is None else [lm_head(first)]
        heads = self.heads[: None if most is None else most - len(before)]
        return torch.stack([*before, *(head.lm_head(head(hidden)) for head in heads)])  # type: ignore[operator, union-attr]

    def about(self) -> dict[str, Any]:
        """As :meth:`Heads.about`."""
        return {**super().about(), "vocab_size": self.vocab_size, "layers": self.layers}
