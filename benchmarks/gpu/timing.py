"""Seconds on the device, and how long it was busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")

_BRIDGE = 5.0  # microseconds; kernels that are queued already follow each other faster, and no host is that fast


def interleaved(
    runs: Mapping[Key, Callable[[], Any]], rounds: int, device: torch.device, warmups: int = 3
) -> dict[Key, float]:
    """Median seconds that each of several runs keeps the device busy, in rounds of one of each.

    On CUDA nothing is waited for before all are queued: the host is ahead of the device then, and the time between a
    run's two events is the device's own. A run must not wait for the device itself.
    """
    for _ in range(warmups):
        for run in runs.values():
            run()
    found: dict[Key, list[float]] = {key: [] for key in runs}
    if device.type != "cuda":
        for _ in range(rounds):
            for key, run in runs.items():
                started = time.perf_counter()
                run()
                found[key].append(time.perf_counter() - started)
        return {key: median(seconds) for key, seconds in found.items()}
    torch.cuda.synchronize(device)
    marks: list[tuple[Key, Any, Any]] = []
    for _ in range(rounds):
        for key, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((key, start, end))
    torch.cuda.synchronize(device)
    for key, start, end in marks:
        found[key].append(start.elapsed_time(end) / 1e3)
    return {key: median(seconds) for key, seconds in found.items()}


def replayed(run: Callable[[], Any], device: torch.device, rounds: int = 20) -> float:
    """Median seconds of a run on the device, replayed as a CUDA graph so that no launch shows."""
    for _ in range(3 if device.type == "cuda" else 1):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    return interleaved({"": run}, rounds if device.type == "cuda" else 1, device, warmups=0)[""]


def kernels(run: Callable[[], Any], device: torch.device) -> list[tuple[str, float, float]]:
    """What a CUDA device did during a run: name, beginning and end in microseconds of each kernel and copy."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    return [(event.name, event.time_range.start, event.time_range.end) for event in events]


def covered(intervals: Iterable[tuple[float, float]], bridge: float = _BRIDGE) -> float:
    """Length of what the intervals cover together, and of the gaps of at most ``bridge`` between them."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        begin = reached if start - reached <= bridge else start
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total
