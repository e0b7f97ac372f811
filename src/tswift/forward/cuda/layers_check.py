"""The kernels of layers in plain PyTorch, to the bit, and whether a device computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.caches import FullKV, KVShape, steps_of
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.cuda.fused_layers import coded_product, head_norms, product_of

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
    numbers = F.pad(numbers, (0, (1 << (numbers.shape[-1] - 1).bit_length()) - numbers.shape[-1]))
    while numbers.shape[-1] > 1:
        numbers = numbers[..., 0::2] + numbers[..., 1::2]
    return numbers


def plain_norm(rows: Tensor, weight: Tensor, eps: float, parts: int = 1) -> Tensor:
    """RMSNorm of ``[..., n]``; the squares are summed in so many parts first.

    Divisions and roots are made in float64: PyTorch's own in float32 are not always the nearest
    number.
    """
    numbers = rows.float()
    first, *others = (tree_sum(part * part) for part in numbers.chunk(parts, -1))
    squares = sum(others, first)
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


class Wrong(Exception):
    """Kernels computed something else than plain PyTorch."""


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
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    return total.to(dtype)


def _compare(what: str, ours: Tensor, plain: Tensor) -> None:
    if not torch.equal(ours, plain):
        raise Wrong(f"the kernel of {what} computes something else than PyTorch")


@torch.inference_mode()
def try_kernels(layer: Any, dtype: torch.dtype, codes: bool = False) -> None:
    """Compare the kernels with plain PyTorch on random rows of a layer's sizes; with ``codes``
    keys and values are stored as these.

    Raises:
        Wrong: a bit differs; products are far apart, or others the second time.
    """
    from tswift.forward.cuda import layer_kernels as kernels

    norm, attention, mlp = layer.input_layernorm, layer.self_attn, layer.mlp
    weight, eps = norm.weight, norm.variance_epsilon
    device = weight.device
    source = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).mul_(3).to(device, dtype)

    hidden, more = random(2, _TRIED, len(weight))
    total, normed = kernels.add_norm(hidden, more, weight, eps)
    _compare("sums", total, hidden + more)
    _compare("norms", normed, plain_norm(total, weight, eps))
    squares = kernels.squares_of(hidden)
    _compare("squares", squares, plain_squares(hidden, kernels.TILE))
    states = kernels.Hidden(hidden, squares, weight, eps)
    normed = plain_norm(hidden, weight, eps)
    gate, up = random(2, _TRIED, mlp.gate_proj.out_features)
    _compare("SiLU", kernels.silu_mul(gate, up), plain_silu_mul(gate, up))
    if type(mlp.down_proj) is CodedLinear:
        _try_coded(layer, normed, hidden, random, codes)
        return
    head = attention.head_dim
    parts_of = _try_heads(attention, states, normed, random, kernels, product_of, head, codes)
    _compare("norms", parts_of(states), parts_of(normed_already(normed)))
    wide = [plain.to(dtype) for plain in _wide_products(normed, (mlp.gate_proj, mlp.up_proj))]
    active = kernels.multiply_silu(states, product_of(mlp.gate_proj), product_of(mlp.up_proj))
    plain = plain_silu_mul(*wide).double()
    if not (active - plain).abs().max() <= 4 * torch.finfo(dtype).eps * plain.abs().max():
        raise Wrong("the kernel of products with SiLU computes something else than PyTorch")
    for linear in (attention.o_proj, mlp.down_proj):
        rows = random(_TRIED, linear.in_features)
        _, total, squares = _try_sums(linear, rows, hidden, kernels, product_of)
        _compare("squares", squares, plain_squares(total, kernels.TILE))


def _try_coded(
    layer: Any, normed: Tensor, hidden: Tensor, random: Callable[..., Tensor], codes: bool
) -> None:
    """Compare the kernel of products of codes with PyTorch, and a row among others with itself."""
    from tswift.forward.cuda import code_kernels as kernels

    attention, mlp = layer.self_attn, layer.mlp
    width = kernels.head_width(attention.head_dim)
    _try_heads(attention, normed, normed, random, kernels, coded_product, width, codes)
    for linear in (attention.o_proj, mlp.down_proj):
        rows = random(_TRIED, linear.in_features)
        sums, *_ = _try_sums(linear, rows, hidden, kernels, coded_product)
        made = added_parts(sums, normed.dtype)
        for times in (1, 3, 5, 20):  # in blocks of 8, 16 and 32 rows, and in a text's pass
            again = kernels.multiply_rows(rows[1:].repeat(times, 1), coded_product(linear))
            _compare("products", again, made[1:].repeat(times, 1))
    gate, up = coded_product(mlp.gate_proj), coded_product(mlp.up_proj)
    size = mlp.gate_proj.out_features
    parts = kernels.product_parts(mlp.gate_proj.in_features, 2 * -(-size // kernels.TILE))
    sums = normed.new_full((parts, len(normed), 2 * size), torch.nan, dtype=torch.float32)
    active = kernels.multiply_silu(normed, gate, up, sums)
    _compare("SiLU", active, plain_silu_mul(*added_parts(sums, normed.dtype).chunk(2, 1)))
    for times in (2, 4):
        again = kernels.multiply_silu(normed.repeat(times, 1), gate, up)
        _compare("SiLU", again, active.repeat(times, 1))
    wide = torch.cat(_wide_products(normed, (mlp.gate_proj, mlp.up_proj)), 1)
    if not (sums.double().sum(0) - wide).abs().max() <= _ROUNDED * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")


def _wide_products(rows: Tensor, linears: Sequence[Any]) -> list[Tensor]:
    """Products ``[n, out]`` in float64, a piece at a time: a device may be full of weights."""
    return [_wide(rows, each, torch.arange(each.out_features)) for each in linears]


def _wide(rows: Tensor, linear: Any, outputs: Tensor) -> Tensor:
    """Some outputs of a product in float64."""
    coded = type(linear) is CodedLinear
    found = []
    for some in outputs.to(rows.device).split(_OUTPUTS):
        weights = linear.packed.rows(some) if coded else linear.weight[some]
        bias = None if linear.bias is None else linear.bias[some].double()
        found.append(F.linear(rows.double(), weights.double(), bias))
    return torch.cat(found, 1)


@torch.inference_mode()
def try_codes(network: Any) -> None:
    """Compare products of codes with PyTorch, by a layer of each form and size that a network has.

    Raises:
        Wrong: one is far off.
    """
    layers = {}
    for linear in (module for module in network.modules() if type(module) is CodedLinear):
        shape = (linear.in_features, linear.out_features, linear.bias is None)
        layers[*linear.packed.form, *shape] = linear
    for linear in layers.values():
        try_product(linear, network.dtype)


@torch.inference_mode()
def try_product(linear: CodedLinear, dtype: torch.dtype) -> None:
    """Compare a layer's products with PyTorch's; Wrong if one is far off."""
    inputs, outputs = linear.in_features, linear.out_features
    device = linear.packed.bytes.device
    rows = torch.linspace(-3, 3, _TRIED * inputs, device=device).cos().view(_TRIED, -1).to(dtype)
    some = torch.arange(0, outputs, 1 + outputs // _OUTPUTS, device=device)
    wide = _wide(rows, linear, some)
    apart = (linear(rows)[:, some] - wide).abs().max()
    if not apart <= torch.finfo(dtype).eps * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")


def _try_sums(
    linear: Any, rows: Tensor, hidden: Tensor, kernels: Any, product_of: Callable[[Any], Any]
) -> tuple[Tensor, ...]:
    """Parts of a product ``[parts, n, out]``, and what it was added to hidden states to."""
    product = product_of(linear)
    inputs, outputs = linear.in_features, linear.out_features
    parts = kernels.product_parts(inputs, -(-outputs // kernels.TILE))
    (wide,) = _wide_products(rows, [linear])
    found = []
    for _ in range(_REPEATS):
        sums = hidden.new_full((parts, len(rows), outputs), torch.nan, dtype=torch.float32)
        found.append((sums, *kernels.add_product(rows, product, hidden, sums)))
    if not (sums.double().sum(0) - wide).abs().max() <= _ROUNDED * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")
    if not all(torch.equal(*both) for each in found for both in zip(each, found[0], strict=True)):
        raise Wrong("the kernel of products gives other bits the second time")
    _compare("products", found[0][1], hidden + added_parts(sums, hidden.dtype))
    return found[0]


def _three(attention: Any) -> tuple[Any, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _try_heads(
    attention: Any,
    states: Hidden | Tensor,
    normed: Tensor,
    random: Callable[..., Tensor],
    kernels: Any,
    product_of: Callable[[Any], Any],
    width: int,
    codes: bool,
) -> Callable[[Hidden | Tensor], Tensor]:
    """Compare products of heads, of ``width`` outputs a program, with PyTorch; returns a function
    that makes their parts anew.
    """
    from tswift.forward.cuda.layer_kernels import HeadPlan, rotate

    head = attention.head_dim
    three = _three(attention)
    sizes = [each.out_features for each in three]
    tiles, rows = sum(sizes) // width, len(normed)
    angles = (random(rows, head), random(rows, head))
    weights, eps = head_norms(attention)
    kept = torch.int8 if codes else normed.dtype
    shape = KVShape(1, sizes[1] // head, head, kept, normed.device, steps_behind=codes)

    def empty() -> FullKV:
        kv = FullKV(shape, rows + 3)
        for buffer in kv.buffers:
            buffer.zero_()
        return kv

    def plain(sums: Tensor) -> list[Tensor]:
        """Queries, keys and values ``[n, heads, d]``."""
        query, key, value = (each.unflatten(1, (-1, head)) for each in sums.split(sizes, 1))
        rotated = [
            plain_rotate(part, angles, weight, eps)
            for part, weight in zip((query, key), weights, strict=True)
        ]
        return [*rotated, value]

    def cached() -> HeadPlan:
        keys, values = empty().parts[0][:2]
        length = torch.full((), 3, dtype=torch.int32, device=normed.device)
        heads = (sizes[0] // head, sizes[1] // head)
        return HeadPlan(heads, angles, weights, eps, keys, values, length, rows - 1)

    def compare(query: Tensor, heads: HeadPlan, sums: Tensor) -> None:
        expected, *made = plain(sums)
        _compare("rotation", query.transpose(0, 1), expected)
        kv = empty()
        kv.length = 3  # the first slots were held before, and the last row is padding
        kv.write(0, *(each[:-1].transpose(0, 1) for each in made))
        for ours, theirs in zip((heads.keys, heads.values), kv.parts[0][:2], strict=True):
            _compare("rotation", ours, theirs)
            if codes:
                _compare("codes", steps_of(ours), steps_of(theirs))

    def parts_of(states: Hidden | Tensor) -> Tensor:
        parts = kernels.product_parts(normed.shape[1], tiles)
        sums = normed.new_full((parts, rows, sum(sizes)), torch.nan, dtype=torch.float32)
        heads = cached()
        query = kernels.project_heads(states, [product_of(each) for each in three], heads, sums)
        compare(query, heads, added_parts(sums, normed.dtype))
        return sums

    given = [random(rows, size) for size in sizes]
    heads = cached()
    compare(rotate(given, heads), heads, torch.cat(given, 1))
    wide = torch.cat(_wide_products(normed, three), 1)
    for _ in range(_REPEATS):
        sums = parts_of(states)
    if not (sums.double().sum(0) - wide).abs().max() <= _ROUNDED * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")
    return parts_of
