"""Attention with exact rows from stock operators: every node's row has the same bits in whatever pass it is computed.

A product of matrices in another shape sums in another order, and on some CPUs even a row's place within one decides how
it is summed. So a product here has the rows of one node, and its shape is fixed. What a node at position p sees is cut
by p alone:

- its **tail**, the 64 newest positions up to p, is gathered along the node's own path in the order of positions, so
  that drafted ancestors, which leave gaps between their slots, and committed ones give the same bits;
- all **before it** is committed, as no path in a pass is longer. It is read in blocks with fixed borders, with zero
  weights for the slots that a node does not see. A block of which it sees nothing leaves its sums as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.attention.layout import MOST_WIDTH, Attention, AttentionSpec, Layout

_LEAST, _MOST = 256, 2048  # keys of a block
_LOWEST = -80.0  # difference of scores; exponentials that are no normal float32 take a CPU 50 times as long
_NOTHING = AttentionSpec()


class ChunkedAttention(Attention):
    """Attention with exact rows, for every device and dtype.

    In a tree, nodes come after their ancestors. A chain may be longer than a tree: it is computed piece by piece.
    """

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
        if ancestors is None:
            ancestors = torch.ones(self._nodes, self._nodes, dtype=torch.bool, device=layout.device).tril_()
        self._positions = (self._prefix + ancestors.sum(1) - 1).view(-1, 1, 1, 1)
        # the slots of each path; below 0 where the text begins later
        slots = torch.arange(self._prefix - MOST_WIDTH + 1, self._prefix + self._nodes, device=layout.device)
        seen = F.pad(ancestors, (MOST_WIDTH - 1, 0), value=True)
        self._path = torch.where(seen, slots, -1).sort(1).values[:, -MOST_WIDTH:]

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, wants: AttentionSpec = _NOTHING
    ) -> Tensor:
        """As :meth:`Attention.__call__`; every token's slot is its position, the root's too."""
        if self._rest is not None:
            rest = self._rest(query[:, MOST_WIDTH:], keys, values, scale, wants)
        heads, width = len(keys), query.shape[-1]
        packed = query[:, : self._nodes].to(self._wide) * scale
        # by node, each in memory of its own: how that is aligned may matter, too
        rows = [
            row.clone(memory_format=torch.contiguous_format)
            for row in packed.view(heads, self._groups, -1, width).permute(2, 0, 1, 3)
        ]
        top, out = self._tail(rows, keys, values, wants)
        top, out = self._before(rows, keys, values, wants, top, out)
        if wants.sinks is not None:
            sinks = wants.sinks.to(self._wide).view(heads, -1, 1)
            higher = torch.maximum(top, sinks)
            out = out * torch.exp(top - higher)
            out[..., width:] += torch.exp(sinks - higher)
        out = (out[..., :width] / out[..., width:]).flatten(1, 2).transpose(0, 1).to(query.dtype)
        return out if self._rest is None else torch.cat([out, rest], dim=1)

    def _tail(self, rows: list[Tensor], keys: Tensor, values: Tensor, wants: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Attention to the newest positions, gathered for each node.

        Args:
            rows: by node ``[kv heads, groups, d]``, scaled.
            keys, values, wants: as for the call.

        Returns:
            The highest score of each row, ``[n, kv heads, groups, 1]``, and ``[..., d + 1]``: the weighted sum of
            values, and behind it the sum of weights.
        """
        hidden = self._path < 0
        if wants.window is not None:
            hidden[:, : -wants.window] = True
        # in place of what is hidden a node reads its own slot, never another's
        path = torch.where(hidden, self._path[:, -1:], self._path)
        near = [x[:, path].transpose(0, 1).to(self._wide).contiguous() for x in (keys, values)]
        hidden = hidden[:, None, None]
        scores = _scores(rows, near[0].transpose(2, 3), wants, hidden)
        top = scores.amax(-1, keepdim=True)
        return top, _products(_weights(scores, top, hidden), F.pad(near[1], (0, 1), value=1.0))

    def _before(
        self, rows: list[Tensor], keys: Tensor, values: Tensor, wants: AttentionSpec, top: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``_tail``, with all that was before it added."""
        window, last, (heads, width) = wants.window, self._prefix + self._nodes - 1, rows[0].shape[::2]
        begin = 0 if window is None else max(0, self._prefix - window + 1)
        end = last - MOST_WIDTH + 1
        wide = out.new_empty(0), out.new_empty(0)
        for at, size in _borders(begin, end, heads, window):
            if wide[0].numel() != heads * size * width:
                wide = out.new_ones(heads, size, width), out.new_ones(heads, size, width + 1)
            read = slice(max(at, begin), min(at + size, end))
            for block, source in zip(wide, (keys, values), strict=True):
                block[:, read.start - at : read.stop - at, :width] = source[:, read]
            hidden = None
            if at + size > self._prefix - MOST_WIDTH + 1 or (window is not None and at <= last - window):
                slots = torch.arange(at, at + size, device=out.device)
                hidden = slots > self._positions - MOST_WIDTH
                if window is not None:
                    hidden |= slots <= self._positions - window
            scores = _scores(rows, repeat(wide[0].transpose(1, 2)), wants, hidden)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            found = _products(_weights(scores, higher, hidden), repeat(wide[1]))
            out, top = out * torch.exp(top - higher) + found, higher
        return top, out


def _borders(begin: int, end: int, kv_heads: int, window: int | None) -> Iterator[tuple[int, int]]:
    """Where the blocks start that hold the slots from ``begin`` to ``end``, and their sizes.

    Sizes grow with the text, or a short one would have to be filled up to a large block. A window's blocks stay small,
    and those of many heads, which leave a CPU's cache otherwise. All are powers of two.
    """
    most = _LEAST if window is not None and window < _MOST else max(_LEAST, _MOST >> (kv_heads - 1).bit_length())
    at = begin // most * most
    while at < end:
        size = min(max(at, _LEAST), most)
        if at + size > begin:
            yield at, size
        at += size


def _scores(rows: list[Tensor], keys: Iterable[Tensor], wants: AttentionSpec, hidden: Tensor | None) -> Tensor:
    scores = _products(rows, keys)
    if wants.softcap is not None:
        scores = scores.div_(wants.softcap).tanh_().mul_(wants.softcap)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _weights(scores: Tensor, top: Tensor, hidden: Tensor | None) -> Tensor:
    weights = scores.sub_(top).clamp_min_(_LOWEST).exp_()
    return weights if hidden is None else weights.masked_fill_(hidden, 0.0)


def _products(left: Iterable[Tensor], right: Iterable[Tensor]) -> Tensor:
    """Batched products, node by node: all in one go, their number would decide how they are computed."""
    return torch.stack([torch.bmm(a, b) for a, b in zip(left, right, strict=False)])
