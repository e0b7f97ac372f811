"""Clocks of the device, and what it did between two moments; imports PyTorch alone,
so that a probe begins at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, TypeVar

import torch

Key = TypeVar("Key")

# microseconds; kernels that are queued already follow each other faster, and no host is that fast
_BRIDGE = 5.0


def interleaved(
    runs: Mapping[Key, Callable[[], Any]], rounds: int, device: torch.device, warmups: int = 3
) -> dict[Key, float]:
    """Median seconds that each of several runs keeps the device busy, in rounds of one of each.

    On CUDA nothing is waited for before all are queued: the host is ahead of the device then, and
    the time between a run's two events is the device's own. A run must not wait for the device
    itself.
    """
    cuda = device.type == "cuda"

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for _ in range(warmups):
        for run in runs.values():
            run()
    if cuda:
        torch.cuda.synchronize()
    marks: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            start = mark()
            run()
            marks[key].append((start, mark()))
    if cuda:
        torch.cuda.synchronize()
    return {
        key: median(start.elapsed_time(end) / 1e3 if cuda else end - start for start, end in pairs)
        for key, pairs in marks.items()
    }


@torch.inference_mode()
def replayed(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a run on the device, replayed as a CUDA graph so that no launch shows."""
    if device.type != "cuda":
        return interleaved({"": run}, 1, device, warmups=1)[""]
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return interleaved({"": graph.replay}, 20, device)[""]


def kernels(run: Callable[[], Any], device: torch.device) -> list[tuple[str, float, float]]:
    """What a CUDA device did during a run: name,
    beginning and end in microseconds of each kernel and copy.
    """
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
    """Length of what the intervals cover together,
    and of the gaps of at most ``bridge`` between them.
    """
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        begin = reached if start - reached <= bridge else start
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total
