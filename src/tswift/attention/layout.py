"""What every attention backend is told: the model's head layout, and the pass at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

ROWS = 128  # of a KV head in a CUDA pass, for which reading the keys takes as long as multiplying them

# Most nodes of a pass with exact rows, and so of a path in its tree. An exact backend sums the newest keys of a node in
# the order of their positions, and a node's result must not depend on how many of these are drafted.
MOST_WIDTH = 64


@dataclass(frozen=True)
class Layout:
    """How a model's heads are laid out.

    Attributes:
        kv_heads: KV heads.
        groups: query heads per KV head.
        dtype: of queries, keys and values.
        device: where they are.
    """

    kv_heads: int
    groups: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer wants; nothing, where all is None.

    Attributes:
        window: a node sees this many tokens, itself included; None for all.
        softcap: scores are squeezed to between minus and plus this, by a hyperbolic tangent; None for not at all.
        sinks: ``[query heads]`` scores that take part in the softmax and stand for no key; None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __bool__(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


class Attention(Protocol):
    """Attention of one pass; what all its layers share is worked out once, when it is made.

    It is made from a layout, the number of keys before the pass's own (every node attends to those), the number of
    nodes, and their ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself;
    None where every node descends from all before it.

    Attributes:
        STATIC: whether it also takes the length of the prefix as a number on the device, ``[]`` int32, with keys and
            values ``[kv heads, capacity, d]``, so that a pass can be replayed while the text grows.
        WANTS: whether a call also takes what a layer wants besides, ``wants``, in a cache whose slots are positions.
        MOST_NODES: most nodes whose ancestors it can be told; None if there is no such limit.
        EXACT: whether a node's row has the same bits whatever other nodes are in the pass, wherever it stands among
            them, and whether its ancestors are drafted or committed; in passes of up to :data:`MOST_WIDTH` nodes over a
            cache whose slots are positions.
    """

    STATIC: ClassVar[bool]
    WANTS: ClassVar[bool]
    MOST_NODES: ClassVar[int | None]
    EXACT: ClassVar[bool]

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None: ...

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend.

        Args:
            query: ``[query heads, n, d]``, rotated.
            keys: ``[kv heads, prefix + n, d]``, rotated; the last n are the nodes' own.
            values: like ``keys``.
            scale: factor of the scores.

        Returns:
            ``[query heads, n, d]``.
        """
        ...


class StaticAttention(Attention, Protocol):
    """One that is ``STATIC``."""

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
        """Write new keys and values ``[kv heads, n, d]`` into ``[kv heads, capacity, d]`` from ``length`` on.

        The length, ``[]`` int32, is read on the device.
        """
        ...


def bias(layout: Layout, before: int, nodes: int, ancestors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: ``[n, before + n]``, 0 where a node attends and ``-inf`` where it does not.

    Args:
        layout: the model's.
        before: keys before the nodes' own, which every node attends to.
        nodes: how many.
        ancestors: as for :class:`Attention`.
        dtype: of the scores.
    """
    out = torch.zeros(nodes, before + nodes, dtype=dtype, device=layout.device)
    if ancestors is None:
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=layout.device).tril_()
    out[:, before:].masked_fill_(~ancestors, -torch.inf)
    return out
