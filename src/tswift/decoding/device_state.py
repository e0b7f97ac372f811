"""What the device knows of a decode between two steps, and what the host sends it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.device_tree import TreeState
from tswift.forward.target import Target


class HostBlock:
    """Integers that the host sends to the device in one copy per step,
    in named sections of given sizes.
    """

    def __init__(self, sections: dict[str, int], device: torch.device) -> None:
        total = sum(sections.values())
        self._device = torch.zeros(total, dtype=torch.int64, device=device)
        # page-locked memory: the copy is asynchronous, and the wait at the end of every step says
        # when it is over
        self._host = torch.zeros(total, dtype=torch.int64, pin_memory=self._device.is_cuda)
        self._sent = np.zeros(total, np.int64)
        self._array = self._host.numpy()
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        start = 0
        for name, count in sections.items():
            self.host[name] = self._array[start : start + count]
            self.device[name] = self._device[start : start + count]
            start += count

    def send(self) -> None:
        """Copy what the host wrote to the device, unless the device has it."""
        if not np.array_equal(self._array, self._sent):
            self._device.copy_(self._host, non_blocking=True)
            self._sent[:] = self._array


class DeviceState(TreeState):
    """What one step leaves on the device for the next, for trees of up to ``n`` nodes.

    Attributes:
        hidden: ``[n, H]`` last hidden states of the last verification.
        pre_norm: the same before the final norm; None where the model does not give them.
    """

    def __init__(self, target: Target, nodes: int) -> None:
        device = target.device
        super().__init__(
            torch.full((nodes,), -1, dtype=torch.int64, device=device),
            torch.zeros(nodes, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        self.hidden = torch.zeros(nodes, target.hidden_size, dtype=target.dtype, device=device)
        self.pre_norm = torch.zeros_like(self.hidden) if target.has_pre_norm else None
