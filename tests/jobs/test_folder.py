"""A run's folder: appended to, never overwritten, its record whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tswift.errors import InputError
from tswift.jobs import folder as module
from tswift.jobs.folder import RunFolder, default_path


def test_appends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    folder.append([1, 2**31], "é")
    folder.append([3], "")
    folder.flush()
    assert np.fromfile(folder.path / "tokens.u32", "<u4").tolist() == [1, 2**31, 3]
    assert (folder.path / "text.txt").read_bytes() == "é".encode()
    folder.close()


def test_flushes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.0)
    folder = RunFolder(tmp_path)
    folder.append([7], "x")
    assert (tmp_path / "tokens.u32").stat().st_size == 4
    folder.close()


def test_record_replaces(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.record({"state": "running"})
    folder.record({"state": "finished", "path": tmp_path})
    assert json.loads((tmp_path / "run.json").read_text()) == {"schema": 1, "state": "finished", "path": str(tmp_path)}
    assert not list(tmp_path.glob("*.new"))
    folder.close()


def test_discard_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    folder.keep_prompt([1, 2])
    folder.discard()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    RunFolder(tmp_path / "old").discard()
    assert list((tmp_path / "old").iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_refuses_what_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="--out"):
        RunFolder(tmp_path / name)


def test_keeps_the_prompt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.keep_prompt([2**31, 3])
    assert np.fromfile(folder.path / "prompt.u32", "<u4").tolist() == [2**31, 3]
    folder.discard()
    with pytest.raises(InputError, match=r"--out: .* cannot be written to"):
        folder.keep_prompt([1])


def test_default_names_differ() -> None:
    assert default_path("ar") != default_path("ar")
    assert default_path("ar").parent == Path("runs")
