"""What is said when a training's folder cannot be written."""

from __future__ import annotations

import os
import re
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from tests.jobs.faults import FaultyOs
from tswift.errors import Fault, InputError
from tswift.jobs import files
from tswift.training.folder import CHECKPOINT, HEADS, METRICS, RECORD, TrainFolder


@pytest.fixture
def folder(tmp_path: Path) -> TrainFolder:
    made = TrainFolder(tmp_path / "train", "train-draft")
    made.begin()
    made.write_record({"state": "running"})
    return made


def keep(folder: TrainFolder) -> None:
    folder.keep({"weight": torch.ones(3)}, step=7, seconds=1.0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk(folder: TrainFolder, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """What was there before is there afterwards; and it is said how to go on, if there is anything to go on from."""
    if kept:
        keep(folder)
    folder.log({"step": 1})
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    goes_on = f"; tswift train-draft --resume {folder.path} goes on from the last checkpoint" if kept else ""

    def full(path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(ENOSPC, "No space left on device")

    def broken(path: Path) -> None:
        raise SafetensorError("Error while serializing:\nI/O error")

    attempts: dict[str, Any] = {
        RECORD: lambda: folder.write_record({"state": "finished"}),
        METRICS: lambda: folder.forget_after(1),
        CHECKPOINT: lambda: folder.write(CHECKPOINT, full),
        HEADS: lambda: folder.write(HEADS, broken),
    }
    for name, attempt in attempts.items():
        monkeypatch.setattr(files, "os", FaultyOs(2, "full"))
        with pytest.raises(Fault) as found:
            attempt()
        reason = "Error while serializing: I/O error" if name == HEADS else "No space left on device"
        assert str(found.value) == f"{folder.path / name} cannot be written ({reason}){goes_on}"
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--out: .* is no UTF-8"):
        TrainFolder(tmp_path / os.fsdecode(b"d\xff")).begin()
    assert not list(tmp_path.iterdir())
    TrainFolder(tmp_path / "größer").begin()


def test_a_folder_that_is_removed(folder: TrainFolder) -> None:
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    for attempt in (lambda: folder.log({"step": 1}), lambda: keep(folder), lambda: folder.write_record({})):
        with pytest.raises(Fault, match=rf"^{re.escape(str(folder.path))}/.* cannot be written \(.*No such file"):
            attempt()
