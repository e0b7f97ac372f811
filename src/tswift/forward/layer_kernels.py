"""Triton kernels of a layer, but for its attention; only ``fused_layers`` imports this module.

A layer of Llama's kind takes nine: four products, the second of which ends with SiLU, the
attention's two, residual addition with RMSNorm (twice), and rotation of queries and keys with the
store into the cache. A pass of many rows, and a layer whose sizes do not fit, leave the products to
PyTorch, and SiLU is a kernel of its own then.

**Products of few rows** read each weight once, and that is what they take. Weights stand where
matrix units take many rows, and rows where they take few. As many programs as fit side by side
share the outputs and, where these are few, the inputs: then each leaves a part of the sum in
float32, and the kernel behind adds the parts up, always in one order, and rounds. How a sum is cut
follows from the layer's sizes alone. Products of many rows, where these are to have the bits that
they have among few, go through the same tiles and parts in the same order, a block of rows at a
time; one program adds its parts up by itself.

**Bits are the same everywhere.** A program computes one row (or a few heads of one row) from that
row alone, so a row's place in a pass and the pass's width decide nothing. A sum over a row is a
tree of pairs: neighbours are added, then neighbouring sums, and so on; every addition has two
terms, so no compiler can order it otherwise. Divisions and roots are correctly rounded, the
exponential is made of additions and products alone, and the compiler fuses none of them. Where
transformers' eager layers round to the model's dtype, these kernels round, too. Plain PyTorch that
does the same is in ``fused_layers``; its results are equal to the bit, on a CPU and on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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


@triton.jit(do_not_specialize=["nodes"])
def multiply_rows(
    rows, weights, scales, bias, out, nodes, rows_row,
    SIZE: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A part of a product of a block of rows, or the sum of ``ADDED`` ones. If ``GATED``, of two
    products, and SiLU of the first times the second.

    Weights in FP8 have scales; a second product's stand behind the first one's. Grid ``(blocks of
    rows, tiles of outputs, parts)``: blocks that read the same weights run side by side.
    """
    kind: tl.constexpr = out.dtype.element_ty
    part = tl.program_id(2)
    outputs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = (row < nodes)[None, :]
    inputs = part * ADDED * SPAN + tl.arange(0, STEP)
    first_at = weights + outputs.to(tl.int64)[:, None] * SIZE + inputs[None, :]
    second_at = first_at + OUTPUTS * SIZE
    row_at = rows + row[None, :] * rows_row + inputs[:, None]
    whole = tl.zeros([TILE, ROWS], tl.float32)
    for index in range(ADDED):
        total = tl.zeros([TILE, ROWS], tl.float32)
        second = tl.zeros([TILE, ROWS], tl.float32)
        for step in range(SPAN // STEP):
            place = index * SPAN + step * STEP
            taken = tl.load(row_at + place, mask=used, other=0.0)
            if WIDE:
                taken = taken.to(tl.float32)
            weight = tl.load(first_at + place).to(taken.dtype)
            total = tl.dot(weight, taken, total, input_precision="ieee")
            if GATED:
                weight = tl.load(second_at + place).to(taken.dtype)
                second = tl.dot(weight, taken, second, input_precision="ieee")
        if scales is not None:
            total = total * tl.load(scales + outputs)[:, None]
            if GATED:
                second = second * tl.load(scales + OUTPUTS + outputs)[:, None]
        if bias is not None:  # noqa: SIM102 (a kernel has no "and" of what is fixed and what is not)
            if part + index == 0:
                total = total + tl.load(bias + outputs).to(tl.float32)[:, None]
        if GATED:
            total = _active(
                _rounded(total, kind, INTERPRETED), _rounded(second, kind, INTERPRETED), kind, INTERPRETED
            )  # fmt: skip
        whole = tl.where(index == 0, total, whole + total)
    at = out + (part * nodes + row).to(tl.int64)[None, :] * OUTPUTS + outputs[:, None]
    tl.store(at, whole.to(kind), mask=used)


@triton.jit
def add_norm_rows(
    hidden, added, weight, total, normed, hidden_row, added_row, part_size, eps,
    SIZE: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row's sum with what is added to it, if anything is, and the RMSNorm of that;
    grid ``(rows,)``.
    """
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = normed.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < SIZE
    numbers = tl.load(hidden + row * hidden_row + places, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        numbers += _of_product(
            added + row * added_row + places, inside, part_size, PARTS, kind, INTERPRETED
        )
        numbers = _rounded(numbers, kind, INTERPRETED)
        tl.store(total + row * SIZE + places, numbers.to(kind), mask=inside)
    squares = tree_sum(tl.reshape(numbers * numbers, [1, 1 << LEVELS]), 1, LEVELS)
    root = tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0) + eps)
    scaled = _rounded(numbers * tl.div_rn(1.0, root), kind, INTERPRETED)
    scaled = _rounded(
        scaled * tl.load(weight + places, mask=inside, other=0.0).to(tl.float32), kind, INTERPRETED
    )
    tl.store(normed + row * SIZE + places, scaled.to(kind), mask=inside)


@triton.jit
def _normed_heads(
    first, second, weight, places, inside, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, kind: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of heads given as two halves ``[HEADS, 2 ** LEVELS]``."""
    squares = tree_sum(first * first, HEADS, LEVELS) + tree_sum(second * second, HEADS, LEVELS)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, 2.0 * HALF) + eps))[:, None]
    own = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = _rounded(_rounded(first * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
    own = tl.load(weight + HALF + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    second = _rounded(_rounded(second * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
    return first, second


@triton.jit
def _rotated_heads(
    source, target, weight, cosines, sines, heads, count, source_head, target_head, part_size, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Normalise, if there is a weight, and rotate some heads of a row;
    those from ``count`` on do not exist.
    """
    kind: tl.constexpr = target.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < HALF
    exist = (heads < count)[:, None] & inside[None, :]
    source_at = source + heads[:, None] * source_head + places[None, :]
    first = _of_product(source_at, exist, part_size, PARTS, kind, INTERPRETED)
    second = _of_product(source_at + HALF, exist, part_size, PARTS, kind, INTERPRETED)
    if weight is not None:
        first, second = _normed_heads(
            first, second, weight, places, inside, eps, HEADS, HALF, LEVELS, kind, INTERPRETED
        )  # fmt: skip
    cosine = tl.load(cosines + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    straight = _rounded(first * cosine, kind, INTERPRETED)
    turned = _rounded(straight - _rounded(second * sine, kind, INTERPRETED), kind, INTERPRETED)
    cosine = tl.load(cosines + HALF + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + HALF + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    straight = _rounded(second * cosine, kind, INTERPRETED)
    other = _rounded(straight + _rounded(first * sine, kind, INTERPRETED), kind, INTERPRETED)
    target_at = target + heads[:, None] * target_head + places[None, :]
    tl.store(target_at, turned.to(kind), mask=exist)
    tl.store(target_at + HALF, other.to(kind), mask=exist)


@triton.jit(do_not_specialize=["nodes", "capacity"])
def rotate_rows(
    query, key, value, cosines, sines, query_weight, key_weight, rotated, keys, values, length, query_row, key_row,
    value_row, part_size, keys_head, keys_slot, values_head, values_slot, eps, nodes, capacity,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rotate a row's queries and keys, and put its keys and values into their slot;
    grid ``(rows, parts)``.

    A part is ``HEADS`` query heads, or behind those ``HEADS`` KV heads. Rows from ``nodes`` on are
    padding, whose keys and values go nowhere. Without a length slots are counted from 0; without
    ``values`` these are left where they are.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cosines += row * 2 * HALF
    sines += row * 2 * HALF
    query_parts: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)
        _rotated_heads(
            query + row * query_row, rotated + row * QUERY_HEADS * 2 * HALF, query_weight, cosines, sines, heads,
            QUERY_HEADS, 2 * HALF, 2 * HALF, part_size, eps, HEADS, HALF, LEVELS, PARTS, INTERPRETED,
        )  # fmt: skip
        return
    heads = (part - query_parts) * HEADS + tl.arange(0, HEADS)
    slot = row
    if length is not None:
        slot += tl.load(length).to(tl.int64)
    if (row >= nodes) | (slot >= capacity):
        return
    heads = heads.to(tl.int64)
    _rotated_heads(
        key + row * key_row, keys + slot * keys_slot, key_weight, cosines, sines, heads, KV_HEADS, 2 * HALF, keys_head,
        part_size, eps, HEADS, HALF, LEVELS, PARTS, INTERPRETED,
    )  # fmt: skip
    if values is not None:
        places = tl.arange(0, 2 << LEVELS)
        exist = (heads < KV_HEADS)[:, None] & (places < 2 * HALF)[None, :]
        kind: tl.constexpr = values.dtype.element_ty
        value_at = value + row * value_row + heads[:, None] * 2 * HALF + places[None, :]
        numbers = _of_product(value_at, exist, part_size, PARTS, kind, INTERPRETED).to(kind)
        tl.store(
            values + slot * values_slot + heads[:, None] * values_head + places[None, :],
            numbers,
            mask=exist,
        )


@triton.jit
def silu_mul_rows(
    gate, up, out, gate_row, up_row, SIZE, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """``silu(gate) * up`` of a part of one row; grid ``(rows, parts)``."""
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    first = tl.load(gate + row * gate_row + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(up + row * up_row + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * SIZE + places, _active(first, second, kind, INTERPRETED).to(kind), mask=inside
    )


_INTERPRETED = not isinstance(add_norm_rows, triton.JITFunction)
_HEADS = 4  # of a program that rotates
_BLOCK = 1024  # numbers of a program of SiLU
# Of products: outputs of a program, inputs that it takes at a time, and how many programs there
# should be at least, for some 130 processors. Chosen by what the compiler makes of them
# (results/cuda-offline); no GPU has timed them yet.
_TILE = 128
_STEP = 64
_PROGRAMS = 120
_MOST_PARTS = 8
MOST_ROWS = 64
# Of products of more rows: the rows of a block. A tensor core sums each of its outputs by itself,
# so that only the number of them changes with it; models are tried with it before use
# (adapting.try_wide_text).
_MANY_ROWS = 128
# what is rounded once and what twice is said by the kernels alone
UNFUSED = {"enable_fp_fusion": False}


def levels_of(size: int) -> int:
    """Levels of a tree of pairs over so many numbers."""
    return (size - 1).bit_length()


def product_parts(inputs: int, outputs: int) -> int:
    """In how many parts the inputs of a product are summed; 0 where it is left to PyTorch."""
    if outputs % _TILE or inputs % _STEP:
        return 0
    parts = 1
    while (
        outputs // _TILE * parts < _PROGRAMS
        and parts < _MOST_PARTS
        and inputs % (2 * parts * _STEP) == 0
    ):
        parts *= 2
    return parts


def multiply(
    rows: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of rows ``[n, in]`` with weights ``[out, in]``, in parts ``[parts, n, out]``.

    The parts' sum is the product; that of more than ``MOST_ROWS`` rows is the only part. A row is
    the same, to the bit, whatever their number. Scales ``[out]`` are of weights in FP8.
    """
    parts = product_parts(rows.shape[1], len(weights))
    added = parts if len(rows) > MOST_ROWS else 1
    out = rows.new_empty(parts // added, len(rows), len(weights), dtype=torch.float32)
    _multiply(rows, weights, scales, bias, out, added)
    return out


def multiply_silu(rows: Tensor, weights: Tensor, scales: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` ``[n, m]`` of rows ``[n, in]``,
    as alike as in :func:`multiply`; the weights ``[2 * m, in]``.
    """
    out = rows.new_empty(1, len(rows), len(weights) // 2)
    _multiply(rows, weights, scales, None, out, 1)
    return out[0]


def _multiply(
    rows: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    added: int,
) -> None:
    """Write a product in parts, each the sum of so many; or, half as wide as the weights, two of
    them with SiLU.
    """
    nodes, size = rows.shape
    parts, _, outputs = out.shape
    gated = outputs < len(weights)
    many = nodes > MOST_ROWS
    tile = _TILE // (1 + gated)
    block = _MANY_ROWS if many else max(16, triton.next_power_of_2(nodes))
    with torch.cuda.device_of(rows):
        multiply_rows[triton.cdiv(nodes, block), outputs // tile, parts](
            rows, weights, scales, bias, out, nodes, rows.stride(0), SIZE=size, OUTPUTS=outputs,
            SPAN=size // (parts * added), ADDED=added, GATED=gated, TILE=tile, STEP=_STEP, ROWS=block,
            WIDE=_INTERPRETED, INTERPRETED=_INTERPRETED, num_warps=8 if many and not gated else 4,
            num_stages=3 if many else 4, **UNFUSED,
        )  # fmt: skip


def _layout(rows: Tensor | None) -> tuple[int, int, int]:
    """From a row to the next, from a part to the next, and how many parts there are:
    0 for a whole ``[n, m]``.
    """
    if rows is None:
        return 0, 0, 0
    return (
        (rows.stride(1), rows.stride(0), len(rows)) if rows.dim() == 3 else (rows.stride(0), 0, 0)
    )


def add_norm(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``hidden + added`` and its RMSNorm, of ``[n, H]`` rows that are contiguous each;
    ``added`` None adds nothing.

    It may also be the parts of a product ``[parts, n, H]``.
    """
    rows, size = hidden.shape
    normed = hidden.new_empty(rows, size)
    total = hidden if added is None else hidden.new_empty(rows, size)
    levels = levels_of(size)
    added_row, part_size, parts = _layout(added)
    with torch.cuda.device_of(hidden):
        add_norm_rows[rows,](
            hidden, added, weight, total, normed, hidden.stride(0), added_row, part_size, eps,
            SIZE=size, LEVELS=levels, PARTS=parts, INTERPRETED=_INTERPRETED,
            num_warps=min(16, max(1, 1 << max(0, levels - 10))), **UNFUSED,
        )  # fmt: skip
    return total, normed


def rotate(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    cache: tuple[Tensor, Tensor | None, Tensor | None],
    nodes: int,
) -> Tensor:
    """Rotate queries and keys; the first ``nodes`` rows' keys and values go into a cache.

    Args:
        query, key, value: ``[n, heads * d]``, rows contiguous each; the value only where the cache
            has values. They may also be the parts of one product, ``[parts, n, heads * d]``.
        angles: cosines and sines ``[n, d]``, contiguous.
        norms: weights ``[d]`` of the norms of queries and of keys; None for no norm.
        eps: of these norms.
        cache: keys and values ``[kv heads, capacity, d]`` and the length on the device, ``[]``
            int32. Values may be None, and stay where they are; the length may be None for 0.
        nodes: of the rows.

    Returns:
        The queries ``[query heads, n, d]``, normalised and rotated, in memory ``[n, heads, d]``.
    """
    keys, values, length = cache
    rows = query.shape[-2]
    size = keys.shape[2]
    query_heads = query.shape[-1] // size
    kv_heads = keys.shape[0]
    rotated = keys.new_empty(rows, query_heads, size)
    query_row, part_size, count = _layout(query)
    parts = triton.cdiv(query_heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)
    values_strides = (0, 0) if values is None else values.stride()[:2]
    with torch.cuda.device_of(query):
        rotate_rows[rows, parts](
            query, key, value, *angles, *norms, rotated, keys, values, length, query_row, _layout(key)[0],
            _layout(value)[0], part_size, *keys.stride()[:2], *values_strides, eps, nodes, keys.shape[1],
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HALF=size // 2, LEVELS=levels_of(size // 2), HEADS=_HEADS,
            PARTS=count, INTERPRETED=_INTERPRETED, num_warps=1, **UNFUSED,
        )  # fmt: skip
    return rotated.transpose(0, 1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[n, m]`` rows that are contiguous each."""
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    with torch.cuda.device_of(gate):
        silu_mul_rows[rows, triton.cdiv(size, _BLOCK)](
            gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=_BLOCK, INTERPRETED=_INTERPRETED, num_warps=4,
            **UNFUSED,
        )  # fmt: skip
    return out
