"""A pass in progress, its result, and how many rows it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.caches import FullKV, KVBuffer
from tswift.forward.recurrent import StatePass

T = TypeVar("T")
# of a layer: its attention, and whether a query may have more rows than there are nodes
Attend = tuple[Callable[..., Tensor], bool]
Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Nodes:
    """A draft tree, or a chain, that is forwarded in one pass over a text.

    Attributes:
        tokens, positions: ``[n]`` int64.
        kv: the cache of the text before them; their own keys and values go to its scratch slots,
            and nothing is committed.
        ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row
            itself; None where every node descends from all before it.
    """

    tokens: Tensor
    positions: Tensor
    kv: KVBuffer
    ancestors: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Pass:
    """A pass in progress."""

    # puts a layer's new keys and values ``[kv heads, n, d]`` into the cache; returns what to attend
    # to
    write: Write
    attends: Sequence[Attend]  # by layer
    nodes: int
    # number that it is padded to; nothing attends to the padding, and nothing of it is kept
    rows: int
    # the cache and its length on the device, if a kernel may write keys and values there itself
    slots: tuple[KVBuffer, Tensor] | None = None
    # whether a row is to have the bits of a narrow pass, however many there are
    batch_invariant: bool = False
    states: Sequence[StatePass] = ()  # of recurrent layers, if there are any
    # the last fused layer's output, and its rows' squares as kernels add them up
    squares: tuple[Tensor, Tensor] | None = None
    # of the layers so far, ``[query heads, n, d]``, rotated
    queries: list[Tensor] = field(default_factory=list)

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of one layer after the other: from a rotated query to a result of its shape
        ``[heads, rows, d]``.

        ``key`` and ``value`` ``[kv heads, rows, d]`` are the nodes' own; ``scale`` is a factor of
        the scores.
        """
        keys, values = self.write(index, key[:, : self.nodes], value[:, : self.nodes])
        return self.attended(index, query, keys, values, scale)

    def attended(
        self, index: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """As :meth:`layer`, when the cache, which ``keys`` and ``values`` are of, has the nodes'
        own already.

        What the rows of the padding come to may be anything.
        """
        self.queries.append(query[:, : self.nodes])
        attend, padded = self.attends[index]
        out = attend(query if padded else query[:, : self.nodes], keys, values, scale)
        missing = self.rows - out.shape[1]
        return F.pad(out, (0, 0, 0, missing)) if missing else out


class PassTogether:
    """A pass of several texts, each of which attends to a cache of its own.

    Args:
        parts: their own, of neighbouring rows; the padding is the last one's.
    """

    def __init__(self, parts: Sequence[Pass]) -> None:
        self.parts = parts
        self._ends = [*accumulate(part.rows for part in parts)]
        self.rows = self._ends[-1]
        self.nodes = sum(part.nodes for part in parts)
        self.states = [states for part in parts for states in part.states]
        self.queries = parts[0].queries  # as many as there were layers

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As :meth:`Pass.layer`."""
        found = []
        for part, end in zip(self.parts, self._ends, strict=True):
            own = slice(end - part.rows, end)
            found.append(part.layer(index, query[:, own], key[:, own], value[:, own], scale))
        return torch.cat(found, 1)


@dataclass(frozen=True)
class Forwarded:
    """Result of a pass."""

    hidden: Tensor  # ``[n, H]`` last hidden states, after the final norm
    # per layer ``[query heads, >= n, head_dim]``, rotated; good until the next prepared pass over
    # any cache
    queries: list[Tensor]
    # ``[n, H]``, before the final norm; None unless the target has a hook for it
    pre_norm: Tensor | None = None
    # ``[n, M * H]``, after M of its layers; None unless it has hooks for them
    layer_states: Tensor | None = None
    # ``[rows, H]``: ``hidden``, and behind it what the pass was padded with; None where there is no
    # such tensor
    padded: Tensor | None = None

    def queries_of(self, nodes: Sequence[int]) -> list[Tensor]:
        """``[query heads, len(nodes), head_dim]`` of some nodes, for each layer."""
        if list(nodes) == list(range(nodes[0], nodes[-1] + 1)):  # no copy of an index to the device
            return [query[:, nodes[0] : nodes[-1] + 1] for query in self.queries]
        chosen = torch.tensor(nodes).to(self.hidden.device, non_blocking=True)
        return [query.index_select(1, chosen) for query in self.queries]


PROMPT_CHUNK = 512  # prompt tokens forwarded at a time, as a chain


def rows_of(width: int | None, kv: KVBuffer, nodes: int) -> int:
    """Rows of a pass: the fixed width for one over the text, if there is one; drafts need none."""
    if width is None or not isinstance(kv, FullKV):
        return nodes
    if nodes > width:
        raise ValueError(f"a pass of {nodes} nodes does not fit in {width} rows")
    return width
