"""Weights of fewer bits: what a checkpoint says of its own, and what torchao makes of others while they are loaded."""

from __future__ import annotations

from typing import Any

import torch

from tswift.errors import InputError

OPTION = "--quantize"
KINDS = ("int8", "fp8", "int4")
_GROUP = 128  # weights of a row that share a scale, in int4


def own_quantization(config: Any) -> str | None:
    """By what method a checkpoint's weights are quantised already; None if they are not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method))


def quantizer(kind: str, config: Any, place: torch.device, dtype: torch.dtype) -> Any:
    """What ``from_pretrained`` has to be told to quantise the weights of linear layers, all but the LM head's.

    Args:
        kind: one of ``KINDS``.
        config: the model's.
        place: where it will run.
        dtype: what it will compute in.

    Raises:
        InputError: no such kind, none for this model, device or dtype, or torchao is not installed.
    """
    if kind not in KINDS:
        raise InputError(f"no {kind!r}; there are {', '.join(KINDS)}", OPTION)
    own = own_quantization(config)
    if own is not None:
        raise InputError(f"the model's weights are quantised already ({own})", OPTION)
    if dtype == torch.float64:
        raise InputError("works in float32, bfloat16 and float16, not in float64", OPTION)
    if kind == "int4" and (place.type != "cuda" or dtype != torch.bfloat16):
        raise InputError("int4 needs a CUDA device and bfloat16", OPTION)
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError:
        raise InputError("needs torchao: pip install 'tswift[quantize]'", OPTION) from None
    from transformers import TorchAoConfig

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "fp8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    # the layout of PyTorch's own product; torchao's plain one needs a library more
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=_GROUP, int4_packing_format="tile_packed_to_4d"))
