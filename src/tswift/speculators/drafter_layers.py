"""Layers of drafters that are our own modules: attention over a window of the text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from tswift.caches import WindowKV
from tswift.speculators.spec import DFLASH2, EAGLE3, SpeculatorSpec

Angles = tuple[Tensor, Tensor]  # ``[n, d / 2]`` cosines and sines of positions


class Rotary(nn.Module):
    """Rotary embeddings; cosines and sines are taken in float32, at any position."""

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        with torch.device("cpu"):
            made = LlamaRotaryEmbedding(spec.llama())
        self.rates = made.inv_freq.float()
        self.scale = float(made.attention_scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and sines of positions ``[n]``, once for all layers."""
        self.rates = self.rates.to(positions.device)
        angles = positions[:, None].float() * self.rates
        cos, sin = ((turn * self.scale).to(dtype) for turn in (angles.cos(), angles.sin()))
        return cos, sin


def _rotated(rows: Tensor, angles: Angles) -> Tensor:
    """``[heads, n, d]``, rotated."""
    cos, sin = angles
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float | None = None
) -> Tensor:
    """``[heads, n, d]``: queries attend to slots ``[kv heads, slots, d]`` that are ``seen`` ``[n or
    1, slots]``.
    """
    # the query heads of a KV head are its rows: keys and values are not repeated
    packed = queries.unflatten(0, (len(keys), -1)).flatten(1, 2)
    mask = seen if len(seen) == 1 else seen.repeat(len(queries) // len(keys), 1)
    out = F.scaled_dot_product_attention(packed[None], keys[None], values[None], mask, scale=scale)[
        0
    ]
    return out.unflatten(1, (-1, queries.shape[1])).flatten(0, 1)


class DrafterAttention(nn.Module):
    """Attention of a drafter's layer, ``width`` its input's."""

    def __init__(self, spec: SpeculatorSpec, width: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads
        size = spec.head_dim
        self.q_proj = nn.Linear(width, spec.heads * size, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(width, spec.kv_heads * size, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(spec.heads * size, spec.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(size, spec.eps) if spec.qk_norm else nn.Identity() for _ in range(2)
        )

    def remember(
        self, index: int, rows: Tensor, angles: Angles, slots: Tensor, kv: WindowKV
    ) -> None:
        """Put the keys and values of rows ``[n, width]`` into slots ``[n]`` of layer ``index``."""
        keys, values = (
            proj(rows).unflatten(-1, (self.kv_heads, -1)).transpose(0, 1)
            for proj in (self.k_proj, self.v_proj)
        )
        kv.put(index, slots, _rotated(self.k_norm(keys), angles), values)

    def forward(
        self, index: int, rows: Tensor, angles: Angles, kv: WindowKV, seen: Tensor
    ) -> Tensor:
        """``[n, H]``: rows ``[n, width]`` attend to layer ``index``'s slots that are ``seen`` ``[n
        or 1, slots]``.
        """
        queries = self.q_proj(rows).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        queries = _rotated(self.q_norm(queries), angles)
        mixed = attend(queries, kv.keys[index], kv.values[index], seen).transpose(0, 1)
        return self.o_proj(mixed.flatten(1))


class DrafterLayer(nn.Module):
    """A layer as Qwen3's; the attention of EAGLE-3's only one reads a token's embedding beside its
    state.
    """

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        eagle = spec.kind == EAGLE3
        hidden = spec.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, spec.eps) for _ in range(2)
        )
        if eagle:
            self.hidden_norm = nn.RMSNorm(hidden, spec.eps)
        self.self_attn = DrafterAttention(spec, (1 + eagle) * hidden)
        self.mlp = LlamaMLP(spec.llama())
        if spec.kind == DFLASH2:
            self.attention_conv, self.mlp_conv = (_Convolution(spec) for _ in range(2))


class _Convolution(nn.Module):
    """DFlash2's mixing of a slot with those before it in the block,
    before and after a part of a layer, by weights computed from the slot itself.
    """

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        taps, group = spec.conv
        hidden = spec.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, taps, H]`` weights before and after, computed from rows ``[n, H]`` of a block."""
        _, taps, hidden = self.base_kernel.shape
        groups = self.kernel_projection(rows).view(len(rows), 2, taps, -1)
        own = groups.repeat_interleave(hidden // groups.shape[-1], -1)
        before, after = (self.base_kernel + own).unbind(1)
        return before, after


def convolved(rows: Tensor, kernel: Tensor) -> Tensor:
    """``[n, H]``: rows of a block, each by its kernel ``[taps, H]`` with those before it."""
    taps = kernel.shape[1]
    padded = F.pad(rows, (0, 0, taps - 1, 0))
    windows = torch.stack([padded[taps - 1 - tap :][: len(rows)] for tap in range(taps)], 1)
    return (windows * kernel).sum(1)


def mixed_slots(
    rows: Tensor, layer: DrafterLayer, name: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows as a part of a layer reads them, and a function for what the part gives: both mix
    neighbouring slots where the part has a convolution (DFlash2), and change nothing elsewhere.
    """
    own = getattr(layer, name, None)
    if own is None:
        return rows, lambda given: given
    before, after = own.kernels(rows)
    return convolved(rows, before), lambda given: convolved(given, after)
