"""Linear layers whose weights are floats as the C products read them, held once,
in 16 bits where that is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.forward.integers import PackedEmbedding, packed_structure
from tswift.forward.products import library, multiply
from tswift.models.codes import Packed

HALVES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 22  # weights that are packed at a time


class PackedFloats(Packed):
    """A matrix of floats in blocks of outputs, see products.c.

    Args:
        weight: ``[outputs, inputs]``; where bfloat16 or float16 hold it without loss, it is kept in
            that.

    Raises:
        Unbuilt: there is no program here.
    """

    bits = block = centre = 0

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        program = library()
        self.outputs, self.inputs = weight.shape
        self._block = int(program.tswift_block())
        self._lanes = int(program.tswift_lanes())
        pieces = weight.detach().split(
            self._block * max(1, _PIECE // weight[: self._block].numel())
        )
        narrow = (
            kind
            for kind in HALVES
            if all(torch.equal(rows.to(kind).to(rows.dtype), rows) for rows in pieces)
        )
        self._kind = weight.dtype if weight.dtype in HALVES else next(narrow, torch.float32)
        # bytes, as those of a network stay what they are when its numbers are converted
        shape = -(-self.outputs // self._block), self.inputs, self._block * self.kind.itemsize
        self.register_buffer("bytes", torch.empty(shape, dtype=torch.uint8))
        at = 0
        for rows in pieces:
            packed = self._packed(rows)
            self.bytes[at : at + len(packed)] = packed
            at += len(packed)

    def _packed(self, rows: Tensor) -> Tensor:
        padded = nn.functional.pad(rows.to(self.kind), (0, 0, 0, -len(rows) % self._block))
        packed = padded.view(-1, self._block, self.inputs).transpose(1, 2)
        if self.kind == torch.bfloat16:  # the numbers of two vectors take turns
            packed = packed.unflatten(2, (-1, 2, self._lanes)).transpose(3, 4)
        return packed.contiguous().view(len(packed), self.inputs, -1).view(torch.uint8)

    @property
    def kind(self) -> torch.dtype:
        """Of the numbers."""
        return self._kind

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, ``[..., inputs]`` float32."""
        own = outputs % self._block
        if self.kind == torch.bfloat16:
            own = own % self._lanes * 2 + own // self._lanes
        return self.bytes.view(self.kind)[outputs // self._block, :, own].float()


class PackedLinear(nn.Module):
    """A linear layer of floats by the C program: frozen weights, packed. Inputs are float32.

    Args:
        weight: the matrix.
        bias: ``[outputs]``, or None.

    Raises:
        Unbuilt: there is no program here.
    """

    def __init__(self, weight: Tensor | PackedFloats, bias: Tensor | None = None) -> None:
        super().__init__()
        self.packed = weight if isinstance(weight, PackedFloats) else PackedFloats(weight)
        self.out_features = self.packed.outputs
        self.in_features = self.packed.inputs
        self.bias = (
            None
            if bias is None
            else nn.Parameter(bias.detach().float().contiguous(), requires_grad=False)
        )

    @property
    def c(self) -> Any:
        """The layer as products.c has it."""
        c = packed_structure(self.packed)
        c.bias = 0 if self.bias is None else self.bias.data_ptr()
        return c

    @property
    def weight(self) -> Tensor:
        """The weights, unpacked anew."""
        return self.packed.rows(torch.arange(self.out_features))

    def forward(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` float32 to ``[..., outputs]``."""
        if input.requires_grad and torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        return multiply(self.c, input.float())

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {self.packed.kind}"
        )


def pack(network: PreTrainedModel) -> None:
    """Hold a network's matrices once, as the C products read them;
    all other numbers become float32.

    Raises:
        Unbuilt: there is no program here.
    """
    embeddings = network.get_input_embeddings()
    lm_head = network.get_output_embeddings()
    tied = lm_head.weight is embeddings.weight
    names = [name for name, module in network.named_modules() if type(module) is nn.Linear]
    for name in names:
        layer = network.get_submodule(name)
        network.set_submodule(name, PackedLinear(layer.weight, layer.bias))
    scale = float(getattr(embeddings, "scalar_embed_scale", 1))
    packed = network.get_output_embeddings().packed if tied else PackedFloats(embeddings.weight)
    network.set_input_embeddings(PackedEmbedding(packed, scale))
    network.float()
