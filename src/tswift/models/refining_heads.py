"""Heads that refine one state step by step over the model's own LM head: told nothing, or the token drafted before.

A chained head (TokenSwift, section 3.2) refines the hidden state of the head before it: ``h <- h + W norm1(h)``,
``logits = lm_head(norm2(h))``. A conditioned head is also told the last drafted token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tswift.models.base_heads import Heads


class ChainedHead(nn.Module):
    """One residual step from the hidden state for token t+i to the one for token t+i+1."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        return hidden + self.linear(self.input_layernorm(hidden))


class ConditionedHead(nn.Module):
    """One residual step that also reads the token drafted before: ``h <- h + B silu(A [norm(h); norm(e)])``."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.embedding_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.mix = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.linear = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        both = torch.cat([self.input_layernorm(hidden), self.embedding_layernorm(embedding)], dim=-1)
        return hidden + self.linear(nn.functional.silu(self.mix(both)))


class _RefiningHeads(Heads):
    """A chain of heads over the model's own LM head."""

    def __init__(
        self,
        head: type[ChainedHead] | type[ConditionedHead],
        hidden_size: int,
        count: int,
        eps: float,
        raw: bool,
    ) -> None:
        super().__init__(hidden_size, (head(hidden_size, eps) for _ in range(count)), raw)
        self.eps = eps

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`Heads.step`."""
        head = self.heads[index]
        hidden = head(hidden, embedding) if self.conditioned else head(hidden)
        return hidden, head.post_layernorm(hidden)  # type: ignore[operator, union-attr]

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, most: int | None = None) -> Tensor:
        """As :meth:`Heads.forward`."""
        states = []
        for index in range(self.count if most is None else most):
            hidden, out = self.step(index, hidden, embeddings[index] if embeddings is not None else None)
            states.append(out)
        return torch.stack(states)

    def about(self) -> dict[str, Any]:
        """As :meth:`Heads.about`."""
        return {**super().about(), "eps": self.eps}


class ChainedHeads(_RefiningHeads):
    """TokenSwift's heads: each refines the state of the one before, and knows nothing of what was drafted."""

    kind = "chained"

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5, raw: bool = False) -> None:
        super().__init__(ChainedHead, hidden_size, count, eps, raw)


class ConditionedHeads(_RefiningHeads):
    """Heads that are told the token drafted before the one they guess.

    With shared noise a drafter almost always knows that token, and need not average over what it might have been.
    """

    kind, conditioned = "conditioned", True

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5, raw: bool = False) -> None:
        super().__init__(ConditionedHead, hidden_size, count, eps, raw)
