"""Decoder layers by Triton kernels: six kernels a layer, and the same bits in every process.

The modeling code stays in transformers. Of the layers listed here, whose forward is known, the
class is exchanged for one that does the same with kernels, in passes of ours; a call without such a
pass goes the old way. A layer hands the squares of its output on with the pass, as the next one's
first product normalises what it reads. What modules take and return is what they took and returned
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.attention.backends import HALVES
from tswift.errors import NoFault
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.hf import UnsupportedModel, final_norm
from tswift.forward.passes import Pass
from tswift.models.architecture import max_positions
from tswift.models.devices import dtype_name

if TYPE_CHECKING:  # triton may not be installed
    from tswift.forward.cuda.code_kernels import CodedProduct
    from tswift.forward.cuda.layer_kernels import HeadPlan, Hidden, Product

_LAYERS = {f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_WIDEST = 16_384  # hidden states that one program can hold
_WIDEST_HEAD = 128  # that one program can multiply
# rotary embeddings that a text's length does not change
_STATIC = ("default", "linear", "llama3", "yarn")
_BEYOND = 1024  # positions, as drafted nodes may lie beyond the last one that is asked for
_MOST_BYTES = 1 << 28  # of cosines and sines
_AT_A_TIME = 4096  # positions
_MIXED = "some of their matrices are codes and others are not"


class FusedNorm(nn.Module):
    """An RMSNorm by a kernel, where no gradients are wanted: the last one of a model."""

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

    input_layernorm: FusedNorm
    post_attention_layernorm: FusedNorm
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, *given: object, **named: Any) -> Tensor:
        """``[1, n, H]`` to ``[1, n, H]``."""
        run = named.get("tswift")
        if not isinstance(run, Pass) or torch.is_grad_enabled():
            return super().forward(hidden_states, *given, **named)
        from tswift.forward.cuda.layer_kernels import MOST_ROWS

        if type(self.mlp.down_proj) is CodedLinear:
            return self._coded(hidden_states[0], named["position_embeddings"], run)
        if not run.batch_invariant and hidden_states.shape[1] > MOST_ROWS:
            return self._prompt(hidden_states, named["position_embeddings"], run)
        return self._few(hidden_states, named["position_embeddings"], run)

    def _few(self, given: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
        """A pass that reads weights and does little else: all by kernels."""
        from tswift.forward.cuda.layer_kernels import (
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
        three = [
            product_of(each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        mixed = _attended(attention, partial(project_heads, hidden, three), rows, angles, run)
        rows, squares = add_product(mixed, product_of(attention.o_proj), rows)
        hidden = _hidden(rows, squares, self.post_attention_layernorm)
        active = multiply_silu(hidden, product_of(mlp.gate_proj), product_of(mlp.up_proj))
        rows, squares = add_product(active, product_of(mlp.down_proj), rows)
        out = rows.unsqueeze(0)
        run.squares = out, squares
        return out

    def _coded(self, rows: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
        """A pass with weights of codes, all by kernels; one of them normalises."""
        from tswift.forward.cuda.code_kernels import add_product, multiply_silu, project_heads

        attention, mlp = self.self_attn, self.mlp
        three = [
            coded_product(each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        project = partial(project_heads, _normed(self.input_layernorm, rows), three)
        mixed = _attended(attention, project, rows, angles, run)
        (rows,) = add_product(mixed, coded_product(attention.o_proj), rows)
        normed = _normed(self.post_attention_layernorm, rows)
        active = multiply_silu(normed, coded_product(mlp.gate_proj), coded_product(mlp.up_proj))
        (rows,) = add_product(active, coded_product(mlp.down_proj), rows)
        return rows.unsqueeze(0)

    def _prompt(self, given: Tensor, angles: tuple[Tensor, Tensor], run: Pass) -> Tensor:
        """A pass over many rows, whose products are PyTorch's."""
        from tswift.forward.cuda.layer_kernels import add_norm, rotate, silu_mul

        attention, mlp = self.self_attn, self.mlp
        rows = given[0]
        normed = _normed(self.input_layernorm, rows)
        three = [each(normed) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        mixed = _attended(attention, partial(rotate, three), rows, angles, run)
        norm = self.post_attention_layernorm
        rows, normed = add_norm(rows, attention.o_proj(mixed), norm.weight, norm.variance_epsilon)
        rows = rows + mlp.down_proj(silu_mul(mlp.gate_proj(normed), mlp.up_proj(normed)))
        return rows.unsqueeze(0)


def _normed(norm: FusedNorm, rows: Tensor) -> Tensor:
    from tswift.forward.cuda.layer_kernels import add_norm

    return add_norm(rows, None, norm.weight, norm.variance_epsilon)[1]


def _hidden(rows: Tensor, squares: Tensor, norm: FusedNorm) -> Hidden:
    from tswift.forward.cuda.layer_kernels import Hidden

    return Hidden(rows, squares, norm.weight, norm.variance_epsilon)


def product_of(layer: nn.Linear) -> Product:
    """What a linear layer multiplies by."""
    from tswift.forward.cuda.layer_kernels import Product

    return Product(layer.weight, layer.bias)


def coded_product(layer: CodedLinear) -> CodedProduct:
    """What a linear layer of codes multiplies by."""
    from tswift.forward.cuda.code_kernels import CodedProduct

    return CodedProduct(layer.packed, layer.bias)


def _attended(
    module: Any,
    project: Callable[[HeadPlan], Tensor],
    rows: Tensor,
    angles: tuple[Tensor, Tensor],
    run: Pass,
) -> Tensor:
    """Attention of one layer: ``[n, query heads * d]``; ``project`` makes queries, keys and values
    of ``[n, H]`` rows.
    """
    from tswift.forward.cuda.layer_kernels import HeadPlan, nothing_held

    index = module.layer_idx
    size = module.head_dim
    kept = (module.q_proj.out_features // size, module.k_proj.out_features // size)
    kv, length = None, nothing_held(rows.device)
    shape = None if run.slots is None else run.slots[0].shape
    if (
        run.slots is not None
        and shape is not None
        and (shape.steps_behind or shape.dtype == rows.dtype)
    ):
        kv, length = run.slots
        keys, values = kv.keys[index], kv.values[index]
    else:
        keys, values = rows.new_empty(2, len(rows), kept[1], size).transpose(1, 2)
    known = (angles[0][0].contiguous(), angles[1][0].contiguous())
    nodes = len(rows) if kv is None else run.nodes
    query = project(HeadPlan(kept, known, *head_norms(module), keys, values, length, nodes))
    attend = run.layer if kv is None else run.attended
    out = attend(index, query, keys, values, module.scaling)
    return out.transpose(0, 1).reshape(len(rows), -1)


def head_norms(module: Any) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Weights of an attention's norms of queries and keys, None for no norm,
    and what keeps their roots from 0.
    """
    if not hasattr(module, "q_norm"):
        return (None, None), 0.0
    return (module.q_norm.weight, module.k_norm.weight), module.q_norm.variance_epsilon


def fuse(
    network: PreTrainedModel, check: Callable[[FusedLayer, torch.dtype], str | None]
) -> str | None:
    """Let kernels compute what is between the products of a network's layers,
    whose weights are frozen.

    Returns:
        Why its layers stay as they are; None if they do not.
    """
    if is_fused(network):
        return None
    reason = _unfit(network)
    if reason is not None:
        return reason if reason == _MIXED else NoFault(reason)
    decoder = network.get_decoder()
    layers = list(decoder.layers)
    norm: Any = final_norm(decoder)
    for layer in layers_by_form(network):
        if fault := check(layer, network.dtype):
            return fault
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


def layers_by_form(network: PreTrainedModel) -> list[FusedLayer]:
    """A layer of each form that a network has: in files of 4 bits some layers have more of them."""
    found = {
        tuple(each.packed.form for each in _linears(layer) if type(each) is CodedLinear): layer
        for layer in reversed(network.get_decoder().layers)
    }
    return [*found.values()]


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


def rows_stand_alone(network: PreTrainedModel) -> bool:
    """Whether all products of a pass of few rows are kernels', whose rows do not depend on how many
    there are.
    """
    layers = getattr(network.get_decoder(), "layers", [])
    if not (len(layers) and isinstance(layers[0], FusedLayer)):
        return False
    ends = layers[0].mlp.down_proj, network.get_output_embeddings()  # all layers are of one kind
    return all(type(each) is CodedLinear for each in ends)


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
    from tswift.forward.cuda.layer_kernels import STEP

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
        f"they are in {dtype_name(network.dtype)}": network.dtype not in HALVES,
        "norms are in another dtype": layers[0].input_layernorm.weight.dtype != network.dtype,
        _MIXED: {type(each) for each in linears} == {nn.Linear, CodedLinear},
        "their weights are quantised": not {type(each) for each in linears}
        <= {nn.Linear, CodedLinear},
        "they rotate a part of each head": share != 1.0,
    }.items():
        if wrong:
            return reason
    return None


def _linears(layer: FusedLayer) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
