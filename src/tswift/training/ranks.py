"""Processes that torchrun starts together ("ranks") to train: how they connect, and agree.

Each holds the whole model, and gradients are averaged. Small things go over a group on the CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from tswift.errors import DecodeError, InputError, reason_of

_TIMEOUT = timedelta(hours=12)  # one process tokenises and evaluates while the others wait
_CPU = torch.device("cpu")


class Gone(DecodeError):
    """Another rank has died. It said why itself, or torchrun does."""


@dataclass(frozen=True)
class Dist:
    """All ranks, as one of them sees them; a single process by default."""

    rank: int = 0  # index of this one
    count: int = 1
    # where this one computes; None for a single process, which can choose
    device: torch.device | None = None
    group: dist.ProcessGroup | None = None  # process group on the CPU, for small things

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def highest(self, *values: float) -> tuple[float, ...]:
        """The highest of each value over all ranks, so that all decide alike."""
        shared = torch.tensor(values, dtype=torch.float64)
        with _guard():
            if self.count > 1:
                dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return tuple(shared.tolist())

    def total(self, *tensors: Tensor) -> None:
        """Sum tensors over all ranks, in place."""
        with _guard():
            for tensor in tensors if self.count > 1 else ():
                dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait for all ranks."""
        self.highest(0.0)

    def wrap(self, module: nn.Module) -> DistributedDataParallel | None:
        """The module, wrapped so that gradients are averaged over ranks;
        None for a single process.
        """
        return DistributedDataParallel(module) if self.count > 1 else None


@contextmanager
def _guard() -> Iterator[None]:
    """Around collectives: turn the error that a dead rank causes into ``Gone``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise Gone("another rank is gone; it, or torchrun's report, says why") from error
        raise


def find_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks, from torchrun's environment variables."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def open_ranks(device: str) -> Iterator[Dist]:
    """The processes of a training, connected as long as the context lasts;
    a single one without torchrun.

    Args:
        device: ``cpu``, ``cuda`` (one for each rank), or ``auto``: CUDA where there is one.

    Raises:
        InputError: the ranks cannot have such devices.
        Gone: they cannot connect.
    """
    if find_ranks()[1] == 1:
        yield Dist()
        return
    ranks = _join(device)
    try:
        yield ranks
    finally:
        gc.collect()
        dist.destroy_process_group()


def _join(device: str) -> Dist:
    rank, count = find_ranks()
    own = _own_device(
        device,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    cuda = own.type == "cuda"
    if cuda:
        torch.cuda.set_device(own)
    try:
        store, rank, count = next(rendezvous("env://"))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=_TIMEOUT,
            device_id=own if cuda else None,
        )
        return Dist(rank, count, own, dist.new_group(backend="gloo", timeout=_TIMEOUT))
    except (RuntimeError, ValueError, OSError) as error:
        reason = reason_of(error)
        raise Gone(f"the {count} ranks cannot connect to each other ({reason})") from None


def _own_device(device: str, local: int, beside: int) -> torch.device:
    """The device of the rank with index ``local`` among the ``beside`` ranks of this machine."""
    available = torch.cuda.device_count()
    kind = ("cuda" if available else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise InputError(
            f"every rank has a device of its own; give auto, cpu or cuda, got {device!r}", "device"
        )
    if kind == "cuda" and max(beside, local + 1) > available:
        raise InputError(
            f"PyTorch finds {available} CUDA devices here, {beside} ranks need one each",
            "nproc_per_node",
        )
    return torch.device(kind, local) if kind == "cuda" else _CPU
