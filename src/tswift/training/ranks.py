"""Several processes that train the same weights, as torchrun starts them; a single one elsewhere."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tswift.errors import Fault, InputError

_PATIENCE = timedelta(hours=12)  # one process tokenises and evaluates, the others wait; torchrun ends them if it dies


def find_ranks() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun tells them. PyTorch is not asked."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@dataclass(frozen=True)
class Ranks:
    """The processes of a training.

    Attributes:
        index: which one this is.
        count: how many there are.
        device: this one's.
    """

    index: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.index == 0

    def wrap(self, module: nn.Module) -> DistributedDataParallel | None:
        """What is trained, so wrapped that the processes' gradients are averaged; None for a single process."""
        return DistributedDataParallel(module) if self.count > 1 else None

    def highest(self, *values: float) -> tuple[float, ...]:
        """The highest of each value over all processes, so that all decide alike."""
        if self.count == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _together():
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return tuple(shared.tolist())

    def total(self, *values: torch.Tensor) -> None:
        """Sum tensors over all processes, in place."""
        for value in values if self.count > 1 else ():
            with _together():
                distributed.all_reduce(value)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            self.highest(0.0)


@contextmanager
def open_ranks(device: str) -> Iterator[Ranks]:
    """Meet the other processes, if there are any.

    Args:
        device: as asked for. Of several processes each takes a CUDA device of its own.

    Raises:
        InputError: several processes, and one device named, or too few.
    """
    index, count = find_ranks()
    if count == 1:
        yield Ranks(device=device)
        return
    cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if ":" in device:
        raise InputError(f"{count} processes take a device each; give cpu or cuda, not {device}", "--device")
    place = f"cuda:{os.environ.get('LOCAL_RANK', index)}" if cuda else device if device != "auto" else "cpu"
    if cuda and int(place.partition(":")[2]) >= torch.cuda.device_count():
        raise InputError(f"wants one for each process; PyTorch finds {torch.cuda.device_count()} here", "--device")
    if cuda:
        torch.cuda.set_device(place)
    with _together():
        distributed.init_process_group("nccl" if cuda else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(index, count, place)
    finally:
        gc.collect()
        distributed.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    """Say in one line that another process is not there.

    Raises:
        Fault: it is not.
    """
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Fault(f"the processes that train together have lost each other ({reason})") from None
