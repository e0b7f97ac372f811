"""Tree attention from stock operators: the prefix without a mask, the tree with a small one, merged by log-sum-exps.

The query heads that share a KV head are packed into rows, so keys and values are never expanded.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tswift.attention.layout import Layout, bias

_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BLOCK = 8192  # keys scored at a time where no operator returns log-sum-exps


class TreeAttention:
    """An :class:`~tswift.attention.layout.Attention` for every device and dtype."""

    STATIC: ClassVar[bool] = False
    WANTS: ClassVar[bool] = False
    MOST_NODES: ClassVar[int | None] = None
    EXACT: ClassVar[bool] = False

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        prefix = int(prefix)
        self._parts = self._split(layout, prefix, layout.groups * nodes)
        whole = prefix + 1 if nodes == 1 else prefix  # a single node attends to itself, too: it needs no mask
        self._even = whole - whole % self._parts
        # What the parts do not divide goes with the tree, whose slots follow it in the cache.
        self._wide = torch.promote_types(layout.dtype, torch.float32)  # bf16 scores would cost two digits more
        if self._even < prefix + nodes:
            self._bias = bias(layout, prefix - self._even, nodes, ancestors, self._wide).repeat(layout.groups, 1)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        rows = query.reshape(keys.shape[0], -1, query.shape[-1])
        even, wide = self._even, self._wide
        outs, lses = [], []
        if even:
            found = self._prefix(rows, keys[:, :even], values[:, :even], scale)
            outs, lses = [found[0].to(wide)], [found[1].to(wide)]
        if even < keys.shape[1]:
            out, lse = self._tail(rows.to(wide), keys[:, even:].to(wide), values[:, even:].to(wide), scale)
            outs, lses = [*outs, out.unsqueeze(0)], [*lses, lse.unsqueeze(0)]
        if len(outs) == len(outs[0]) == 1:
            return outs[0].view_as(query).to(query.dtype)
        shares = torch.cat(lses).softmax(0).unsqueeze(-1)
        return (torch.cat(outs) * shares).sum(0).view_as(query).to(query.dtype)

    def _tail(self, rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over the nodes' own keys, and the few before them that the parts of the prefix leave.

        Returns:
            Output ``[kv heads, rows, d]`` and log-sum-exps ``[kv heads, rows]``.
        """
        if rows.device.type != "cpu":
            return _masked(rows, keys, values, scale, self._bias)
        outs, lses = _OPERATOR(rows[None], keys[None], values[None], attn_mask=self._bias[None, None], scale=scale)
        return outs[0], lses[0]

    def _split(self, layout: Layout, prefix: int, rows: int) -> int:
        """In how many parts the prefix is cut."""
        if layout.device.type != "cpu" or rows > 64 or prefix < 256:
            return 1
        # the CPU operator works in parallel over heads and blocks of rows only; few of both leave cores idle
        return -(-torch.get_num_threads() // layout.kv_heads)

    def _prefix(self, rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Unmasked attention over the prefix.

        Returns:
            Outputs ``[parts, kv heads, rows, d]`` and log-sum-exps ``[parts, kv heads, rows]``.
        """
        if rows.device.type != "cpu":
            return _blockwise(rows, keys, values, scale)
        parts = self._parts
        split = [x.unflatten(1, (parts, x.shape[1] // parts)).transpose(0, 1) for x in (keys, values)]
        # one row in bfloat16 takes the operator 4.2 ms over 65,536 keys of 64, two take it 1.8
        count = rows.shape[1]
        wanted = 2 if count == 1 and rows.dtype == torch.bfloat16 else count
        query = rows.expand(parts, len(rows), wanted, -1)
        outs, lses = _OPERATOR(query, *split, scale=scale)
        return outs[:, :, :count], lses[:, :, :count]


def _masked(rows: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_tail``, from plain products."""
    scores = torch.baddbmm(bias, rows, keys.transpose(1, 2), alpha=scale)
    lse = scores.logsumexp(-1)
    return torch.bmm(torch.exp(scores - lse.unsqueeze(-1)), values), lse


def _blockwise(rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As ``_prefix``, from plain products."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    scaled = rows.to(wide) * scale  # unscaled float16 scores could overflow
    outs, lses = [], []
    for start in range(0, keys.shape[1], _BLOCK):
        scores = torch.bmm(scaled, keys[:, start : start + _BLOCK].to(wide).transpose(1, 2))
        lses.append(scores.logsumexp(-1))
        weights = torch.exp(scores - lses[-1].unsqueeze(-1))
        outs.append(torch.bmm(weights, values[:, start : start + _BLOCK].to(wide)))
    return torch.stack(outs), torch.stack(lses)
