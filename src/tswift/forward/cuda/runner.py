"""Passes that are replayed: captured once a size, over a cache whose length the device knows."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from tswift.caches import KVBuffer
from tswift.forward.cuda.fused_layers import rows_stand_alone
from tswift.forward.cuda.graphs import Graphs, StaticPass, sizes
from tswift.forward.eager import EagerRunner, WrappedModel
from tswift.forward.passes import Forwarded, Nodes, T
from tswift.forward.recurrent import device_kernel


class ReplayedRunner(EagerRunner):
    """Replays a target's passes over prepared caches, as CUDA graphs on CUDA.

    Attributes:
        passes: those that are prepared, by their cache.
        graphs: what the graphs of the model share; None before the first, and without CUDA.
    """

    def __init__(self, target: WrappedModel) -> None:
        super().__init__(target)
        self.passes: WeakKeyDictionary[KVBuffer, list[StaticPass]] = WeakKeyDictionary()
        self.graphs: Graphs | None = None

    @property
    def replays(self) -> bool:  # type: ignore[override]
        """As :attr:`EagerRunner.replays`."""
        target = self.target
        states = target.kv_shape.states
        kernel = states is None or device_kernel(states.device, states.wide) is not None
        return target.serves() and "steps" not in target.fallbacks and kernel

    @property
    def exact_rows(self) -> int | None:
        """As :attr:`EagerRunner.exact_rows`: where kernels make all products of codes."""
        target = self.target
        return target.fixed_rows if rows_stand_alone(target.model) else None

    def prepare(self, kv: KVBuffer, limit: int) -> None:
        """On CUDA there is a graph for each of a few sizes; elsewhere a static pass is run like any
        other. There must always be room for ``limit`` nodes after the cache's length.
        """
        target = self.target
        if kv not in self.passes and self.replays and target.serves(kv):
            self.passes[kv] = [
                StaticPass(target.compute_static, self.capture, kv, size) for size in sizes(limit)
            ]

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """As :meth:`EagerRunner.capture`: as one CUDA graph."""
        target = self.target
        if self.graphs is None:
            if not target.on_cuda:
                return run
            self.graphs = Graphs(target.device)
        captured = self.graphs.capture(run)
        target.fallbacks.note("graphs", self.graphs.failure)
        return captured

    def forward(self, nodes: Nodes) -> Forwarded:
        """As :meth:`EagerRunner.forward`."""
        passes = self.passes.get(nodes.kv, ())
        for static in passes:
            if static.nodes >= len(nodes):
                for each in passes:  # all at once: a later capture would count as a slow step
                    each.capture(nodes.kv.length)
                return static(nodes)
        return super().forward(nodes)
