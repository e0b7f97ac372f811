"""What a decoder is made of, as far as the C program of passes knows the parts.

A model is read by the names of its modules, not by its class: which norms stand where, which linear
layers are one, what turns queries and keys, the MLP's activation, and by what it is multiplied
on the way. A model fits if all its weights have a place. Whether they are put together as the
program does is seen by comparing logits, near and far into a text (see adapting.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.attention.sdpa import AttentionSpec
from tswift.forward.cpu.products import PackedEmbedding, PackedLinear
from tswift.forward.hf import output_rule

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# types whose rates are the same at every length, as far as models with others have not been refused
_ROTARY = ("default", "linear", "llama3", "yarn", "longrope")
# where a layer's norms stand: before attention, after it, before the MLP, after it
_NORMS = {
    "Llama": ("input_layernorm", "", "post_attention_layernorm", ""),
    "OLMo 2": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "Gemma": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
_GATES: dict[bool, Callable[[Tensor], Tensor]] = {
    False: F.silu,
    True: lambda x: F.gelu(x, approximate="tanh"),
}


class Unfit(Exception):
    """Why a model's passes cannot be such a program, in one line."""


@dataclass(frozen=True)
class RecurrentParts:
    """What a gated delta net has beside its linear layers.

    Attributes:
        module: it, whose own parameters tell how fast its states decay.
        convolution: of each channel with rows before.
        norm: of what is read from its states.
        heads, group, key_size, value_size: of its states; so many heads share queries and keys.
    """

    module: Any
    convolution: nn.Conv1d
    norm: Any
    heads: int
    group: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class LayerParts:
    """A layer's modules; linear layers that are one matrix are there once,
    the others of them are None.

    Attributes:
        linears: by the name in program.c's ``Layer``: queries, keys, values, extra, output,
            gate, up, down.
        norms: likewise: pre_attention_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm,
            query_norm, key_norm; None where there is
            none.
        joint: whether queries (and keys) are normed over all heads at once.
        rotary: which rotary embedding turns queries and keys; None for none.
        spec: of its attention.
        scale: of the scores.
        gated: whether queries bring gates for what attention puts out.
        recurrent: of a recurrent layer, in the place of attention; None for attention.
    """

    linears: Mapping[str, Any]
    norms: Mapping[str, Any]
    joint: bool = False
    rotary: int | None = None
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    scale: float = 0.0
    gated: bool = False
    recurrent: RecurrentParts | None = None


@dataclass(frozen=True)
class Parts:
    """A decoder's modules.

    Attributes:
        layers: one by one.
        head_dim: of attention.
        norm: the last one.
        embeddings, lm_head: before and after them.
        rotaries: rates ``[turned / 2]`` and scale of each rotary embedding.
        gelu: whether the MLP lets through by the GELU's tangent form, and not by the SiLU.
        embedding_scale, residual_scale: factors of embeddings, and of what layers add.
        output_scale, output_cap: of the logits; 0 for none.
        eps: of all norms.
    """

    layers: Sequence[LayerParts]
    head_dim: int
    norm: nn.Module
    embeddings: nn.Embedding | PackedEmbedding
    lm_head: nn.Linear | PackedLinear
    rotaries: Sequence[tuple[Tensor, float]]
    gelu: bool
    embedding_scale: float
    residual_scale: float
    output_scale: float
    output_cap: float
    eps: float


def read_parts(network: PreTrainedModel, specs: Sequence[AttentionSpec] = ()) -> Parts:
    """The parts of a causal language model of transformers, which may be on the meta device.

    Args:
        network: the model.
        specs: of its layers with attention; empty where they are not known.

    Raises:
        Unfit: it has others.
    """
    kind = type(network).__name__
    decoder: Any = network.get_decoder() if hasattr(network, "get_decoder") else None
    if not all(hasattr(decoder, name) for name in ("layers", "norm", "rotary_emb", "embed_tokens")):
        raise Unfit(f"{kind} has no program")
    config = network.config.get_text_config()
    _refuse_other_turns(config)
    attending = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    sizes = {getattr(each, "head_dim", 0) for each in attending}
    if len(sizes) != 1:
        raise Unfit("heads of several sizes have no program")
    rates = _Rates(decoder.rotary_emb)
    left = iter(specs or [AttentionSpec()] * len(attending))
    layers = [
        _layer(layer, rates.index(config, index), next(left))
        if hasattr(layer, "self_attn")
        else _recurrent_layer(layer)
        for index, layer in enumerate(decoder.layers)
    ]
    mlps = [layer.mlp for layer in decoder.layers]
    residual = {float(getattr(layer, "residual_multiplier", 1)) for layer in decoder.layers}
    norms = [
        decoder.norm,
        *(norm for layer in layers for norm in layer.norms.values() if norm is not None),
        *(layer.recurrent.norm for layer in layers if layer.recurrent is not None),
    ]
    eps = {float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0))) for norm in norms}
    if (
        not all(map(_size, norms))
        or len(residual) > 1
        or len(eps) > 1
        or len({layer.linears["down"].in_features for layer in layers}) > 1
    ):
        raise Unfit("its layers differ in ways that have no program")
    scale, cap = output_rule(config)
    parts = Parts(
        layers=layers,
        head_dim=sizes.pop(),
        norm=decoder.norm,
        embeddings=decoder.embed_tokens,
        lm_head=network.get_output_embeddings(),
        rotaries=rates.found,
        gelu=_gate(mlps[0]),
        embedding_scale=float(getattr(decoder.embed_tokens, "scalar_embed_scale", 1))
        * float(getattr(decoder, "embedding_multiplier", 1)),
        residual_scale=residual.pop(),
        output_scale=scale,
        output_cap=cap,
        eps=eps.pop(),
    )
    _refuse_left_over(network, parts, norms)
    return parts


def norm_weight(norm: Any) -> Tensor:
    """What a norm multiplies by, in float32: its weights, or one more than these.

    Raises:
        Unfit: it is no RMS norm.
    """
    weight = norm.weight.detach().float()
    given = torch.linspace(-1, 2, len(weight))
    found = norm(given.to(norm.weight.dtype)).float()
    plain = F.rms_norm(given, (len(weight),))
    for added in (0.0, 1.0):
        if torch.allclose(found, plain * (weight + added), rtol=2e-2, atol=1e-3):
            return weight + added
    raise Unfit("it has norms that are no RMS norms")


def in_float32(weight: Tensor) -> Tensor:
    """A parameter's numbers."""
    return weight.detach().to(torch.float32)


def _size(norm: Any) -> int:
    """How many numbers a norm takes; Unfit if it has no weights to tell."""
    if getattr(norm, "weight", None) is None:
        raise Unfit(f"{type(norm).__name__} has no program")
    return len(norm.weight)


def _layer(layer: nn.Module, rotary: int | None, spec: AttentionSpec) -> LayerParts:
    own: Any = layer.self_attn
    if spec.sinks is not None:
        raise Unfit("attention sinks have no program")
    if _has(own, "qkv_proj"):
        linears = {"queries": own.qkv_proj, "keys": None, "values": None}
    elif _has(own, "q_proj", "k_proj", "v_proj"):
        linears = {"queries": own.q_proj, "keys": own.k_proj, "values": own.v_proj}
    else:
        raise Unfit(f"{type(own).__name__} has no program")
    output = getattr(own, "o_proj", None)
    heads = {"query_norm": getattr(own, "q_norm", None), "key_norm": getattr(own, "k_norm", None)}
    products, norms = _around(layer, linears | {"output": output}, heads)
    joint = any(norm is not None and _size(norm) != own.head_dim for norm in heads.values())
    separate = products["keys"] is not None
    gated = separate and products["queries"].out_features == 2 * products["output"].in_features
    if gated and joint:
        raise Unfit("gated attention normed over all heads has no program")
    return LayerParts(
        linears=products,
        norms=norms,
        joint=joint,
        rotary=rotary if getattr(own, "use_rope", True) else None,
        spec=spec,
        scale=float(own.scaling),
        gated=gated,
    )


def _recurrent_layer(layer: nn.Module) -> LayerParts:
    """A layer with a gated delta net in the place of attention."""
    own: Any = getattr(layer, "linear_attn", None)
    # under the names of attention's products, as program.c's Layer has them: what is convolved,
    # gates for what it puts out, how much is new, and how much time passes
    products = {
        "queries": "in_proj_qkv",
        "keys": "in_proj_z",
        "values": "in_proj_b",
        "extra": "in_proj_a",
        "output": "out_proj",
    }
    if own is None or not _has(own, *products.values(), "conv1d", "norm"):
        raise Unfit(f"{type(layer).__name__} has parts that have no program")
    linears, norms = _around(
        layer, {name: getattr(own, module) for name, module in products.items()}, {}
    )
    group = own.num_v_heads // own.num_k_heads
    recurrent = RecurrentParts(
        own, own.conv1d, own.norm, own.num_v_heads, group, own.head_k_dim, own.head_v_dim
    )
    return LayerParts(linears, norms, recurrent=recurrent)


def _around(
    layer: nn.Module, linears: Mapping[str, Any], norms: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A layer's linear layers and norms, given those of its attention."""
    mlp = getattr(layer, "mlp", None)
    places = next(
        (each for each in reversed(_NORMS.values()) if _has(layer, *filter(None, each))), None
    )
    if mlp is None or places is None:
        raise Unfit(f"{type(layer).__name__} has parts that have no program")
    if _has(mlp, "gate_up_proj", "down_proj"):
        own = {"gate": mlp.gate_up_proj, "up": None, "down": mlp.down_proj}
    elif _has(mlp, "gate_proj", "up_proj", "down_proj"):
        own = {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    else:
        raise Unfit(f"{type(mlp).__name__} has no program")
    for linear in (*linears.values(), *own.values()):
        if not isinstance(linear, nn.Linear | PackedLinear | None):
            raise Unfit(f"{type(linear).__name__} has no program")
    found = {
        name: getattr(layer, norm) if norm else None
        for name, norm in zip(
            ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"),
            places,
            strict=True,
        )
    }
    return {**linears, **own}, {**norms, **found}


def _has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


class _Rates:
    """Rates and scales of a model's rotary embedding: one for all layers,
    or one for each type of layer.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._names: list[str] = []
        self.found: list[tuple[Tensor, float]] = []

    def index(self, config: PreTrainedConfig, layer: int) -> int:
        """Which of those found is a layer's."""
        kind = (getattr(config, "layer_types", None) or [""] * (layer + 1))[layer]
        name = f"{kind}_" if hasattr(self._rotary, f"{kind}_inv_freq") else ""
        if name not in self._names:
            if not hasattr(self._rotary, f"{name}inv_freq"):
                raise Unfit("its position encoding has no program")
            rates = getattr(self._rotary, f"{name}inv_freq")
            if self.found and len(rates) != len(self.found[0][0]):
                raise Unfit("its layers turn other shares of their heads, which has no program")
            self._names.append(name)
            self.found.append((rates, float(getattr(self._rotary, f"{name}attention_scaling"))))
        return self._names.index(name)


def _refuse_other_turns(config: PreTrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [each for each in rope.values() if each is not None]
    if not kinds or any(each.get("rope_type") not in _ROTARY for each in kinds):
        raise Unfit("its position encoding has no program")


def _gate(mlp: nn.Module) -> bool:
    """What lets an MLP through, see ``gelu`` of :class:`Parts`; seen by what it makes of some
    numbers.
    """
    activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    given = torch.linspace(-4, 4, 33)
    for gelu, known in _GATES.items():
        if activation is not None and torch.allclose(activation(given), known(given), atol=1e-5):
            return gelu
    raise Unfit("its activation has no program")


def _refuse_left_over(network: PreTrainedModel, parts: Parts, norms: Sequence[nn.Module]) -> None:
    """Refuse a model with weights that have no place among its parts."""
    linears = (
        linear for layer in parts.layers for linear in layer.linears.values() if linear is not None
    )
    recurrent = [layer.recurrent for layer in parts.layers if layer.recurrent is not None]
    modules = [*norms, *linears, parts.embeddings, parts.lm_head]
    modules += [each for part in recurrent for each in (part.module, part.convolution)]
    known = {id(weight) for module in modules for weight in module.parameters(recurse=False)}
    for name, weight in network.named_parameters():
        if id(weight) not in known:
            raise Unfit(f"{name} has no place in a program")
