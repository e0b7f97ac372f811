"""Processes that torchrun starts together ("ranks"): how they connect, agree, and fail together.

To decode, each rank holds a part of the model; transformers makes the collectives of its passes. To
train, each holds the whole model, and gradients are averaged. Small things go over a group on the
CPU.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from tswift.errors import DecodeError, InputError

RANKS = "nproc_per_node"  # option of torchrun
_DECODING = timedelta(hours=2)  # large weights take long to read, and a prompt may come from a pipe
_TRAINING = timedelta(hours=12)  # one process tokenises and evaluates while the others wait
_REPORTED, _LEFT = "tswift/reported", "tswift/left"
_CPU = torch.device("cpu")
_T = TypeVar("_T")


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
    store: Any = None  # key-value store of torchrun

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def share(self, value: _T) -> _T:
        """Rank 0's value, on all ranks."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box, src=0, group=self.group, device=_CPU)
        return box[0]

    def gather(self, *numbers: int) -> list[list[int]]:
        """These integers of all ranks, by rank."""
        mine = torch.tensor(numbers)
        gathered = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(gathered, mine, group=self.group)
        return [theirs.tolist() for theirs in gathered]

    def highest(self, *values: float) -> tuple[float, ...]:
        """The highest of each value over all ranks, so that all decide alike."""
        shared = torch.tensor(values, dtype=torch.float64)
        with guard():
            if self.count > 1:
                dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return tuple(shared.tolist())

    def total(self, *tensors: Tensor) -> None:
        """Sum tensors over all ranks, in place."""
        with guard():
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
    def fail_together(self) -> Iterator[None]:
        """If one rank fails inside, for example for lack of memory, all ranks raise an error.

        Raises:
            InputError: as on the first rank that failed.
            DecodeError: likewise.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        errors: list[object] = [None] * self.count
        if self.count > 1:
            # an error of input is told by its message and field, others by their words
            mine: object = None if own is None else str(own)
            if isinstance(own, InputError):
                mine = (own.message, own.field)
            dist.all_gather_object(errors, mine, group=self.group)
        if own is not None:
            raise own
        for rank, theirs in enumerate(errors):
            if theirs is not None:
                raise (
                    InputError(*theirs)
                    if isinstance(theirs, tuple)
                    else DecodeError(f"rank {rank}: {theirs}")
                )

    def report(self) -> None:
        """Let the others know that this rank prints what went wrong."""
        self.store.set(_REPORTED, "yes")

    def reported(self, seconds: float = 2.0) -> bool:
        """Whether rank 0 prints what went wrong; waits a few seconds to know."""
        until = time.monotonic() + seconds
        try:
            while not self.store.check([_REPORTED]):
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)
        except RuntimeError:  # nobody keeps the store any more
            return True
        return True

    def disconnect(self) -> None:
        """Disconnect after success; rank 0 may have found nothing to do while the others still
        wait.
        """
        if self.first:
            self.store.set(_LEFT, "yes")
        dist.destroy_process_group()

    def left(self) -> bool:
        """Whether rank 0 has left after success."""
        try:
            return bool(self.store.check([_LEFT]))
        except RuntimeError:
            return False


ALONE = Dist()


@contextmanager
def guard() -> Iterator[None]:
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


def join(device: str = "auto", timeout: timedelta = _DECODING) -> Dist:
    """Connect to the other processes that torchrun has started.

    Args:
        device: ``cpu``, ``cuda`` (one for each rank), or ``auto``: CUDA where there is one.
        timeout: how long a rank waits for the others.

    Raises:
        InputError: the ranks cannot have such devices.
        Gone: they cannot connect.
    """
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
            timeout=timeout,
            device_id=own if cuda else None,
        )
        return Dist(rank, count, own, dist.new_group(backend="gloo", timeout=timeout), store)
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Gone(f"the {count} ranks cannot connect to each other ({reason})") from None


@contextmanager
def open_ranks(device: str) -> Iterator[Dist]:
    """The processes of a training, connected as long as the context lasts;
    a single one without torchrun.

    Raises:
        InputError, Gone: as :func:`join`.
    """
    if find_ranks()[1] == 1:
        yield ALONE
        return
    ranks = join(device, _TRAINING)
    try:
        yield ranks
    finally:
        gc.collect()
        dist.destroy_process_group()


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
            f"PyTorch finds {available} CUDA devices here, {beside} ranks need one each", RANKS
        )
    return torch.device(kind, local) if kind == "cuda" else _CPU
