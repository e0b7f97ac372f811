"""Decoder layers by Triton kernels: nine or ten kernels a layer,
and the same bits in every process.

The modeling code stays in transformers. Of the layers listed here, whose forward is known, the
class is exchanged for one that does the same with kernels, in passes of ours; a call without such a
pass goes the old way. Each layer adds its output and computes the norm that comes next in one
kernel, and hands the result to that norm. What modules take and return is what they took and
returned before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.errors import NoFault
from tswift.forward.draft_weights import Float8Linear
from tswift.forward.hf import UnsupportedModel, final_norm
from tswift.forward.joined import JoinedLinear
from tswift.forward.passes import Pass
from tswift.models.architecture import max_positions

_LAYERS = {f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_WIDEST = 16_384  # hidden states that one program can hold
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# rotary embeddings that a text's length does not change
_STATIC = ("default", "linear", "llama3", "yarn")
_BEYOND = 1024  # positions, as drafted nodes may lie beyond the last one that is asked for
_MOST_BYTES = 1 << 28  # of cosines and sines
_AT_A_TIME = 4096  # positions
_TRIED = 5  # rows that kernels are tried with
_ROUNDED = 1e-4  # of the largest number, that sums in float32 may be off by
_REPEATS = 8


class FusedNorm(nn.Module):
    """An RMSNorm by a kernel, where nothing is learnt; often it was computed before,
    by the layer in front of it.
    """

    weight: Tensor
    variance_epsilon: float
    # an input, and the output for it; None once that was taken
    handed: tuple[Tensor, Tensor] | None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., H]``."""
        handed, self.handed = self.handed, None
        if handed is not None and handed[0] is hidden_states:
            return handed[1]
        if torch.is_grad_enabled() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        from tswift.forward.layer_kernels import add_norm

        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return add_norm(rows, None, self.weight, self.variance_epsilon)[1].view_as(hidden_states)

    def added(self, hidden: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of ``[1, n, H]`` and a product ``[n, H]``, perhaps in parts; and its norm."""
        from tswift.forward.layer_kernels import add_norm

        total, normed = add_norm(hidden[0], more, self.weight, self.variance_epsilon)
        return total.unsqueeze(0), normed.unsqueeze(0)


class KnownAngles(nn.Module):
    """Rotary embeddings whose cosines and sines are looked up: two kernels where there were ten."""

    known: tuple[Tensor, Tensor]  # ``[positions, d]`` each, as the module itself computes them

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., d]`` cosines and sines of positions, in the dtype of hidden states."""
        cosines, sines = self.known
        if hidden.dtype != cosines.dtype:
            return super().forward(hidden, position_ids)
        return F.embedding(position_ids, cosines), F.embedding(position_ids, sines)


class FusedLayer(nn.Module):
    """A decoder layer by kernels, in passes of ours."""

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    self_attn: Any
    mlp: Any
    # the norm that takes this layer's output; a tuple, as it is no part of the layer
    following: tuple[FusedNorm]

    def forward(self, hidden_states: Tensor, *given: object, **named: Any) -> Tensor:
        """``[1, n, H]`` to ``[1, n, H]``."""
        run = named.get("tswift")
        if not isinstance(run, Pass) or torch.is_grad_enabled():
            return super().forward(hidden_states, *given, **named)
        normed = self.input_layernorm(hidden_states)[0]
        mixed = _attended(self.self_attn, normed, named["position_embeddings"], run)
        hidden, normed = self.post_attention_layernorm.added(
            hidden_states, _multiplied([self.self_attn.o_proj], mixed, run.alike)[0]
        )
        active = _activated(self.mlp, normed[0], run.alike)
        hidden, normed = self.following[0].added(
            hidden, _multiplied([self.mlp.down_proj], active, run.alike)[0]
        )
        self.following[0].handed = (hidden, normed)
        return hidden


def _weights(
    layers: Sequence[nn.Module], rows: Tensor, alike: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Weights, scales and bias of linear layers with the same input,
    if a kernel multiplies so few rows by them.

    Or more of them, if these are to be ``alike``: with the bits that each has among few.
    """
    from tswift.forward.layer_kernels import MOST_ROWS, product_parts

    first = layers[0]
    whole = (
        first.product if isinstance(first, JoinedLinear) else first if len(layers) == 1 else None
    )
    found: tuple[Tensor, Tensor | None, Tensor | None]
    if type(whole) is Float8Linear:
        found = whole.weight, whole.scale[0], whole.bias
    elif type(whole) is nn.Linear and whole.weight.dtype == rows.dtype and rows.dtype.itemsize == 2:
        found = whole.weight, None, whole.bias
    else:
        return None
    outputs, inputs = found[0].shape
    return found if (alike or len(rows) <= MOST_ROWS) and product_parts(inputs, outputs) else None


def _multiplied(layers: Sequence[nn.Module], rows: Tensor, alike: bool) -> list[Tensor]:
    """The products of some rows ``[n, in]`` and each of linear layers: ``[n, out]``,
    or parts ``[parts, n, out]``.
    """
    known = _weights(layers, rows, alike)
    if known is None:
        shared = rows.unsqueeze(0)  # one object: joined layers know their input by it
        return [each(shared)[0] for each in layers]
    from tswift.forward.layer_kernels import multiply

    weights, scales, bias = known
    parts = multiply(rows, weights, scales, bias)
    return list(parts.split([each.out_features for each in layers], -1))


def _activated(mlp: Any, rows: Tensor, alike: bool) -> Tensor:
    """What the last product of an MLP takes: ``[n, m]`` from ``[n, H]``."""
    from tswift.forward.layer_kernels import multiply_silu, silu_mul

    known = _weights([mlp.gate_proj, mlp.up_proj], rows, alike)
    if known is not None and known[2] is None:
        return multiply_silu(rows, known[0], known[1])
    shared = rows.unsqueeze(0)
    return silu_mul(mlp.gate_proj(shared)[0], mlp.up_proj(shared)[0])


def _attended(module: Any, normed: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
    """Attention of one layer: ``[n, query heads * d]`` from normalised hidden states."""
    from tswift.forward.layer_kernels import rotate

    query, key, value = _multiplied(
        [module.q_proj, module.k_proj, module.v_proj], normed, run.alike
    )
    cosines, sines = (each[0].contiguous() for each in angles)
    weights, eps = _head_norms(module)
    index = module.layer_idx
    scale = module.scaling
    head = module.head_dim
    if run.slots is None or run.slots[0].shape.dtype != normed.dtype:
        heads = key.shape[-1] // head
        keys, values = normed.new_empty(2, len(normed), heads, head).transpose(1, 2)
        query = rotate(
            query, key, value, (cosines, sines), weights, eps, (keys, values, None), len(normed)
        )
        out = run.layer(index, query, keys, values, scale)
    else:
        kv, length = run.slots
        cache = (kv.keys[index], kv.values[index])
        query = rotate(
            query, key, value, (cosines, sines), weights, eps, (*cache, length), run.nodes
        )
        out = run.attended(index, query, *cache, scale)
    return out.transpose(0, 1).reshape(len(normed), -1)


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
    norms = [*(layer.input_layernorm for layer in layers), final_norm(decoder)]
    try:
        _try_kernels(layers[0], norms[0], network.dtype)
    except Exception as error:  # compilers and drivers fail in many ways
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    for norm in (*norms, *(layer.post_attention_layernorm for layer in layers)):
        _exchange(norm, FusedNorm, handed=None)
    for layer, following in zip(layers, norms[1:], strict=True):
        _exchange(layer, FusedLayer, following=(following,))
    rotary = decoder.rotary_emb
    positions = max_positions(network.config) + _BEYOND
    if (
        rotary.rope_type in _STATIC
        and 2 * positions * layers[0].self_attn.head_dim * network.dtype.itemsize <= _MOST_BYTES
    ):
        _exchange(rotary, KnownAngles, known=_angles(rotary, positions, norms[0].weight))
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
        for name in ("handed", "following", "known"):
            module.__dict__.pop(name, None)
        module.__class__ = type(module).__bases__[1]


def is_fused(network: nn.Module) -> bool:
    """Whether a network's layers run by kernels."""
    return next(_fused(network), None) is not None


def makes_rows_alike(network: PreTrainedModel) -> bool:
    """Whether all of a network's layers run by kernels, its products too,
    so that a row needs no fixed width.
    """
    if not is_fused(network):
        return False
    for layer in network.get_decoder().layers:
        attention = layer.self_attn
        mlp = layer.mlp
        first = [attention.q_proj, attention.k_proj, attention.v_proj]
        for linears in (first, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]):
            row = torch.empty(1, linears[0].in_features, dtype=network.dtype, device="meta")
            if _weights(linears, row) is None:
                return False
        if mlp.gate_proj.bias is not None:  # their product is PyTorch's
            return False
    return True


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
    head = layers[0].self_attn.head_dim
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    for reason, wrong in {
        f"no kernels are written for {config.hidden_act}": config.hidden_act != "silu",
        f"a row of {config.hidden_size:,} is too wide": config.hidden_size > _WIDEST,
        f"heads of {head} have no halves": head % 2 != 0,
        "they are in float64": network.dtype not in _DTYPES,
        "norms are in another dtype": layers[0].input_layernorm.weight.dtype != network.dtype,
        "they rotate a part of each head": share != 1.0,
    }.items():
        if wrong:
            return reason
    return None


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


def _try_products(layers: Sequence[nn.Module], rows: Tensor) -> None:
    """Compare products of some rows, which are rounded once, with those in float64.

    Raises:
        Wrong: they are far apart, or others the second time.
    """
    from tswift.forward import layer_kernels as kernels

    known = _weights(layers, rows)
    if known is None:
        return
    weights, scales, bias = known
    parts = kernels.multiply(rows, weights, scales, bias)
    exact = F.linear(rows.double(), weights.double(), None if bias is None else bias.double())
    if not (parts.double().sum(0) - exact).abs().max() <= _ROUNDED * exact.abs().max():
        raise Wrong("the kernel of products computes something else than PyTorch")
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    if len(layers) == 2 and bias is None:
        gate, up = whole.to(rows.dtype).chunk(2, 1)
        ours = kernels.multiply_silu(rows, weights, scales).double()
        plain = plain_silu_mul(gate, up).double()
        if not (ours - plain).abs().max() <= 4 * torch.finfo(rows.dtype).eps * plain.abs().max():
            raise Wrong("the kernel of products with SiLU computes something else than PyTorch")
    for _ in range(_REPEATS):
        if not torch.equal(kernels.multiply(rows, weights, scales, bias), parts):
            raise Wrong("the kernel of products gives other bits the second time")


@torch.inference_mode()
def _try_kernels(layer: Any, norm: Any, dtype: torch.dtype) -> None:
    """Compare the kernels with plain PyTorch on random rows of a layer's sizes.

    Raises:
        Wrong: a bit differs.
    """
    from tswift.forward import layer_kernels as kernels

    device = norm.weight.device
    attention = layer.self_attn
    source = torch.Generator().manual_seed(0)
    head = attention.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).mul_(3).to(device, dtype)

    def compare(what: str, ours: Tensor, plain: Tensor) -> None:
        if not torch.equal(ours, plain):
            raise Wrong(f"the kernel of {what} computes something else than PyTorch")

    hidden, more = random(2, _TRIED, len(norm.weight))
    total, normed = kernels.add_norm(hidden, more, norm.weight, norm.variance_epsilon)
    compare("sums", total, hidden + more)
    compare("norms", normed, plain_norm(total, norm.weight, norm.variance_epsilon))
    gate, up = random(2, _TRIED, layer.mlp.gate_proj.out_features)
    compare("SiLU", kernels.silu_mul(gate, up), plain_silu_mul(gate, up))
    for linears in ([layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]):
        _try_products(linears, random(_TRIED, linears[0].in_features))
    kv_heads = attention.k_proj.out_features // head
    query = random(_TRIED, attention.q_proj.out_features)
    key, value = random(2, _TRIED, kv_heads * head)
    angles = (random(_TRIED, head), random(_TRIED, head))
    weights, eps = _head_norms(attention)
    keys, values = torch.zeros(2, kv_heads, _TRIED + 3, head, device=device, dtype=dtype)
    length = torch.full((), 3, dtype=torch.int32, device=device)
    rotated = kernels.rotate(
        query, key, value, angles, weights, eps, (keys, values, length), _TRIED - 1
    )
    expected = [
        plain_rotate(rows.unflatten(1, (-1, head)), angles, weight, eps)
        for rows, weight in zip((query, key), weights, strict=True)
    ]
    compare("rotation", rotated.transpose(0, 1), expected[0])
    for cached, made in ((keys, expected[1]), (values, value.unflatten(1, (-1, head)))):
        made[-1:] = 0  # the last row is padding, and the first slots were held before
        compare("rotation", cached, F.pad(made[:-1], (0, 0, 0, 0, 3, 1)).transpose(0, 1))
