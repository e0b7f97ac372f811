"""Quantised weights: by the checkpoint itself, by torchao while loading, or in a copy for drafting passes only."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tswift.errors import InputError
from tswift.models.linear import slow

BITS = {"int8": 8, "fp8": 8, "int4": 4}  # of a weight, by kind, without its scale
_GROUP = 128  # weights of a row that share a scale, in int4
_TILE = 1024, 8  # inputs and outputs of int4 weights are padded to multiples of these


def own_quantization(config: Any) -> str | None:
    """Name of the method by which a checkpoint's weights are quantised; None if they are not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method))


def quantizer(kind: str, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The ``quantization_config`` with which ``from_pretrained`` quantises linear layers, all but the LM head."""
    how = weight_only(kind, config, device, dtype)
    from transformers import TorchAoConfig

    return TorchAoConfig(how)


def cheaper_copy(network: PreTrainedModel, kind: str) -> PreTrainedModel:
    """A copy of a model in which the weights of the decoder's linear layers are quantised.

    It shares all else with the model, the embeddings and the LM head among them: nothing else takes memory twice.
    """
    device, dtype = network.get_input_embeddings().weight.device, network.dtype
    how = weight_only(kind, network.config, device, dtype, "draft_weights")
    from torchao.quantization import quantize_

    whole = network.get_input_embeddings(), network.get_output_embeddings()
    shared = [*network.parameters(), *network.buffers(), *whole]
    twin = deepcopy(network, {id(each): each for each in shared})
    for module in twin.modules():
        module._forward_pre_hooks.clear()  # the model's own tap
    slow(twin.get_decoder())
    quantize_(twin.get_decoder(), how)
    return twin


def copy_bytes(network: PreTrainedModel, kind: str) -> int:
    """Bytes that :func:`cheaper_copy` takes beside the model, by the shapes of its weights."""
    count = 0
    for layer in network.get_decoder().modules():
        if isinstance(layer, nn.Linear):
            rows, width = layer.weight.shape
            if kind == "int4":
                if width % _GROUP == 0:  # else torchao leaves the layer alone
                    rows, width = rows + -rows % _TILE[1], width + -width % _TILE[0]
                    count += rows * width // 2 + rows * width // _GROUP * 4
            else:
                count += rows * width + rows * 4
    return count


def weight_only(kind: str, config: Any, device: torch.device, dtype: torch.dtype, field: str = "quantize") -> Any:
    """The torchao configuration of a kind; arguments and errors as for :func:`quantizer`."""
    if kind not in BITS:
        raise InputError(f"no {kind!r}; there are {', '.join(BITS)}", field)
    own = own_quantization(config)
    if own is not None:
        raise InputError(f"the model's weights are quantised already ({own})", field)
    if dtype == torch.float64:
        raise InputError("works in float32, bfloat16 and float16, not in float64", field)
    if kind == "int4" and (device.type != "cuda" or dtype != torch.bfloat16):
        raise InputError("int4 needs a CUDA device and bfloat16", field)
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError:
        raise InputError("needs torchao: pip install 'tswift[quantize]'", field) from None
    # settings of the whole process are not torchao's to change: the model's own passes go by them
    alone = {"set_inductor_config": False}
    if kind == "int8":
        return Int8WeightOnlyConfig(**alone)
    if kind == "fp8":
        return Float8WeightOnlyConfig(**alone)
    # the layout of PyTorch's own product; torchao's plain one needs a library more
    return Int4WeightOnlyConfig(group_size=_GROUP, int4_packing_format="tile_packed_to_4d", **alone)
