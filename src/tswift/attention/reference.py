"""Attention as reference implementations of speculative decoding do it: slow on purpose, to be shown beside ours.

At every step keys and values are expanded to all query heads, and a dense mask covers the whole text. Published
speedups are relative to plain decoding of this kind.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from tswift.attention.layout import Layout, bias


class ReferenceAttention:
    """An :class:`~tswift.attention.layout.Attention` that computes what the others do."""

    STATIC: ClassVar[bool] = False
    WANTS: ClassVar[bool] = False
    MOST_NODES: ClassVar[int | None] = None
    EXACT: ClassVar[bool] = False

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        prefix = int(prefix)
        self._groups = layout.groups
        self._mask = bias(layout, prefix, nodes, ancestors, layout.dtype)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        keys, values = (x.repeat_interleave(self._groups, dim=0).unsqueeze(0) for x in (keys, values))
        return F.scaled_dot_product_attention(query.unsqueeze(0), keys, values, self._mask, scale=scale)[0]
