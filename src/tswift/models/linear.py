"""Large linear layers on the CPU by oneDNN, which multiplies a few rows faster than PyTorch's default there.

A decode pass has one row, or as many as a draft tree has nodes. Measured on an AMD EPYC with two threads, 256 to 1,024
features in float32: one row 43 us instead of 139, eight rows 54 instead of 255 (162 without a copy of the weights in
the order that oneDNN wants for a few rows). Small layers are better off without.

Processors without instructions for bfloat16 or float16 multiply in float32 whatever they are given, and convert the
weights in every call: 16 rows, 256 to 1,024 features in bfloat16, took 172 us on an Intel Xeon, and 50 with weights
converted once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_LEAST = {4: 1 << 17, 2: 1 << 14}  # weights of a layer, by bytes of one; below, the call costs more than it saves
_ROWS = 8  # that weights are put in order for
_FLOAT = torch.float32.itemsize
_MOST_COPIED = 1 << 30  # bytes of a network's weights; above, memory is worth more than time


class OneDNNLinear(nn.Linear):
    """A linear layer whose weights are frozen, and may be held a second time: in float32, in oneDNN's own order."""

    ordered: Tensor | None  # not of the layer's state
    added: Tensor | None  # the bias in float32

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        learns = torch.is_grad_enabled() and input.requires_grad  # the operator below has no gradient
        alone = input.numel() == self.in_features and input.dtype != torch.float32  # one row reads half the bytes so
        if learns or alone:
            return super().forward(input)
        weight = self.weight if self.ordered is None else self.ordered
        return torch.ops.mkldnn._linear_pointwise(input.float(), weight, self.added, "none", [], "").to(input.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Without the second copy: what is made of this layer may change its weights."""
        return {name: value for name, value in self.__dict__.items() if name not in OneDNNLinear.__annotations__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy in 16 bits is PyTorch's own layer again."""
        super().__setstate__(state)
        if self.weight.dtype == torch.float32:
            self.__dict__.update(ordered=None, added=self.bias)
        else:
            self.__class__ = nn.Linear  # type: ignore[assignment]


def quicken(network: nn.Module) -> None:
    """Let oneDNN compute the large linear layers of a network, where it can; the weights must stay as they are.

    Weights that are quantised, or split over ranks, are no plain tensors and are left alone. Of a network whose layers
    take up to 1 GiB in float32 the weights are copied; those in 16 bits are left alone otherwise.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return
    layers = [module for module in network.modules() if type(module) is nn.Linear and _fits(module.weight)]
    copied = sum(layer.weight.numel() for layer in layers) * _FLOAT <= _MOST_COPIED
    for layer in layers:
        if not copied and layer.weight.dtype != torch.float32:
            continue
        ordered = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().float(), _ROWS) if copied else None
        added = None if layer.bias is None else layer.bias.detach().float()
        layer.__class__ = OneDNNLinear
        layer.__dict__.update(ordered=ordered, added=added)  # past nn.Module, for which they would be buffers


def slow(network: nn.Module) -> None:
    """Make linear layers PyTorch's own again, for their weights to be changed."""
    for module in [module for module in network.modules() if type(module) is OneDNNLinear]:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        del module.__dict__["ordered"], module.__dict__["added"]


def copied(network: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the weights that :func:`quicken` would copy of a network, were it so loaded; at most."""
    if dtype not in _converted() or device.type != "cpu":
        return 0
    sizes = [layer.weight.numel() for layer in network.modules() if type(layer) is nn.Linear]
    size = sum(size for size in sizes if size >= _LEAST[dtype.itemsize]) * _FLOAT
    return size if size <= _MOST_COPIED else 0


def _converted() -> set[torch.dtype]:
    """Dtypes in which this processor multiplies in float32."""
    native = {
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported(),
        torch.float16: _has_float16(),
    }
    return {torch.float32} | {dtype for dtype, has in native.items() if not has}


def _has_float16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.dtype in _converted() and weight.device.type == "cpu"
    return plain and weight.numel() >= _LEAST[weight.dtype.itemsize]
