"""Tree attention in one Triton kernel: plain decoding, drafting and verification alike, on CUDA.

All query heads that share a KV head, at all nodes, are rows of one matrix. The keys are cut into chunks that run side
by side, and a second, small kernel combines what they found. A program holds up to 128 rows and reads its chunk once.
How many keys there are is read on the device and decides nothing about the launch, so that a captured CUDA graph serves
every length. Only the table of backends imports this module: triton may not be installed.

**Rows are exact** in passes of at most ``MOST_WIDTH`` (64) nodes over a cache whose slots are positions: a node's row
is a function of its position p and of the queries, keys and values along its own path, to the bit. It is the same
whatever other nodes are in the pass, how many, in which order, how many of the node's ancestors are drafted and which
are committed, and however long the text grows. That is so because all borders are positions:

- The keys before ``floor((p - 64) / tile) * tile`` are committed in every such pass. They are read in chunks and tiles
  that begin at fixed slots, given by the number of KV heads and the head size alone; a tile that a row does not see
  leaves it as it was. The others, the tail, the node reads by itself, in tiles of the same borders, in the order of
  positions along its own path, wherever these keys are.
- Tail and chunks are merged in one order. Chunks without a visible key weigh exactly nothing.
- Compiled for a GPU, a pass of more rows may have more warps (:func:`configuration`), and nothing else: a warp has 16
  rows and all keys of a tile, so that the instructions that a row goes through are the same ones in the same order.
  tests/attention/test_offline_compile.py compares the code. The compiler may fuse no product with a sum by itself.

Not exact are passes of more than 128 nodes, a prompt's, whose chunks are 32 times as long, or their partial results
would take more memory than the keys; and in trees nodes more than 64 below the root. No GPU has confirmed any of this
yet; the interpreter has, and the compiled code.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
from torch import Tensor

from tswift.attention.kernels import MIDDLE, NEAR, attend_chunk, combine_chunks, store_new
from tswift.attention.layout import MOST_WIDTH, Attention, AttentionSpec, Layout

_PROMPT = 128  # nodes; a pass of more is over a prompt
_LONG = 32  # times as long are the chunks of a prompt
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTERPRETED = not isinstance(attend_chunk, triton.JITFunction)
_NOTHING = AttentionSpec()


class TritonAttention(Attention):
    """Attention for CUDA, and for tests on the CPU with ``TRITON_INTERPRET=1``.

    Raises:
        ValueError: the dtype is none of float32, bfloat16 and float16.
    """

    STATIC: ClassVar[bool] = True
    WANTS: ClassVar[bool] = True
    EXACT: ClassVar[bool] = True

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None:
        if layout.dtype not in _DTYPES:
            raise ValueError(f"triton attention takes float32, bfloat16 and float16, not {layout.dtype}")
        if not isinstance(prefix, Tensor):
            prefix = torch.full((), prefix, dtype=torch.int32, device=layout.device)
        self._kv_heads, self._groups, self._nodes, self._length = layout.kv_heads, layout.groups, nodes, prefix
        self._depths = self._paths = None
        if nodes > 1 and ancestors is not None:
            self._depths = ancestors.sum(1) - 1
            # [n, n]: a node's ancestors, root first, itself last, and behind them all others
            self._paths = ancestors.byte().argsort(dim=1, descending=True, stable=True)
        self._wide = _INTERPRETED and layout.dtype == torch.bfloat16  # numpy cannot calculate in bfloat16

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, wants: AttentionSpec = _NOTHING
    ) -> Tensor:
        """As :meth:`Attention.__call__`; the last dimension of keys and values is contiguous, the scale above 0."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        size, rows = query.shape[-1], self._groups * self._nodes
        width = head_width(size)
        run = configuration(rows, width, query.element_size(), _generation(query.device))
        chunk, chunks = chunking(self._kv_heads, self._nodes, keys.shape[1])
        programs = triton.cdiv(rows, run.rows) * chunks + self._nodes * triton.cdiv(self._groups, run.rows)
        shared = {
            "GROUPS": self._groups,
            "HEAD": size,
            "WIDTH": width,
            "KEYS": run.keys,
            "REACH": MOST_WIDTH,
            "CHUNK": chunk,
            "TREE": self._paths is not None,
            "WINDOW": wants.window or 0,
            "enable_fp_fusion": False,  # left to the compiler, what is rounded once and what twice is not known
        }
        factor, cap = scale * math.log2(math.e), 0.0
        if wants.softcap is not None:  # the kernel's hyperbolic tangent takes powers of two as well
            factor, cap = 2 * factor / wants.softcap, wants.softcap * math.log2(math.e)
        outs = query.new_empty(1 + chunks, self._kv_heads, rows, size, dtype=torch.float32)
        lses = query.new_empty(1 + chunks, self._kv_heads, rows, dtype=torch.float32)
        # [n, heads, d] in memory: what the output projection reads next
        out = query.new_empty(query.transpose(0, 1).shape, dtype=torch.float32 if self._wide else None).transpose(0, 1)
        with torch.cuda.device_of(query):
            attend_chunk[self._kv_heads, programs](
                query, keys, values, self._depths, self._paths, self._length, outs, lses, *query.stride()[:2],
                *keys.stride()[:2], *values.stride()[:2], factor, cap, self._nodes, ROWS=run.rows,
                SOFTCAP=wants.softcap is not None, WIDE=self._wide, num_warps=run.warps, num_stages=run.stages,
                maxnreg=run.registers, **shared,
            )  # fmt: skip
            block = 32 if _INTERPRETED else 1  # a GPU has programs enough for every row, an interpreter has not
            combine_chunks[triton.cdiv(rows, block), self._kv_heads](
                outs, lses, out, self._depths, wants.sinks, self._length, *out.stride()[:2], self._nodes, ROWS=block,
                CHUNKS=32, **shared,
            )  # fmt: skip
        return out.to(query.dtype)

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
        """As :meth:`StaticAttention.store`, but not past the capacity, in a launch that does not depend on the length.

        The last dimension of all four is contiguous.
        """
        kv_heads, nodes, size = new_keys.shape
        with torch.cuda.device_of(keys):
            store_new[triton.cdiv(nodes, 16), kv_heads](
                keys, values, new_keys, new_values, length, *keys.stride()[:2], *values.stride()[:2],
                *new_keys.stride()[:2], *new_values.stride()[:2], nodes, keys.shape[1], HEAD=size,
                WIDTH=head_width(size), ROWS=16,
            )  # fmt: skip


def head_width(size: int) -> int:
    """The head size, padded to what a matrix product takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


@dataclass(frozen=True)
class Configuration:
    """The layout of a program of the attention kernel.

    Attributes:
        rows: rows of a program; those beyond are taken by further programs, which read the keys again.
        keys: keys of a tile. They order the sums within a tile, so that no number of rows may change them.
        warps: of 32 threads. Each takes 16 rows where there are tensor cores, so that it sums all keys of a tile alone.
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
    multiprocessor where that can be. No GPU has timed them yet. Those that one model gets on one device give a row the
    same bits: there is either one of them, or one of 64 and one of 128 rows, which differ by the number of warps alone.

    Args:
        rows: query heads per KV head times nodes.
        width: padded head size.
        itemsize: bytes per element.
        generation: major compute capability; 0 is the interpreter. On 9 every warp multiplies rows of its own; on 8 and
            12 only where a head is no wider than 64, and otherwise 4 warps share rows and 8 would do it differently.
            The code for others has not been looked at.
    """
    if itemsize == 4:  # multiplied outside the tensor cores, and bound by that: keys may well be read again
        return Configuration(16, min(64, max(16, 2048 // width)), warps=8, stages=2)
    keys, widest = min(64, max(16, 4096 // width)), {8: 64, 9: 256, 12: 64}.get(generation, 0)
    if width > 128 and generation != 9:
        return Configuration(32, keys, warps=4, stages=3)
    if rows <= 64 or width > widest:
        return Configuration(64, keys, warps=4, stages=3)
    return Configuration(128, keys, warps=8, stages=3, registers=128 if generation == 9 and width <= 128 else None)


def chunk_size(kv_heads: int) -> int:
    """Keys of the first chunks: with 8 KV heads 256, so that 4,096 keys give each of some 130 processors a program.

    The first 16 chunks have this size, the next 24 twice, and all others 8 times as many keys: where many programs run
    anyway, partial results, which are in float32, are to be few beside the keys and values that they come from.
    """
    return min(1024, max(256, triton.next_power_of_2(32 * kv_heads)))


def chunking(kv_heads: int, nodes: int, capacity: int) -> tuple[int, int]:
    """Keys of the first chunks of a pass, and how many chunks there are up to a slot."""
    size = chunk_size(kv_heads) * (1 if nodes <= _PROMPT else _LONG)
    return size, chunk_count(capacity, size)


def chunk_count(capacity: int, size: int) -> int:
    """How many chunks there are up to a slot; those that a text has not reached end at once."""
    units = triton.cdiv(capacity, size)
    middle = min(MIDDLE, triton.cdiv(max(0, units - NEAR), 2))
    return min(units, NEAR) + middle + triton.cdiv(max(0, units - NEAR - 2 * MIDDLE), 8)


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
