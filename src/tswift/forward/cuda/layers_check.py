"""The kernels of layers in plain PyTorch, to the bit, and whether a device computes the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tswift.caches import FullKV, KVShape
from tswift.checking import Compared, difference
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.cuda.fused_layers import FusedLayer, coded_product, head_norms, product_of
from tswift.forward.recurrence import neighbours_sum

if TYPE_CHECKING:
    from tswift.forward.cuda.layer_kernels import HeadPlan, Hidden


_TRIED = 5  # rows that kernels are tried with
_ROUNDED = 1e-4  # of the largest number, that sums in float32 may be off by
_REPEATS = 8
_OUTPUTS = 1024  # of a matrix, that are looked at, or multiplied at a time


def tree_sum(numbers: Tensor) -> Tensor:
    """Sums ``[..., 1]`` over the last dimension: of neighbours, then of neighbouring sums,
    and so on.
    """
    *shape, count = numbers.shape
    return neighbours_sum(numbers.reshape(-1, count, 1)).view(*shape, 1)


def plain_norm(rows: Tensor, weight: Tensor, eps: float, parts: int = 1) -> Tensor:
    """RMSNorm of ``[..., n]``; the squares are summed in so many parts first.

    Divisions and roots are made in float64: PyTorch's own in float32 are not always the nearest
    number.
    """
    numbers = rows.float()
    squares = reduce(torch.add, (tree_sum(part * part) for part in numbers.chunk(parts, -1)))
    root = ((squares.double() / rows.shape[-1]).float() + eps).double().sqrt().float()
    scaled = (numbers * (1 / root.double()).float()).to(rows.dtype)
    return (scaled.float() * weight.float()).to(rows.dtype)


def plain_exponential(numbers: Tensor) -> Tensor:
    """``e`` to the power of float32 numbers, as Cephes approximates it."""
    numbers = numbers.clamp(-87.0, 88.0)
    power = torch.floor(numbers * 1.44269504088896341 + 0.5)
    rest = numbers - power * 0.693359375
    rest = rest + power * 2.12194440e-4
    series = rest * 1.9875691500e-4 + 1.3981999507e-3
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = series * rest + factor
    series = series * (rest * rest) + rest + 1.0
    return series * ((power.nan_to_num().int() + 127) << 23).view(torch.float32)


def plain_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    numbers = gate.float()
    active = (numbers / (1 + plain_exponential(-numbers))).to(gate.dtype)
    return (active.float() * up.float()).to(gate.dtype)


def plain_rotate(
    heads: Tensor, angles: tuple[Tensor, Tensor], weight: Tensor | None, eps: float
) -> Tensor:
    """Heads ``[n, heads, d]``, normalised if there is a weight,
    and rotated as transformers does it.
    """
    if weight is not None:
        heads = plain_norm(heads, weight, eps, 2)
    cosines, sines = (each.unsqueeze(1) for each in angles)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat([-second, first], -1) * sines


def plain_squares(rows: Tensor, tile: int) -> Tensor:
    """Sums of the squares of ``tile`` neighbours in rows ``[n, H]``: ``[n, tiles]``."""
    numbers = F.pad(rows.float(), (0, -rows.shape[1] % tile))
    return tree_sum((numbers * numbers).unflatten(1, (-1, tile)))[..., 0]


def normed_already(rows: Tensor) -> Hidden:
    """Hidden states that are read as they are: their norm multiplies by 1."""
    from tswift.forward.cuda.layer_kernels import Hidden, squares_of

    squares = torch.zeros_like(squares_of(rows))
    squares[:, 0] = rows.shape[1]
    return Hidden(rows, squares, torch.ones_like(rows[0]), 0.0)


def added_parts(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of its parts ``[parts, n, out]``, added in their order, and rounded."""
    return reduce(torch.add, sums).to(dtype)


@torch.inference_mode()
def layer_fault(layer: FusedLayer, dtype: torch.dtype, codes: bool = False) -> str | None:
    """What kernels compute otherwise than plain PyTorch on random rows of a layer's sizes, a bit or
    products that are far apart, or otherwise the second time; None if they do not. With ``codes``
    keys and values are stored as these.
    """
    return difference(_compared(layer, dtype, codes))


@torch.inference_mode()
def codes_fault(network: nn.Module, dtype: torch.dtype) -> str | None:
    """Which products of codes are far off PyTorch's, by a layer of each form and size that a
    network has, or a layer's own; None if none are.
    """
    layers = {
        (*each.packed.form, each.in_features, each.out_features, each.bias is None): each
        for each in network.modules()
        if type(each) is CodedLinear
    }
    return difference(_products(each, dtype) for each in layers.values())


def _products(linear: CodedLinear, dtype: torch.dtype) -> Compared:
    """Some of a layer's products."""
    device = linear.packed.bytes.device
    shape = _TRIED, linear.in_features
    rows = torch.linspace(-3, 3, math.prod(shape), device=device).cos().view(shape).to(dtype)
    outputs = linear.out_features
    some = torch.arange(0, outputs, 1 + outputs // _OUTPUTS, device=device)
    wide = _wide(rows, linear, some)
    return "products", linear(rows)[:, some], wide, torch.finfo(dtype).eps * wide.abs().max()


def _wide(rows: Tensor, linear: Any, outputs: Tensor | None = None) -> Tensor:
    """Outputs of a product in float64, all or some, a piece at a time: a device may be full of
    weights.
    """
    if outputs is None:
        outputs = torch.arange(linear.out_features, device=rows.device)
    found = []
    for some in outputs.split(_OUTPUTS):
        coded = type(linear) is CodedLinear
        weights = linear.packed.rows(some) if coded else linear.weight[some]
        bias = None if linear.bias is None else linear.bias[some].double()
        found.append(F.linear(rows.double(), weights.double(), bias))
    return torch.cat(found, 1)


def _rounded(sums: Tensor, wide: Tensor) -> Compared:
    """Parts of products, which are off by no more than their rounding."""
    return "products", sums.double().sum(0), wide, _ROUNDED * wide.abs().max()


def _compared(layer: FusedLayer, dtype: torch.dtype, codes: bool) -> Iterator[Compared]:
    """All that kernels compute in a layer, and that products of a row have the same bits again, and
    among other rows.
    """
    from tswift.forward.cuda import code_kernels, layer_kernels

    norm, attention, mlp = layer.input_layernorm, layer.self_attn, layer.mlp
    weight, eps = norm.weight, norm.variance_epsilon
    gate, up = mlp.gate_proj, mlp.up_proj
    coded = type(mlp.down_proj) is CodedLinear
    kernels: ModuleType = code_kernels if coded else layer_kernels
    product: Callable[..., object] = coded_product if coded else product_of
    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).mul_(3).to(weight.device, dtype)

    def empty(inputs: int, outputs: int, tiles: int) -> Tensor:
        """Room for the parts of products."""
        shape = kernels.product_parts(inputs, tiles), _TRIED, outputs
        return weight.new_full(shape, torch.nan, dtype=torch.float32)

    hidden, more = random(2, _TRIED, len(weight))
    total, normed = layer_kernels.add_norm(hidden, more, weight, eps)
    yield "sums", total, hidden + more
    yield "norms", normed, plain_norm(total, weight, eps)
    squares = layer_kernels.squares_of(hidden)
    yield "squares", squares, plain_squares(hidden, layer_kernels.TILE)
    both = random(2, _TRIED, gate.out_features)
    yield "SiLUs", layer_kernels.silu_mul(*both), plain_silu_mul(*both)
    normed = plain_norm(hidden, weight, eps)
    states: list[Hidden | Tensor] = [normed] * _REPEATS
    if not coded:
        states = [layer_kernels.Hidden(hidden, squares, weight, eps)] * _REPEATS
        states.append(normed_already(normed))
    yield from _heads(attention, states, normed, codes, random, empty, kernels, product)
    for linear in (attention.o_proj, mlp.down_proj):
        inputs, outputs = linear.in_features, linear.out_features
        rows = random(_TRIED, inputs)
        found = []
        for _ in range(_REPEATS):
            sums = empty(inputs, outputs, -(-outputs // kernels.TILE))
            found.append((sums, *kernels.add_product(rows, product(linear), hidden, sums)))
        sums, total, *squared = found[0]
        yield _rounded(sums, _wide(rows, linear))
        for again in found:
            yield "products, again,", again, found[0]
        made = added_parts(sums, dtype)
        yield "products", total, hidden + made
        for each in squared:
            yield "squares", each, plain_squares(total, kernels.TILE)
        for times in (1, 3, 5, 20) if coded else ():  # blocks of 8, 16, 32 rows, and a text's pass
            wider = kernels.multiply_rows(rows[1:].repeat(times, 1), product(linear))
            yield "products", wider, made[1:].repeat(times, 1)
    wide = _wide(normed, gate), _wide(normed, up)
    if not coded:
        active = kernels.multiply_silu(states[0], product(gate), product(up))
        plain = plain_silu_mul(*(each.to(dtype) for each in wide)).double()
        allowed = 4 * torch.finfo(dtype).eps * plain.abs().max()
        yield "products with SiLU", active, plain, allowed
        return
    size = gate.out_features
    sums = empty(len(weight), 2 * size, 2 * -(-size // kernels.TILE))
    active = kernels.multiply_silu(normed, product(gate), product(up), sums)
    yield "SiLUs", active, plain_silu_mul(*added_parts(sums, dtype).chunk(2, 1))
    for times in (2, 4):
        wider = kernels.multiply_silu(normed.repeat(times, 1), product(gate), product(up))
        yield "SiLUs", wider, active.repeat(times, 1)
    yield _rounded(sums, torch.cat(wide, 1))


def _heads(
    attention: Any,
    states: Sequence[Hidden | Tensor],
    normed: Tensor,
    codes: bool,
    random: Callable[..., Tensor],
    empty: Callable[..., Tensor],
    kernels: ModuleType,
    product: Callable[..., object],
) -> Iterator[Compared]:
    """Heads that are rotated and stored, and their products."""
    from tswift.forward.cuda.code_kernels import head_width
    from tswift.forward.cuda.layer_kernels import HeadPlan, rotate

    head, rows, device = attention.head_dim, len(normed), normed.device
    three = attention.q_proj, attention.k_proj, attention.v_proj
    sizes = [each.out_features for each in three]
    count = sizes[0] // head, sizes[1] // head
    angles = random(rows, head), random(rows, head)
    weights, eps = head_norms(attention)
    kept = torch.int8 if codes else normed.dtype
    shape = KVShape(1, count[1], head, kept, device, steps_behind=codes)

    def cleared() -> FullKV:
        kv = FullKV(shape, rows + 3)
        for buffer in kv.buffers:
            buffer.zero_()
        kv.length = 3  # the first slots were held before, and the last row is padding
        return kv

    def cached(kv: FullKV) -> HeadPlan:
        length = torch.full((), kv.length, dtype=torch.int32, device=device)
        keys, values = kv.parts[0][:2]
        return HeadPlan(count, angles, weights, eps, keys, values, length, rows - 1)

    def compared(query: Tensor, ours: FullKV, products: Tensor) -> Compared:
        *parts, values = (each.unflatten(1, (-1, head)) for each in products.split(sizes, 1))
        rotated, keys = (
            plain_rotate(part, angles, weight, eps)
            for part, weight in zip(parts, weights, strict=True)
        )
        plain = cleared()
        plain.write(0, *(each[:-1].transpose(0, 1) for each in (keys, values)))
        made = [query.transpose(0, 1), *ours.parts[0]]
        return "rotated heads", made, [rotated, *plain.parts[0]]

    given = [random(rows, size) for size in sizes]
    kv = cleared()
    yield compared(rotate(given, cached(kv)), kv, torch.cat(given, 1))
    products = [product(each) for each in three]
    width = head_width(head) if type(attention.q_proj) is CodedLinear else head
    found = []
    for state in states:
        kv = cleared()
        sums = empty(normed.shape[1], sum(sizes), sum(sizes) // width)
        query = kernels.project_heads(state, products, cached(kv), sums)
        yield compared(query, kv, added_parts(sums, normed.dtype))
        found.append(sums)
    yield _rounded(sums, torch.cat([_wide(normed, each) for each in three], 1))
    yield "products of heads, again,", found, [sums] * len(found)
