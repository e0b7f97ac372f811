"""Attention for layers that want more than softmax over scaled products: windows, soft-capped scores, sinks.

A backend may do them itself (:class:`SpecAttention`). Where it does not, they are plain products over blocks of
keys, on every device: slower than the backends where a layer sees the whole text, and cheap where it sees a window, as
keys before the window are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tswift.attention.layout import Layout

_BLOCK = 2048  # keys scored at a time


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer wants; nothing, where all is None.

    Attributes:
        window: a node sees this many tokens, itself included; None for all.
        softcap: scores are squeezed to between minus and plus this, by a hyperbolic tangent; None for not at all.
        sinks: ``[query heads]`` scores that take part in the softmax and stand for no key; None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __bool__(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


class SpecAttention:
    """Attention of one pass by a backend that itself does what layers want.

    Args:
        attend: the backend's; it also takes ``wants``.
        wants: by layer.
    """

    def __init__(self, attend: Callable[..., Tensor], wants: Sequence[AttentionSpec]) -> None:
        self._attend, self.wants = attend, wants

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; the layer's index, and shapes as for every attention."""
        return self._attend(query, keys, values, scale, wants=self.wants[layer])


class Places(Protocol):
    """A cache that knows where in the text its tokens are."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    def places(self, layer: int) -> Tensor:
        """``[kv heads or 1, length]`` positions of the tokens held."""
        ...

    def before(self, window: int) -> int:
        """How many slots at the beginning hold tokens that no coming one has in its window."""
        ...


class SpecialAttention:
    """Attention of one pass, for layers that want something.

    Args:
        layout: the model's.
        wants: by layer.
        cache: what the nodes attend to, themselves apart.
        positions: ``[n]`` int64, the nodes'.
        ancestors: as for :class:`~tswift.attention.layout.Attention`.
    """

    def __init__(
        self, layout: Layout, wants: Sequence[AttentionSpec], cache: Places, positions: Tensor, ancestors: Tensor | None
    ) -> None:
        self.wants, self._cache, self._positions = wants, cache, positions
        if ancestors is None:
            ancestors = torch.ones(len(positions), len(positions), dtype=torch.bool, device=layout.device).tril_()
        self._ancestors = ancestors
        self._wide = torch.promote_types(layout.dtype, torch.float32)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; the layer's index, and shapes as for every attention."""
        wants = self.wants[layer]
        start = 0 if wants.window is None else self._cache.before(wants.window)
        visible = self._visible(layer, wants.window, start)
        wide, heads = self._wide, len(keys)
        rows = query.unflatten(0, (heads, -1)).to(wide) * scale  # [kv heads, groups, n, d]
        lowest = torch.finfo(wide).min  # stands for minus infinity, which a block without a visible key would give
        out, total = torch.zeros_like(rows), rows.new_full(rows.shape[:-1], lowest)
        for at in range(start, keys.shape[1], _BLOCK):
            block = slice(at, at + _BLOCK)
            scores = rows @ keys[:, None, block].to(wide).transpose(2, 3)
            if wants.softcap is not None:
                scores = torch.tanh(scores / wants.softcap) * wants.softcap
            scores.masked_fill_(~visible[:, None, :, at - start : at - start + _BLOCK], -torch.inf)
            larger = torch.logaddexp(total, scores.logsumexp(-1)).clamp_min(lowest)
            shares = torch.exp(scores - larger.unsqueeze(-1))
            out = out * torch.exp(total - larger).unsqueeze(-1) + shares @ values[:, None, block].to(wide)
            total = larger
        if wants.sinks is not None:
            sinks = wants.sinks.to(wide).view(heads, -1, 1)
            out = out * torch.exp(total - torch.logaddexp(total, sinks)).unsqueeze(-1)
        return out.flatten(0, 1).to(query.dtype)

    def _visible(self, layer: int, window: int | None, start: int) -> Tensor:
        """``[kv heads or 1, n, keys]`` bool: true where a node sees a key, from slot ``start`` on."""
        held, nodes = self._cache.length - start, len(self._positions)
        if window is None:
            before = self._ancestors.new_ones(1, nodes, held)
            return torch.cat([before, self._ancestors.unsqueeze(0)], dim=2)
        first = self._positions - window  # the last position that is out of sight
        before = self._cache.places(layer)[:, None, start:] > first[:, None]
        own = self._ancestors & (self._positions > first[:, None])
        return torch.cat([before, own.expand(len(before), -1, -1)], dim=2)
