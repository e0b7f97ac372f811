"""Triton kernels for what stands between the matrix products of a layer; only ``fused_layers`` imports this module.

A layer of Llama's kind takes ten kernels with them: four products, the attention's two, and four of these. That are
residual addition with RMSNorm (twice), rotation of queries and keys with the store into the cache, and SiLU with its
product.

**Bits are the same everywhere.** A program computes one row (or a few heads of one row) from that row alone, so a row's
place in a pass and the pass's width decide nothing. A sum over a row is a tree of pairs: neighbours are added, then
neighbouring sums, and so on; every addition has two terms, so no compiler can order it otherwise. Divisions and roots
are correctly rounded, the exponential is made of additions and products alone, and the compiler fuses none of them.
Where transformers' eager layers round to the model's dtype, these kernels round, too. Plain PyTorch that does the same
is in ``fused_layers``; its results are equal to the bit, on a CPU and on a GPU.
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
def _tree_sum(numbers, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of the rows of ``[ROWS, 2 ** LEVELS]`` numbers by a tree of pairs; ``[ROWS]``."""
    for level in tl.static_range(LEVELS):
        numbers = tl.sum(tl.reshape(numbers, [ROWS, 1 << (LEVELS - 1 - level), 2]), 2)
    return tl.reshape(numbers, [ROWS])


@triton.jit
def _exponential(numbers):
    """``e`` to the power of float32 numbers, by additions and products alone; what exceeds 88 counts as 88."""
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
def add_norm_rows(
    hidden, added, weight, total, normed, hidden_row, added_row, eps,
    SIZE: tl.constexpr, LEVELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row's sum with what is added to it, if anything is, and the RMSNorm of that; grid ``(rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = normed.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < SIZE
    numbers = tl.load(hidden + row * hidden_row + places, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        numbers += tl.load(added + row * added_row + places, mask=inside, other=0.0).to(tl.float32)
        numbers = _rounded(numbers, kind, INTERPRETED)
        tl.store(total + row * SIZE + places, numbers.to(kind), mask=inside)
    squares = _tree_sum(tl.reshape(numbers * numbers, [1, 1 << LEVELS]), 1, LEVELS)
    root = tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0) + eps)
    scaled = _rounded(numbers * tl.div_rn(1.0, root), kind, INTERPRETED)
    scaled = _rounded(scaled * tl.load(weight + places, mask=inside, other=0.0).to(tl.float32), kind, INTERPRETED)
    tl.store(normed + row * SIZE + places, scaled.to(kind), mask=inside)


@triton.jit
def _normed_heads(
    first, second, weight, places, inside, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, kind: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of heads given as two halves ``[HEADS, 2 ** LEVELS]``."""
    squares = _tree_sum(first * first, HEADS, LEVELS) + _tree_sum(second * second, HEADS, LEVELS)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, 2.0 * HALF) + eps))[:, None]
    own = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = _rounded(_rounded(first * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
    own = tl.load(weight + HALF + places, mask=inside, other=0.0).to(tl.float32)[None, :]
    second = _rounded(_rounded(second * scale, kind, INTERPRETED) * own, kind, INTERPRETED)
    return first, second


@triton.jit
def _rotated_heads(
    source, target, weight, cosines, sines, heads, count, source_head, target_head, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Normalise, if there is a weight, and rotate some heads of a row; those from ``count`` on do not exist."""
    kind: tl.constexpr = target.dtype.element_ty
    places = tl.arange(0, 1 << LEVELS)
    inside = places < HALF
    exist = (heads < count)[:, None] & inside[None, :]
    source_at = source + heads[:, None] * source_head + places[None, :]
    first = tl.load(source_at, mask=exist, other=0.0).to(tl.float32)
    second = tl.load(source_at + HALF, mask=exist, other=0.0).to(tl.float32)
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
    value_row, keys_head, keys_slot, values_head, values_slot, eps, nodes, capacity,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr, HEADS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rotate a row's queries and keys, and put its keys and values into their slot; grid ``(rows, parts)``.

    A part is ``HEADS`` query heads, or behind those ``HEADS`` KV heads. Rows from ``nodes`` on are padding, whose keys
    and values go nowhere. Without a length slots are counted from 0; without ``values`` these are left where they are.
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
            QUERY_HEADS, 2 * HALF, 2 * HALF, eps, HEADS, HALF, LEVELS, INTERPRETED,
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
        eps, HEADS, HALF, LEVELS, INTERPRETED,
    )  # fmt: skip
    if values is not None:
        places = tl.arange(0, 2 << LEVELS)
        exist = (heads < KV_HEADS)[:, None] & (places < 2 * HALF)[None, :]
        numbers = tl.load(value + row * value_row + heads[:, None] * 2 * HALF + places[None, :], mask=exist)
        tl.store(values + slot * values_slot + heads[:, None] * values_head + places[None, :], numbers, mask=exist)


@triton.jit
def silu_mul_rows(gate, up, out, gate_row, up_row, SIZE, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """``silu(gate) * up`` of a part of one row; grid ``(rows, parts)``."""
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    numbers = tl.load(gate + row * gate_row + places, mask=inside, other=0.0).to(tl.float32)
    active = _rounded(tl.div_rn(numbers, 1.0 + _exponential(-numbers)), kind, INTERPRETED)
    active = active * tl.load(up + row * up_row + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + places, _rounded(active, kind, INTERPRETED).to(kind), mask=inside)


@triton.jit
def quantize_row(source, target, scales, source_row, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A row in FP8, and what 1 stands for in it; rows from ``rows`` on are empty; grid ``(padded rows,)``."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    numbers = tl.load(source + row * source_row + places, mask=inside & (row < rows), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    tl.store(target + row * SIZE + places, (numbers / scale).to(target.dtype.element_ty), mask=inside)


_INTERPRETED = not isinstance(add_norm_rows, triton.JITFunction)
_HEADS = 4  # of a program that rotates
_BLOCK = 1024  # numbers of a program of SiLU
_UNFUSED = {"enable_fp_fusion": False}  # what is rounded once and what twice is said by the kernels alone


def _levels(size: int) -> int:
    return (size - 1).bit_length()


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``hidden + added`` and its RMSNorm, of ``[n, H]`` rows that are contiguous each; ``added`` None adds nothing."""
    rows, size = hidden.shape
    normed = hidden.new_empty(rows, size)
    total = hidden if added is None else hidden.new_empty(rows, size)
    levels = _levels(size)
    with torch.cuda.device_of(hidden):
        add_norm_rows[rows,](
            hidden, added, weight, total, normed, hidden.stride(0), 0 if added is None else added.stride(0), eps,
            SIZE=size, LEVELS=levels, INTERPRETED=_INTERPRETED, num_warps=min(16, max(1, 1 << max(0, levels - 10))),
            **_UNFUSED,
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
        query, key, value: ``[n, heads * d]``, rows contiguous each; the value only where the cache has values.
        angles: cosines and sines ``[n, d]``, contiguous.
        norms: weights ``[d]`` of the norms of queries and of keys; None for no norm.
        eps: of these norms.
        cache: keys and values ``[kv heads, capacity, d]`` and the length on the device, ``[]`` int32. Values may be
            None, and stay where they are; the length may be None for 0.
        nodes: of the rows.

    Returns:
        The queries ``[query heads, n, d]``, normalised and rotated, in memory ``[n, heads, d]``.
    """
    keys, values, length = cache
    rows, size = query.shape[0], keys.shape[2]
    query_heads, kv_heads = query.shape[1] // size, keys.shape[0]
    rotated = query.new_empty(rows, query_heads, size)
    parts = triton.cdiv(query_heads, _HEADS) + triton.cdiv(kv_heads, _HEADS)
    values_strides = (0, 0) if values is None else values.stride()[:2]
    with torch.cuda.device_of(query):
        rotate_rows[rows, parts](
            query, key, value, *angles, *norms, rotated, keys, values, length, query.stride(0), key.stride(0),
            0 if value is None else value.stride(0), *keys.stride()[:2], *values_strides, eps, nodes, keys.shape[1],
            QUERY_HEADS=query_heads, KV_HEADS=kv_heads, HALF=size // 2, LEVELS=_levels(size // 2), HEADS=_HEADS,
            INTERPRETED=_INTERPRETED, num_warps=1, **_UNFUSED,
        )  # fmt: skip
    return rotated.transpose(0, 1)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[n, m]`` rows that are contiguous each."""
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    with torch.cuda.device_of(gate):
        silu_mul_rows[rows, triton.cdiv(size, _BLOCK)](
            gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=_BLOCK, INTERPRETED=_INTERPRETED, num_warps=4,
            **_UNFUSED,
        )  # fmt: skip
    return out


def quantize_rows(rows: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """``[n, m]`` rows in FP8, with empty ones up to a multiple; and what 1 stands for in each, ``[n, 1]`` float32."""
    count, size = rows.shape
    padded = triton.cdiv(count, multiple) * multiple
    small = rows.new_empty(padded, size, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(padded, 1, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(rows):
        quantize_row[padded,](
            rows, small, scales, rows.stride(0), count, SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 1024))
        )
    return small, scales
