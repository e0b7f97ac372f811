"""Linear layers whose weights are integer codes of 4 or 8 bits, and which multiply integers.

The inputs of a layer are rounded, too: to integers of 8 or 16 bits, with a step for every row and
block. So the sum of a block's products is an exact integer, whatever its order, and the blocks are
added up in float32 in one order. A row therefore has the same bits whatever other rows are
multiplied with it, on every processor, and with any number of threads.

The product is defined by :func:`multiply`, in plain PyTorch. products.c computes the same bits much
faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tswift.caches import ask_for_huge_pages
from tswift.forward import products
from tswift.forward.products import KINDS, C
from tswift.models.codes import Codes, Packed, PackedCodes
from tswift.models.devices import give_back
from tswift.native_build import Unbuilt

INPUT_BITS = 16  # to which the inputs of linear layers are rounded
# of a rounded input, by its bits: 256 * 127 + 127 is two numbers of 8 bits, as some processors
# would multiply them
_HIGHEST = {8: 127, 16: 32639}
_LINE, _PAGE = 64, 1 << 21  # bytes of a line of the cache, and of a large page
_MOVED = 1 << 26  # bytes after which the memory that they were in is given back
_LEAST = 2.0**-100  # a block of inputs none of which is larger counts as zeros


def rounded(rows: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """Rows ``[n, inputs]`` as integers ``[n, blocks, block]`` (int64),
    and the step ``[n, blocks]`` of each block.
    """
    blocks = rows.unflatten(1, (-1, block))
    largest = blocks.abs().amax(2)
    largest = largest.where(~(largest < _LEAST), 0.0)
    # a number over a tensor would be a product with its inverse
    highest = torch.tensor(float(_HIGHEST[bits]))
    step = largest / highest
    by = torch.where(largest == 0, 0.0, highest / largest)
    return (blocks * by.unsqueeze(2)).round().to(torch.int64), step


def multiply(rows: Tensor, weight: Codes, bits: int) -> Tensor:
    """Rows ``[n, inputs]`` float32 times a matrix: ``[n, outputs]``.

    This is what products.c computes.

    Args:
        rows: the inputs.
        weight: the matrix.
        bits: to which the inputs are rounded, 8 or 16.
    """
    counts, step = rounded(rows, weight.block, bits)
    codes = weight.codes.unflatten(1, (-1, weight.block))
    total = torch.zeros(len(rows), len(codes), dtype=torch.float32)
    for index in range(codes.shape[1]):
        # float64 holds every sum of a block exactly
        exact = (counts[:, index].double() @ codes[:, index].double().T).float()
        sums = counts[:, index].sum(1).float() * step[:, index]
        total = _fused(weight.scale[:, index] * step[:, index, None], exact, total)
        total = _fused(weight.minimum[:, index], sums[:, None], total)
    return total


def _fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """``x * y + z`` of float32, rounded once.

    The product is exact in float64. The sum is rounded there to odd: what is not exact gets an odd
    last bit, so that it cannot look like a tie when it is rounded to float32.
    """
    product = x.double() * y.double()
    addend = z.double()
    total = product + addend
    back = total - addend
    lost = (product - back) + (addend - (total - back))
    bits = total.view(torch.int64)
    outwards = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost != 0) & (bits & 1 == 0) & lost.isfinite()
    return torch.where(inexact, bits + outwards, bits).view(torch.float64).float()


def packed_structure(packed: Packed) -> Any:
    """A new structure that says to products.c what lies where."""
    return C.Linear(
        weight=packed.bytes.data_ptr(),
        inputs=packed.inputs,
        outputs=packed.outputs,
        kind=KINDS[packed.kind],
        bits=packed.bits,
        block=packed.block,
        centre=packed.centre,
    )


class IntegerLinear(nn.Module):
    """A linear layer of codes. Inputs are float32.

    Args:
        codes: the weights.
        bias: ``[outputs]`` float32, or None.
        input_bits: to which its inputs are rounded, 8 or 16.
    """

    def __init__(
        self, codes: Codes | PackedCodes, bias: Tensor | None = None, input_bits: int = INPUT_BITS
    ) -> None:
        super().__init__()
        self.packed = PackedCodes(codes) if isinstance(codes, Codes) else codes
        self.out_features = self.packed.outputs
        self.in_features = self.packed.inputs
        self.input_bits = input_bits
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)
        )

    def codes(self) -> Codes:
        """The weights' codes."""
        return self.packed.codes()

    @property
    def c(self) -> Any:
        """The layer as products.c has it."""
        c = packed_structure(self.packed)
        c.bias = 0 if self.bias is None else self.bias.data_ptr()
        c.input_bits = self.input_bits
        return c

    def forward(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` float32 to ``[..., outputs]``."""
        if input.requires_grad and torch.is_grad_enabled():
            return nn.functional.linear(input, self.codes().dequantized(), self.bias)
        try:
            return products.multiply(self.c, input.float())
        except Unbuilt:
            out = multiply(
                input.reshape(-1, self.in_features).float(), self.codes(), self.input_bits
            )
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bits={self.packed.bits}"
        )


class PackedEmbedding(nn.Module):
    """Embeddings of packed weights, of which rows are made float32 when they are looked up.

    Args:
        packed: as of a linear layer (a tied LM head), a row for every token.
        scale: a factor of all.
    """

    def __init__(self, packed: Packed, scale: float = 1.0) -> None:
        super().__init__()
        self.packed = packed
        self.num_embeddings = self.packed.outputs
        self.embedding_dim = self.packed.inputs
        self.scalar_embed_scale = scale

    @property
    def c(self) -> Any:
        """The embeddings as products.c has them, but for the scale."""
        return packed_structure(self.packed)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., H]`` float32 of tokens ``[...]``."""
        return self.packed.rows(tokens) * self.scalar_embed_scale


def holds_codes(network: nn.Module) -> bool:
    """Whether any matrix of a network is codes."""
    return any(isinstance(module, PackedCodes) for module in network.modules())


def lay_together(network: nn.Module) -> None:
    """Move all packed weights of a network into one piece of memory, in the layers' order,
    unless several are in one.

    It has pages of 2 MiB, which most matrices are too small for: with those of 4 KiB they were read
    at 32 GB/s instead of 43, on an AMD EPYC.
    """
    packed = [module for module in network.modules() if isinstance(module, Packed)]
    if len(packed) != 1 and len({each.bytes.untyped_storage().data_ptr() for each in packed}) < 2:
        return
    sizes = [-(-each.bytes.nbytes // _LINE) * _LINE for each in packed]
    whole = torch.empty(sum(sizes) + _PAGE, dtype=torch.uint8)
    ask_for_huge_pages(whole)
    whole = whole[-whole.data_ptr() % _LINE :]
    moved = 0
    for each, piece in zip(packed, whole.split([*sizes, len(whole) - sum(sizes)]), strict=False):
        own = piece[: each.bytes.nbytes].view(each.bytes.shape)
        each.bytes = own.copy_(each.bytes)
        moved += len(piece)
        if moved >= _MOVED:  # or all weights would be in memory twice
            give_back()
            moved = 0


@contextmanager
def finely_rounded(network: nn.Module) -> Iterator[None]:
    """Have a network round inputs to 16 bits for a while,
    so that two ways to compute it can be compared.

    Rounding to 8 bits makes large differences of the smallest ones.
    """
    layers = [module for module in network.modules() if isinstance(module, IntegerLinear)]
    bits = [layer.input_bits for layer in layers]
    for layer in layers:
        layer.input_bits = 16
    try:
        yield
    finally:
        for layer, own in zip(layers, bits, strict=True):
            layer.input_bits = own
