"""A copy of a model for drafting passes whose linear layers have weights of 8 or 4 bits, on CUDA.

PyTorch's own products multiply them: scaled FP8, with a scale for each row of the input and each
output; and weights in 4 bits, a scale and a zero for each 128 of them. What is drafted never
decides a token, so none of it has to be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.errors import InputError
from tswift.forward.hf import JoinedLinear, own_quantization, restore_linears, share

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DEVICES = ("cuda",)  # tests add the CPU, which has the same products
_FP8 = torch.float8_e4m3fn
_MOST = torch.finfo(_FP8).max
# that rows, inputs and outputs of an FP8 product are padded to, or have to be multiples of
_ROWS = 16
_GROUP = 128  # weights of a row that share a scale, in 4 bits
_TILES = 8  # inner tiles of packed weights; their width is 16
_NONSENSE = 0.4  # of a product's norm; 4 bits round random weights by 0.1
_NEEDED = (8, 9)  # compute capability for FP8


class Float8Linear(nn.Module):
    """A linear layer whose weights are FP8; so are its inputs,
    where no kernel of ours multiplies them.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        numbers = whole.weight.detach().float()
        scale = numbers.abs().amax(1, keepdim=True).clamp_min(1e-12) / _MOST
        self.register_buffer("weight", (numbers / scale).to(_FP8))
        self.register_buffer("scale", scale.t().contiguous())
        self.bias = whole.bias
        self.out_features = whole.out_features

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, bfloat16."""
        rows = input.flatten(0, -2)
        small, scales = _float8_rows(rows)
        out = torch._scaled_mm(
            small,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
        )
        return out[: len(rows)].view(*input.shape[:-1], -1)


def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8, with empty ones up to a multiple of 16,
    and what 1 stands for in each ``[n, 1]``.
    """
    wide = F.pad(rows.float(), (0, 0, 0, -len(rows) % _ROWS))
    scales = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / _MOST
    return (wide / scales).to(_FP8), scales


class Int4Linear(nn.Module):
    """A linear layer whose weights are packed in 4 bits; inputs are bfloat16."""

    weight: Tensor
    scales: Tensor

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        numbers = whole.weight.detach().float().unflatten(1, (-1, _GROUP))
        least, most = numbers.aminmax(dim=2, keepdim=True)
        scale = (most - least).clamp_min(1e-6) / 15
        counts = ((numbers - least) / scale).round().clamp(0, 15).flatten(1).to(torch.int32)
        zero = least + 8 * scale  # what the count of 8 stands for
        scales = torch.cat([scale, zero], 2).transpose(0, 1).to(torch.bfloat16).contiguous()
        if counts.is_cuda:
            pairs = (counts[:, 0::2] << 4 | counts[:, 1::2]).to(torch.uint8)
            packed = torch._convert_weight_to_int4pack(pairs, _TILES)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(counts, _TILES)
        self.register_buffer("weight", packed)
        self.register_buffer("scales", scales)
        self.bias = whole.bias
        self.out_features = whole.out_features

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, bfloat16."""
        multiply: Any = (
            torch._weight_int4pack_mm
            if input.is_cuda
            else torch.ops.aten._weight_int4pack_mm_for_cpu
        )
        out = multiply(input.flatten(0, -2).contiguous(), self.weight, _GROUP, self.scales)
        return (out if self.bias is None else out + self.bias).view(*input.shape[:-1], -1)


_KINDS: dict[str, type[Float8Linear] | type[Int4Linear]] = {"fp8": Float8Linear, "int4": Int4Linear}


def refuse_draft_weights(
    kind: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse what a model's drafting weights cannot be here.

    Raises:
        InputError: that they cannot be had, and why.
    """
    own = own_quantization(config)
    reason = ""
    if own is not None:
        reason = f"the model's weights are quantised already ({own})"
    elif device.type not in _DEVICES:
        reason = f"{kind} needs a CUDA device"
    elif dtype != torch.bfloat16:
        reason = f"{kind} needs a model in bfloat16"
    elif (
        kind == "fp8"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) < _NEEDED
    ):
        reason = "fp8 needs a GPU of compute capability 8.9 or more"
    if reason:
        raise InputError(reason, "draft_weights")


@torch.no_grad()
def cheaper_copy(network: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy of a model in which the decoder's linear layers have weights of fewer bits,
    where the product takes them.

    It shares all else with the model, the embeddings and the LM head among them: nothing else takes
    memory twice. Layers that the model joined are one product here, too.
    """
    ends = network.get_input_embeddings(), network.get_output_embeddings()
    twin = deepcopy(
        network,
        {id(shared): shared for shared in (*network.parameters(), *network.buffers(), *ends)},
    )
    for module in twin.modules():
        module._forward_pre_hooks.clear()  # the model's own taps
        module._forward_hooks.clear()
    decoder = twin.get_decoder()
    make = _KINDS[kind]
    whole = next(
        (each for each in decoder.modules() if isinstance(each, nn.Linear) and _fits(each, kind)),
        None,
    )
    if whole is not None:
        _refuse_nonsense(whole, make(whole), kind)
    restore_linears(decoder)
    own = dict(network.get_decoder().named_modules())
    copies = {id(own[name]): (name, module) for name, module in decoder.named_modules()}
    for module in own.values():
        if (
            isinstance(module, JoinedLinear)
            and isinstance(module.product, nn.Linear)
            and _fits(module.product, kind)
        ):
            share([copies[id(each)][1] for each in module.group], make(module.product))
    for name, module in list(decoder.named_modules()):
        if type(module) is nn.Linear and _fits(module, kind):
            setattr(
                decoder.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
                make(module),
            )
    return twin


def _refuse_nonsense(whole: nn.Linear, cheap: nn.Module, kind: str) -> None:
    """Try a product, which may never have been run on such a device:
    wrong drafts would show in no text.

    Raises:
        InputError: it is far from the whole layer's.
    """
    rows = torch.randn(_ROWS + 1, whole.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(whole.weight.device, whole.weight.dtype)
    expected = F.linear(rows, whole.weight, whole.bias).float()
    apart = float((cheap(rows).float() - expected).norm() / expected.norm())
    if not apart < _NONSENSE:
        raise InputError(f"{kind} products are off by {apart:.0%} here", "draft_weights")


def _fits(layer: nn.Linear, kind: str) -> bool:
    inputs, outputs = (_ROWS, _ROWS) if kind == "fp8" else (_GROUP, _ROWS)
    return layer.in_features % inputs == 0 and layer.out_features % outputs == 0


def copy_bytes(network: PreTrainedModel, kind: str) -> int:
    """Bytes that :func:`cheaper_copy` takes beside the model, by the shapes of its weights."""
    layers: Iterator[nn.Module] = network.get_decoder().modules()
    count = 0
    for layer in layers:
        if isinstance(layer, nn.Linear) and _fits(layer, kind):
            rows, width = layer.weight.shape
            count += (
                rows * width + rows * 4
                if kind == "fp8"
                else rows * width // 2 + rows * width // _GROUP * 4
            )
    return count
