"""Real processes that are really killed, or asked to stop."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.killing import Process, result
from tswift.jobs import folder
from tswift.jobs.folder import list_runs


@pytest.fixture
def words(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    monkeypatch.setattr(folder, "_TOKENS", 64)  # the processes are forked from this one
    (tmp_path / "prompt.txt").write_text("The ship had lain three days becalmed.")
    where = ["--model", checkpoint, "--prompt", tmp_path / "prompt.txt", "--len", 800, "--quiet"]
    return [*where, "--dtype", "float64", "--temperature", 1.3, "--min-p", 0, "--method"]


@pytest.mark.slow
def test_killed_in_the_prefill_goes_on_from_nothing(tmp_path: Path) -> None:
    """The bundled model reads 15,000 tokens, which takes seconds, and is killed before it has drawn one."""
    words = ["generate", "--prefill", 15_000, "--len", 30, "--quiet", "--out"]
    process = Process([*words, tmp_path / "run"], tmp_path / "first.out")
    while not (tmp_path / "run" / "run.json").exists() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(0.3)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.errors.read_text()
    assert "prefill_seconds" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert process.output.read_bytes() == b""
    for number, more in enumerate(
        (["generate", "--quiet", "--resume", tmp_path / "run"], [*words, tmp_path / "whole"])
    ):
        process = Process(more, tmp_path / f"{number}.out")
        assert process.wait() == 0, process.errors.read_text()
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert len(result(tmp_path / "run")[0]) == 4 * 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop(words: list[object], tmp_path: Path, number: int) -> None:
    process = Process(["generate", *words, "ar", "--out", tmp_path / "run"], tmp_path / "out")
    process.begin()
    process.send(number)
    assert process.wait() == 128 + number
    (entry,) = list_runs(tmp_path / "run")
    assert entry.state == "interrupted"
    assert 0 < entry.tokens < 800


def test_two_processes_on_one_folder(words: list[object], tmp_path: Path) -> None:
    first = Process(["generate", *words, "ar", "--out", tmp_path / "run"], tmp_path / "first.out")
    first.begin()
    second = Process(["generate", "--resume", tmp_path / "run"], tmp_path / "second.out")
    assert second.wait() == 2
    first.send(signal.SIGKILL)
    first.wait()
    assert f"is in use: process {first.pid} on " in second.errors.read_text()
    assert second.errors.read_text().count("\n") == 1
    assert [entry.state for entry in list_runs(tmp_path / "run")] == ["killed"]
