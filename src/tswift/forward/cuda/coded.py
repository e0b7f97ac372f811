"""Linear layers whose weights are integer codes, on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tswift.attention.backends import HALVES
from tswift.models.codes import Codes, CodesOnDevice


def by_kernels(device: torch.device) -> bool:
    """Whether kernels multiply codes on a device, and not the C program."""
    return device.type != "cpu"


class CodedLinear(nn.Module):
    """A linear layer of codes, which a kernel of ours multiplies: a row has the same bits however
    many there are.

    Args:
        weight: on the device.
        bias: ``[out]``, or None.
    """

    def __init__(self, weight: Codes | CodesOnDevice, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = CodesOnDevice(weight) if isinstance(weight, Codes) else weight
        self.out_features, self.in_features = self.packed.outputs, self.packed.inputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, in]`` in float32, made anew."""
        return self.packed.whole()

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in bfloat16 or float16; PyTorch multiplies other dtypes,
        and what learns through it, by weights made anew.
        """
        from tswift.forward.cuda.code_kernels import CodedProduct, multiply_rows

        learns = input.requires_grad and torch.is_grad_enabled()  # the kernel has no gradient
        if learns or input.dtype not in HALVES:
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return nn.functional.linear(input, self.weight.to(input.dtype), bias)
        rows = input.reshape(-1, self.in_features)
        out = multiply_rows(rows, CodedProduct(self.packed, self.bias))
        return out.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.packed.bits} bits"
