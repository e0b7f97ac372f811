"""One step of a training: micro-batches, their gradients together, the optimizers, the rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tswift.models.base_heads import Heads
from tswift.models.target import Target
from tswift.training.loss import TEXT, Tally, foresee

_RISING = 0.25  # most of a training in which the rate rises: table 9's 50 steps of 200


def adamw(heads: Heads, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """The paper's optimizer (table 9)."""
    return [torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=decay)]


def muon(heads: Heads, matrix_rate: float, other_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms: what the bundled heads were trained with."""
    matrices = [weight for weight in heads.parameters() if weight.ndim == 2]
    others = [weight for weight in heads.parameters() if weight.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=other_rate, weight_decay=0.0),
    ]


def rate(step: int, share: float, warmup: int) -> float:
    """Factor of the learning rates: a linear rise, under half a cosine.

    Args:
        step: from 0.
        share: of the training that is done.
        warmup: steps of the rise, which ends after a quarter of the training at the latest.
    """
    risen = max((step + 1) / warmup if warmup else 1.0, share / _RISING)
    return min(1.0, risen) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


class Trainer(ABC):
    """Something in training.

    Args:
        module: trained in place.
        optimizers: over its weights; their rates are the highest ones.
        name: what its weights are called in checkpoints.
        wrapped: the module wrapped by PyTorch, where several processes train it together.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        name: str,
        wrapped: DistributedDataParallel | None,
    ) -> None:
        module.train().requires_grad_(True)
        self._module, self._optimizers, self._name, self._wrapped = module, optimizers, name, wrapped
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def learn(self, ids: Tensor, positions: Tensor | None = None, of: int = 1, last: bool = True) -> Tally:
        """Add the gradient of a micro-batch.

        Args:
            ids: ``[B, T]`` int64 token ids.
            positions: ``[B, T]`` int64; None for 0, 1, ...
            of: how many micro-batches make a step.
            last: whether this is the step's last one, after which processes sum up their gradients.
        """
        alone = self._wrapped.no_sync() if self._wrapped is not None and not last else nullcontext()
        with alone:
            return self._backward(ids, positions, 1 / of)

    @abstractmethod
    def _backward(self, ids: Tensor, positions: Tensor | None, share: float) -> Tally:
        """Add the gradient of a micro-batch's mean loss, times a share."""

    def update(self, factor: float) -> None:
        """Let the optimizers step, at this share of their rates."""
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, highest in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = highest * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All that training goes on from: weights and what the optimizers remember of them."""
        found = {f"{self._name}.{name}": value for name, value in self._weights().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, memory in optimizer.state_dict()["state"].items():
                found |= {f"optimizer.{number}.{index}.{name}": value for name, value in memory.items()}
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from there.

        Raises:
            KeyError, RuntimeError, ValueError: they are not those of such a module.
        """
        weights = _under(self._name, tensors)
        lacking = self._weights().keys() ^ weights.keys()
        if lacking:
            raise KeyError(*lacking)
        self._module.load_state_dict(weights, strict=False)  # of weights that are tied, one name is kept
        for number, optimizer in enumerate(self._optimizers):
            memories: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimizer.{number}", tensors).items():
                index, _, what = name.partition(".")
                memories.setdefault(int(index), {})[what] = value
            optimizer.load_state_dict({"state": memories, "param_groups": optimizer.state_dict()["param_groups"]})

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._module.named_parameters()}


class HeadTrainer(Trainer):
    """Heads in training.

    Args:
        target: the frozen model.
        heads: trained in place; in float32 where the model is in bfloat16.
        optimizers: over the heads' weights; their rates are the highest ones.
        objective: ``text`` or ``distill``.
        wrapped: the heads wrapped by PyTorch, where several processes train them together.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads,
        optimizers: Sequence[torch.optim.Optimizer],
        objective: str = TEXT,
        wrapped: DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(heads, optimizers, "heads", wrapped)
        self.heads, self._target, self._objective = heads, target, objective

    def _backward(self, ids: Tensor, positions: Tensor | None, share: float) -> Tally:
        run = self._wrapped
        return foresee(self._target, self.heads, ids, self._objective, positions=positions, share=share, run=run)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
