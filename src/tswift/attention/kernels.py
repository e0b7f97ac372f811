"""The Triton kernels of tree attention: chunks of the keys, what the chunks make together, and storing new keys.

A row is one query head at one node; the rows of a KV head are numbered node by node, so that a block of rows is a run
of nodes. Scores are kept in powers of two: their factor is multiplied by log2(e), and a chunk's log-sum-exp is base 2.
Between the kernels, ``outs`` is ``[chunks, kv heads, rows, d]`` and ``lses`` ``[chunks, kv heads, rows]``, both
float32. Only :mod:`tswift.attention.triton` imports this module.
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
def _attend_tile(
    tile,
    query,
    keys,
    values,
    top,
    total,
    mixed,
    node,
    low,
    high,
    farthest,
    prefix,
    end,
    keys_slot,
    values_slot,
    scale,
    cap,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Let the rows attend to one tile of keys: the running maximum, sum and weighted values after it."""
    slots = tile * KEYS + tl.arange(0, KEYS)
    dims = tl.arange(0, WIDTH)
    far = slots.to(tl.int64)[:, None]
    key_at = keys + far * keys_slot + dims[None, :]
    value_at = values + far * values_slot + dims[None, :]
    if MASKED:
        # What unused slots hold may be NaN, and a weight of zero would not undo that.
        held = (slots < end)[:, None] & (dims < HEAD)[None, :]
        key = tl.load(key_at, mask=held, other=0.0)
        value = tl.load(value_at, mask=held, other=0.0)
    elif HEAD < WIDTH:
        held = (dims < HEAD)[None, :]
        key = tl.load(key_at, mask=held, other=0.0)
        value = tl.load(value_at, mask=held, other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    if WIDE:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)  # cap * tanh
    if MASKED:
        column = slots - prefix
        if TREE:
            word = tl.where((column < 64)[None, :], low[:, None], high[:, None])
            bit = (word >> (column & 63).to(tl.int64)[None, :]) & 1
            visible = (bit != 0) & (slots < end)[None, :]
            if WINDOW:
                visible = tl.where((column < 0)[None, :], slots[None, :] > farthest[:, None], visible)
            else:
                visible = (column < 0)[None, :] | visible
        else:
            visible = column[None, :] <= node[:, None]
            if WINDOW:
                visible = visible & (slots[None, :] > farthest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    # Fused by hand: left to the compiler, products and sums round once in tiles without a mask and twice in others, and
    # the same tile would give other bits once the prefix has grown past it.
    factor = scale
    if SOFTCAP:
        factor = 1.0
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    base = highest
    if MASKED:
        base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: -inf minus -inf is NaN
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    shrink = tl.exp2(top - base)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit(do_not_specialize=["nodes"])
def attend_chunk(
    query,
    keys,
    values,
    bits,
    depths,
    length,
    outs,
    lses,
    query_head,
    query_node,
    keys_head,
    keys_slot,
    values_head,
    values_slot,
    scale,
    cap,
    nodes,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One block of rows over one chunk of the keys of one KV head; grid ``(row blocks, kv heads, chunks)``.

    The newest chunks, which are the longest, go first, so that short ones fill the gaps that they leave at the end.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    prefix = tl.load(length).to(tl.int32)
    lowest = prefix - WINDOW + 1
    end = prefix + nodes
    if not TREE:
        lowest += block * ROWS // GROUPS
        end = tl.minimum(end, prefix + (block * ROWS + ROWS - 1) // GROUPS + 1)  # no row sees past its own node
    chunk = _chunks_before(end, CHUNK) - 1 - tl.program_id(2)
    start = _chunk_start(chunk, CHUNK)
    stop = tl.minimum(_chunk_start(chunk + 1, CHUNK), end)
    if WINDOW:
        start = tl.maximum(start, lowest)
    if (chunk < 0) | (start >= stop):
        return
    row = block * ROWS + tl.arange(0, ROWS)
    node = row // GROUPS
    used = node < nodes
    dims = tl.arange(0, WIDTH)
    query_heads = (head * GROUPS + row % GROUPS).to(tl.int64)
    query_at = query + query_heads[:, None] * query_head + node.to(tl.int64)[:, None] * query_node + dims[None, :]
    rows = tl.load(query_at, mask=used[:, None] & (dims < HEAD)[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head
    low = node
    high = node
    farthest = node
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    begin = start // KEYS
    last = tl.cdiv(stop, KEYS)
    for masked in tl.static_range(2):
        if masked:
            if TREE:  # loaded here, as registers are scarce in the loop before
                low = tl.load(bits + 2 * node, mask=used, other=0)
                high = tl.load(bits + 2 * node + 1, mask=used, other=0)
            if WINDOW:
                depth = node
                if TREE:
                    depth = tl.load(depths + node, mask=used, other=0)
                farthest = prefix + depth - WINDOW
            until = last
        elif WINDOW:
            until = begin
        else:
            until = tl.minimum(prefix // KEYS, last)  # tiles before it hold prefix only, which everyone sees
        for tile in range(begin, until):
            top, total, mixed = _attend_tile(
                tile,
                rows,
                keys,
                values,
                top,
                total,
                mixed,
                node,
                low,
                high,
                farthest,
                prefix,
                end,
                keys_slot,
                values_slot,
                scale,
                cap,
                HEAD,
                WIDTH,
                KEYS,
                TREE,
                WINDOW,
                SOFTCAP,
                masked,
                WIDE,
            )
        begin = tl.maximum(begin, until)
    total = tl.where(total == 0.0, 1.0, total)  # of a chunk a row saw nothing: log-sum-exp -inf, it weighs nothing
    place = (chunk * tl.num_programs(1) + head).to(tl.int64) * nodes * GROUPS + row
    out_at = outs + place[:, None] * HEAD + dims[None, :]
    wanted = row < nodes * GROUPS  # as `used`, which would take registers in the loops
    tl.store(out_at, mixed / total[:, None], mask=wanted[:, None] & (dims < HEAD)[None, :])
    tl.store(lses + place, top + tl.log2(total), mask=wanted)


@triton.jit(do_not_specialize=["nodes"])
def combine_chunks(
    outs,
    lses,
    out,
    depths,
    sinks,
    length,
    out_head,
    out_node,
    nodes,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Weigh what the chunks found for a block of rows by their log-sum-exps; grid ``(row blocks, kv heads)``.

    ``CHUNKS`` are read at a time, always the same ones together. Those that a row does not see were not written.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    node = row // GROUPS
    used = node < nodes
    prefix = tl.load(length).to(tl.int32)
    depth = node
    end = prefix + node + 1
    if TREE:
        end = prefix + nodes + 0 * node
        if WINDOW:
            depth = tl.load(depths + node, mask=used, other=0)
    last = _chunks_before(end, CHUNK)
    first = tl.zeros_like(last)
    if WINDOW:
        first = _chunks_before(tl.maximum(prefix + depth - WINDOW + 2, 1), CHUNK) - 1
    dims = tl.arange(0, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    heads = head * GROUPS + row % GROUPS
    if sinks is not None:
        top = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    begin = tl.min(tl.where(used, first, tl.max(last, 0)), 0) // CHUNKS * CHUNKS
    for start in range(begin, tl.max(tl.where(used, last, 0), 0), CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        held = used[:, None] & (chunk[None, :] >= first[:, None]) & (chunk[None, :] < last[:, None])
        place = (chunk[None, :] * tl.num_programs(1) + head).to(tl.int64) * nodes * GROUPS + row[:, None]
        lse = tl.load(lses + place, mask=held, other=float("-inf"))
        found_at = outs + place[:, :, None] * HEAD + dims[None, None, :]
        found = tl.load(found_at, mask=held[:, :, None] & (dims < HEAD)[None, None, :], other=0.0)
        highest = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2(lse - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None] + tl.sum(share[:, :, None] * found, 1)
        top = highest
    out_at = out + heads.to(tl.int64) * out_head + node.to(tl.int64) * out_node
    done = (mixed / tl.where(used, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + dims[None, :], done, mask=used[:, None] & (dims < HEAD)[None, :])


@triton.jit(do_not_specialize=["nodes", "capacity"])
def store_new(
    keys,
    values,
    new_keys,
    new_values,
    length,
    keys_head,
    keys_slot,
    values_head,
    values_slot,
    new_keys_head,
    new_keys_node,
    new_values_head,
    new_values_node,
    nodes,
    capacity,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
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
