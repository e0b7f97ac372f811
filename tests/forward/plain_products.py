"""The product of codes as products.c has it, in PyTorch: integers, added up exactly in a block, and
blocks added up in one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tswift.models.codes import Codes

# of a rounded input, by its bits: 256 * 127 + 127 is two numbers of 8 bits, as some processors
# would multiply them
_HIGHEST = {8: 127, 16: 32639}
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


def multiply_plainly(rows: Tensor, weight: Codes, bits: int) -> Tensor:
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
        total = fused(weight.scale[:, index] * step[:, index, None], exact, total)
        total = fused(weight.minimum[:, index], sums[:, None], total)
    return total


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
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
