"""Attention as reference implementations of speculative decoding do it: slow on purpose, to be shown beside ours.

At every step keys and values are expanded to all query heads, and a dense mask covers the whole text. Published
speedups are relative to plain decoding of this kind.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class ReferenceAttention:
    """Takes what :class:`~tswift.attention.sdpa.TreeAttention` takes and computes the same."""

    def __init__(self, prefix: int, ancestors: Tensor, groups: int, kv_heads: int, dtype: torch.dtype) -> None:
        nodes = len(ancestors)
        self._groups = groups
        self._mask = torch.zeros(nodes, prefix + nodes, dtype=dtype, device=ancestors.device)
        self._mask[:, prefix:].masked_fill_(~ancestors, torch.finfo(dtype).min)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for ``TreeAttention``."""
        keys, values = (x.repeat_interleave(self._groups, dim=0).unsqueeze(0) for x in (keys, values))
        return F.scaled_dot_product_attention(query.unsqueeze(0), keys, values, self._mask, scale=scale)[0]
