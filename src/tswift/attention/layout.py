"""The interface of attention backends: the model's head layout, what a layer asks for, and one pass."""

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
    """A model's KV heads, query heads per KV head, and dtype and device of queries, keys and values."""

    kv_heads: int
    groups: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention has beside softmax over scaled products; all None for nothing.

    Attributes:
        window: number of tokens that a node sees, itself included; None for all.
        softcap: scores are squeezed to between minus and plus this by a hyperbolic tangent.
        sinks: ``[query heads]`` scores that take part in the softmax and stand for no key.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __bool__(self) -> bool:
        return self.window is not None or self.softcap is not None or self.sinks is not None


class Attention(Protocol):
    """Attention of one pass; what its layers share is computed once, when it is made.

    Args:
        layout: the model's.
        prefix: number of keys before the pass's own; every node attends to those.
        nodes: number of nodes.
        ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself; None where every
            node descends from all before it.

    Attributes:
        STATIC: whether ``prefix`` may be a tensor on the device, ``[]`` int32, with keys and values ``[kv heads,
            capacity, d]``, so that a pass can be replayed while the text grows.
        WANTS: whether a call also takes an :class:`AttentionSpec`, ``wants``, over a cache whose slots are positions.
        MOST_NODES: most nodes of a tree; None for no limit.
        EXACT: whether a node's row has the same bits whatever other nodes are in the pass, wherever it stands among
            them, and whether its ancestors are drafted or committed; in passes of up to :data:`MOST_WIDTH` nodes over a
            cache whose slots are positions.
    """

    STATIC: ClassVar[bool] = False
    WANTS: ClassVar[bool] = False
    MOST_NODES: ClassVar[int | None] = None
    EXACT: ClassVar[bool] = False

    def __init__(self, layout: Layout, prefix: int | Tensor, nodes: int, ancestors: Tensor | None) -> None: ...

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attend: ``[query heads, n, d]`` from a query of that shape, rotated.

        Keys, rotated, and values are ``[kv heads, prefix + n, d]``, the last n the nodes' own; ``scale`` is the factor
        of the scores.
        """
        ...


class StaticAttention(Attention, Protocol):
    """One that is ``STATIC``."""

    @staticmethod
    def store(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
        """Write new keys and values ``[kv heads, n, d]`` into ``[kv heads, capacity, d]`` from ``length`` on."""
        ...


def bias(layout: Layout, before: int, nodes: int, ancestors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The mask added to scores: ``[n, before + n]``, 0 where a node attends and ``-inf`` where it does not.

    Every node attends to the ``before`` keys; ``ancestors`` are as for :class:`Attention`.
    """
    out = torch.zeros(nodes, before + nodes, dtype=dtype, device=layout.device)
    if ancestors is None:
        ancestors = torch.ones(nodes, nodes, dtype=torch.bool, device=layout.device).tril_()
    out[:, before:].masked_fill_(~ancestors, -torch.inf)
    return out
