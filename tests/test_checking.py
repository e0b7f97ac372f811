"""What kernels compute otherwise than plain PyTorch is told, and what passed is not tried again."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from tswift import checking, remembered
from tswift.checking import difference, kernel_fault

ONES = torch.ones(3)
INFINITE = torch.tensor([-math.inf, 1.0, 2.0])
NEAR = ONES + torch.tensor([0, 1e-3, 0])


@pytest.mark.parametrize(
    ("ours", "plain", "allowed", "said"),
    [
        (ONES, ONES.double(), (), None),
        (ONES, NEAR, (), "0.001"),
        (ONES, NEAR, (2e-3,), None),
        (ONES, NEAR, (5e-4,), "0.001"),
        (ONES, NEAR, (torch.tensor([0, 2e-3, 0]),), None),
        (ONES, NEAR, (torch.tensor([2e-3, 0, 2e-3]),), "0.001"),
        (ONES * math.nan, ONES, (9.0,), "nan"),
        (ONES * math.nan, ONES * math.nan, (9.0,), "nan"),
        (INFINITE, INFINITE + torch.tensor([0, 1e-3, 0]), (2e-3,), None),
        (INFINITE, ONES, (9.0,), "inf"),
        ([ONES, INFINITE], [ONES, INFINITE], (), None),
        ([ONES, ONES], [ONES, NEAR], (), "0.001"),
        (ONES[:1], ONES, (9.0,), "0"),
        (torch.tensor([True, False]), torch.tensor([True, True]), (), "1"),
    ],
)
def test_what_differs_is_told(ours, plain, allowed, said):
    found = difference([("rows", ONES, ONES), ("states", ours, plain, *allowed)])
    assert found == (said and f"states differ from plain ones by up to {said}")


@pytest.mark.parametrize(
    ("ours", "plain", "said"),
    [(ONES[:2], ONES, "must match"), ([ONES], [ONES, ONES], "is longer than")],
)
def test_other_shapes_are_no_match(ours, plain, said):
    assert said in difference([("states", ours, plain, math.inf)])


def test_what_fails_is_told_in_a_line():
    def compared():
        yield "rows", ONES, ONES
        raise RuntimeError("no kernel image is available\nand more")

    said = difference(compared())
    assert re.fullmatch(r"no kernel image is available \(checking\.py:\d+\)", said)


def test_kernels_are_checked_once_for_a_card(monkeypatch, tmp_path):
    card, driver = ["H100"], ["550.54"]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name=card[0], major=9, minor=0, multi_processor_count=132),
    )
    monkeypatch.setattr(remembered, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(checking, "driver_version", lambda: driver[0])
    monkeypatch.setattr(checking, "KERNELS", {})

    def asked(right=True, *sizes, device="cuda", another=True):
        """Whether a check is made, in another process or the same, and what is said of it."""
        if another:
            checking.KERNELS.clear()
        tried = []

        def compared():
            tried.append(right)
            yield "states", ONES, ONES if right else NEAR

        found = kernel_fault("trees", compared(), torch.device(device), *sizes)
        said = checking.KERNELS["trees", device, *map(str, sizes)]
        assert found == (None if said.startswith("passed") else said)
        return bool(tried), said

    wrong = "states differ from plain ones by up to 0.001"
    assert asked(False) == (True, wrong)
    assert asked(another=False) == (False, wrong)
    assert asked() == (True, "passed")  # what failed is tried again
    assert asked(another=False) == (False, "passed")
    assert asked() == (False, "passed before")
    assert asked(True, 8, another=False) == (True, "passed")
    assert asked(True, 8) == (False, "passed before")
    driver[0] = "560.35"
    assert asked()[0]
    card[0] = "H200"
    assert asked()[0]
    assert not asked()[0]
    monkeypatch.setattr(remembered, "_sources", lambda: "others")
    assert asked()[0]
    remembered.forget()
    assert asked()[0]
    assert [asked(device="cpu")[0], asked(device="cpu")[0]] == [True, True]
