"""Passes that a C program makes on a CPU: one call for all layers, and for what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tswift.caches import KVBuffer
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.program import PassProgram
from tswift.forward.eager import EagerRunner, WrappedModel
from tswift.forward.passes import PROMPT_CHUNK, Forwarded, Nodes, T, rows_of
from tswift.native_build import Unbuilt


class CompiledRunner(EagerRunner):
    """Makes a target's passes by a C program over caches in their dtype.

    Attributes:
        program: that function, and what it reads.

    Raises:
        Unfit: there is none for the model.
        Unbuilt: there is none here.
    """

    program: PassProgram

    def __init__(self, target: WrappedModel) -> None:
        super().__init__(target)
        self.program = PassProgram(target.model, target.kv_shape.dtype, target.layer_specs)

    @property
    def exact_rows(self) -> int | None:
        """As :attr:`EagerRunner.exact_rows`."""
        return self.program.most_nodes

    def takes(self, kv: KVBuffer, nodes: int, chain: bool = False) -> bool:
        """As :meth:`EagerRunner.takes`."""
        return self.program.takes(kv, nodes, chain)

    def renew(self) -> None:
        """Pack weights that have been changed anew."""
        target = self.target
        if not self.program.outdated(target.model):
            return
        try:
            target.runner = CompiledRunner(target)
        except Unfit:
            # rows that PyTorch computes have not been found to be exact
            target.runner, target.fixed_rows = EagerRunner(target), None

    def rebuilt(self) -> EagerRunner:
        """As :meth:`EagerRunner.rebuilt`; PyTorch makes passes where that cannot be built."""
        try:
            return CompiledRunner(self.target)
        except Unbuilt:
            return EagerRunner(self.target)

    def forward(self, nodes: Nodes) -> Forwarded:
        """As :meth:`EagerRunner.forward`."""
        target, chain = self.target, nodes.ancestors is None
        if not self.program.takes(nodes.kv, len(nodes), chain):
            return super().forward(nodes)
        if not chain:
            rows_of(target.fixed_rows, nodes.kv, len(nodes))
        return self.program([nodes], target.has_pre_norm, target.tapped)[0]

    @property
    def most_rows(self) -> int | None:
        """As :attr:`EagerRunner.most_rows`."""
        return PROMPT_CHUNK

    def joins(self, nodes: Nodes) -> bool:
        """As :meth:`EagerRunner.joins`."""
        return self.program.takes(nodes.kv, len(nodes))

    def forward_together(self, texts: Sequence[Nodes]) -> list[Forwarded]:
        """As :meth:`EagerRunner.forward_together`."""
        target = self.target
        return self.program(texts, target.has_pre_norm, target.tapped)

    def verify(self, nodes: Nodes, draw: Callable[..., T]) -> tuple[Forwarded, Tensor, T] | None:
        """As :meth:`EagerRunner.verify`."""
        target = self.target
        if not self.program.takes(nodes.kv, len(nodes)):
            return None
        rows_of(target.fixed_rows, nodes.kv, len(nodes))
        return self.program.verify(draw, nodes, target.has_pre_norm, target.tapped)

    def logits(self, hidden: Tensor) -> Tensor:
        """As :meth:`EagerRunner.logits`."""
        return self.program.lm_head(hidden)

    def open_logits(self, hidden: Tensor) -> Tensor:
        """As :meth:`EagerRunner.open_logits`."""
        learns = hidden.requires_grad and torch.is_grad_enabled()
        return self.target.output(hidden) if learns else self.program.lm_head(hidden)
