"""The Triton kernels of tree attention: chunks of the keys and tails, what these make together, and storing new keys.

A row is one query head at one node; the rows of a KV head are numbered node by node, so that a block of rows is a run
of nodes. A node at position p reads the keys before its split, which depends on p alone, in chunks, many rows at a
time; the others, its tail, it reads by itself, in the order of their positions along its own path in the tree.
Scores are kept in powers of two: their factor is multiplied by log2(e), and a partial log-sum-exp is base 2. Between
the kernels, ``outs`` is ``[1 + chunks, kv heads, rows, d]`` and ``lses`` ``[1 + chunks, kv heads, rows]``, both
float32; the tails come first. Only :mod:`tswift.attention.triton` imports this module.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Chunks are 1, 2 and 8 times as long as the first one: NEAR of the first length, MIDDLE of the second, then the third.
NEAR = 16
MIDDLE = 24
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
    """The first key that a node at this position reads along its own path, and not in chunks: a border of tiles."""
    split = tl.maximum(position - REACH, 0)
    if TREE:  # chunks hold committed keys only; this shortens them for nodes more than REACH below the root
        split = tl.minimum(split, prefix)
    return split // KEYS * KEYS


@triton.jit
def _attend_tile(
    slots, held, visible, query, keys, values, top, total, mixed, keys_slot, values_slot, scale, cap,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Let the rows attend to one tile of keys: the running maximum, sum and weighted values after it.

    For a row that sees none of the keys, nothing changes, to the bit. Slots that are not ``held`` are not read: what is
    in them may be NaN, and a weight of zero would not undo that.
    """
    dims = tl.arange(0, WIDTH)
    far = slots.to(tl.int64)[:, None]
    key_at = keys + far * keys_slot + dims[None, :]
    value_at = values + far * values_slot + dims[None, :]
    if held is not None or HEAD < WIDTH:
        wanted = (dims < HEAD)[None, :]
        if held is not None:
            wanted = wanted & held[:, None]
        key = tl.load(key_at, mask=wanted, other=0.0)
        value = tl.load(value_at, mask=wanted, other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    if WIDE:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    factor = scale
    if SOFTCAP:
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)  # cap * tanh
        factor = 1.0
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: -inf minus -inf is NaN
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    shrink = tl.exp2(top - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit(do_not_specialize=["nodes"])
def attend_chunk(
    query, keys, values, depths, paths, length, outs, lses, query_head, query_node, keys_head, keys_slot, values_head,
    values_slot, scale, cap, nodes,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    REACH: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows over one chunk of the keys of one KV head, or the rows of one node over its tail.

    Grid ``(kv heads, row blocks * chunks + tails)``. The newest chunks, which are the longest, go first, so that short
    ones and tails fill the gaps that they leave at the end. Of the partial results, tails are the first, chunks follow.
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
            newest = prefix + (first + ROWS - 1) // GROUPS
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
    query_at = query + query_heads[:, None] * query_head + node.to(tl.int64)[:, None] * query_node + dims[None, :]
    rows = tl.load(query_at, mask=used[:, None] & (dims < HEAD)[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    mixed = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for tile in range(start // KEYS, stop // KEYS):
        slots = tile * KEYS + tl.arange(0, KEYS)
        visible = (tile * KEYS < split)[:, None]
        if WINDOW:
            visible = visible & (slots[None, :] > farthest[:, None])
        top, total, mixed = _attend_tile(
            slots, None, visible, rows, keys, values, top, total, mixed, keys_slot, values_slot, scale, cap, HEAD,
            WIDTH, SOFTCAP, WIDE,
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
            at = tl.load(paths + own * nodes + drafted, mask=held & (drafted >= 0), other=0).to(tl.int32)
            slots = tl.where(drafted < 0, slots, prefix + at)
        top, total, mixed = _attend_tile(
            slots, held, visible, rows, keys, values, top, total, mixed, keys_slot, values_slot, scale, cap, HEAD,
            WIDTH, SOFTCAP, WIDE,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # of a chunk a row saw nothing: log-sum-exp -inf, it weighs nothing
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
    """Weigh what tail and chunks found for a block of rows by their log-sum-exps; grid ``(row blocks, kv heads)``.

    ``CHUNKS`` are read at a time, always the same ones together. Those that a row does not see were not written.
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
        place = ((chunk[None, :] + 1) * tl.num_programs(1) + head).to(tl.int64) * nodes * GROUPS + row[:, None]
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


@triton.jit(do_not_specialize=["nodes", "capacity"])
def store_new(
    keys, values, new_keys, new_values, length, keys_head, keys_slot, values_head, values_slot, new_keys_head,
    new_keys_node, new_values_head, new_values_node, nodes, capacity,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a block of new keys and values of one KV head behind those held; grid ``(node blocks, kv heads)``."""
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    slot = tl.load(length).to(tl.int32) + node
    fits = ((node < nodes) & (slot < capacity))[:, None] & (dims < HEAD)[None, :]
    node = node.to(tl.int64)[:, None]
    slot = slot.to(tl.int64)[:, None]
    key = tl.load(new_keys + head * new_keys_head + node * new_keys_node + dims[None, :], mask=fits)
    value = tl.load(new_values + head * new_values_head + node * new_values_node + dims[None, :], mask=fits)
    tl.store(keys + head * keys_head + slot * keys_slot + dims[None, :], key, mask=fits)
    tl.store(values + head * values_head + slot * values_slot + dims[None, :], value, mask=fits)
