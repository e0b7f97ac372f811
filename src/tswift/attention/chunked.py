"""Attention with exact rows from stock operators: every node's row has the same bits in whatever pass it is computed.

A product of matrices gives a row the same bits wherever it stands and whatever the other rows hold, as long as the
shapes stay the same; in other shapes it sums in another order. So all products here have fixed shapes, and what a node
at position p sees is cut by p alone:

- its **tail**, the 64 newest positions up to p, is gathered along the node's own path in the order of positions, so
  that drafted ancestors, which leave gaps between their slots, and committed ones give the same bits;
- **before it** all is committed, as no path in a pass is longer. It is read in blocks with fixed borders, zeros in
  place of the slots that are not there. A block that a node does not see leaves its sums as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from tswift.attention.layout import MOST_WIDTH, Layout
from tswift.attention.special import Wants

_BLOCK = 2048  # keys scored at a time
_ROWS = 8  # of a product, about: more would cost a single node time, fewer a wide pass
_NOTHING = Wants()


class ChunkedAttention:
    """An :class:`~tswift.attention.layout.Attention` with exact rows, for every device and dtype.

    In a tree, nodes come after their ancestors. A chain may be longer than a tree: it is computed piece by piece.
    """

    STATIC: ClassVar[bool] = False
    WANTS: ClassVar[bool] = True
    MOST_NODES: ClassVar[int | None] = MOST_WIDTH
    EXACT: ClassVar[bool] = True

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        self._prefix, self._nodes, self._groups = int(prefix), min(nodes, MOST_WIDTH), layout.groups
        self._rest = None
        if nodes > MOST_WIDTH:
            if ancestors is not None:
                raise ValueError(f"a tree of {nodes} nodes has more than {MOST_WIDTH}")
            self._rest = ChunkedAttention(layout, self._prefix + MOST_WIDTH, nodes - MOST_WIDTH, None)
        self._wide = torch.promote_types(layout.dtype, torch.float32)  # bf16 scores would cost two digits
        self._block = max(1, _ROWS // layout.groups)  # nodes
        if ancestors is None:
            ancestors = torch.ones(self._nodes, self._nodes, dtype=torch.bool, device=layout.device).tril_()
        # the last block is filled up with its last node
        self._filled = torch.arange(-(-self._nodes // self._block) * self._block, device=layout.device)
        self._filled.clamp_max_(self._nodes - 1)
        ancestors = ancestors[self._filled]
        self._positions = (self._prefix + ancestors.sum(1) - 1).view(-1, 1, self._block, 1)
        # slots of a path, [filled, 64]; below 0 where the text begins later
        slots = torch.arange(self._prefix - MOST_WIDTH + 1, self._prefix + self._nodes, device=layout.device)
        seen = torch.cat([ancestors.new_ones(len(ancestors), MOST_WIDTH - 1), ancestors], dim=1)
        self._path = torch.where(seen, slots, -1).sort(1).values[:, -MOST_WIDTH:]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, wants: Wants = _NOTHING) -> Tensor:
        """Attend; shapes as for every attention."""
        if self._rest is not None:
            rest = self._rest(query[:, MOST_WIDTH:], keys, values, scale, wants)
            held = self._prefix + MOST_WIDTH
            query, keys, values = query[:, :MOST_WIDTH], keys[:, :held], values[:, :held]
        heads, width, blocks = len(keys), query.shape[-1], len(self._filled) // self._block
        rows = query[:, self._filled].to(self._wide) * scale
        rows = rows.view(heads, self._groups, blocks, self._block, width).permute(2, 0, 3, 1, 4).contiguous()
        top, out = self._tail(rows, keys, values, wants)
        rows = rows.flatten(2, 3)  # [blocks, kv heads, rows, d]
        top, out = self._before(rows, keys, values, wants, top.view(*rows.shape[:3], 1), out.view(*rows.shape[:3], -1))
        if wants.sinks is not None:
            sinks = wants.sinks.to(self._wide).view(heads, 1, -1).expand(-1, self._block, -1).reshape(heads, -1, 1)
            higher = torch.maximum(top, sinks)
            out = out * torch.exp(top - higher)
            out[..., width:] += torch.exp(sinks - higher)
        out = (out[..., :width] / out[..., width:]).view(blocks, heads, self._block, self._groups, width)
        out = out.permute(1, 3, 0, 2, 4).reshape(len(query), -1, width)[:, : self._nodes].to(query.dtype)
        return out if self._rest is None else torch.cat([out, rest], dim=1)

    def _tail(self, rows: Tensor, keys: Tensor, values: Tensor, wants: Wants) -> tuple[Tensor, Tensor]:
        """Attention to the newest positions, gathered for each node.

        Args:
            rows: ``[blocks, kv heads, block, groups, d]``, scaled.
            keys: as for every attention.
            values: as for every attention.
            wants: as for every attention.

        Returns:
            Per row the highest score, and the weighted sum of values with the sum of weights behind it: ``[blocks, kv
            heads * block, groups, 1]`` and ``[..., d + 1]``.
        """
        path = self._path if wants.window is None else self._path.clone()
        if wants.window is not None:
            path[:, : -wants.window] = -1
        hidden = (path < 0).view(len(rows), 1, self._block, 1, -1).expand(-1, len(keys), -1, -1, -1)
        path = torch.where(path < 0, path[:, -1:], path)  # what is hidden is its own: of others nothing is read
        near = [self._gathered(x, path) for x in (keys, values)]
        near[1] = torch.cat([near[1], near[1].new_ones(*near[1].shape[:-1], 1)], dim=-1)
        scores = self._scores(rows.flatten(1, 2), near[0].transpose(2, 3), wants)
        scores.masked_fill_(hidden.flatten(1, 2), -torch.inf)
        top = scores.amax(-1, keepdim=True)
        return top, _products(torch.exp(scores - top), near[1])

    def _gathered(self, source: Tensor, path: Tensor) -> Tensor:
        """``[blocks, kv heads * block, 64, d]`` of ``[kv heads, slots, d]``."""
        found = (
            source[:, path.flatten()]
            .to(self._wide)
            .view(len(source), -1, self._block, *path.shape[1:], source.shape[2])
        )
        return found.transpose(0, 1).contiguous().flatten(1, 2)

    def _before(
        self, rows: Tensor, keys: Tensor, values: Tensor, wants: Wants, top: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``_tail``, with all that was before it added; shapes are ``[blocks, kv heads, rows, ...]``."""
        window, last = wants.window, self._prefix + self._nodes - 1
        begin = 0 if window is None else max(0, self._prefix - window + 1)
        end = last - MOST_WIDTH + 1  # of the node farthest behind
        positions = self._positions.expand(-1, -1, -1, self._groups).reshape(len(rows), 1, -1, 1)
        heads, width = len(keys), keys.shape[2]
        block = [rows.new_ones(heads, _BLOCK, size) for size in (width, width + 1)]  # a last column sums the weights
        for at in range(begin // _BLOCK * _BLOCK, end, _BLOCK):
            read = slice(max(at, begin), min(at + _BLOCK, end))
            for held, source in zip(block, (keys, values), strict=True):
                held[:, read.start - at : read.stop - at, :width] = source[:, read]
            scores = self._scores(rows, repeat(block[0].transpose(1, 2)), wants)
            if at + _BLOCK > self._prefix - MOST_WIDTH + 1 or (window is not None and at <= last - window):
                slots = torch.arange(at, at + _BLOCK, device=rows.device)
                hidden = slots > positions - MOST_WIDTH
                if window is not None:
                    hidden |= slots <= positions - window
                scores.masked_fill_(hidden, -torch.inf)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores.sub_(higher))
            out, top = out * torch.exp(top - higher) + _products(weights, repeat(block[1])), higher
        return top, out

    def _scores(self, rows: Tensor, keys: Iterable[Tensor], wants: Wants) -> Tensor:
        scores = _products(rows, keys)
        if wants.softcap is not None:
            scores = scores.div_(wants.softcap).tanh_().mul_(wants.softcap)
        return scores


def _products(left: Tensor, right: Iterable[Tensor]) -> Tensor:
    """Batched products of each block, one by one: all in one go, their number would decide how they are computed."""
    return torch.stack([torch.bmm(a, b) for a, b in zip(left, right)])
