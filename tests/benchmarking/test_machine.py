"""Measuring the machine: figures follow from the clock, and a real measurement is quick and possible."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import tswift.benchmarking.machine as machine

CPU = torch.device("cpu")


def test_rates_follow_from_the_fastest_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda device: 4_000_000)
    monkeypatch.setattr(machine, "_SIZES", (8, 16))
    seconds = iter([9.0, 2, 1, 4, 4, 4, *[0.001] * 6, *[5.0] * 6])  # a first try that does not count, then five
    readings = [0.0]

    def clock() -> float:
        readings.append(readings[-1] + (next(seconds) if len(readings) % 2 == 0 else 0.0))
        return readings[-1]

    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=clock))
    found = machine.measured(CPU, torch.float32)
    assert found.bandwidth == 1_000_000  # a quarter of the free memory, in one second
    assert found.flops == pytest.approx(2 * 8**3 / 0.001)  # the larger product was slower


def test_products_grow_until_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def best(run, device: torch.device) -> float:  # type: ignore[no-untyped-def]
        sizes.append(run().shape[0])
        return 0.001 if len(sizes) < 3 else 0.5

    monkeypatch.setattr(machine, "_best", best)
    assert machine._flops(CPU, torch.float64) == 2 * 512**3 / 0.001
    assert sizes == [256, 512, 1024]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine(dtype: torch.dtype) -> None:
    started = time.monotonic()
    found = machine.measured(CPU, dtype)
    assert time.monotonic() - started < 30  # a second or two, and far more when everything else is busy
    assert 1e8 < found.bandwidth < 1e13
    assert 1e7 < found.flops < 1e16
