"""Decoder layers by Triton kernels: six kernels a layer, and the same bits in every process.

The modeling code stays in transformers. Of the layers listed here, whose forward is known, the
class is exchanged for one that does the same with kernels, in passes of ours; a call without such a
pass goes the old way. A layer hands the squares of its output on with the pass, as the next one's
first product normalises what it reads. What modules take and return is what they took and returned
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.errors import NoFault
from tswift.forward.draft_weights import Float8Linear
from tswift.forward.hf import UnsupportedModel, final_norm
from tswift.forward.passes import Pass
from tswift.models.architecture import max_positions
from tswift.models.devices import dtype_name

if TYPE_CHECKING:  # triton may not be installed
    from tswift.forward.layer_kernels import Heads, Hidden, Product

_LAYERS = {f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_WIDEST = 16_384  # hidden states that one program can hold
_WIDEST_HEAD = 128  # that one program can multiply
_DTYPES = (torch.bfloat16, torch.float16)
_PRODUCTS = (nn.Linear, Float8Linear)
# rotary embeddings that a text's length does not change
_STATIC = ("default", "linear", "llama3", "yarn")
_BEYOND = 1024  # positions, as drafted nodes may lie beyond the last one that is asked for
_MOST_BYTES = 1 << 28  # of cosines and sines
_AT_A_TIME = 4096  # positions
_TRIED = 5  # rows that kernels are tried with
_ROUNDED = 1e-4  # of the largest number, that sums in float32 may be off by
_REPEATS = 8


class FusedNorm(nn.Module):
    """An RMSNorm by a kernel, where nothing is learnt: the last one of a model."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, *given: object, **named: object) -> Tensor:
        """``[..., H]`` to ``[..., H]``."""
        unknown = given or named
        if unknown or torch.is_grad_enabled() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states, *given, **named)
        return _normed(self, hidden_states.flatten(0, -2)).view_as(hidden_states)


class KnownAngles(nn.Module):
    """Rotary embeddings whose cosines and sines are looked up: two kernels where there were ten."""

    known: tuple[Tensor, Tensor]  # ``[positions, d]`` each, as the module itself computes them

    def forward(
        self, hidden: Tensor, position_ids: Tensor, *given: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        """``[..., d]`` cosines and sines of positions, in the dtype of hidden states."""
        cosines, sines = self.known
        if given or named or hidden.dtype != cosines.dtype:
            return super().forward(hidden, position_ids, *given, **named)
        return F.embedding(position_ids, cosines), F.embedding(position_ids, sines)


class FusedLayer(nn.Module):
    """A decoder layer by kernels, in passes of ours."""

    input_layernorm: Any
    post_attention_layernorm: Any
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, *given: object, **named: Any) -> Tensor:
        """``[1, n, H]`` to ``[1, n, H]``."""
        run = named.get("tswift")
        if not isinstance(run, Pass) or torch.is_grad_enabled():
            return super().forward(hidden_states, *given, **named)
        from tswift.forward.layer_kernels import MOST_ROWS

        if not run.batch_invariant and hidden_states.shape[1] > MOST_ROWS:
            return self._prompt(hidden_states, named["position_embeddings"], run)
        return self._few(hidden_states, named["position_embeddings"], run)

    def _few(self, given: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
        """A pass that reads weights and does little else: all by kernels."""
        from tswift.forward.layer_kernels import (
            add_product,
            multiply_silu,
            project_heads,
            squares_of,
        )

        attention, mlp = self.self_attn, self.mlp
        rows = given[0]
        known, squares = run.squares or (None, None)
        if squares is None or known is not given:  # the first layer, or a hook's own states
            squares = squares_of(rows)
        hidden = _hidden(rows, squares, self.input_layernorm)
        three = [_product(each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        mixed = _attended(attention, partial(project_heads, hidden, three), rows, angles, run)
        rows, squares = add_product(mixed, _product(attention.o_proj), rows)
        hidden = _hidden(rows, squares, self.post_attention_layernorm)
        active = multiply_silu(hidden, _product(mlp.gate_proj), _product(mlp.up_proj))
        rows, squares = add_product(active, _product(mlp.down_proj), rows)
        out = rows.unsqueeze(0)
        run.squares = out, squares
        return out

    def _prompt(self, given: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
        """A pass over many rows, whose products are PyTorch's."""
        from tswift.forward.layer_kernels import add_norm, rotate, silu_mul

        attention, mlp = self.self_attn, self.mlp
        rows = given[0]
        normed = _normed(self.input_layernorm, rows)
        three = [each(normed) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        mixed = _attended(attention, partial(rotate, three), rows, angles, run)
        norm = self.post_attention_layernorm
        rows, normed = add_norm(rows, attention.o_proj(mixed), norm.weight, norm.variance_epsilon)
        rows = rows + mlp.down_proj(silu_mul(mlp.gate_proj(normed), mlp.up_proj(normed)))
        return rows.unsqueeze(0)


def _normed(norm: Any, rows: Tensor) -> Tensor:
    from tswift.forward.layer_kernels import add_norm

    return add_norm(rows, None, norm.weight, norm.variance_epsilon)[1]


def _hidden(rows: Tensor, squares: Tensor, norm: Any) -> Hidden:
    from tswift.forward.layer_kernels import Hidden

    return Hidden(rows, squares, norm.weight, norm.variance_epsilon)


def _product(layer: Any) -> Product:
    """What a linear layer multiplies by."""
    from tswift.forward.layer_kernels import Product

    scales = layer.scale[0] if type(layer) is Float8Linear else None
    return Product(layer.weight, scales, layer.bias)


def _attended(
    module: Any,
    project: Callable[[Heads], Tensor],
    rows: Tensor,
    angles: tuple[Tensor, Tensor],
    run: Pass,
) -> Tensor:
    """Attention of one layer: ``[n, query heads * d]``; ``project`` makes queries, keys and values
    of ``[n, H]`` rows.
    """
    from tswift.forward.layer_kernels import Heads, nothing_held

    index = module.layer_idx
    size = module.head_dim
    kept = (module.q_proj.out_features // size, module.k_proj.out_features // size)
    kv, length = None, nothing_held(rows.device)
    if run.slots is not None and run.slots[0].shape.dtype == rows.dtype:
        kv, length = run.slots
        keys, values = kv.keys[index], kv.values[index]
    else:
        keys, values = rows.new_empty(2, len(rows), kept[1], size).transpose(1, 2)
    known = (angles[0][0].contiguous(), angles[1][0].contiguous())
    nodes = len(rows) if kv is None else run.nodes
    query = project(Heads(kept, known, *_head_norms(module), keys, values, length, nodes))
    attend = run.layer if kv is None else run.attended
    out = attend(index, query, keys, values, module.scaling)
    return out.transpose(0, 1).reshape(len(rows), -1)


def _head_norms(module: Any) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Weights of an attention's norms of queries and keys, None for no norm,
    and what keeps their roots from 0.
    """
    if not hasattr(module, "q_norm"):
        return (None, None), 0.0
    return (module.q_norm.weight, module.k_norm.weight), module.q_norm.variance_epsilon


def fuse(network: PreTrainedModel) -> str | None:
    """Let kernels compute what is between the products of a network's layers,
    whose weights are frozen.

    Returns:
        Why its layers stay as they are; None if they do not.
    """
    if is_fused(network):
        return None
    reason = _unfit(network)
    if reason is not None:
        return NoFault(reason)
    decoder = network.get_decoder()
    layers = list(decoder.layers)
    norm: Any = final_norm(decoder)
    try:
        _try_kernels(layers[0], network.dtype)
    except Exception as error:  # compilers and drivers fail in many ways
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    _exchange(norm, FusedNorm)
    for layer in layers:
        _exchange(layer, FusedLayer)
    rotary = decoder.rotary_emb
    positions = max_positions(network.config) + _BEYOND
    if (
        rotary.rope_type in _STATIC
        and 2 * positions * layers[0].self_attn.head_dim * network.dtype.itemsize <= _MOST_BYTES
    ):
        _exchange(rotary, KnownAngles, known=_angles(rotary, positions, norm.weight))
    return None


@torch.no_grad()
def _angles(rotary: nn.Module, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, on the device and in the dtype of another tensor."""
    places = torch.arange(positions, device=like.device).unsqueeze(0)
    parts = [rotary(like, chunk) for chunk in places.split(_AT_A_TIME, 1)]
    cosines, sines = (torch.cat(each, 1)[0].contiguous() for each in zip(*parts, strict=True))
    return cosines, sines


def separate_layers(network: nn.Module) -> None:
    """Undo :func:`fuse`."""
    for module in _fused(network):
        module.__dict__.pop("known", None)
        module.__class__ = type(module).__bases__[1]


def is_fused(network: nn.Module) -> bool:
    """Whether a network's layers run by kernels."""
    return next(_fused(network), None) is not None


def _fused(network: nn.Module) -> Iterator[nn.Module]:
    return (
        module
        for module in list(network.modules())
        if isinstance(module, FusedLayer | FusedNorm | KnownAngles)
    )


def _exchange(module: nn.Module, mixin: type[nn.Module], **fields: object) -> None:
    kind = type(module)
    module.__class__ = type(f"Fused{kind.__name__}", (mixin, kind), {})  # type: ignore[assignment]
    module.__dict__.update(fields)  # past nn.Module, which would take them for parts of this one


def _unfit(network: PreTrainedModel) -> str | None:
    """Why no kernels are known to do what a network's layers do."""
    config = network.config.get_text_config()
    layers = getattr(network.get_decoder(), "layers", [])
    kinds = {type(layer).__name__ for layer in layers}
    if not kinds or not kinds <= _LAYERS:
        return f"no kernels are written for {network.config.model_type}"
    try:
        final_norm(network.get_decoder())
    except UnsupportedModel as error:
        return f"it has {error}"
    from tswift.forward.layer_kernels import STEP

    head = layers[0].self_attn.head_dim
    linears = [each for layer in layers for each in _linears(layer)]
    odd = next((each.in_features for each in linears if each.in_features % STEP), 0)
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    for reason, wrong in {
        f"no kernels are written for {config.hidden_act}": config.hidden_act != "silu",
        f"a row of {config.hidden_size:,} is too wide": config.hidden_size > _WIDEST,
        f"a row of {odd:,} is no multiple of {STEP}": odd,
        f"heads of {head} are too wide": head > _WIDEST_HEAD,
        f"heads of {head} have no halves": head % 2 != 0,
        f"they are in {dtype_name(network.dtype)}": network.dtype not in _DTYPES,
        "norms are in another dtype": layers[0].input_layernorm.weight.dtype != network.dtype,
        "their weights are quantised": not all(type(each) in _PRODUCTS for each in linears),
        "they rotate a part of each head": share != 1.0,
    }.items():
        if wrong:
            return reason
    return None


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


# -------------------------------------------------------------------------------------------------
# The same in plain PyTorch, to the bit


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
    from tswift.forward.layer_kernels import Hidden, squares_of

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
def _try_kernels(layer: Any, dtype: torch.dtype) -> None:
    """Compare the kernels with plain PyTorch on random rows of a layer's sizes.

    Raises:
        Wrong: a bit differs; products are far apart, or others the second time.
    """
    from tswift.forward import layer_kernels as kernels

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
    _try_heads(attention, states, normed, random)
    wide = [plain.to(dtype) for plain in _wide_products(normed, (mlp.gate_proj, mlp.up_proj))]
    active = kernels.multiply_silu(states, _product(mlp.gate_proj), _product(mlp.up_proj))
    plain = plain_silu_mul(*wide).double()
    if not (active - plain).abs().max() <= 4 * torch.finfo(dtype).eps * plain.abs().max():
        raise Wrong("the kernel of products with SiLU computes something else than PyTorch")
    for linear in (attention.o_proj, mlp.down_proj):
        rows = random(_TRIED, linear.in_features)
        _try_sums(linear, rows, hidden)


def _wide_products(rows: Tensor, linears: Sequence[Any]) -> list[Tensor]:
    """Products ``[n, out]`` in float64."""
    return [
        F.linear(
            rows.double(), each.weight.double(), None if each.bias is None else each.bias.double()
        )
        for each in linears
    ]


def _try_sums(linear: Any, rows: Tensor, hidden: Tensor) -> None:
    from tswift.forward import layer_kernels as kernels

    product = _product(linear)
    outputs, inputs = product.weights.shape
    parts = kernels.product_parts(inputs, -(-outputs // kernels.TILE))
    (wide,) = _wide_products(rows, [linear])
    found = []
    for _ in range(_REPEATS):
        sums = hidden.new_full((parts, len(rows), outputs), torch.nan, dtype=torch.float32)
        total, squares = kernels.add_product(rows, product, hidden, sums)
        found.append((sums, total, squares))
    if not (sums.double().sum(0) - wide).abs().max() <= _ROUNDED * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")
    if not all(torch.equal(*both) for each in found for both in zip(each, found[0], strict=True)):
        raise Wrong("the kernel of products gives other bits the second time")
    _compare("products", total, hidden + added_parts(sums, hidden.dtype))
    _compare("squares", squares, plain_squares(total, kernels.TILE))


def _try_heads(
    attention: Any, states: Hidden, normed: Tensor, random: Callable[..., Tensor]
) -> None:
    from tswift.forward import layer_kernels as kernels

    head = attention.head_dim
    three = (attention.q_proj, attention.k_proj, attention.v_proj)
    sizes = [each.out_features for each in three]
    count, rows = sum(sizes) // head, len(normed)
    angles = (random(rows, head), random(rows, head))
    weights, eps = _head_norms(attention)

    def plain(sums: Tensor) -> list[Tensor]:
        """Queries, keys and values ``[n, heads, d]``."""
        query, key, value = (each.unflatten(1, (-1, head)) for each in sums.split(sizes, 1))
        rotated = [
            plain_rotate(part, angles, weight, eps)
            for part, weight in zip((query, key), weights, strict=True)
        ]
        return [*rotated, value]

    def cached() -> Heads:
        keys, values = normed.new_zeros(2, sizes[1] // head, rows + 3, head)
        length = torch.full((), 3, dtype=torch.int32, device=normed.device)
        heads = (sizes[0] // head, sizes[1] // head)
        return kernels.Heads(heads, angles, weights, eps, keys, values, length, rows - 1)

    def compare(query: Tensor, heads: Heads, sums: Tensor) -> None:
        expected, *kept = plain(sums)
        _compare("rotation", query.transpose(0, 1), expected)
        for ours, made in zip((heads.keys, heads.values), kept, strict=True):
            made[-1:] = 0  # the last row is padding, and the first slots were held before
            padded = F.pad(made[:-1], (0, 0, 0, 0, 3, 1))
            _compare("rotation", ours, padded.transpose(0, 1))

    given = [random(rows, size) for size in sizes]
    heads = cached()
    compare(kernels.rotate(given, heads), heads, torch.cat(given, 1))
    parts = kernels.product_parts(normed.shape[1], count)
    sums = normed.new_empty(parts, rows, sum(sizes), dtype=torch.float32)
    wide = torch.cat(_wide_products(normed, three), 1)
    products = [_product(each) for each in three]
    for _ in range(_REPEATS):
        heads = cached()
        query = kernels.project_heads(states, products, heads, sums)
        compare(query, heads, added_parts(sums, normed.dtype))
    plainly = torch.empty_like(sums)
    kernels.project_heads(normed_already(normed), products, cached(), plainly)
    _compare("norms", sums, plainly)
    if not (sums.double().sum(0) - wide).abs().max() <= _ROUNDED * wide.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")
