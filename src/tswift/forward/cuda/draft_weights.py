"""A copy of a model for drafting passes whose linear layers have weights in FP8, on CUDA.

Kernels of ours multiply them by inputs in bfloat16 where they compute the layers; elsewhere
PyTorch's own scaled products do, with a scale for each row of the input and each output. What is
drafted never decides a token, so none of it has to be exact.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.errors import InputError
from tswift.models.architecture import own_quantization

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DEVICES = ("cuda",)  # tests add the CPU, which has the same products
_FP8 = torch.float8_e4m3fn
_MOST = torch.finfo(_FP8).max
# that rows, inputs and outputs of an FP8 product are padded to, or have to be multiples of
_ROWS = 16
_NONSENSE = 0.4  # of a hidden state's norm
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
        self.in_features, self.out_features = whole.in_features, whole.out_features

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
        reason = "fp8 needs a CUDA device"
    elif dtype != torch.bfloat16:
        reason = "fp8 needs a model in bfloat16"
    elif torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _NEEDED:
        reason = "fp8 needs a GPU of compute capability 8.9 or more"
    if reason:
        raise InputError(reason, "draft_weights")


@torch.no_grad()
def cheaper_copy(network: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model in which the decoder's linear layers have weights in FP8,
    where the product takes them.

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
            decoder.set_submodule(name, Float8Linear(module))
    return twin


def refuse_nonsense(states: Tensor, expected: Tensor) -> None:
    """Refuse drafting weights that may never have been multiplied on such a device before: wrong
    drafts would show in no text.

    Raises:
        InputError: hidden states are far from the whole model's.
    """
    apart = float((states.float() - expected.float()).norm() / expected.float().norm())
    if not apart < _NONSENSE:
        raise InputError(f"fp8 drafts are off by {apart:.0%} here", "draft_weights")


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _ROWS == 0 and layer.out_features % _ROWS == 0


def copy_bytes(network: PreTrainedModel) -> int:
    """Bytes that :func:`cheaper_copy` takes beside the model, by the shapes of its weights."""
    layers = [
        layer
        for layer in network.get_decoder().modules()
        if isinstance(layer, nn.Linear) and _fits(layer)
    ]
    return sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
