"""A copy of a model for drafting passes whose linear layers have weights of 4 or 8 bits, on CUDA.

What is drafted never decides a token, so none of it has to be what the model computes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from tswift.attention.backends import HALVES, why_not
from tswift.errors import InputError
from tswift.forward.cuda.coded import CodedLinear
from tswift.models.architecture import own_quantization
from tswift.models.codes import BLOCK, UNIT, quantize
from tswift.models.config import BITS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DEVICES = ("cuda",)  # tests add the CPU, where the kernels are interpreted


def refuse_draft_weights(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse drafting weights where a model cannot have them.

    Raises:
        InputError: that they cannot be had, and why.
    """
    own = own_quantization(config)
    reason = ""
    if own is not None:
        reason = f"the model's weights are quantised already ({own})"
    elif device.type not in _DEVICES:
        reason = "weights of fewer bits for drafts need a CUDA device"
    elif dtype not in HALVES:
        reason = "weights of fewer bits for drafts need a model in bfloat16 or float16"
    else:
        reason = why_not("triton", dtype, device) or ""
    if reason:
        raise InputError(reason, "draft_weights")


@torch.no_grad()
def cheaper_copy(network: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy of a model in which the decoder's linear layers have weights of a key of
    :data:`~tswift.models.config.BITS`, where the kernel takes them.

    It shares all else with the model, the embeddings and the LM head among them: nothing else takes
    memory twice.
    """
    ends = network.get_input_embeddings(), network.get_output_embeddings()
    angles = [each for module in network.modules() for each in getattr(module, "known", ())]
    shared = (*network.parameters(), *network.buffers(), *ends, *angles)
    twin = deepcopy(network, {id(each): each for each in shared})
    for module in twin.modules():
        module._forward_pre_hooks.clear()  # the model's own taps
        module._forward_hooks.clear()
    decoder = twin.get_decoder()
    for name, module in list(decoder.named_modules()):
        if type(module) is nn.Linear and _fits(module):
            codes = quantize(module.weight, BITS[kind])
            decoder.set_submodule(name, CodedLinear(codes, module.bias))
    return twin


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % UNIT == 0


def copy_bytes(network: PreTrainedModel, kind: str) -> int:
    """Bytes that :func:`cheaper_copy` takes beside the model, by the shapes of its weights."""
    layers = [
        layer
        for layer in network.get_decoder().modules()
        if isinstance(layer, nn.Linear) and _fits(layer)
    ]
    factors = 2 * torch.float16.itemsize
    return sum(
        layer.weight.numel() * BITS[kind] // 8 + layer.weight.numel() // BLOCK * factors
        for layer in layers
    )
