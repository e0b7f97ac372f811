"""The list of runs: what each state looks like from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tswift.errors import InputError
from tswift.jobs.folder import RunFolder, list_runs


def made(path: Path, state: str, started: str, **more: Any) -> RunFolder:
    folder = RunFolder.create(path)
    folder.keep_prompt([1])
    options = {"length": 100, "method": "ar"}
    folder.record({"state": state, "options": options, "model": {"name": "m"}, "started": started, **more})
    return folder


def test_every_state(tmp_path: Path) -> None:
    running = made(tmp_path / "d", "running", "2026-01-04")
    running.append([1, 2, 3], "", dict)
    running.checkpoint({"seconds": 1.5})
    made(tmp_path / "a", "finished", "2026-01-01").close()
    made(tmp_path / "b", "failed", "2026-01-02", reason="no room").close()
    made(tmp_path / "c", "running", "2026-01-03").close()
    loading = RunFolder.create(tmp_path / "y")
    made(tmp_path / "z", "finished", "2026-01-05").close()
    (tmp_path / "z" / "run.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bench.json").write_text("{}")
    entries = {entry.path.name: entry for entry in list_runs(tmp_path)}
    assert list(entries) == ["y", "z", "a", "b", "c", "d"]  # what has no time first
    states = {name: entry.state for name, entry in entries.items()}
    assert states == {"a": "finished", "b": "failed", "c": "killed", "d": "running", "y": "running", "z": "broken"}
    assert entries["b"].reason == "no room"
    assert "is not JSON" in entries["z"].reason
    found = entries["d"]
    assert (found.tokens, found.length, found.method, found.model) == (3, 100, "ar", "m")
    assert found.tokens_per_second == 2.0
    assert [entry.path for entry in list_runs(tmp_path / "d")] == [tmp_path / "d"]
    running.close()
    loading.close()


def test_a_record_of_another_kind_is_broken(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "x")
    folder.record({"state": "finished"})
    folder.close()
    record = json.loads((tmp_path / "x" / "run.json").read_text())
    assert record["state"] == "finished"
    (entry,) = list_runs(tmp_path)
    assert (entry.state, "is broken" in entry.reason) == ("broken", True)


def test_no_folder(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == []
    with pytest.raises(InputError, match="there is no folder"):
        list_runs(tmp_path / "none")


def test_a_journal_that_would_never_end(tmp_path: Path) -> None:
    for name in ("pipe", "device"):
        made(tmp_path / name, "finished", "2026-01-01").close()
        (tmp_path / name / "journal").unlink()
    os.mkfifo(tmp_path / "pipe" / "journal")
    (tmp_path / "device" / "journal").symlink_to("/dev/zero")
    assert [(entry.state, entry.tokens) for entry in list_runs(tmp_path)] == [("finished", 0)] * 2
