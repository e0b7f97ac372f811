"""Triton kernels that multiply by weights of 4 or 8 bits; :mod:`tswift.models.codes` says what
these stand for.

A block of 32 (or 16) inputs is multiplied as what it is: small integers, which the 16 bits of rows
hold exactly, so matrix units take them. The block's sum in float32 is multiplied by its scale, and
the sum of its inputs by its minimum; blocks are added in their order. So nothing is rounded but
sums in float32, and a row has the same bits whatever rows stand beside it.

One kernel makes up to three products of the same rows in one launch, and what follows them: the
rotation of queries and keys, SiLU, or the sum with hidden states, by the functions that the kernels
of floats use. Rows have been normalised before, as there is enough to do here. As many programs as
can share the inputs do: a program waits for its own numbers most of the time, and others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tswift.forward.cuda.layer_kernels import (
    _INTERPRETED,
    MOST_ROWS,
    UNFUSED,
    HeadPlan,
    _active,
    _counters,
    _finish_head,
    _finish_sums,
    _is_last,
    _of_product,
    _of_three,
    _places,
    _sizes,
    _strides,
    _sums,
)
from tswift.models.codes import LINES, MIDDLE, UNIT, WORDS, CodesOnDevice

TILE = 64  # outputs of a program at most
_LEAST_ROWS = 8
_MOST_ROWS = 32  # at a time; more would take more registers than there are
_PROGRAMS = 520  # that there should be at least: four on each of some 130 processors
_MOST_PARTS = 16
_ROWS, _ADD, _SILU, _HEADS = 0, 1, 2, 3  # what follows a product

# Two words become the numbers of their codes, two at a time: 128 (or 1024) and the code, whose bits
# are the last of that number. Of 8 bits the highest is the sign, 0 or 128, which is a number apart.
_CODES_OF_4 = """{{
.reg .b32 second, third, fourth;
shr.u32 second, $4, 4;
shr.u32 third, $4, 8;
shr.u32 fourth, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $1, second, 0x000F000F, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $2, third, 0x000F000F, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $3, fourth, 0x000F000F, 0x{0:04X}{0:04X}, 0xEA;
}}"""
_CODES_OF_8 = """{{
.reg .b32 high;
shr.u32 high, $4, 8;
lop3.b32 $0, $4, 0x007F007F, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $1, high, 0x007F007F, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $2, $4, 0x00800080, 0x{0:04X}{0:04X}, 0xEA;
lop3.b32 $3, high, 0x00800080, 0x{0:04X}{0:04X}, 0xEA;
}}"""
_ONES = "mov.b32 $0, 0x{0:04X}{0:04X};"
_4_BFLOAT16 = tl.constexpr(_CODES_OF_4.format(0x4300))
_4_FLOAT16 = tl.constexpr(_CODES_OF_4.format(0x6400))
_8_BFLOAT16 = tl.constexpr(_CODES_OF_8.format(0x4300))
_8_FLOAT16 = tl.constexpr(_CODES_OF_8.format(0x6400))
_1_BFLOAT16 = tl.constexpr(_ONES.format(0x3F80))
_1_FLOAT16 = tl.constexpr(_ONES.format(0x3C00))
_LINES = tl.constexpr(LINES)
_UNIT = tl.constexpr(UNIT)
_MIDDLE_OF_4 = tl.constexpr(float(MIDDLE[4]))
_MIDDLE_OF_8 = tl.constexpr(float(MIDDLE[8]))
_WORDS = tl.constexpr(WORDS)
_FOLLOWS_ADD = tl.constexpr(_ADD)
_FOLLOWS_SILU = tl.constexpr(_SILU)
_FOLLOWS_HEADS = tl.constexpr(_HEADS)


@triton.jit
def _codes_of_4(words, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """The numbers that the four codes of words are, less 8; from a word's last bits on."""
    made_by: tl.constexpr = _4_BFLOAT16 if kind == tl.bfloat16 else _4_FLOAT16
    zero: tl.constexpr = 136.0 if kind == tl.bfloat16 else 1032.0
    if INTERPRETED:
        bits = words.to(tl.int32)
        first, second = (bits & 15).to(tl.float32) - 8, (bits >> 4 & 15).to(tl.float32) - 8
        third, fourth = (bits >> 8 & 15).to(tl.float32) - 8, (bits >> 12 & 15).to(tl.float32) - 8
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            made_by, "=r,=r,=r,=r,r", [words], (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
        first = (first.to(kind, bitcast=True) - zero).to(kind)
        second = (second.to(kind, bitcast=True) - zero).to(kind)
        third = (third.to(kind, bitcast=True) - zero).to(kind)
        fourth = (fourth.to(kind, bitcast=True) - zero).to(kind)
    return first, second, third, fourth


@triton.jit
def _codes_of_8(words, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """The numbers that the two codes of words are; from a word's last bits on."""
    made_by: tl.constexpr = _8_BFLOAT16 if kind == tl.bfloat16 else _8_FLOAT16
    if INTERPRETED:
        low, high = words.to(tl.int8).to(tl.float32), (words >> 8).to(tl.int8).to(tl.float32)
    else:
        low, high, low_sign, high_sign = tl.inline_asm_elementwise(
            made_by, "=&r,=&r,=&r,=&r,r", [words], (tl.int16, tl.int16, tl.int16, tl.int16), True, 2
        )
        low = low.to(kind, bitcast=True) - low_sign.to(kind, bitcast=True)
        high = high.to(kind, bitcast=True) - high_sign.to(kind, bitcast=True)
    return low, high


@triton.jit
def _ones_like(words, kind: tl.constexpr, INTERPRETED: tl.constexpr):
    """Ones, which the compiler takes for numbers that come of codes: it would not fetch rows ahead
    that are multiplied by two kinds of matrices.
    """
    of_1: tl.constexpr = _1_BFLOAT16 if kind == tl.bfloat16 else _1_FLOAT16
    if INTERPRETED:
        ones = tl.full(words.shape, 1.0, tl.float32)
    else:
        made = tl.inline_asm_elementwise(of_1, "=r,r", [words], tl.int16, True, 2)
        ones = made.to(kind, bitcast=True)
    return ones


@triton.jit
def _code_dots(
    rows, weights, factors, bias, part, outputs, exist, row, used, rows_row, factors_row, SIZE, SPAN,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr, ADDED: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A part ``[TILE, ROWS]`` of the products of rows and some outputs' weights,
    or the sum of ``ADDED`` parts.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    per: tl.constexpr = 16 // BITS  # codes of a word
    line: tl.constexpr = _UNIT // per  # words of an output in a unit
    inputs = tl.arange(0, _WORDS)
    row_at = rows + row.to(tl.int64)[None, :] * rows_row + inputs[:, None]
    at = weights + ((outputs // _LINES).to(tl.int64) * SIZE + outputs % _LINES)[:, None] * line
    at += inputs[None, :]
    factor_at = factors + (FACTORS * outputs)[:, None] + tl.arange(0, FACTORS)[None, :]
    whole = tl.zeros([TILE, ROWS], tl.float32)
    for index in range(ADDED):
        total = tl.zeros([TILE, ROWS], tl.float32)
        begin = (part * ADDED + index) * SPAN
        # all that a step reads is fetched ahead, which the compiler does by itself for rows alone
        for step in tl.range(0, SPAN // _UNIT, num_stages=3):
            place = begin + step * _UNIT
            for load in tl.static_range(line // _WORDS):
                words = tl.load(at + place.to(tl.int64) * line + load * _WORDS)
                if BITS == 4:
                    codes = _codes_of_4(words, kind, INTERPRETED)
                else:
                    codes = _codes_of_8(words, kind, INTERPRETED)
                for block in tl.static_range(per * _WORDS // BLOCK):
                    first = place + load * per * _WORDS + block * BLOCK
                    found = tl.zeros([TILE, ROWS], tl.float32)
                    inputs_sum = tl.zeros([TILE, ROWS], tl.float32)
                    for cut in tl.static_range(BLOCK // _WORDS):
                        at_row = row_at + first + cut * _WORDS
                        own = tl.load(at_row, mask=used[None, :], other=0.0)
                        if INTERPRETED:  # numpy cannot calculate in bfloat16
                            own = own.to(tl.float32)
                        number = codes[block * (BLOCK // _WORDS) + cut]
                        found = tl.dot(number, own, found, input_precision="ieee")
                        if FACTORS == 2:
                            ones = _ones_like(words, kind, INTERPRETED)
                            inputs_sum = tl.dot(ones, own, inputs_sum, input_precision="ieee")
                    factor = tl.load(factor_at + (first // BLOCK).to(tl.int64) * factors_row)
                    factor = factor.to(tl.float32)
                    if FACTORS == 1:
                        total = tl.fma(found, tl.broadcast_to(factor, [TILE, ROWS]), total)
                    else:
                        scale, minimum = tl.split(factor)
                        minimum = tl.fma(
                            scale, _MIDDLE_OF_4 if BITS == 4 else _MIDDLE_OF_8, minimum
                        )
                        scale = tl.broadcast_to(scale[:, None], [TILE, ROWS])
                        total = tl.fma(found, scale, total)
                        minimum = tl.broadcast_to(minimum[:, None], [TILE, ROWS])
                        total = tl.fma(inputs_sum, minimum, total)
        if bias is not None:  # noqa: SIM102 (a kernel has no "and" of what is fixed and what is not)
            if part + index == 0:
                total += tl.load(bias + outputs, mask=exist, other=0.0).to(tl.float32)[:, None]
        whole = tl.where(index == 0, total, whole + total)
    return whole


@triton.jit(do_not_specialize=["count", "nodes", "capacity"])
def multiply_codes(
    rows, weights, factors, bias, second_weights, second_factors, second_bias, third_weights, third_factors, third_bias,
    sums, counters, out, count, rows_row, part_size,
    hidden, hidden_row, cosines, sines, query_weight, key_weight, rotated, keys, values, key_steps, value_steps, length,
    keys_head, keys_slot, values_head, values_slot, head_eps, nodes, capacity,
    SIZE, SPAN, OUTPUTS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr, ACROSS: tl.constexpr,
    SECOND_BITS: tl.constexpr, SECOND_BLOCK: tl.constexpr, SECOND_FACTORS: tl.constexpr, SECOND_ACROSS: tl.constexpr,
    THIRD_BITS: tl.constexpr, THIRD_BLOCK: tl.constexpr, THIRD_FACTORS: tl.constexpr, THIRD_ACROSS: tl.constexpr,
    ALIKE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, FOLLOWS: tl.constexpr, ADDED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Up to three products of a block of rows and what follows them;
    grid ``(blocks of rows, tiles of outputs, parts)``.

    A product has ``OUTPUTS`` (``SECOND``, ``THIRD``; 0 for none) of them, ``WIDTH`` a tile. Where
    the forms of all codes are ``ALIKE`` there is one loop for them, else one for each.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    tile = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < count
    places = tl.arange(0, TILE)
    tiles: tl.constexpr = (OUTPUTS + WIDTH - 1) // WIDTH
    second_tiles: tl.constexpr = (SECOND + WIDTH - 1) // WIDTH
    every: tl.constexpr = OUTPUTS + SECOND + THIRD
    behind: tl.constexpr = tiles + second_tiles
    outputs = (tile - _of_three(tile, 0, tiles, behind, tiles, second_tiles)) * WIDTH + places
    exist = (places < WIDTH) & (
        outputs < _of_three(tile, OUTPUTS, SECOND, THIRD, tiles, second_tiles)
    )
    column = outputs + _of_three(tile, 0, OUTPUTS, OUTPUTS + SECOND, tiles, second_tiles)
    inside = outputs  # of those there are weights; a narrow tile's places behind it have none
    if WIDTH != TILE:
        inside = tl.where(exist, outputs, 0)
    if ALIKE:
        if SECOND != 0:
            weights = _of_three(tile, weights, second_weights, third_weights, tiles, second_tiles)
            factors = _of_three(tile, factors, second_factors, third_factors, tiles, second_tiles)
            if bias is not None:
                bias = _of_three(tile, bias, second_bias, third_bias, tiles, second_tiles)
        across = tl.multiple_of(
            _of_three(tile, ACROSS, SECOND_ACROSS, THIRD_ACROSS, tiles, second_tiles), _LINES
        )
        whole = _code_dots(
            rows, weights, factors, bias, part, inside, exist, row, used, rows_row, across, SIZE, SPAN, BITS, BLOCK,
            FACTORS, ADDED, TILE, ROWS, INTERPRETED,
        )  # fmt: skip
    elif tile < tiles:
        whole = _code_dots(
            rows, weights, factors, bias, part, inside, exist, row, used, rows_row, ACROSS, SIZE, SPAN, BITS, BLOCK,
            FACTORS, ADDED, TILE, ROWS, INTERPRETED,
        )  # fmt: skip
    elif THIRD == 0 or tile < behind:
        whole = _code_dots(
            rows, second_weights, second_factors, second_bias, part, inside, exist, row, used, rows_row, SECOND_ACROSS,
            SIZE, SPAN, SECOND_BITS, SECOND_BLOCK, SECOND_FACTORS, ADDED, TILE, ROWS, INTERPRETED,
        )  # fmt: skip
    else:
        whole = _code_dots(
            rows, third_weights, third_factors, third_bias, part, inside, exist, row, used, rows_row, THIRD_ACROSS, SIZE,
            SPAN, THIRD_BITS, THIRD_BLOCK, THIRD_FACTORS, ADDED, TILE, ROWS, INTERPRETED,
        )  # fmt: skip
    at = sums + part * part_size + row.to(tl.int64)[None, :] * every + column[:, None]
    tl.store(at, whole, mask=used[None, :] & exist[:, None])
    # tiles that what follows waits for: those of two products, or of a head
    of_head: tl.constexpr = 2 * HALF // WIDTH if FOLLOWS == _FOLLOWS_HEADS else 1
    together: tl.constexpr = 2 if FOLLOWS == _FOLLOWS_SILU else of_head
    unit = tile % tiles if FOLLOWS == _FOLLOWS_SILU else tile // together
    counter = counters + tl.program_id(0) * tl.num_programs(1) + unit
    if _is_last(counter, PARTS * together):
        first = tl.program_id(0) * ROWS
        some: tl.constexpr = min(ROWS, 16)  # rows at a time, as registers are few
        if FOLLOWS == _FOLLOWS_ADD:
            for begin in range(first, first + ROWS, some):
                _finish_sums(
                    sums, hidden, out, None, begin, count, tile, part_size, hidden_row, OUTPUTS, TILE, 1, 1, PARTS, some,
                    INTERPRETED,
                )  # fmt: skip
        elif FOLLOWS == _FOLLOWS_HEADS:
            for begin in range(first, first + ROWS, some):
                lines = begin + tl.arange(0, some)
                _finish_head(
                    sums + unit * 2 * HALF, every, lines, lines < count, unit, cosines, sines, query_weight, key_weight,
                    rotated, keys, values, key_steps, value_steps, length, part_size, keys_head, keys_slot, values_head, values_slot, head_eps,
                    nodes, capacity, QUERY_HEADS, KV_HEADS, HALF, LEVELS, PARTS, some, INTERPRETED,
                )  # fmt: skip
        else:
            own = unit * WIDTH + places[None, :]
            line = row.to(tl.int64)[:, None]
            mask = used[:, None] & (own < OUTPUTS)
            made = _of_product(sums + line * every + own, mask, part_size, PARTS, kind, INTERPRETED)
            if FOLLOWS == _FOLLOWS_SILU:
                of_up = sums + line * every + OUTPUTS + own
                up = _of_product(of_up, mask, part_size, PARTS, kind, INTERPRETED)
                made = _active(made, up, kind, INTERPRETED)
            tl.store(out + line * OUTPUTS + own, made.to(kind), mask=mask)


class CodedProduct(NamedTuple):
    """What a linear layer multiplies by."""

    weights: CodesOnDevice
    bias: Tensor | None = None  # ``[out]``

    @property
    def given(self) -> tuple[Tensor | None, ...]:
        """What the kernel takes of it."""
        return self.weights.bytes, self.weights.factors, self.bias


def product_parts(inputs: int, tiles: int) -> int:
    """In how many parts the inputs of a product are summed."""
    parts = 1
    while tiles * parts < _PROGRAMS and parts < _MOST_PARTS and inputs % (2 * parts * UNIT) == 0:
        parts *= 2
    return parts


def head_width(head: int) -> int:
    """Outputs of a program that multiplies for heads of so many numbers: all, or half of them where
    it has too few registers.
    """
    return head // 2 if head > TILE else head


def _multiply(
    rows: Tensor,
    products: Sequence[CodedProduct],
    follows: int,
    out: Tensor | None = None,
    hidden: Tensor | None = None,
    heads: HeadPlan | None = None,
    rotated: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Launch the kernel; ``out``, ``hidden``, ``heads`` and ``rotated`` are of what follows."""
    count, inputs = rows.shape
    sizes = [each.weights.outputs for each in products]
    width = TILE if heads is None else head_width(heads.keys.shape[2])
    tiles = sum(triton.cdiv(size, width) for size in sizes)
    parts = product_parts(inputs, tiles)
    many = count > MOST_ROWS
    layout = {
        "SIZE": inputs,
        "SPAN": inputs // parts,
        "ADDED": parts if many else 1,
        "PARTS": 1 if many else parts,
        "ROWS": max(_LEAST_ROWS, min(triton.next_power_of_2(count), _MOST_ROWS)),
    }
    counters = _counters(rows.device)
    counts = layout["PARTS"] > 1 or follows in (_SILU, _HEADS)
    if counts and triton.cdiv(count, layout["ROWS"]) * tiles > len(counters):
        raise ValueError(f"{count:,} rows of {sum(sizes):,} products are too many at a time")
    sums = _sums(rows, layout, sum(sizes), sums)
    # what is never chosen has to be there, too
    three = [*products, *[products[-1]] * (3 - len(products))]
    codes = [each.weights for each in three]
    forms = {
        prefix + name: value
        for prefix, each in zip(("", "SECOND_", "THIRD_"), codes, strict=True)
        for name, value in {
            "BITS": each.bits,
            "BLOCK": each.block,
            "FACTORS": each.factors.shape[2],
            "ACROSS": each.factors.stride(0),
        }.items()
    }
    alike = len({each.form for each in codes}) == 1 == len({each.bias is None for each in three})
    of_heads: tuple[object, ...] = (None,) * 10 + (0,) * 4 + (0.0, 0, 0)
    if heads is not None and rotated is not None:
        of_heads = (*_places(heads, rotated), *_strides(heads))
    shape = dict.fromkeys(("QUERY_HEADS", "KV_HEADS", "HALF", "LEVELS"), 1)
    with torch.cuda.device_of(rows):
        multiply_codes[triton.cdiv(count, layout["ROWS"]), tiles, layout["PARTS"]](
            rows, *(part for each in three for part in each.given), sums, counters, out, count,
            rows.stride(0), sums.stride(0), hidden, 0 if hidden is None else hidden.stride(0), *of_heads,
            **dict(zip(("OUTPUTS", "SECOND", "THIRD"), [*sizes, 0, 0], strict=False)), **forms, ALIKE=alike, WIDTH=width,
            TILE=max(16, triton.next_power_of_2(width)), FOLLOWS=follows, **layout,
            **(shape if heads is None else _sizes(heads)), INTERPRETED=_INTERPRETED, num_warps=2, num_stages=3, **UNFUSED,
        )  # fmt: skip


def multiply_rows(rows: Tensor, product: CodedProduct, sums: Tensor | None = None) -> Tensor:
    """``rows @ weights.T`` ``[n, out]`` of rows ``[n, in]``, contiguous each;
    a row is the same, to the bit, whatever their number.
    """
    out = rows.new_empty(len(rows), product.weights.outputs)
    _multiply(rows, [product], _ROWS, out, sums=sums)
    return out


def add_product(
    rows: Tensor, product: CodedProduct, hidden: Tensor, sums: Tensor | None = None
) -> tuple[Tensor]:
    """As :func:`tswift.forward.cuda.layer_kernels.add_product`, without squares."""
    total = hidden.new_empty(len(rows), product.weights.outputs)
    _multiply(rows, [product], _ADD, total, hidden=hidden, sums=sums)
    return (total,)


def project_heads(
    rows: Tensor, products: Sequence[CodedProduct], heads: HeadPlan, sums: Tensor | None = None
) -> Tensor:
    """As that of floats, of hidden states that have been normalised."""
    rotated = rows.new_empty(len(rows), heads.heads[0], heads.keys.shape[2])
    _multiply(rows, products, _HEADS, heads=heads, rotated=rotated, sums=sums)
    return rotated.transpose(0, 1)


def multiply_silu(
    rows: Tensor, gate: CodedProduct, up: CodedProduct, sums: Tensor | None = None
) -> Tensor:
    """As that of floats, of hidden states that have been normalised."""
    out = rows.new_empty(len(rows), gate.weights.outputs)
    _multiply(rows, [gate, up], _SILU, out, sums=sums)
    return out
