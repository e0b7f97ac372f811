"""What every KV cache is: two preallocated tensors, a length, and scratch slots after it for the pass at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What one token's keys and values take: layers, KV heads, head size, and how they are stored.

    Attributes:
        placed: whether a cache that mixes tokens has to know where in the text they are.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    placed: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def allocate(self, capacity: int) -> Tensor:
        """Uninitialised ``[layers, heads, capacity, head_dim]``."""
        return torch.empty(self.layers, self.heads, capacity, self.head_dim, dtype=self.dtype, device=self.device)


class KVBuffer:
    """Preallocated keys and values, and how many of them count.

    Args:
        shape: what one token takes.
        capacity: slots, scratch included.

    Attributes:
        length: tokens held. Slots from there on are scratch: to roll back is not to count them.
        keys, values: ``[layers, heads, capacity, head_dim]``; keys are rotated.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        self.shape, self.capacity, self.length = shape, capacity, 0
        self.keys, self.values = shape.allocate(capacity), shape.allocate(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes

    def places(self, layer: int) -> Tensor:
        """``[heads or 1, length]`` positions in the text of the tokens held."""
        raise NotImplementedError

    def before(self, window: int) -> int:
        """How many slots at the beginning hold tokens that no coming one has in its window of so many tokens."""
        raise NotImplementedError

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a pass's keys and values ``[heads, n, head_dim]`` into the scratch slots.

        Returns:
            Views ``[heads, length + n, head_dim]`` of the layer's keys and values.
        """
        end = self.length + keys.shape[1]
        self.keys[layer, :, self.length : end] = keys
        self.values[layer, :, self.length : end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def commit(self, slots: Sequence[int]) -> None:
        """Keep the drafted tokens in these scratch slots, counted from ``length``, in this order."""
        count = len(slots)
        if list(slots) != list(range(count)):
            chosen = torch.tensor(slots).to(self.keys.device, non_blocking=True) + self.length
            for buffer in (self.keys, self.values):
                buffer[:, :, self.length : self.length + count] = buffer.index_select(2, chosen)
        self.advance(count)

    def advance(self, count: int) -> None:
        """Keep the first ``count`` scratch slots."""
        self.length += count
