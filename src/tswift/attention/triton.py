"""Tree attention in one Triton kernel: plain decoding, drafting and verification alike, on CUDA.

All query heads that share a KV head, at all nodes, are rows of one matrix; the keys are cut into parts that run side by
side, and a second, small kernel combines what they found. How many keys there are is read on the device and decides
nothing about the launch, so that a captured CUDA graph serves every length. Only the table of backends imports this
module: triton may not be installed.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from tswift.attention.kernels import attend_part, combine_parts, store_new
from tswift.attention.layout import Layout

MOST_NODES = 128  # of a tree: two words of 64 bits
MOST_PARTS = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a tile of keys or values, by bytes per element. Two or three pairs are in shared memory at a time; in
# float32, which is multiplied outside the tensor cores, larger ones would not fit into registers either.
_TILE = {2: 8192, 4: 2048}
_INTERPRETED = not isinstance(attend_part, triton.JITFunction)


class TritonAttention:
    """An :class:`~tswift.attention.layout.Attention` for CUDA, and for tests on the CPU with ``TRITON_INTERPRET=1``.

    Args:
        layout: the model's.
        prefix: keys before the pass's own: an int, or a 0-dim int32 or int64 tensor on the device. With a tensor, keys
            and values may be views of the whole capacity, ``[kv heads, capacity, d]``.
        nodes: how many.
        ancestors: as for every attention, of at most 128 nodes; None, the chain, has no limit.

    Raises:
        ValueError: the dtype is none of float32, bfloat16 and float16, or the tree has more than 128 nodes.
    """

    STATIC: ClassVar[bool] = True
    MOST_NODES: ClassVar[int | None] = MOST_NODES

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        if layout.dtype not in _DTYPES:
            raise ValueError(f"triton attention takes float32, bfloat16 and float16, not {layout.dtype}")
        if not isinstance(prefix, Tensor):
            prefix = torch.full((), prefix, dtype=torch.int32, device=layout.device)
        self._kv_heads, self._groups, self._nodes, self._length = layout.kv_heads, layout.groups, nodes, prefix
        self._bits = None if ancestors is None or nodes == 1 else pack(ancestors)
        self._wide = _INTERPRETED and layout.dtype == torch.bfloat16  # numpy cannot calculate in bfloat16

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend; shapes as for every attention. The last dimension of keys and values is contiguous."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        size, itemsize, rows = query.shape[-1], query.element_size(), self._groups * self._nodes
        width = head_width(size)
        block = row_block(rows, width, itemsize)
        blocks = triton.cdiv(rows, block)
        parts = splits(_processors(query.device), self._kv_heads, blocks)
        outs = query.new_empty(parts, self._kv_heads, rows, size, dtype=torch.float32)
        lses = query.new_empty(parts, self._kv_heads, rows, dtype=torch.float32)
        # [n, heads, d] in memory: what the output projection reads next
        out = query.new_empty(query.transpose(0, 1).shape, dtype=torch.float32 if self._wide else None).transpose(0, 1)
        with torch.cuda.device_of(query):
            attend_part[blocks, parts, self._kv_heads](
                query,
                keys,
                values,
                self._bits,
                self._length,
                outs,
                lses,
                *query.stride()[:2],
                *keys.stride()[:2],
                *values.stride()[:2],
                scale * math.log2(math.e),
                self._nodes,
                GROUPS=self._groups,
                HEAD=size,
                WIDTH=width,
                ROWS=block,
                KEYS=key_tile(width, itemsize),
                TREE=self._bits is not None,
                WIDE=self._wide,
                num_warps=4 if itemsize == 2 and block < 128 else 8,
                num_stages=3 if itemsize == 2 and width <= 128 else 2,
            )
            some = min(32, triton.next_power_of_2(parts))
            combine_parts[triton.cdiv(rows, 32 // some), self._kv_heads](
                outs,
                lses,
                out,
                *out.stride()[:2],
                rows,
                parts,
                GROUPS=self._groups,
                HEAD=size,
                WIDTH=width,
                ROWS=32 // some,
                PARTS=some,
                MOST_PARTS=MOST_PARTS,
            )
        return out.to(query.dtype)

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
        """Write a pass's new keys and values behind those held, in a launch that does not depend on their number.

        Args:
            keys: one layer's ``[kv heads, capacity, d]``, written from ``length`` on, but not past the capacity.
            values: like ``keys``.
            new_keys: ``[kv heads, n, d]``, rotated. The last dimension of all four is contiguous.
            new_values: like ``new_keys``.
            length: 0-dim int32 or int64 on the device.
        """
        kv_heads, nodes, size = new_keys.shape
        with torch.cuda.device_of(keys):
            store_new[triton.cdiv(nodes, 16), kv_heads](
                keys,
                values,
                new_keys,
                new_values,
                length,
                *keys.stride()[:2],
                *values.stride()[:2],
                *new_keys.stride()[:2],
                *new_values.stride()[:2],
                nodes,
                keys.shape[1],
                HEAD=size,
                WIDTH=head_width(size),
                ROWS=16,
            )


def pack(ancestors: Tensor) -> Tensor:
    """Ancestors as bits.

    Args:
        ancestors: ``[n, n]`` bool.

    Returns:
        ``[n, 2]`` int64, on the same device: bit ``j % 64`` of word ``j // 64`` says whether node j is visible.

    Raises:
        ValueError: there are more than 128 nodes.
    """
    nodes = len(ancestors)
    if nodes > MOST_NODES:
        raise ValueError(f"triton attention takes trees of at most {MOST_NODES} nodes, not {nodes}")
    bits = F.pad(ancestors, (0, MOST_NODES - nodes)).view(nodes, 2, 64)
    return (bits.long() << torch.arange(64, device=bits.device)).sum(-1)


def head_width(size: int) -> int:
    """The head size, padded to what a matrix product takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def row_block(rows: int, width: int, itemsize: int) -> int:
    """How many rows a program takes: little padding, but few programs, as each reads its keys anew.

    Args:
        rows: query heads per KV head times nodes.
        width: padded head size.
        itemsize: bytes per element; float32 is multiplied outside the tensor cores, in small blocks.
    """
    most = 32 if itemsize == 4 else 128 if width <= 128 else 64
    blocks = [block for block in (16, 32, 64, 128) if block <= most]
    # reading the keys once more is taken to cost as much as 32 rows
    return min(blocks, key=lambda block: (triton.cdiv(rows, block) * (block + 32), -block))


def key_tile(width: int, itemsize: int) -> int:
    """How many keys a program reads at a time."""
    return min(128, max(16, _TILE[itemsize] // width))


def splits(processors: int, kv_heads: int, row_blocks: int) -> int:
    """Into how many parts the keys are cut, whatever their number: about two programs per processor of the GPU."""
    return min(MOST_PARTS, max(1, 2 * processors // (kv_heads * row_blocks)))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter has none; so are there several parts
    return torch.cuda.get_device_properties(device).multi_processor_count
