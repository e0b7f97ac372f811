"""Tree attention in one Triton kernel: plain decoding, drafting and verification alike, on CUDA.

All query heads that share a KV head, at all nodes, are rows of one matrix. The keys are cut into
chunks that run side by side, and a second, small kernel combines what they found. A program holds
up to 128 rows and reads its chunk once. How many keys there are is read on the device and decides
nothing about the launch, so that a captured CUDA graph serves every length. Only the table of
backends imports this module: triton may not be installed.

**Rows are exact** in passes of at most ``MAX_WIDTH`` (64) nodes over a cache whose slots are
positions: a node's row is a function of its position p and of the queries, keys and values along
its own path, to the bit. It is the same whatever other nodes are in the pass, how many, in which
order, how many of the node's ancestors are drafted and which are committed, and however long the
text grows. That is so because all borders are positions:

- The keys before ``floor((p - 64) / tile) * tile`` are committed in every such pass. They are read
  in chunks and tiles that begin at fixed slots, given by the number of KV heads and the head size
  alone; a tile that a row does not see leaves it as it was. The others, the tail, the node reads by
  itself, in tiles of the same borders, in the order of positions along its own path, wherever these
  keys are.
- Tail and chunks are merged in one order. Chunks without a visible key weigh exactly nothing.
- Compiled for a GPU, a pass of more rows may have more warps (:func:`configuration`), and nothing
  else: a warp has 16 rows and all keys of a tile, so that the instructions that a row goes through
  are the same ones in the same order. tests/attention/test_offline_compile.py compares the code.
  The compiler may fuse no product with a sum by itself.

A row is one query head at one node; the rows of a KV head are numbered node by node, so that a
block of rows is a run of nodes. Scores are kept in powers of two: their factor is multiplied by
log2(e), and a partial log-sum-exp is base 2. Between the kernels, ``outs`` is ``[1 + chunks, kv
heads, rows, d]`` and ``lses`` ``[1 + chunks, kv heads, rows]``, both float32; the tails come first.

Not exact are passes of more than 128 nodes, a prompt's, whose chunks are 32 times as long, or their
partial results would take more memory than the keys; and in trees nodes more than 64 below the
root. An H100 has confirmed that texts are the same (results/h100).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.attention.backends import HALVES
from tswift.attention.sdpa import MAX_WIDTH, Attention, AttentionSpec, Layout
from tswift.caches import steps_of

# Chunks are 1, 2 and 8 times as long as the first one: NEAR of the first length, MIDDLE of the
# second, then the third.
NEAR = 16
MIDDLE = 24
EMULATED = 9  # major compute capability of the device whose layouts are interpreted
_NEAR = tl.constexpr(NEAR)
_MIDDLE = tl.constexpr(MIDDLE)


@triton.jit
def _chunk_start(chunk, CHUNK: tl.constexpr):
    """The first slot of a chunk."""
    near = tl.minimum(chunk, _NEAR)
    middle = tl.minimum(tl.maximum(chunk - _NEAR, 0), _MIDDLE)
    far = tl.maximum(chunk - _NEAR - _MIDDLE, 0)
    return CHUNK * (near + 2 * middle + 8 * far)


@triton.jit
def _chunks_before(end, CHUNK: tl.constexpr):
    """How many chunks begin before a slot."""
    units = tl.cdiv(end, CHUNK)
    middle = tl.maximum(units - _NEAR, 0)
    far = tl.maximum(middle - 2 * _MIDDLE, 0)
    return tl.minimum(units, _NEAR) + tl.minimum((middle + 1) // 2, _MIDDLE) + (far + 7) // 8


@triton.jit
def _split(position, prefix, KEYS: tl.constexpr, REACH: tl.constexpr, TREE: tl.constexpr):
    """The first key that a node at this position reads along its own path, and not in chunks:
    a border of tiles.
    """
    split = tl.maximum(position - REACH, 0)
    if TREE:
        # chunks hold committed keys only; this shortens them for nodes more than REACH below the
        # root
        split = tl.minimum(split, prefix)
    return split // KEYS * KEYS


@triton.jit
def _tile(at, held, kind: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """Keys, or values, of a tile's slots in a dtype; those that are not ``held`` are not read."""
    dims = tl.arange(0, WIDTH)
    at = at + dims[None, :]
    wanted = (dims < HEAD)[None, :]
    if held is not None:
        return tl.load(at, mask=wanted & held[:, None], other=0).to(kind)
    elif HEAD < WIDTH:
        return tl.load(at, mask=wanted, other=0).to(kind)
    else:
        return tl.load(at).to(kind)


@triton.jit
def _held_steps(at, held):
    """Steps of a tile's slots, 0 for those that are not ``held``."""
    if held is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=held, other=0.0)


@triton.jit
def _attend_tile(
    slots, held, visible, query, keys, values, key_steps, value_steps, top, total, mixed, keys_slot, values_slot, scale,
    cap,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Let the rows attend to one tile of keys: the running maximum,
    sum and weighted values after it.

    For a row that sees none of the keys, nothing changes, to the bit. Slots that are not ``held``
    are not read: what is in them may be NaN, and a weight of zero would not undo that. Codes are
    multiplied as they are; a key's step multiplies its scores, and a value's its weights.
    """
    far = slots.to(tl.int64)[:, None]
    kind: tl.constexpr = tl.float32 if WIDE else query.dtype
    # bfloat16 where there are steps, as none is too small for it
    mixes: tl.constexpr = kind if WIDE or key_steps is None else tl.bfloat16
    key = _tile(keys + far * keys_slot, held, kind, HEAD, WIDTH)
    value = _tile(values + far * values_slot, held, mixes, HEAD, WIDTH)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if key_steps is not None:
        scores = scores * _held_steps(key_steps + slots, held)[None, :]
    factor = scale
    if SOFTCAP:
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)  # cap * tanh
        factor = 1.0
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    # nothing seen so far: -inf minus -inf is NaN
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    shrink = tl.exp2(top - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    if key_steps is not None:
        weights = weights * _held_steps(value_steps + slots, held)[None, :]
    mixed = tl.dot(weights.to(mixes), value, mixed * shrink[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit(do_not_specialize=["nodes"])
def attend_chunk(
    query, keys, values, key_steps, value_steps, depths, paths, length, outs, lses, query_head, query_node, keys_head,
    keys_slot, values_head, values_slot, scale, cap, nodes,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows over one chunk of the keys of one KV head,
    or the rows of one node over its tail.

    Grid ``(kv heads, row blocks * chunks + tails)``. The newest chunks, which are the longest, go
    first, so that short ones and tails fill the gaps that they leave at the end. Of the partial
    results, tails are the first, chunks follow.
    """
    head = tl.program_id(0)
    parts: tl.constexpr = (GROUPS + ROWS - 1) // ROWS  # of a node's rows
    tail = tl.program_id(1) - tl.num_programs(1) + nodes * parts  # negative in programs of chunks
    own = tl.maximum(tail, 0) // parts  # the node whose tail it is
    prefix = tl.load(length).to(tl.int32)
    place = head
    first = own * GROUPS + tail % parts * ROWS
    behind = own * GROUPS + GROUPS
    start = prefix
    stop = prefix
    if tail < 0:
        blocks = (nodes * GROUPS + ROWS - 1) // ROWS
        block = tl.program_id(1) % blocks
        first = block * ROWS
        behind = nodes * GROUPS
        newest = prefix + nodes - 1
        lowest = prefix - WINDOW + 1
        if not TREE:
            newest = prefix + tl.minimum((first + ROWS - 1) // GROUPS, nodes - 1)
            lowest += first // GROUPS
        end = _split(newest, prefix, KEYS, REACH, TREE)
        chunk = _chunks_before(end, CHUNK) - 1 - tl.program_id(1) // blocks
        place += (chunk + 1) * tl.num_programs(0)
        start = tl.maximum(_chunk_start(chunk, CHUNK), 0)
        stop = tl.minimum(_chunk_start(chunk + 1, CHUNK), end)
        if WINDOW:
            start = tl.maximum(start, lowest)
    if (tail < 0) & (start >= stop):
        return
    row = first + tl.arange(0, ROWS)
    used = row < behind
    node = row // GROUPS
    depth = node
    own_depth = own
    if TREE:
        depth = tl.load(depths + node, mask=used, other=0).to(tl.int32)
        own_depth = tl.load(depths + own).to(tl.int32)
    split = _split(prefix + depth, prefix, KEYS, REACH, TREE)
    farthest = prefix + depth - WINDOW
    dims = tl.arange(0, WIDTH)
    query_heads = (head * GROUPS + row % GROUPS).to(tl.int64)
    query_at = (
        query
        + query_heads[:, None] * query_head
        + node.to(tl.int64)[:, None] * query_node
        + dims[None, :]
    )
    rows = tl.load(query_at, mask=used[:, None] & (dims < HEAD)[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head
    if key_steps is not None:
        key_steps += head.to(tl.int64) * (keys_head // 4)
        value_steps += head.to(tl.int64) * (values_head // 4)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for tile in range(start // KEYS, stop // KEYS):
        slots = tile * KEYS + tl.arange(0, KEYS)
        visible = (tile * KEYS < split)[:, None]
        if WINDOW:
            visible = visible & (slots[None, :] > farthest[:, None])
        top, total, mixed = _attend_tile(
            slots, None, visible, rows, keys, values, key_steps, value_steps, top, total, mixed, keys_slot, values_slot,
            scale, cap, HEAD, WIDTH, SOFTCAP, WIDE,
        )  # fmt: skip
    begin = _split(prefix + own_depth, prefix, KEYS, REACH, TREE)
    beyond = tl.where(tail < 0, begin, prefix + own_depth + 1)
    if WINDOW:
        begin = tl.maximum(begin, beyond - WINDOW)
    for tile in range(begin // KEYS, (beyond + KEYS - 1) // KEYS):
        slots = tile * KEYS + tl.arange(0, KEYS)  # positions, still
        held = slots < beyond
        visible = held[None, :]
        if WINDOW:
            visible = visible & (slots >= beyond - WINDOW)[None, :]
        if TREE:
            drafted = slots - prefix
            at = tl.load(paths + own * nodes + drafted, mask=held & (drafted >= 0), other=0).to(
                tl.int32
            )
            slots = tl.where(drafted < 0, slots, prefix + at)
        top, total, mixed = _attend_tile(
            slots, held, visible, rows, keys, values, key_steps, value_steps, top, total, mixed, keys_slot, values_slot,
            scale, cap, HEAD, WIDTH, SOFTCAP, WIDE,
        )  # fmt: skip
    # of a chunk a row saw nothing: log-sum-exp -inf, it weighs nothing
    total = tl.where(total == 0.0, 1.0, total)
    place = place.to(tl.int64) * nodes * GROUPS + row
    out_at = outs + place[:, None] * HEAD + dims[None, :]
    tl.store(out_at, mixed / total[:, None], mask=used[:, None] & (dims < HEAD)[None, :])
    tl.store(lses + place, top + tl.log2(total), mask=used)


@triton.jit(do_not_specialize=["nodes"])
def combine_chunks(
    outs, lses, out, depths, sinks, length, out_head, out_node, nodes,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Weigh what tail and chunks found for a block of rows by their log-sum-exps;
    grid ``(row blocks, kv heads)``.

    ``CHUNKS`` are read at a time, always the same ones together. Those that a row does not see were
    not written.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    node = row // GROUPS
    used = node < nodes
    prefix = tl.load(length).to(tl.int32)
    depth = node
    if TREE:
        depth = tl.load(depths + node, mask=used, other=0).to(tl.int32)
    split = _split(prefix + depth, prefix, KEYS, REACH, TREE)
    last = tl.where(used, _chunks_before(split, CHUNK), 0)
    first = tl.zeros_like(last)
    if WINDOW:
        nearest = tl.maximum(prefix + depth - WINDOW + 1, 0)
        first = _chunks_before(nearest + 1, CHUNK) - 1
        last = tl.where(nearest < split, last, 0)
    dims = tl.arange(0, WIDTH)
    wanted = used[:, None] & (dims < HEAD)[None, :]
    heads = head * GROUPS + row % GROUPS
    tail = head.to(tl.int64) * nodes * GROUPS + row
    top = tl.load(lses + tail, mask=used, other=0.0)
    total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.load(outs + tail[:, None] * HEAD + dims[None, :], mask=wanted, other=0.0)
    for start in range(tl.min(first, 0) // CHUNKS * CHUNKS, tl.max(last, 0), CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        held = (chunk[None, :] >= first[:, None]) & (chunk[None, :] < last[:, None])
        place = ((chunk[None, :] + 1) * tl.num_programs(1) + head).to(
            tl.int64
        ) * nodes * GROUPS + row[:, None]
        lse = tl.load(lses + place, mask=held, other=float("-inf"))
        found_at = outs + place[:, :, None] * HEAD + dims[None, None, :]
        found = tl.load(found_at, mask=held[:, :, None] & (dims < HEAD)[None, None, :], other=0.0)
        highest = tl.maximum(top, tl.max(lse, 1))
        share = tl.exp2(lse - highest[:, None])
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None] + tl.sum(share[:, :, None] * found, 1)
        top = highest
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        total += tl.exp2(sink - top)
    out_at = out + heads.to(tl.int64) * out_head + node.to(tl.int64) * out_node
    done = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + dims[None, :], done, mask=wanted)


@triton.jit
def step_of(first, second):
    """What 1 stands for in the codes of rows, of which these float32 numbers ``[n, half]`` are the
    two halves: the largest is 127, and NaN if one is not finite; ``[n, 1]``.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))  # passes over NaN
    broken = tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
    return (tl.div_rn(largest, 127.0) + broken)[:, None]


@triton.jit
def counted(numbers, step):
    """Rows ``[n, m]`` of float32 numbers in multiples of their steps ``[n, 1]``, the nearest ones,
    or even ones.
    """
    used = step > 0.0
    counts = tl.div_rn(numbers, tl.where(used, step, 1.0))
    counts = counts + 12582912.0 - 12582912.0  # 1.5 * 2 ** 23, beside which no fraction has room
    return tl.where(used, counts, 0.0)


@triton.jit(do_not_specialize=["nodes", "capacity"])
def store_new(
    keys, values, key_steps, value_steps, new_keys, new_values, length, keys_head, keys_slot, values_head, values_slot,
    new_keys_head, new_keys_node, new_values_head, new_values_node, nodes, capacity,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a block of new keys and values of one KV head behind those held;
    grid ``(node blocks, kv heads)``.
    """
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    slot = tl.load(length).to(tl.int32) + node
    kept = ((node < nodes) & (slot < capacity))[:, None]
    fits = kept & (dims < HEAD)[None, :]
    node = node.to(tl.int64)[:, None]
    slot = slot.to(tl.int64)[:, None]
    key = tl.load(new_keys + head * new_keys_head + node * new_keys_node + dims[None, :], mask=fits)
    value = tl.load(
        new_values + head * new_values_head + node * new_values_node + dims[None, :], mask=fits
    )
    if key_steps is not None:
        key = tl.where(fits, key.to(tl.float32), 0.0)
        value = tl.where(fits, value.to(tl.float32), 0.0)
        key_step = step_of(key, key)
        value_step = step_of(value, value)
        tl.store(key_steps + head * (keys_head // 4) + slot, key_step, mask=kept)
        tl.store(value_steps + head * (values_head // 4) + slot, value_step, mask=kept)
        key = counted(key, key_step).to(tl.int8)
        value = counted(value, value_step).to(tl.int8)
    tl.store(keys + head * keys_head + slot * keys_slot + dims[None, :], key, mask=fits)
    tl.store(values + head * values_head + slot * values_slot + dims[None, :], value, mask=fits)


@triton.jit
def append_path(
    keys, values, full_keys, full_values, length, places, slots, count, own_head, full_head,
    STEPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one head's accepted keys, or values, into a partial cache, or forward in the same;
    grid ``(layers * kv heads, 2)``.
    """
    head = tl.program_id(0).to(tl.int64)
    to = keys
    source = full_keys
    if tl.program_id(1) == 1:
        to = values
        source = full_values
    dims = tl.arange(0, WIDTH)
    kept = tl.load(count)
    reached = tl.zeros([], tl.int64)
    for step in range(STEPS):
        held = dims < tl.where(step < kept, HEAD, 0)  # see walk_tree
        slot = tl.load(slots + step)
        place = head * full_head + tl.load(places + step) * HEAD
        row = tl.load(source + place + dims, mask=held)
        tl.store(to + head * own_head + slot * HEAD + dims, row, mask=held)
        reached = tl.where(step < kept, tl.maximum(reached, slot + 1), reached)
    if length is not None:  # noqa: SIM102 (a kernel has no "and" of what is fixed and what is not)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(length, tl.maximum(tl.load(length), reached.to(tl.int32)))


_PROMPT = 128  # nodes; a pass of more is over a prompt
_LONG = 32  # times as long are the chunks of a prompt
_INTERPRETED = not isinstance(attend_chunk, triton.JITFunction)
_NOTHING = AttentionSpec()


class TritonAttention(Attention):
    """Attention for CUDA, and for tests on the CPU with ``TRITON_INTERPRET=1``;
    ValueError for another dtype.
    """

    STATIC: ClassVar[bool] = True
    SPECS: ClassVar[bool] = True
    EXACT: ClassVar[bool] = True
    STEPS_BEHIND: ClassVar[bool] = True
    PADDED: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None
    ) -> None:
        if layout.dtype not in HALVES:
            raise ValueError(f"triton attention takes bfloat16 and float16, not {layout.dtype}")
        if not isinstance(prefix, Tensor):
            prefix = torch.full((), prefix, dtype=torch.int32, device=layout.device)
        self._kv_heads = layout.kv_heads
        self._groups = layout.groups
        self._nodes = nodes
        self._length = prefix
        self._depths = self._paths = None
        if nodes > 1 and ancestors is not None:
            self._depths = ancestors.sum(1) - 1
            # [n, n]: a node's ancestors, root first, itself last, and behind them all others
            self._paths = ancestors.byte().argsort(dim=1, descending=True, stable=True)
        self._dtype = layout.dtype

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        spec: AttentionSpec = _NOTHING,
    ) -> Tensor:
        """As :meth:`Attention.__call__`; the last dimension of keys and values is contiguous, the
        scale above 0.
        """
        if query.stride(-1) != 1:
            query = query.contiguous()
        steps = _steps(keys, values)
        # numpy cannot calculate in bfloat16
        wide = _INTERPRETED and (self._dtype == torch.bfloat16 or steps[0] is not None)
        size = query.shape[-1]
        rows = self._groups * self._nodes
        width = head_width(size)
        run = configuration(rows, width, generation_of(query.device), steps[0] is not None)
        chunk, chunks = chunking(self._kv_heads, self._nodes, keys.shape[1])
        programs = triton.cdiv(rows, run.rows) * chunks + self._nodes * triton.cdiv(
            self._groups, run.rows
        )
        shared = {
            "GROUPS": self._groups,
            "HEAD": size,
            "WIDTH": width,
            "KEYS": run.keys,
            "REACH": MAX_WIDTH,
            "CHUNK": chunk,
            "TREE": self._paths is not None,
            "WINDOW": spec.window or 0,
            # left to the compiler, what is rounded once and what twice is not known
            "enable_fp_fusion": False,
        }
        factor = scale * math.log2(math.e)
        cap = 0.0
        if spec.softcap is not None:  # the kernel's hyperbolic tangent takes powers of two as well
            factor = 2 * factor / spec.softcap
            cap = spec.softcap * math.log2(math.e)
        outs = query.new_empty(1 + chunks, self._kv_heads, rows, size, dtype=torch.float32)
        lses = query.new_empty(1 + chunks, self._kv_heads, rows, dtype=torch.float32)
        # [n, heads, d] in memory: what the output projection reads next
        out = query.new_empty(
            query.transpose(0, 1).shape, dtype=torch.float32 if wide else None
        ).transpose(0, 1)
        with torch.cuda.device_of(query):
            attend_chunk[self._kv_heads, programs](
                query, keys, values, *steps, self._depths, self._paths, self._length, outs, lses, *query.stride()[:2],
                *keys.stride()[:2], *values.stride()[:2], factor, cap, self._nodes, ROWS=run.rows,
                SOFTCAP=spec.softcap is not None, WIDE=wide, num_warps=run.warps, num_stages=run.stages,
                maxnreg=run.registers, **shared,
            )  # fmt: skip
            # a GPU has programs enough for every row, an interpreter has not
            block = 32 if _INTERPRETED else 1
            combine_chunks[triton.cdiv(rows, block), self._kv_heads](
                outs, lses, out, self._depths, spec.sinks, self._length, *out.stride()[:2], self._nodes, ROWS=block,
                CHUNKS=32, **shared,
            )  # fmt: skip
        return out.to(query.dtype)

    @staticmethod
    def store(
        keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor
    ) -> None:
        """As :meth:`Attention.store`, but not past the capacity, in a launch that does not depend
        on the length.

        The last dimension of all four is contiguous.
        """
        kv_heads, nodes, size = new_keys.shape
        with torch.cuda.device_of(keys):
            store_new[triton.cdiv(nodes, 16), kv_heads](
                keys, values, *_steps(keys, values), new_keys, new_values, length, *keys.stride()[:2],
                *values.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2], nodes, keys.shape[1], HEAD=size,
                WIDTH=head_width(size), ROWS=16, enable_fp_fusion=False,
            )  # fmt: skip

    @staticmethod
    def append(
        own: Sequence[Tensor],
        full: Sequence[Tensor],
        places: Tensor,
        slots: Tensor,
        count: Tensor,
        length: Tensor | None = None,
    ) -> None:
        """As :meth:`Attention.append`, in one launch, without scratch; a head's rows are without
        gaps, and heads as far apart in all layers.
        """
        layers, kv_heads, _, size = own[0].shape
        for each in (*own, *full):
            assert each.stride()[2:] == (size, 1)
            assert layers == 1 or each.stride(0) == kv_heads * each.stride(1)
        with torch.cuda.device_of(own[0]):
            append_path[layers * kv_heads, 2](
                *own, *full, length, places, slots, count, own[0].stride(1), full[0].stride(1), STEPS=len(places),
                HEAD=size, WIDTH=head_width(size), num_warps=1,
            )  # fmt: skip


def _steps(keys: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The steps of keys and values that are codes; None of others."""
    if keys.dtype != torch.int8:
        return None, None
    return steps_of(keys), steps_of(values)


def head_width(size: int) -> int:
    """The head size, padded to what a matrix product takes: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


@dataclass(frozen=True)
class Configuration:
    """The layout of a program of the attention kernel.

    Attributes:
        rows: rows of a program; those beyond are taken by further programs, which read the keys
            again.
        keys: keys of a tile. They order the sums within a tile, so that no number of rows may
            change them.
        warps: of 32 threads. Each takes 16 rows, so that it sums all keys of a tile alone.
        stages: tiles of keys and values in shared memory at a time, loads under way included.
        registers: most per thread; None leaves it to the compiler.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def configuration(rows: int, width: int, generation: int, codes: bool = False) -> Configuration:
    """The layout of the attention kernel's programs; the only place that says so.

    Chosen by what the compiler makes of them (results/cuda-offline): nothing spilled, and two
    programs per multiprocessor where that can be. Those for 9 have run on an H100 and an H200
    (results/h200), the others on no GPU. Those that one model gets on one device give a row the
    same bits: there is either one of them, or one of 64 and one of 128 rows, which differ by the
    number of warps alone.

    ``rows`` are query heads per KV head times nodes; ``width`` is the padded head size,
    ``generation`` the major compute capability. Keys that are ``codes`` are made floats in registers,
    which are bounded where more programs fit then. On 9 every warp multiplies
    rows of its own; on 8 and 12 only where a head is no wider than 64, and otherwise 4 warps share
    rows and 8 would do it differently. Others were not looked at.
    """
    keys = min(64, max(16, 4096 // width))
    widest = {8: 64, 9: 256, 12: 64}.get(generation, 0)
    most = 128 if generation == 9 and width <= 128 else None
    if width > 128 and generation != 9:
        return Configuration(32, keys, warps=4, stages=3)
    if rows <= 64 or width > widest:
        return Configuration(64, keys, warps=4, stages=3, registers=most if codes else None)
    return Configuration(128, keys, warps=8, stages=4 if codes else 3, registers=most)


def chunk_size(kv_heads: int) -> int:
    """Keys of the first chunks: with 8 KV heads 256,
    so that 4,096 keys give each of some 130 processors a program.

    The first 16 chunks have this size, the next 24 twice, and all others 8 times as many keys:
    where many programs run anyway, partial results, which are in float32, are to be few beside the
    keys and values that they come from.
    """
    return min(1024, max(256, triton.next_power_of_2(32 * kv_heads)))


def chunking(kv_heads: int, nodes: int, capacity: int) -> tuple[int, int]:
    """Keys of the first chunks of a pass, and how many chunks there are up to a slot.

    Those that a text has not reached end at once.
    """
    size = chunk_size(kv_heads) * (1 if nodes <= _PROMPT else _LONG)
    units = triton.cdiv(capacity, size)
    middle = min(MIDDLE, triton.cdiv(max(0, units - NEAR), 2))
    return size, min(units, NEAR) + middle + triton.cdiv(max(0, units - NEAR - 2 * MIDDLE), 8)


@functools.cache
def generation_of(device: torch.device) -> int:
    """Its major compute capability; the interpreter makes the choices of a device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else EMULATED
