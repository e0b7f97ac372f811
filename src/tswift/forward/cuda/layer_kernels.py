"""Triton kernels of a layer, but for its attention; imported where triton is at hand.

A layer of Llama's kind takes six, the attention's two among them. Each product reads its rows as
they have to be, normalised where a norm stands before it, and ends with what follows it:

- queries, keys and values: norm, product, rotation, and the store into the cache;
- the attention's output: product, and its sum with the residual;
- the MLP's first two: norm, products, SiLU of one times the other;
- the MLP's last: product, and its sum with the residual.

**Products of few rows** read each weight once, and that is what they take. Weights stand where
matrix units take many rows, and rows where they take few. As many programs as fit side by side
share the outputs and, where these are few, the inputs: then each leaves a part of the sum in
float32. The program of a tile of outputs that is done last adds the parts up, always in one order,
rounds, and does what follows. How a sum is cut follows from the layer's sizes alone. Products of
many rows that are to have the bits that they have among few go through the same tiles and parts in
the same order, a block of rows at a time; one program adds its parts up by itself. Other products
of many rows, a prompt's, are PyTorch's, and what stands between them are kernels of their own.

**Bits are the same everywhere.** What a row comes to follows from that row alone, so its place in a
pass and the pass's width decide nothing. A sum over a row is a tree of pairs: neighbours are added,
then neighbouring sums, and so on; every addition has two terms, so no compiler can order it
otherwise, and a tile's squares are a part of the tree that the next product adds up. Divisions and
roots are correctly rounded, the exponential is made of additions and products alone, and the
compiler fuses none of them. Where transformers' eager layers round to the model's dtype, these
kernels round, too. Plain PyTorch that does the same is in ``layers_check``; its results are equal
to the bit, on a CPU and on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.attention.triton import counted, step_of
from tswift.caches import steps_of


@triton.jit
def _rounded(numbers, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 numbers rounded to a dtype, and back to float32.

    Triton's interpreter does not round to the nearest bfloat16, so there it is done by hand.
    """
    if INTERPRETED and kind == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        return tl.where(numbers == numbers, bits.to(tl.float32, bitcast=True), numbers)
    return numbers.to(kind).to(tl.float32)


@triton.jit
def tree_sum(numbers, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of the rows of ``[ROWS, 2 ** LEVELS]`` numbers by a tree of pairs; ``[ROWS]``."""
    for level in tl.static_range(LEVELS):
        numbers = tl.sum(tl.reshape(numbers, [ROWS, 1 << (LEVELS - 1 - level), 2]), 2)
    return tl.reshape(numbers, [ROWS])


@triton.jit
def _exponential(numbers):
    """``e`` to the power of float32 numbers, by additions and products alone;
    what exceeds 88 counts as 88.
    """
    numbers = tl.minimum(tl.maximum(numbers, -87.0), 88.0)
    power = tl.floor(numbers * 1.44269504088896341 + 0.5)
    rest = numbers - power * 0.693359375
    rest = rest + power * 2.12194440e-4
    series = rest * 1.9875691500e-4 + 1.3981999507e-3
    series = series * rest + 8.3334519073e-3
    series = series * rest + 4.1665795894e-2
    series = series * rest + 1.6666665459e-1
    series = series * rest + 5.0000001201e-1
    series = series * (rest * rest) + rest + 1.0
    return series * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _of_product(
    at, mask, part_size, PARTS: tl.constexpr, kind: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Numbers that a product made, in float32: rounded already where there are no parts,
    else their sum, rounded.
    """
    numbers = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(1, PARTS):
            numbers += tl.load(at + part * part_size, mask=mask, other=0.0)
        numbers = _rounded(numbers, kind, INTERPRETED)
    return numbers


@triton.jit
def _active(gate, up, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """``silu(gate) * up`` of float32 numbers."""
    active = _rounded(tl.div_rn(gate, 1.0 + _exponential(-gate)), kind, INTERPRETED)
    return _rounded(active * up, kind, INTERPRETED)


@triton.jit
def _roots(
    squares, row, used, size, eps, TILES: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr
):
    """What RMSNorm multiplies rows by ``[ROWS]``, from the squares of their tiles, added up."""
    tiles = tl.arange(0, 1 << LEVELS)
    known = used[:, None] & (tiles < TILES)[None, :]
    parts = tl.load(
        squares + row.to(tl.int64)[:, None] * TILES + tiles[None, :], mask=known, other=0.0
    )
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(parts, ROWS, LEVELS), size) + eps))


@triton.jit
def _weight(at, wanted, MASKED: tl.constexpr):
    """Weights of a tile of outputs, 0 for outputs that do not exist."""
    if MASKED:
        return tl.load(at, mask=wanted[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _dots(
    rows, squares, norm, weights, bias, second_weights, second_bias, part, outputs, wanted, row,
    used, rows_row, eps, SIZE, SPAN,
    ADDED: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, LEVELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A part ``[TILE, ROWS]`` of the products of rows and some outputs' weights, or the sum of
    ``ADDED`` parts; and the same by second weights, if there are any.

    Rows are normalised on the way, where there is a norm.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    inputs = part * ADDED * SPAN + tl.arange(0, STEP)
    weights_at = outputs.to(tl.int64)[:, None] * SIZE + inputs[None, :]
    row_at = rows + row.to(tl.int64)[None, :] * rows_row + inputs[:, None]
    if squares is not None:
        roots = _roots(squares, row, used, SIZE * 1.0, eps, TILES, LEVELS, ROWS)
    whole = tl.zeros([TILE, ROWS], tl.float32)
    second_whole = tl.zeros([TILE, ROWS], tl.float32)
    for index in range(ADDED):
        total = tl.zeros([TILE, ROWS], tl.float32)
        second = tl.zeros([TILE, ROWS], tl.float32)
        for step in range(SPAN // STEP):
            place = index * SPAN + step * STEP
            taken = tl.load(row_at + place, mask=used[None, :], other=0.0)
            if squares is not None:
                scaled = _rounded(taken.to(tl.float32) * roots[None, :], kind, INTERPRETED)
                factors = tl.load(norm + inputs + place).to(tl.float32)
                taken = _rounded(scaled * factors[:, None], kind, INTERPRETED).to(kind)
            if INTERPRETED:  # numpy cannot calculate in bfloat16
                taken = taken.to(tl.float32)
            weight = _weight(weights + weights_at + place, wanted, MASKED)
            total = tl.dot(weight.to(taken.dtype), taken, total, input_precision="ieee")
            if second_weights is not None:
                weight = _weight(second_weights + weights_at + place, wanted, MASKED)
                second = tl.dot(weight.to(taken.dtype), taken, second, input_precision="ieee")
        if bias is not None:  # noqa: SIM102 (a kernel has no "and" of what is fixed and what is not)
            if part + index == 0:
                total += tl.load(bias + outputs, mask=wanted, other=0.0).to(tl.float32)[:, None]
                if second_bias is not None:
                    more = tl.load(second_bias + outputs, mask=wanted, other=0.0)
                    second += more.to(tl.float32)[:, None]
        whole = tl.where(index == 0, total, whole + total)
        second_whole = tl.where(index == 0, second, second_whole + second)
    return whole, second_whole


@triton.jit
def _is_last(counter, PARTS: tl.constexpr):
    """Whether the other programs of a tile have left their parts already. They can be read then."""
    last = True
    tl.debug_barrier()  # all threads have stored theirs
    if PARTS > 1:
        last = tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.store(counter, 0)  # for the next product
        tl.debug_barrier()
    return last


@triton.jit
def _finish_sums(
    sums, hidden, total, squares, first, count, tile, part_size, hidden_row,
    SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add a tile of products to hidden states; and the squares of what they come to,
    where these are asked for.
    """
    kind: tl.constexpr = total.dtype.element_ty
    outputs = tile * TILE + tl.arange(0, TILE)[None, :]
    some: tl.constexpr = min(ROWS, 32)  # rows at a time: more of them spill registers on sm_80
    for begin in range(0, ROWS, some):
        row = (first + begin + tl.arange(0, some)).to(tl.int64)[:, None]
        used = row < count
        exist = used & (outputs < SIZE)
        numbers = _of_product(
            sums + row * SIZE + outputs, exist, part_size, PARTS, kind, INTERPRETED
        )
        numbers += tl.load(hidden + row * hidden_row + outputs, mask=exist, other=0.0).to(
            tl.float32
        )
        numbers = _rounded(numbers, kind, INTERPRETED)
        tl.store(total + row * SIZE + outputs, numbers.to(kind), mask=exist)
        if squares is not None:
            found = tree_sum(numbers * numbers, some, LEVELS)
            tl.store(squares + row * TILES + tile, found[:, None], mask=used)


@triton.jit
def _rotated(
    first, second, weight, cosines, sines, row, exist, places, inside, eps,
    HALF: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, kind: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Heads, given as two halves ``[ROWS, 2 ** LEVELS]``, normalised if there is a weight, and
    rotated.
    """
    if weight is not None:
        squares = tree_sum(first * first, ROWS, LEVELS) + tree_sum(second * second, ROWS, LEVELS)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, 2.0 * HALF) + eps))[:, None]
        own = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = _rounded(_rounded(first * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
        own = tl.load(weight + HALF + places, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = _rounded(_rounded(second * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
    at = row * 2 * HALF + places[None, :]
    cosine = tl.load(cosines + at, mask=exist, other=0.0).to(tl.float32)
    sine = tl.load(sines + at, mask=exist, other=0.0).to(tl.float32)
    straight = _rounded(first * cosine, kind, INTERPRETED)
    turned = _rounded(straight - _rounded(second * sine, kind, INTERPRETED), kind, INTERPRETED)
    cosine = tl.load(cosines + HALF + at, mask=exist, other=0.0).to(tl.float32)
    sine = tl.load(sines + HALF + at, mask=exist, other=0.0).to(tl.float32)
    straight = _rounded(second * cosine, kind, INTERPRETED)
    other = _rounded(straight + _rounded(first * sine, kind, INTERPRETED), kind, INTERPRETED)
    return turned, other


@triton.jit
def _keep_head(
    kept, steps, head, slot, first, second, places, stored, inside, kept_head, kept_slot, HALF: tl.constexpr
):  # fmt: skip
    """Put one head's keys, or values, of some rows into their slots: as numbers, or as codes and
    their steps.
    """
    own = head.to(tl.int64) * kept_head
    if steps is not None:
        step = step_of(first, second)
        tl.store(steps + own // 4 + slot, step, mask=stored)
        first = counted(first, step)
        second = counted(second, step)
    to = kept + own + slot * kept_slot + places[None, :]
    stored = stored & inside[None, :]
    tl.store(to, first.to(kept.dtype.element_ty), mask=stored)
    tl.store(to + HALF, second.to(kept.dtype.element_ty), mask=stored)


@triton.jit
def _finish_head(
    sums, sums_row, row, used, head, cosines, sines, query_weight, key_weight, rotated, keys, values, key_steps,
    value_steps, length, part_size, keys_head, keys_slot, values_head, values_slot, eps, nodes, capacity,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rotate one head of some rows, if it is of queries or keys, and put a key or value into its
    slot.

    ``sums`` points to the head's first number in the first row. Query heads come first, then those
    of keys, then those of values. Rows from ``nodes`` on are
    padding, whose keys and values go nowhere.
    """
    kind: tl.constexpr = rotated.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < HALF
    slot = row.to(tl.int64) + tl.load(length).to(tl.int64)
    stored = (used & (row < nodes) & (slot < capacity))[:, None]
    slot = slot[:, None]
    row = row.to(tl.int64)[:, None]
    exist = used[:, None] & inside[None, :]
    at = sums + row * sums_row + places[None, :]
    first = _of_product(at, exist, part_size, PARTS, kind, INTERPRETED)
    second = _of_product(at + HALF, exist, part_size, PARTS, kind, INTERPRETED)
    if head < QUERY_HEADS:
        turned, other = _rotated(
            first, second, query_weight, cosines, sines, row, exist, places, inside, eps, HALF, LEVELS, ROWS, kind,
            INTERPRETED,
        )  # fmt: skip
        to = rotated + (row * QUERY_HEADS + head) * 2 * HALF + places[None, :]
        tl.store(to, turned.to(kind), mask=exist)
        tl.store(to + HALF, other.to(kind), mask=exist)
    elif head < QUERY_HEADS + KV_HEADS:
        turned, other = _rotated(
            first, second, key_weight, cosines, sines, row, exist, places, inside, eps, HALF, LEVELS, ROWS, kind,
            INTERPRETED,
        )  # fmt: skip
        _keep_head(
            keys, key_steps, head - QUERY_HEADS, slot, turned, other, places, stored, inside, keys_head, keys_slot, HALF
        )  # fmt: skip
    else:
        _keep_head(
            values, value_steps, head - QUERY_HEADS - KV_HEADS, slot, first, second, places, stored, inside, values_head,
            values_slot, HALF,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def multiply_add(
    rows, weights, bias, sums, counters, hidden, total, squares, count, rows_row, hidden_row, part_size,
    SIZE, SPAN,  # not fixed: one kernel serves the attention's output and the MLP's
    OUTPUTS: tl.constexpr, ADDED: tl.constexpr, TILE: tl.constexpr, TILE_LEVELS: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A product of a block of rows, added to hidden states, and the squares of these by tiles.

    Grid ``(blocks of rows, tiles of outputs, parts)``: blocks that read
    the same weights run side by side.
    """
    tile = tl.program_id(1)
    part = tl.program_id(2)
    tiles: tl.constexpr = (OUTPUTS + TILE - 1) // TILE
    outputs = tile * TILE + tl.arange(0, TILE)
    wanted = outputs < OUTPUTS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < count
    whole, _ = _dots(
        rows, None, None, weights, bias, None, None, part, outputs, wanted, row, used, rows_row, 0.0, SIZE,
        SPAN, ADDED, TILE, OUTPUTS % TILE != 0, STEP, ROWS, 0, 0, INTERPRETED,
    )  # fmt: skip
    at = sums + part * part_size + row.to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
    tl.store(at, whole, mask=used[None, :] & wanted[:, None])
    if _is_last(counters + tl.program_id(0) * tiles + tile, PARTS):
        _finish_sums(
            sums, hidden, total, squares, tl.program_id(0) * ROWS, count, tile, part_size, hidden_row, OUTPUTS, TILE,
            tiles, TILE_LEVELS, PARTS, ROWS, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _of_three(head, query, key, value, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """What belongs to a head, of what belongs to those of queries, of keys and of values."""
    return tl.where(head < QUERY_HEADS, query, tl.where(head < QUERY_HEADS + KV_HEADS, key, value))


@triton.jit(do_not_specialize=["count", "nodes", "capacity"])
def multiply_heads(
    rows, squares, norm, query, query_bias, key, key_bias, value, value_bias,
    sums, counters, cosines, sines, query_weight, key_weight, rotated, keys, values, key_steps, value_steps, length,
    count, rows_row, part_size, eps, keys_head, keys_slot, values_head, values_slot, head_eps, nodes, capacity,
    SIZE: tl.constexpr, SPAN: tl.constexpr, ADDED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, TILES_LEVELS: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a block of rows, from hidden states: normalised, multiplied,
    rotated, keys and values stored; grid ``(blocks of rows, heads, parts)``.
    """
    head = tl.program_id(1)
    part = tl.program_id(2)
    heads: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    own = _of_three(
        head, head, head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS, QUERY_HEADS, KV_HEADS
    )
    weights = _of_three(head, query, key, value, QUERY_HEADS, KV_HEADS)
    bias = query_bias
    if query_bias is not None:
        bias = _of_three(head, query_bias, key_bias, value_bias, QUERY_HEADS, KV_HEADS)
    places = tl.arange(0, TILE)
    wanted = places < 2 * HALF
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < count
    whole, _ = _dots(
        rows, squares, norm, weights, bias, None, None, part, own * 2 * HALF + places, wanted, row, used,
        rows_row, eps, SIZE, SPAN, ADDED, TILE, 2 * HALF != TILE, STEP, ROWS, TILES, TILES_LEVELS, INTERPRETED,
    )  # fmt: skip
    sums += head * 2 * HALF
    at = sums + part * part_size + row.to(tl.int64)[None, :] * heads * 2 * HALF + places[:, None]
    tl.store(at, whole, mask=used[None, :] & wanted[:, None])
    if _is_last(counters + tl.program_id(0) * heads + head, PARTS):
        some: tl.constexpr = ROWS if ROWS < 32 else 32  # at a time, as registers are few
        for first in range(tl.program_id(0) * ROWS, tl.program_id(0) * ROWS + ROWS, some):
            lines = first + tl.arange(0, some)
            _finish_head(
                sums, heads * 2 * HALF, lines, lines < count, head, cosines, sines, query_weight, key_weight, rotated, keys,
                values, key_steps, value_steps, length, part_size, keys_head, keys_slot, values_head, values_slot, head_eps,
                nodes, capacity, QUERY_HEADS, KV_HEADS, HALF, LEVELS, PARTS, some, INTERPRETED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def multiply_silu_rows(
    rows, squares, norm, gate, gate_bias, up, up_bias, out, count, rows_row, eps,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TILES_LEVELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """SiLU of one product of normalised hidden states times a second;
    grid ``(blocks of rows, tiles of outputs)``.
    """
    kind: tl.constexpr = out.dtype.element_ty
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = outputs < OUTPUTS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < count
    first, second = _dots(
        rows, squares, norm, gate, gate_bias, up, up_bias, 0, outputs, wanted, row, used, rows_row,
        eps, SIZE, SIZE, 1, TILE, OUTPUTS % TILE != 0, STEP, ROWS, TILES, TILES_LEVELS, INTERPRETED,
    )  # fmt: skip
    made = _active(
        _rounded(first, kind, INTERPRETED), _rounded(second, kind, INTERPRETED), kind, INTERPRETED
    )
    at = out + row.to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
    tl.store(at, made.to(kind), mask=used[None, :] & wanted[:, None])


@triton.jit
def add_norm_rows(
    hidden, added, weight, total, normed, squares, hidden_row, added_row, eps,
    SIZE: tl.constexpr, LEVELS: tl.constexpr, TILE_LEVELS: tl.constexpr, TILES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row's sum with what is added to it, the RMSNorm of that, and its squares by tiles: what
    of these is asked for; grid ``(rows,)``.
    """
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = hidden.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < SIZE
    numbers = tl.load(hidden + row * hidden_row + places, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        numbers += tl.load(added + row * added_row + places, mask=inside, other=0.0).to(tl.float32)
        numbers = _rounded(numbers, kind, INTERPRETED)
        tl.store(total + row * SIZE + places, numbers.to(kind), mask=inside)
    count: tl.constexpr = 1 << (LEVELS - TILE_LEVELS)
    found = tree_sum(tl.reshape(numbers * numbers, [count, 1 << TILE_LEVELS]), count, TILE_LEVELS)
    if squares is not None:
        tiles = tl.arange(0, count)
        tl.store(squares + row * TILES + tiles, found, mask=tiles < TILES)
    if normed is not None:
        whole = tree_sum(tl.reshape(found, [1, count]), 1, LEVELS - TILE_LEVELS)
        root = tl.sqrt_rn(tl.div_rn(whole, SIZE * 1.0) + eps)
        scaled = _rounded(numbers * tl.div_rn(1.0, root), kind, INTERPRETED)
        own = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
        scaled = _rounded(scaled * own, kind, INTERPRETED)
        tl.store(normed + row * SIZE + places, scaled.to(kind), mask=inside)


@triton.jit(do_not_specialize=["count", "nodes", "capacity"])
def rotate_rows(
    query, key, value, cosines, sines, query_weight, key_weight, rotated, keys, values, key_steps, value_steps, length,
    count, keys_head, keys_slot, values_head, values_slot, eps, nodes, capacity,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys of a block of rows that PyTorch has made, and store keys and values;
    grid ``(blocks of rows, heads)``.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = _of_three(
        head, head, head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS, QUERY_HEADS, KV_HEADS
    )
    product = _of_three(head, query, key, value, QUERY_HEADS, KV_HEADS) + own * 2 * HALF
    product_row = tl.where(head < QUERY_HEADS, QUERY_HEADS * 2 * HALF, KV_HEADS * 2 * HALF)
    _finish_head(
        product, product_row, row, row < count, head, cosines, sines, query_weight, key_weight, rotated, keys, values,
        key_steps, value_steps, length, 0, keys_head, keys_slot, values_head, values_slot, eps, nodes, capacity,
        QUERY_HEADS, KV_HEADS, HALF, LEVELS, 0, ROWS, INTERPRETED,
    )  # fmt: skip


@triton.jit
def silu_mul_rows(gate, up, out, SIZE, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """``silu(gate) * up`` of a part of one row; grid ``(rows, parts)``."""
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    first = tl.load(gate + row * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(up + row * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * SIZE + places, _active(first, second, kind, INTERPRETED).to(kind), mask=inside
    )


_INTERPRETED = not isinstance(add_norm_rows, triton.JITFunction)
_BLOCK = 1024  # numbers of a program of SiLU
_ROTATED = 16  # rows of a program that rotates
# Of products: outputs of a program, inputs that it takes at a time, and how many programs there
# should be at least, for some 130 processors. Chosen by what the compiler makes of them
# (results/cuda-offline).
TILE = 128
STEP = 64
_PROGRAMS = 120
_MOST_PARTS = 8
MOST_ROWS = 64
# a block of 16 is no quicker (results/h100), and would have to be compiled beside this one
_LEAST_ROWS = 32
# Of products of more rows: the rows of a block. A tensor core sums each of its outputs by itself,
# so that only the number of them changes with it; models are tried with it before use
# (exact_passes.wide_text_has_the_bits).
_MANY_ROWS = 128
# what is rounded once and what twice is said by the kernels alone
UNFUSED = {"enable_fp_fusion": False}


class Product(NamedTuple):
    """What a linear layer multiplies by."""

    weights: Tensor  # ``[out, in]``, in the dtype of rows
    bias: Tensor | None = None  # ``[out]``


class Hidden(NamedTuple):
    """Hidden states that are normalised where they are read."""

    rows: Tensor  # ``[n, H]``, contiguous each
    squares: Tensor  # ``[n, tiles]``, float32: sums of the squares of ``TILE`` neighbours
    weight: Tensor  # ``[H]``, of the norm
    eps: float


class HeadPlan(NamedTuple):
    """What becomes of queries, keys and values."""

    heads: tuple[int, int]  # of queries, of keys
    angles: tuple[Tensor, Tensor]  # cosines and sines ``[n, d]``, contiguous
    norms: tuple[Tensor | None, Tensor | None]  # weights ``[d]`` for queries and keys, if any
    eps: float  # of these norms
    # ``[kv heads, capacity, d]``, where keys go; the last dimension contiguous. Of int8 their steps
    # are apart
    keys: Tensor
    values: Tensor
    length: Tensor  # ``[]`` int32, of what these hold
    nodes: int  # rows whose keys and values are kept


def levels_of(size: int) -> int:
    """Levels of a tree of pairs over so many numbers."""
    return (size - 1).bit_length()


def product_parts(inputs: int, tiles: int) -> int:
    """In how many parts the inputs of a product are summed."""
    parts = 1
    while tiles * parts < _PROGRAMS and parts < _MOST_PARTS and inputs % (2 * parts * STEP) == 0:
        parts *= 2
    return parts


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """How many programs of each tile have left their part: 0 between products."""
    with torch.inference_mode(False):
        return torch.zeros(1 << 14, dtype=torch.int32, device=device)


def _layout(count: int, inputs: int, tiles: int) -> dict[str, int]:
    """Options of a product's launch: how rows and inputs are divided."""
    many = count > MOST_ROWS
    parts = product_parts(inputs, tiles)
    return {
        "SIZE": inputs,
        "SPAN": inputs // parts,
        "ADDED": parts if many else 1,
        "PARTS": 1 if many else parts,
        **_launch(count),
    }


def _launch(count: int) -> dict[str, int]:
    many = count > MOST_ROWS
    return {
        "ROWS": _MANY_ROWS if many else max(_LEAST_ROWS, triton.next_power_of_2(count)),
        "STEP": STEP,
        "INTERPRETED": _INTERPRETED,
        "num_warps": 8 if many else 4,
        "num_stages": 3 if many else 4,
    }


def _tiles(size: int) -> dict[str, int]:
    """Options of a launch whose rows have squares by tiles."""
    tiles = triton.cdiv(size, TILE)
    return {"TILES": tiles, "TILES_LEVELS": levels_of(tiles)}


def _sums(rows: Tensor, layout: dict[str, int], outputs: int, sums: Tensor | None) -> Tensor:
    """Memory for the parts of a product: ``[parts, n, out]``, float32."""
    if sums is None:
        sums = rows.new_empty(layout["PARTS"], len(rows), outputs, dtype=torch.float32)
    return sums


def add_product(
    rows: Tensor, product: Product, hidden: Tensor, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``hidden + rows @ weights.T`` ``[n, H]``, and its squares by tiles ``[n, tiles]``.

    A row is the same, to the bit, whatever their number.

    Args:
        rows: ``[n, in]``, contiguous each.
        product: of ``[H, in]``.
        hidden: ``[n, H]``, contiguous each.
        sums: memory for the product's parts, ``[parts, n, H]`` float32, for who wants to see them.
    """
    outputs, inputs = product.weights.shape
    tiles = triton.cdiv(outputs, TILE)
    layout = _layout(len(rows), inputs, tiles)
    sums = _sums(rows, layout, outputs, sums)
    total = hidden.new_empty(len(rows), outputs)
    squares = hidden.new_empty(len(rows), tiles, dtype=torch.float32)
    with torch.cuda.device_of(rows):
        multiply_add[triton.cdiv(len(rows), layout["ROWS"]), tiles, layout["PARTS"]](
            rows, *product, sums, _counters(rows.device), hidden, total, squares, len(rows), rows.stride(0),
            hidden.stride(0), sums.stride(0), OUTPUTS=outputs, TILE=TILE, TILE_LEVELS=levels_of(TILE), **layout,
            **UNFUSED,
        )  # fmt: skip
    return total, squares


def project_heads(
    hidden: Hidden, products: Sequence[Product], heads: HeadPlan, sums: Tensor | None = None
) -> Tensor:
    """Queries, rotated, of hidden states; keys and values go to where they are kept.

    A row is the same, to the bit, whatever their number.

    Args:
        hidden: the states.
        products: of queries, of keys and of values.
        heads: what becomes of them.
        sums: as for :func:`add_product`, of all three, one behind the other.

    Returns:
        The queries ``[query heads, n, d]``, in memory ``[n, heads, d]``.
    """
    rows, squares, weight, eps = hidden
    size = heads.keys.shape[2]
    count = heads.heads[0] + 2 * heads.heads[1]
    layout = _layout(len(rows), rows.shape[1], count)
    sums = _sums(rows, layout, count * size, sums)
    rotated = rows.new_empty(len(rows), heads.heads[0], size)
    with torch.cuda.device_of(rows):
        multiply_heads[triton.cdiv(len(rows), layout["ROWS"]), count, layout["PARTS"]](
            rows, squares, weight, *chain(*products), sums, _counters(rows.device), *_places(heads, rotated),
            len(rows), rows.stride(0), sums.stride(0), eps, *_strides(heads), TILE=max(16, triton.next_power_of_2(size)),
            **_tiles(rows.shape[1]), **_sizes(heads), **layout, **UNFUSED,
        )  # fmt: skip
    return rotated.transpose(0, 1)


def rotate(products: Sequence[Tensor], heads: HeadPlan) -> Tensor:
    """As :func:`project_heads`, of products ``[n, heads * d]`` that were made before: of queries,
    of keys and of values, contiguous.
    """
    query, *_ = products
    rotated = query.new_empty(len(query), heads.heads[0], heads.keys.shape[2])
    with torch.cuda.device_of(query):
        rotate_rows[triton.cdiv(len(query), _ROTATED), heads.heads[0] + 2 * heads.heads[1]](
            *products, *_places(heads, rotated), len(query), *_strides(heads), ROWS=_ROTATED, **_sizes(heads),
            INTERPRETED=_INTERPRETED, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return rotated.transpose(0, 1)


@functools.cache
def nothing_held(device: torch.device) -> Tensor:
    """The length of an empty cache."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int32, device=device)


def _places(heads: HeadPlan, rotated: Tensor) -> tuple[Tensor | None, ...]:
    kept = heads.keys, heads.values
    steps = map(steps_of, kept) if heads.keys.dtype == torch.int8 else (None, None)
    return *heads.angles, *heads.norms, rotated, *kept, *steps, heads.length


def _strides(heads: HeadPlan) -> tuple[int | float, ...]:
    strides = *heads.keys.stride()[:2], *heads.values.stride()[:2]
    return *strides, heads.eps, heads.nodes, heads.keys.shape[1]


def _sizes(heads: HeadPlan) -> dict[str, int]:
    half = heads.keys.shape[2] // 2
    return {
        "QUERY_HEADS": heads.heads[0],
        "KV_HEADS": heads.heads[1],
        "HALF": half,
        "LEVELS": levels_of(half),
    }


def multiply_silu(hidden: Hidden, gate: Product, up: Product) -> Tensor:
    """``silu(gate) * up`` ``[n, m]`` of hidden states; the weights are ``[m, H]`` each.

    A row is the same, to the bit, whatever their number.
    """
    rows, squares, weight, eps = hidden
    outputs = len(gate.weights)
    launch = _launch(len(rows))
    out = rows.new_empty(len(rows), outputs)
    with torch.cuda.device_of(rows):
        multiply_silu_rows[triton.cdiv(len(rows), launch["ROWS"]), triton.cdiv(outputs, TILE // 2)](
            rows, squares, weight, *gate, *up, out, len(rows), rows.stride(0), eps, SIZE=rows.shape[1],
            OUTPUTS=outputs, TILE=TILE // 2, **_tiles(rows.shape[1]), **launch, **UNFUSED,
        )  # fmt: skip
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[n, m]``, contiguous."""
    rows, size = gate.shape
    out = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        silu_mul_rows[rows, triton.cdiv(size, _BLOCK)](
            gate, up, out, size, BLOCK=_BLOCK, INTERPRETED=_INTERPRETED, num_warps=4, **UNFUSED
        )
    return out


def add_norm(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``hidden + added`` and its RMSNorm, of ``[n, H]`` rows that are contiguous each;
    ``added`` None adds nothing.
    """
    total = hidden if added is None else hidden.new_empty(hidden.shape)
    normed = hidden.new_empty(hidden.shape)
    _launch_rows(hidden, added, weight, total, normed, None, eps)
    return total, normed


def squares_of(hidden: Tensor) -> Tensor:
    """The squares of rows ``[n, H]``, contiguous each, by tiles: ``[n, tiles]``, float32."""
    rows, size = hidden.shape
    squares = hidden.new_empty(rows, triton.cdiv(size, TILE), dtype=torch.float32)
    _launch_rows(hidden, None, None, hidden, None, squares, 0.0)
    return squares


def _launch_rows(
    hidden: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    normed: Tensor | None,
    squares: Tensor | None,
    eps: float,
) -> None:
    rows, size = hidden.shape
    tile_levels = levels_of(TILE)
    levels = max(levels_of(size), tile_levels)
    with torch.cuda.device_of(hidden):
        add_norm_rows[rows,](
            hidden, added, weight, total, normed, squares, hidden.stride(0), 0 if added is None else added.stride(0),
            eps, SIZE=size, LEVELS=levels, TILE_LEVELS=tile_levels, TILES=triton.cdiv(size, TILE),
            INTERPRETED=_INTERPRETED, num_warps=min(16, max(1, 1 << max(0, levels - 10))), **UNFUSED,
        )  # fmt: skip
