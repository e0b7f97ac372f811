"""A stand-in for torchao: what its weight-only configurations are told, and linear layers changed as a test wants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CONFIGS = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int4WeightOnlyConfig")


def rounded(weight: Tensor) -> Tensor:
    """``[out, in]`` as int8 has it, one scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def garbage(weight: Tensor) -> Tensor:
    """Weights that have nothing to do with those that were."""
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(weight.dtype)


def broken(weight: Tensor) -> Tensor:
    """No numbers."""
    return torch.full_like(weight, torch.nan)


def change(network: nn.Module, how: Callable[[Tensor], Tensor]) -> None:
    """Give linear layers other weights, which are tensors of their own."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(how(layer.weight.detach()), requires_grad=False)


def install(monkeypatch: pytest.MonkeyPatch, how: Callable[[Tensor], Tensor] = rounded) -> list[Any]:
    """Have it imported instead; returns the configurations that modules were quantised with."""
    given: list[Any] = []
    module = ModuleType("torchao.quantization")
    for name in CONFIGS:
        setattr(module, name, lambda name=name, **asked: (name, asked))

    def quantize_(network: nn.Module, config: Any) -> None:
        given.append(config)
        change(network, how)

    module.quantize_ = quantize_  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    return given
