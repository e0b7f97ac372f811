"""Processes that hold one model together, each a part of its weights, as torchrun starts them: its ranks.

All of them do the same in step, and what they do is the first one's to say. Beside the collectives of the model's
passes, which transformers makes, there is a group on the CPU by which they tell each other small things.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tswift.errors import Fault, InputError

OPTION = "--nproc-per-node"  # of torchrun
_PATIENCE = timedelta(hours=2)  # large weights take long to read, and a prompt may come from a pipe
_SPOKE, _LEFT = "tswift/spoke", "tswift/left"
_CPU = torch.device("cpu")
_T = TypeVar("_T")


class Gone(Fault):
    """Another rank is gone. Why, it has said itself, or torchrun says."""


@dataclass(frozen=True)
class Ranks:
    """The ranks as one of them sees them; alone if nothing is said.

    Attributes:
        rank: which one this is.
        count: how many there are.
        device: where this one keeps its part; None for one that is alone, which can choose.
        group: for small things, on the CPU.
        store: what torchrun keeps for all of them.
    """

    rank: int = 0
    count: int = 1
    device: torch.device | None = None
    group: Any = None
    store: Any = None

    def share(self, thing: _T) -> _T:
        """What the first rank has."""
        if self.count == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0, group=self.group, device=_CPU)
        return box[0]

    def gather(self, *numbers: int) -> list[list[int]]:
        """These integers of all ranks, by rank."""
        mine = torch.tensor(numbers)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        if self.count == 1:
            return [list(numbers)]
        dist.all_gather(found, mine, group=self.group)
        return [theirs.tolist() for theirs in found]

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Around what a rank can fail in by itself, such as having too little memory: all fail then.

        Raises:
            InputError: as on the first rank that failed.
            Fault: likewise.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        mine = None if failed is None else (str(failed), isinstance(failed, InputError))
        told: list[Any] = [None] * self.count
        if self.count > 1:
            dist.all_gather_object(told, mine, group=self.group)
        if failed is not None:
            raise failed
        for rank, theirs in enumerate(told):
            if theirs is not None:
                message, mendable = theirs
                raise InputError(message) if mendable else Fault(f"rank {rank}: {message}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together.

        Raises:
            Gone: one of them is not there any more.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "/gloo/" in str(error):
                raise Gone("another rank is gone; it, or torchrun's report, says why") from error
            raise

    def speak(self) -> None:
        """Let the others know that this rank says what is wrong."""
        self.store.set(_SPOKE, "yes")

    def spoken(self, seconds: float = 2.0) -> bool:
        """Whether the first rank says what is wrong, within some seconds or at all."""
        until = time.monotonic() + seconds
        try:
            while not self.store.check([_SPOKE]):
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)
        except RuntimeError:  # nobody keeps the store any more
            return True
        return True

    def leave(self) -> None:
        """The end of it, when all has gone well; the first may have found that there is nothing to do."""
        if self.rank == 0:
            self.store.set(_LEFT, "yes")
        dist.destroy_process_group()

    def left(self) -> bool:
        """Whether the first rank has left because all has gone well."""
        try:
            return bool(self.store.check([_LEFT]))
        except RuntimeError:
            return False


ALONE = Ranks()


def join(device: str = "auto") -> Ranks:
    """Join the other processes that torchrun has started.

    Args:
        device: ``cpu``, ``cuda`` (the rank's own), or ``auto``: CUDA where there is one.

    Raises:
        InputError: the ranks cannot have such devices, or what transformers needs to split a model is not installed.
    """
    place = _place(device, int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if find_spec("accelerate") is None:
        raise InputError("to split a model, transformers needs accelerate: pip install 'tswift[ranks]'", OPTION)
    store, rank, count = next(rendezvous("env://"))
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=count,
        timeout=_PATIENCE,
        device_id=place if cuda else None,
    )
    return Ranks(rank, count, place, dist.new_group(backend="gloo", timeout=_PATIENCE), store)


def _place(device: str, local: int, beside: int) -> torch.device:
    """The device of the rank that is ``local`` among the ``beside`` of this machine."""
    found = torch.cuda.device_count()
    kind = ("cuda" if found else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda"):
        raise InputError(f"every rank has a device of its own; give auto, cpu or cuda, got {device!r}", "--device")
    if kind == "cuda" and beside > found:
        raise InputError(f"PyTorch finds {found} CUDA devices here, {beside} ranks need one each", OPTION)
    if kind == "cpu" and found:
        raise InputError("transformers splits over the GPUs that it sees; CUDA_VISIBLE_DEVICES= hides them", "--device")
    return torch.device(kind, local) if kind == "cuda" else _CPU
