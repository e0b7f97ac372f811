"""Linear layers with other weights than they had, as a test wants them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


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


def change(network: nn.Module, how: Callable[[Tensor], Tensor]):
    """Give linear layers other weights, which are tensors of their own."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(how(layer.weight.detach()), requires_grad=False)
