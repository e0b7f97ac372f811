"""Seconds on the device, and how long it was busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")

_BRIDGE = 5.0  # microseconds; kernels that are queued already follow each other faster, and no host is that fast


def interleaved(
    runs: Mapping[Key, Callable[[], Any]], rounds: int, warmups: int, device: torch.device
) -> dict[Key, list[float]]:
    """Seconds that each of several runs keeps the device busy, in rounds of one of each.

    On CUDA nothing is waited for before all are queued: the host is ahead of the device then, and the time between a
    run's two events is the device's own. A run must not wait for the device itself.
    """
    for _ in range(warmups):
        for run in runs.values():
            run()
    if device.type != "cuda":
        return _by_clock(runs, rounds)
    torch.cuda.synchronize(device)
    marks: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks[key].append((start, end))
    torch.cuda.synchronize(device)
    return {key: [start.elapsed_time(end) / 1e3 for start, end in each] for key, each in marks.items()}


def _by_clock(runs: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - started)
    return seconds


def busy_seconds(run: Callable[[], Any], device: torch.device) -> float | None:
    """Seconds in which a CUDA device had something to do during a run, graphs' own gaps included; None on the CPU."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    kernels = [event.time_range for event in events if not getattr(event, "is_user_annotation", False)]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    return covered(((kernel.start, kernel.end) for kernel in kernels), _BRIDGE) / 1e6


def covered(intervals: Iterable[tuple[float, float]], bridge: float) -> float:
    """Length of what the intervals cover together, and of the gaps of at most ``bridge`` between them."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        begin = reached if start - reached <= bridge else start
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total
