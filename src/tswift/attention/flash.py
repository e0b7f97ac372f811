"""Tree attention with the prefix through flash-attn, where that is installed; the tree and the merge are ours."""

from __future__ import annotations

from torch import Tensor

from tswift.attention.layout import Layout
from tswift.attention.sdpa import TreeAttention


class FlashAttention(TreeAttention):
    """An :class:`~tswift.attention.layout.Attention` for CUDA in bfloat16 and float16.

    Raises:
        ImportError: flash-attn is not installed.
    """

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
