"""Tree attention in one Triton kernel: plain decoding, drafting and verification alike, on CUDA.

All query heads that share a KV head, at all nodes, are rows of one matrix. The keys are cut into chunks that run side
by side, and a second, small kernel combines what they found. A program holds up to 256 rows and reads its chunk once.
How many keys there are is read on the device and decides nothing about the launch, so that a captured CUDA graph serves
every length. Only the table of backends imports this module: triton may not be installed.

**What a row's result depends on.** The borders of chunks and of the tiles within them are fixed slots, given by the
number of KV heads and the head size alone. Each chunk is read tile by tile from its beginning, the chunks are merged
in their order, and masked keys add exact zeros. So a row's result is the same, bit for bit, whatever other nodes are in
the pass, wherever its node stands, and however long the text grows behind it, if the keys that it sees are in the same
slots. In a chain they always are: a chain's rows equal those of plain decoding. Exceptions:

- a node whose ancestors leave gaps between their slots (a tree's second and later branches) adds the same numbers in
  other places of a sum than plain decoding will once they are committed, so that its last bits may differ;
- compiled for a GPU, sums within a tile are also ordered by the block of rows (:func:`configuration`): equality is to
  be expected only of passes that take the same one. The interpreter has no such difference;
- chains of more than 128 nodes, a prompt's, have chunks 32 times as long, or their partial results would take more
  memory than the keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from tswift.attention.kernels import MIDDLE, NEAR, attend_chunk, combine_chunks, store_new
from tswift.attention.layout import Layout
from tswift.attention.special import Wants

MOST_NODES = 128  # of a tree: two words of 64 bits
_LONG = 32  # times as long are the chunks of longer chains
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTERPRETED = not isinstance(attend_chunk, triton.JITFunction)
_NOTHING = Wants()


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
    WANTS: ClassVar[bool] = True
    MOST_NODES: ClassVar[int | None] = MOST_NODES
    EXACT: ClassVar[bool] = False

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        if layout.dtype not in _DTYPES:
            raise ValueError(f"triton attention takes float32, bfloat16 and float16, not {layout.dtype}")
        if not isinstance(prefix, Tensor):
            prefix = torch.full((), prefix, dtype=torch.int32, device=layout.device)
        self._kv_heads, self._groups, self._nodes, self._length = layout.kv_heads, layout.groups, nodes, prefix
        self._ancestors = None if nodes == 1 else ancestors
        self._bits: dict[int, Tensor] = {}  # by window
        if self._ancestors is not None:
            self._bits[0] = pack(self._ancestors)
        self._wide = _INTERPRETED and layout.dtype == torch.bfloat16  # numpy cannot calculate in bfloat16

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, wants: Wants = _NOTHING) -> Tensor:
        """Attend; shapes as for every attention. The last dimension of keys and values is contiguous.

        What a layer wants besides, it can have if every token's slot is its position, the root's too. The scale is more
        than 0.
        """
        if query.stride(-1) != 1:
            query = query.contiguous()
        size, rows, window = query.shape[-1], self._groups * self._nodes, wants.window or 0
        width, tree = head_width(size), self._ancestors is not None
        run = configuration(rows, width, query.element_size(), _generation(query.device))
        chunk = chunk_size(self._kv_heads) * (1 if self._nodes <= MOST_NODES else _LONG)
        chunks = chunk_count(keys.shape[1], chunk)
        depths = self._depths if tree and window else None
        factor, cap = scale * math.log2(math.e), 0.0
        if wants.softcap is not None:  # the kernel's hyperbolic tangent takes powers of two as well
            factor, cap = 2 * factor / wants.softcap, wants.softcap * math.log2(math.e)
        outs = query.new_empty(chunks, self._kv_heads, rows, size, dtype=torch.float32)
        lses = query.new_empty(chunks, self._kv_heads, rows, dtype=torch.float32)
        # [n, heads, d] in memory: what the output projection reads next
        out = query.new_empty(query.transpose(0, 1).shape, dtype=torch.float32 if self._wide else None).transpose(0, 1)
        with torch.cuda.device_of(query):
            attend_chunk[triton.cdiv(rows, run.rows), self._kv_heads, chunks](
                query,
                keys,
                values,
                self._seen(window) if tree else None,
                depths,
                self._length,
                outs,
                lses,
                *query.stride()[:2],
                *keys.stride()[:2],
                *values.stride()[:2],
                factor,
                cap,
                self._nodes,
                GROUPS=self._groups,
                HEAD=size,
                WIDTH=width,
                ROWS=run.rows,
                KEYS=run.keys,
                CHUNK=chunk,
                TREE=tree,
                WINDOW=window,
                SOFTCAP=wants.softcap is not None,
                WIDE=self._wide,
                num_warps=run.warps,
                num_stages=run.stages,
                maxnreg=run.registers,
            )
            block = 32 if _INTERPRETED else 1  # a GPU has programs enough for every row, an interpreter has not
            combine_chunks[triton.cdiv(rows, block), self._kv_heads](
                outs,
                lses,
                out,
                depths,
                wants.sinks,
                self._length,
                *out.stride()[:2],
                self._nodes,
                GROUPS=self._groups,
                HEAD=size,
                WIDTH=width,
                ROWS=block,
                CHUNK=chunk,
                CHUNKS=32,
                TREE=tree,
                WINDOW=window,
            )
        return out.to(query.dtype)

    @functools.cached_property
    def _depths(self) -> Tensor:
        """``[n]`` int32: how many ancestors a node has, itself not among them."""
        assert self._ancestors is not None
        return (self._ancestors.sum(1) - 1).to(torch.int32)

    def _seen(self, window: int) -> Tensor:
        """The ancestors within a window, packed; all of them if it is 0."""
        if window not in self._bits:
            assert self._ancestors is not None
            self._bits[window] = pack(self._ancestors & (self._depths[:, None] - self._depths < window))
        return self._bits[window]

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


@dataclass(frozen=True)
class Configuration:
    """How a program of the attention kernel is laid out.

    Attributes:
        rows: it holds; those beyond are taken by further programs, which read the keys again.
        keys: read at a time. Sums within a tile are ordered by them, so that no number of rows may change them.
        warps: of 32 threads.
        stages: tiles of keys and values in shared memory at a time, loads under way included.
        registers: most per thread; None leaves it to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def configuration(rows: int, width: int, itemsize: int, generation: int) -> Configuration:
    """The layout of the attention kernel's programs; the only place that says so.

    Chosen by what the compiler makes of them (results/cuda-offline): nothing spilled, and two programs per
    multiprocessor where that can be. No GPU has timed them yet.

    Args:
        rows: query heads per KV head times nodes.
        width: padded head size.
        itemsize: bytes per element.
        generation: major compute capability. On 9 and 10 a program takes up to 227 KB of shared memory, and its
            matrix products read from there, which leaves registers for more rows; 8 and 12 have as little as 99 KB.
    """
    if itemsize == 4:  # multiplied outside the tensor cores, and bound by that: keys may well be read again
        return Configuration(16 if rows <= 16 else 32, min(128, max(16, 2048 // width)), warps=8, stages=2)
    keys = min(128, max(16, 4096 // width))
    if rows <= 32:
        return Configuration(16 if rows <= 16 else 32, keys, warps=4, stages=4)
    if rows <= 64 or (width > 128 and generation not in (9, 10)):
        return Configuration(64, keys, warps=4, stages=3)
    if generation not in (9, 10) or width > 128:
        return Configuration(128, keys, warps=8, stages=3)
    if rows <= 128:
        return Configuration(128, keys, warps=8, stages=3, registers=128)
    return Configuration(256, keys, warps=16, stages=3)


def chunk_size(kv_heads: int) -> int:
    """Keys of the first chunks: with 8 KV heads 256, so that 4,096 keys give each of some 130 processors a program.

    The first 16 chunks have this size, the next 24 twice, and all others 8 times as many keys: where many programs run
    anyway, partial results, which are in float32, are to be few beside the keys and values that they come from.
    """
    return min(1024, max(256, triton.next_power_of_2(32 * kv_heads)))


def chunk_count(capacity: int, size: int) -> int:
    """How many chunks there are up to a slot; those that a text has not reached end at once."""
    units = triton.cdiv(capacity, size)
    middle = min(MIDDLE, triton.cdiv(max(0, units - NEAR), 2))
    return min(units, NEAR) + middle + triton.cdiv(max(0, units - NEAR - 2 * MIDDLE), 8)


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
