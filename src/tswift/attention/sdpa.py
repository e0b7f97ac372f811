"""Tree attention from stock operators: the prefix without a mask, the tree with a small one, merged by log-sum-exps.

The query heads that share a KV head are packed into rows, so keys and values are never expanded. Beside it: the prefix
through flash-attn, attention as reference implementations do it, and layers with windows, soft caps or sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.attention.layout import Attention, AttentionSpec, Layout, bias

_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BLOCK = 8192  # keys scored at a time where no operator returns log-sum-exps
_MASKED_BLOCK = 2048  # keys scored at a time in masked attention


class TreeAttention(Attention):
    """Attention by stock operators, for every device and dtype."""

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
        """Masked attention over the nodes' own keys and the few before them that the prefix's parts leave.

        Returns output ``[kv heads, rows, d]`` and log-sum-exps ``[kv heads, rows]``.
        """
        if rows.device.type != "cpu":
            return _masked(rows, keys, values, scale, self._bias)
        outs, lses = _OPERATOR(rows[None], keys[None], values[None], attn_mask=self._bias[None, None], scale=scale)
        return outs[0], lses[0]

    def _split(self, layout: Layout, prefix: int, rows: int) -> int:
        """Number of parts of the prefix."""
        if layout.device.type != "cpu" or rows > 64 or prefix < 256:
            return 1
        # the CPU operator works in parallel over heads and blocks of rows only; few of both leave cores idle
        return -(-torch.get_num_threads() // layout.kv_heads)

    def _prefix(self, rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Unmasked attention over the prefix.

        Returns outputs ``[parts, kv heads, rows, d]`` and log-sum-exps ``[parts, kv heads, rows]``.
        """
        if rows.device.type != "cpu":
            return _blockwise(rows, keys, values, scale)
        parts = self._parts
        split = [x.to(rows.dtype).unflatten(1, (parts, x.shape[1] // parts)).transpose(0, 1) for x in (keys, values)]
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


class FlashAttention(TreeAttention):
    """Attention with the prefix through flash-attn, for CUDA in bfloat16 and float16; ImportError without it."""

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        from flash_attn import flash_attn_with_kvcache

        super().__init__(layout, prefix, nodes, ancestors)
        self._flash = flash_attn_with_kvcache

    def _split(self, layout: Layout, prefix: int, rows: int) -> int:
        return 1  # flash-attn cuts the keys itself

    def _prefix(self, rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # Each KV head is a batch entry with one head, and its rows are the positions: nothing is copied or expanded.
        out, lse = self._flash(
            rows.unsqueeze(2),
            keys.unsqueeze(2),
            values.unsqueeze(2),
            softmax_scale=scale,
            causal=False,
            return_softmax_lse=True,
        )
        return out.squeeze(2).unsqueeze(0), lse.squeeze(1).unsqueeze(0)


class ReferenceAttention(Attention):
    """Attention as reference implementations of speculative decoding do it: slow on purpose, for comparison.

    At every step keys and values are expanded to all query heads, and a dense mask covers the whole text. Published
    speedups are relative to plain decoding of this kind.
    """

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        prefix = int(prefix)
        self._groups = layout.groups
        self._mask = bias(layout, prefix, nodes, ancestors, layout.dtype)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention."""
        keys, values = (x.repeat_interleave(self._groups, dim=0).unsqueeze(0) for x in (keys, values))
        return F.scaled_dot_product_attention(query.unsqueeze(0), keys, values, self._mask, scale=scale)[0]


class SpecAttention:
    """Attention of one pass by a backend that itself does what each layer's spec (``wants``) says."""

    def __init__(self, attend: Callable[..., Tensor], wants: Sequence[AttentionSpec]) -> None:
        self._attend, self.wants = attend, wants

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """As :meth:`Attention.__call__`, of one layer."""
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
        """Number of leading slots outside the attention window of every future token."""
        ...


class SpecialAttention:
    """Attention of one pass with windows, soft caps and sinks, by masked products over blocks of keys.

    For every device and dtype: slower than the backends where a layer sees the whole text, and cheap where it sees a
    window, as keys before the window are not read.

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
        """As :meth:`Attention.__call__`, of one layer."""
        wants = self.wants[layer]
        start = 0 if wants.window is None else self._cache.before(wants.window)
        visible = self._visible(layer, wants.window, start)
        wide, heads = self._wide, len(keys)
        rows = query.unflatten(0, (heads, -1)).to(wide) * scale  # [kv heads, groups, n, d]
        lowest = torch.finfo(wide).min  # stands for minus infinity, which a block without a visible key would give
        out, total = torch.zeros_like(rows), rows.new_full(rows.shape[:-1], lowest)
        for at in range(start, keys.shape[1], _MASKED_BLOCK):
            block = slice(at, at + _MASKED_BLOCK)
            scores = rows @ keys[:, None, block].to(wide).transpose(2, 3)
            if wants.softcap is not None:
                scores = torch.tanh(scores / wants.softcap) * wants.softcap
            scores.masked_fill_(~visible[:, None, :, at - start : at - start + _MASKED_BLOCK], -torch.inf)
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
