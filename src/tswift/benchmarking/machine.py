"""What the machine at hand can do, measured in a second or two: a big read, and big matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tswift.benchmarking.roofline import Machine
from tswift.models.devices import available_bytes

_READ_BYTES = {"cpu": 2**29, "cuda": 2**32}  # beyond any processor's caches
_TRIES = 5
_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # of square matrices
_LONG = 0.02  # seconds; a product that takes so long is big enough


def measured(device: torch.device, dtype: torch.dtype) -> Machine:
    """Bandwidth and FLOP rate of a device, each the best of several tries: a floor must not lie above the truth.

    Args:
        device: CPU or CUDA.
        dtype: of the matrix products.
    """
    return Machine(_bandwidth(device), _flops(device, dtype))


def _bandwidth(device: torch.device) -> float:
    room = available_bytes(device)
    size = _READ_BYTES[device.type]
    numbers = torch.ones(min(size, room // 4 if room else size) // 4, device=device)
    return numbers.nbytes / _best(numbers.sum, device)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    rates = []
    for size in _SIZES:
        left, right = torch.rand(2, size, size, device=device).to(dtype)
        seconds = _best(partial(torch.matmul, left, right), device)
        rates.append(2 * size**3 / seconds)
        if seconds > _LONG:
            break
    return max(rates)


def _best(run: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of the fastest try, after one that does not count."""
    seconds = []
    for _ in range(1 + _TRIES):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
