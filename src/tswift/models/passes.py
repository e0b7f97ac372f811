"""Passes over the model: what the attention function needs while one is under way, and passes that can be replayed.

A GPU runs the kernels of a pass faster than a host can launch them. A static pass keeps all that it reads and writes
in place and takes the cache's length from the device, so that one CUDA graph of it serves a whole decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tswift.attention.layout import Attention, Layout, StaticAttention
from tswift.attention.special import SpecialAttention

Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

_SIZES = (1, 8, 16, 32, 48, 64, 96)


@dataclass
class Pass:
    """A pass under way.

    Attributes:
        write: puts a layer's new keys and values ``[kv heads, n, d]`` into the cache; returns what to attend to.
        attend: the attention.
        special: the attention of layers that want something; None for a model that has no such layers.
        queries: of the layers so far, ``[query heads, n, d]``, rotated.
    """

    write: Write
    attend: Attention
    special: SpecialAttention | None = None
    queries: list[Tensor] = field(default_factory=list)

    def layer(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One layer's attention.

        Args:
            index: of the layer; they come in order.
            query: ``[query heads, n, d]``, rotated.
            key, value: ``[kv heads, n, d]``, the nodes' own.
            scale: factor of the scores.

        Returns:
            ``[query heads, n, d]``.
        """
        keys, values = self.write(index, key, value)
        self.queries.append(query)
        if self.special is not None and self.special.wants[index]:
            return self.special(index, query, keys, values, scale)
        return self.attend(query, keys, values, scale)


@dataclass(frozen=True)
class Forwarded:
    """What a pass yields.

    Attributes:
        hidden: ``[n, H]`` last hidden states, after the final norm.
        queries: per layer ``[query heads, n, head_dim]``, rotated; good until the next prepared pass over any cache.
        raw: ``[n, H]``, before the final norm; None where nobody asked for it.
    """

    hidden: Tensor
    queries: list[Tensor]
    raw: Tensor | None = None

    def queries_of(self, nodes: Sequence[int]) -> Tensor:
        """``[layers, query heads, len(nodes), head_dim]`` of some nodes."""
        if list(nodes) == list(range(nodes[0], nodes[-1] + 1)):  # no copy of an index to the device
            return torch.stack([query[:, nodes[0] : nodes[-1] + 1] for query in self.queries])
        chosen = torch.tensor(nodes).to(self.hidden.device, non_blocking=True)
        return torch.stack([query.index_select(1, chosen) for query in self.queries])

    def before_norm(self, node: int) -> Tensor:
        """``[H]`` of one node, before the final norm."""
        assert self.raw is not None
        return self.raw[node]


Compute = Callable[[Tensor, Tensor, Pass], Forwarded]


def sizes(limit: int) -> list[int]:
    """The numbers of nodes for which passes are prepared, so that trees of up to ``limit`` nodes find one."""
    return [size for size in _SIZES if size < limit] + [limit]


@dataclass
class Graphs:
    """What the CUDA graphs of a model share.

    Attributes:
        device: where they run.
        pool: of their memory.
        stream: on which they are made; a library keeps memory for every stream that it has seen.
        failure: why they cannot be made here; empty as long as they can.
    """

    device: torch.device
    pool: Any
    stream: torch.cuda.Stream
    failure: str = ""

    @classmethod
    def on(cls, device: torch.device) -> Graphs:
        """For a CUDA device."""
        with torch.cuda.device(device):
            return cls(device, torch.cuda.graph_pool_handle(), torch.cuda.Stream())

    def capture(self, run: Callable[[], Forwarded]) -> Callable[[], Forwarded] | None:
        """A function as a graph that can be replayed; None where that fails, with the reason kept.

        The function is run for real first: what it writes must be nothing that is needed still.
        """
        if self.failure:
            return None
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(self.stream):
                    run()  # compiles kernels and sets up libraries, which a capture cannot
                current.wait_stream(self.stream)
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                    out = run()
            except Exception as error:  # decoding without graphs is slower, not wrong
                torch.cuda.set_stream(current)
                current.wait_stream(self.stream)
                self.failure = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                return None

        def replay() -> Forwarded:
            graph.replay()
            return out

        return replay


class StaticPass:
    """A pass over one cache for trees of up to ``nodes`` nodes; smaller ones are filled up with nodes by themselves.

    Args:
        compute: forwards ``[nodes]`` tokens at ``[nodes]`` positions.
        attention: one that reads the cache's length on the device.
        layout: the model's.
        keys, values: the cache's, ``[layers, kv heads, capacity, d]``; there is room for ``nodes`` after its length.
        nodes: how many.
        length: the cache's at present. Capturing writes to the slots behind it.
        graphs: what the model's graphs share; None where there are none, and the pass is run anew each time.
    """

    def __init__(
        self,
        compute: Compute,
        attention: type[StaticAttention],
        layout: Layout,
        keys: Tensor,
        values: Tensor,
        nodes: int,
        length: int,
        graphs: Graphs | None,
    ) -> None:
        self.nodes = nodes
        self._compute, self._attention, self._layout = compute, attention, layout
        self._keys, self._values = keys, values
        self._tokens = torch.zeros(nodes, dtype=torch.int64, device=layout.device)
        self._positions = torch.zeros_like(self._tokens)
        self._alone = torch.eye(nodes, dtype=torch.bool, device=layout.device)
        self._ancestors = self._alone.clone()
        self._length = torch.full((), length, dtype=torch.int32, device=layout.device)
        self._replay = graphs.capture(self._forward) if graphs else None

    def __call__(self, tokens: Tensor, positions: Tensor, ancestors: Tensor | None, length: int) -> Forwarded:
        """Forward a tree; arguments as for :meth:`tswift.models.target.Target.forward`, and the cache's length.

        Raises:
            ValueError: there is no room for all ``nodes`` behind the cache's length.
        """
        slots = self._keys.shape[2]
        if length + self.nodes > slots:
            raise ValueError(f"a pass of {self.nodes} nodes does not fit behind {length} of {slots} slots")
        count = len(tokens)
        self._tokens[:count].copy_(tokens)
        self._positions[:count].copy_(positions)
        self._ancestors.copy_(self._alone)
        if ancestors is None:
            self._ancestors[:count, :count].fill_(True).tril_()
        else:
            self._ancestors[:count, :count].copy_(ancestors)
        self._length.fill_(length)
        out = self._run()
        raw = None if out.raw is None else out.raw[:count].clone()
        return Forwarded(out.hidden[:count].clone(), [query[:, :count] for query in out.queries], raw)

    def _run(self) -> Forwarded:
        return self._replay() if self._replay else self._forward()  # not kept: a pass that holds itself lingers

    def _forward(self) -> Forwarded:
        attend = self._attention(self._layout, self._length, self.nodes, self._ancestors)
        return self._compute(self._tokens, self._positions, Pass(self._write, attend))

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._attention.store(self._keys[layer], self._values[layer], keys, values, self._length)
        return self._keys[layer], self._values[layer]
