"""Large linear layers on the CPU by oneDNN, which multiplies a few rows faster than PyTorch's default there.

A decode pass has one row, or as many as a draft tree has nodes. Measured on an AMD EPYC with two threads, 256 to 1,024
features in float32: one row 43 us instead of 139, eight rows 54 instead of 255 (162 without a copy of the weights in
the order that oneDNN wants for a few rows). Small layers are better off without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LEAST = 1 << 17  # weights of a layer; below, the call costs more than it saves
_ROWS = 8  # that weights are put in order for
_MOST_COPIED = 1 << 30  # bytes of a network's weights; above, memory is worth more than time


class OneDNNLinear(nn.Linear):
    """A linear layer in float32 whose weights are frozen, and may be held a second time in an order of oneDNN's own."""

    ordered: Tensor | None  # not of the layer's state

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if torch.is_grad_enabled() and input.requires_grad:  # the operator below has no gradient
            return super().forward(input)
        weight = self.weight if self.ordered is None else self.ordered
        return torch.ops.mkldnn._linear_pointwise(input, weight, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        """Without the second copy: what is made of this layer may change its weights."""
        return {**self.__dict__, "ordered": None}


def quicken(network: nn.Module) -> None:
    """Let oneDNN compute the large linear layers of a network, where it can; the weights must stay as they are.

    Weights that are quantised, or split over ranks, are no plain tensors and are left alone. Of a network whose layers
    take up to 1 GiB the weights are copied.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return
    layers = [module for module in network.modules() if type(module) is nn.Linear and _fits(module.weight)]
    copied = sum(layer.weight.nbytes for layer in layers) <= _MOST_COPIED
    for layer in layers:
        ordered = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS) if copied else None
        layer.__class__ = OneDNNLinear
        layer.__dict__["ordered"] = ordered  # past nn.Module, for which it would be a buffer


def slow(network: nn.Module) -> None:
    """Make linear layers PyTorch's own again, for their weights to be changed."""
    for module in [module for module in network.modules() if type(module) is OneDNNLinear]:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        del module.__dict__["ordered"]


def copied(network: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Weights that :func:`quicken` would copy of a network, were it in this dtype and on this device; at most."""
    if dtype != torch.float32 or device.type != "cpu":
        return 0
    sizes = [layer.weight.numel() for layer in network.modules() if type(layer) is nn.Linear]
    count = sum(size for size in sizes if size >= _LEAST)
    return count if count * dtype.itemsize <= _MOST_COPIED else 0


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.numel() >= _LEAST
