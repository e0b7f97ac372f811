"""Several processes that train the same weights, as torchrun starts them; a single one otherwise."""

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

_TIMEOUT = timedelta(hours=12)  # one process tokenises and evaluates, the others wait; torchrun ends them if it dies


def find_ranks() -> tuple[int, int]:
    """This process's number and how many there are, from torchrun's environment variables."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@dataclass(frozen=True)
class Ranks:
    """The processes of a training: this one's index, how many there are, this one's device."""

    index: int = 0
    count: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.index == 0

    def wrap(self, module: nn.Module) -> DistributedDataParallel | None:
        """The module, wrapped so that gradients are averaged over processes; None for a single process."""
        return DistributedDataParallel(module) if self.count > 1 else None

    def highest(self, *values: float) -> tuple[float, ...]:
        """The highest of each value over all processes, so that all decide alike."""
        if self.count == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _connected():
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return tuple(shared.tolist())

    def total(self, *values: torch.Tensor) -> None:
        """Sum tensors over all processes, in place."""
        for value in values if self.count > 1 else ():
            with _connected():
                distributed.all_reduce(value)

    def wait(self) -> None:
        """Wait for all processes."""
        self.highest(0.0)


@contextmanager
def open_ranks(device: str) -> Iterator[Ranks]:
    """Connect to the other processes, if there are any; on CUDA, each has a device of its own.

    Raises:
        InputError: there are several processes, but one device is named, or there are too few.
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
    with _connected():
        distributed.init_process_group("nccl" if cuda else "gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(index, count, place)
    finally:
        gc.collect()
        distributed.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """Raise a ``Fault`` of one line if another process is gone."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise Fault(f"the processes that train together have lost each other ({reason})") from None
