"""Passes that PyTorch makes, layer after layer: the runner that every model can have.

A target's runner is chosen when a model is loaded: this one, that of replayed passes
(``forward/cuda/runner.py``) by the attention that it is wrapped with, or that of a C program
(``forward/cpu/runner.py``) where ``forward/adapting.py`` finds that it gives the same logits. It is
exchanged where weights or the cache's dtype change. The others are this one wherever they have
nothing better for a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.caches import KVBuffer
from tswift.forward.passes import Forwarded, Nodes, T

if TYPE_CHECKING:
    from tswift.forward.cpu.program import PassProgram
    from tswift.forward.cuda.graphs import StaticPass
    from tswift.forward.target import Target


class EagerRunner:
    """Makes a target's passes by PyTorch.

    Attributes:
        replays: whether passes over a full cache can be replayed while the text grows.
        passes: those that are prepared, by their cache.
        program: the C program that makes passes; None where PyTorch does.
    """

    replays: bool = False
    passes: Mapping[KVBuffer, Sequence[StaticPass]] = {}
    program: PassProgram | None = None

    def __init__(self, target: Target) -> None:
        self._target = weakref.ref(target)  # one that nobody has any more is free to go at once

    def __deepcopy__(self, memo: dict[int, Target]) -> EagerRunner:
        return type(self)(memo[id(self.target)])  # a copied target's

    @property
    def exact_rows(self) -> int | None:
        """Most nodes of passes whose rows are exact by themselves;
        None where they have to be padded to one width.
        """
        return None

    @property
    def target(self) -> Target:
        """Whose passes it makes."""
        target = self._target()
        assert target is not None
        return target

    def takes(self, kv: KVBuffer, nodes: int, chain: bool = False) -> bool:
        """Whether a pass over so many nodes, a tree's or a chain's, is one call for all layers."""
        return False

    def prepare(self, kv: KVBuffer, limit: int) -> None:
        """Prepare passes of up to ``limit`` nodes over a cache, where they can be replayed."""

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """A program over tensors that stay in place, as one launch where that is possible."""
        return run

    def renew(self) -> None:
        """Follow weights that have been changed."""

    def rebuilt(self) -> EagerRunner:
        """The runner for caches of the dtype that the target has now."""
        return self

    def forward(self, nodes: Nodes) -> Forwarded:
        """As :meth:`~tswift.forward.target.Target.forward`."""
        return self.target.forward_eager(nodes, self.target.fixed_rows)

    def verify(self, nodes: Nodes, draw: Callable[..., T]) -> tuple[Forwarded, Tensor, T] | None:
        """As :meth:`~tswift.forward.target.Target.verify`."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` logits of hidden states ``[n, H]``, in passes of the fixed width if any."""
        width, output = self.target.fixed_rows, self.target.output
        if width is None:
            return output(hidden)
        parts = hidden.split(width)
        if len(parts[-1]) < width and self.exact_rows is None:
            parts = (*parts[:-1], F.pad(parts[-1], (0, 0, 0, width - len(parts[-1]))))
        logits = [output(part) for part in parts]
        logits[-1] = logits[-1][: len(hidden) - (len(parts) - 1) * width]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def open_logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits for a draft or a loss; gradients flow back."""
        return self.target.output(hidden)
