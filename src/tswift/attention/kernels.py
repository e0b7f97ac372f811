"""The Triton kernels of tree attention: parts of the keys, what the parts make together, and storing new keys.

A row is one query head at one node; the rows of a KV head are numbered node by node, so that a block of rows is a run
of nodes. Scores are kept in powers of two: their factor is multiplied by log2(e), and a part's log-sum-exp is base 2.
Between the kernels, ``outs`` is ``[parts, kv heads, rows, d]`` and ``lses`` ``[parts, kv heads, rows]``, both float32.
Only :mod:`tswift.attention.triton` imports this module.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(
    tile,
    query,
    keys,
    values,
    top,
    total,
    out,
    node,
    low,
    high,
    prefix,
    end,
    keys_slot,
    values_slot,
    scale,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    TREE: tl.constexpr,
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
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        column = slots - prefix
        if TREE:
            word = tl.where((column < 64)[None, :], low[:, None], high[:, None])
            bit = (word >> (column & 63).to(tl.int64)[None, :]) & 1
            visible = (column < 0)[None, :] | ((bit != 0) & (slots < end)[None, :])
        else:
            visible = column[None, :] <= node[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    base = highest
    if MASKED:
        base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: -inf minus -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
    return highest, total, out


@triton.jit(do_not_specialize=["nodes"])
def attend_part(
    query,
    keys,
    values,
    bits,
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
    nodes,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TREE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One block of rows over one part of the keys of one KV head; grid ``(row blocks, parts, kv heads)``.

    Blocks of rows are the fastest axis, so that programs which read the same keys run together and find them in L2.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    head = tl.program_id(2)
    parts = tl.num_programs(1)
    row = block * ROWS + tl.arange(0, ROWS)
    node = row // GROUPS
    used = node < nodes
    dims = tl.arange(0, WIDTH)
    query_heads = (head * GROUPS + row % GROUPS).to(tl.int64)
    query_at = query + query_heads[:, None] * query_head + node.to(tl.int64)[:, None] * query_node + dims[None, :]
    rows = tl.load(query_at, mask=used[:, None] & (dims < HEAD)[None, :], other=0.0)
    if WIDE:
        rows = rows.to(tl.float32)
    prefix = tl.load(length).to(tl.int32)
    if TREE:
        end = prefix + nodes
        low = tl.load(bits + 2 * node, mask=used, other=0)
        high = tl.load(bits + 2 * node + 1, mask=used, other=0)
    else:
        end = prefix + tl.minimum(nodes, (block * ROWS + ROWS - 1) // GROUPS + 1)  # no row sees past its own node
        low = node
        high = node
    tiles = tl.cdiv(end, KEYS)
    first = part * tiles // parts
    last = (part + 1) * tiles // parts
    plain = tl.minimum(prefix // KEYS, last)  # tiles before it hold prefix only, which everyone sees
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for masked in tl.static_range(2):
        start = first
        stop = plain
        if masked:
            start = tl.maximum(first, plain)
            stop = last
        for tile in range(start, stop):
            top, total, out = _tile(
                tile,
                rows,
                keys,
                values,
                top,
                total,
                out,
                node,
                low,
                high,
                prefix,
                end,
                keys_slot,
                values_slot,
                scale,
                HEAD,
                WIDTH,
                KEYS,
                TREE,
                masked,
                WIDE,
            )

    total = tl.where(total == 0.0, 1.0, total)  # a part that saw nothing: its log-sum-exp is -inf, it weighs nothing
    out = out / total[:, None]
    lse = top + tl.log2(total)
    place = (part * tl.num_programs(2) + head).to(tl.int64) * nodes * GROUPS + row
    tl.store(outs + place[:, None] * HEAD + dims[None, :], out, mask=used[:, None] & (dims < HEAD)[None, :])
    tl.store(lses + place, lse, mask=used)


@triton.jit(do_not_specialize=["rows", "parts"])
def combine_parts(
    outs,
    lses,
    out,
    out_head,
    out_node,
    rows,
    parts,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
):
    """Weigh what the parts found for a block of rows by their log-sum-exps; grid ``(row blocks, kv heads)``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    used = row < rows
    stride = tl.num_programs(1) * rows
    place = head * rows + row
    every = tl.arange(0, MOST_PARTS)
    there = used[:, None] & (every < parts)[None, :]
    lse = tl.load(lses + every[None, :] * stride + place[:, None], mask=there, other=float("-inf"))
    top = tl.where(used, tl.max(lse, 1), 0.0)  # finite: a node sees itself
    total = tl.where(used, tl.sum(tl.exp2(lse - top[:, None]), 1), 1.0)
    dims = tl.arange(0, WIDTH)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, parts, PARTS):
        some = start + tl.arange(0, PARTS)
        at = some[None, :] * stride + place[:, None]
        held = used[:, None] & (some < parts)[None, :]
        share = tl.exp2(tl.load(lses + at, mask=held, other=float("-inf")) - top[:, None])
        found_at = outs + at.to(tl.int64)[:, :, None] * HEAD + dims[None, None, :]
        found = tl.load(found_at, mask=held[:, :, None] & (dims < HEAD)[None, None, :], other=0.0)
        mixed += tl.sum(share[:, :, None] * found, 1)
    out_at = out + (head * GROUPS + row % GROUPS).to(tl.int64) * out_head + (row // GROUPS).to(tl.int64) * out_node
    done = (mixed / total[:, None]).to(out.dtype.element_ty)
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
