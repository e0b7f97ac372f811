"""Heads that are one layer, fed with its own states; for the layer itself see :mod:`tswift.models.autoregressive`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tswift.models.autoregressive import HEAD_DIM, AutoregressiveLayer, Memory
from tswift.models.base_heads import Heads

DEEPEST = 1000  # tokens that are drafted one after another, where heads set no end


class AutoregressiveHeads(Heads):
    """One small layer that is fed with its own states, to any depth; see :mod:`tswift.models.autoregressive`.

    Args:
        hidden_size: width of the model's hidden states.
        count: steps that it is unrolled for while it is trained.
        eps: of the norms.
        raw: as for :class:`Heads`.
        window: tokens of the text that it attends to.
        inner: width of its MLP; None for three times the hidden size.
        queries: query heads; None for as many as the hidden size has room for.
    """

    kind, conditioned = "autoregressive", True

    def __init__(
        self,
        hidden_size: int,
        count: int = 3,
        eps: float = 1e-5,
        raw: bool = False,
        window: int = 128,
        inner: int | None = None,
        queries: int | None = None,
    ) -> None:
        self.inner, self.queries = inner or 3 * hidden_size, queries or max(1, hidden_size // HEAD_DIM)
        super().__init__(hidden_size, [AutoregressiveLayer(hidden_size, self.inner, self.queries, eps)], raw)
        self.count, self.eps, self.window = count, eps, window

    @property
    def layer(self) -> AutoregressiveLayer:
        """The one that there is."""
        return cast(AutoregressiveLayer, self.heads[0])

    @property
    def deepest(self) -> int:
        """As :attr:`Heads.deepest`: it is fed with its own states for as long as is wanted."""
        return DEEPEST

    def memory(self, held_back: int) -> Memory:
        """As :meth:`Heads.memory`."""
        return Memory(self.layer, self.window, held_back)

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`Heads.step`, of a text that begins with this token; :meth:`memory` knows of more."""
        assert embedding is not None
        return self.memory(0).step(hidden, embedding)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, most: int | None = None) -> Tensor:
        """As :meth:`Heads.forward`; ``hidden`` is ``[..., T, H]``, of T tokens that follow each other."""
        assert embeddings is not None
        flat = embeddings[:most].reshape(-1, hidden[..., 0, 0].numel(), *hidden.shape[-2:])
        states = torch.stack(self.layer.unroll(hidden.reshape(flat.shape[1:]), flat, self.window))
        out: Tensor = self.layer.post_layernorm(states)
        return out.reshape(-1, *hidden.shape)

    def about(self) -> dict[str, Any]:
        """As :meth:`Heads.about`."""
        own = {name: getattr(self, name) for name in ("eps", "window", "inner", "queries")}
        return {**super().about(), **own}
