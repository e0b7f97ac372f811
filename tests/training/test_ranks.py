"""Processes that train together; that two of them do is in test_train.py."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import tiny_heads
from tswift.distributed import open_ranks
from tswift.errors import Fault, InputError


def test_a_single_process_needs_nobody() -> None:
    with open_ranks("auto") as ranks:
        assert (ranks.first, ranks.count, ranks.device) == (True, 1, None)
        assert ranks.highest(3.0, 0.5) == (3.0, 0.5)
        assert ranks.wrap(tiny_heads()) is None
        value = torch.ones(2)
        ranks.total(value)
        ranks.wait()
        assert value.tolist() == [1, 1]


def test_several_processes_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^device: every rank has .* got 'cuda:1'$"):
        open_ranks("cuda:1").__enter__()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^nproc_per_node: PyTorch finds 1 CUDA devices here, 2 ranks need"):
        open_ranks("cuda").__enter__()


def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(Fault, match=r"^the 2 ranks cannot connect to each other \(.*\)$"):
        open_ranks("cpu").__enter__()
