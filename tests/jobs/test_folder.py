"""A run's folder: appended to with checkpoints, locked, never overwritten, its record whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from tests.jobs.faults import FaultyOs
from tswift.errors import InputError
from tswift.jobs import folder as module
from tswift.jobs.folder import (
    Lock,
    RunFolder,
    SaveFailed,
    bytes_of,
    checksum,
    default_path,
    in_use,
    parse_journal,
    read_record,
    read_saved,
    write_whole,
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "a" / "b")
    folder.keep_prompt([9, 9])
    yield folder
    folder.close()


def nothing() -> dict[str, int]:
    return {}


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, fault: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(module, "os", FaultyOs(call, fault))
    named = None
    try:
        write_whole(path, b"new and longer")
    except OSError as error:
        named = error.filename
    if named:
        assert named == str(path)
        assert path.read_bytes() == b"old"
    else:
        assert fault == "full"  # there is room for everything but what is written
        assert call > 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_write_that_is_cut_short_goes_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:3]))
    folder.append([1, 2, 3], "abcdefgh", nothing)
    folder.checkpoint({})
    folder.append([4], "dropped", nothing)
    folder.close()
    folder.close()
    assert (folder.path / "text.txt").read_text() == "abcdefgh"
    assert read_saved(folder.path, [9, 9]).tokens == [1, 2, 3]


def test_a_checkpoint_puts_everything_on_the_disk(folder: RunFolder) -> None:
    folder.append([1, 2**31], "é", nothing)
    folder.append([3], "", nothing)
    assert (folder.path / "tokens.u32").stat().st_size == 0
    folder.checkpoint({"passes": 2})
    assert folder.saved == 3
    assert np.fromfile(folder.path / "tokens.u32", "<u4").tolist() == [1, 2**31, 3]
    assert (folder.path / "text.txt").read_bytes() == "é".encode()
    (line,) = parse_journal((folder.path / "journal").read_bytes()).checkpoints
    assert (line.tokens, line.counters) == (3, {"passes": 2})
    assert line.crc32 == crc32(bytes_of([9, 9, 1, 2**31, 3]))


def test_neither_512_tokens_nor_many_seconds_are_at_stake(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(1023):
        folder.append([7], "", nothing)
    assert folder.saved == 512
    monkeypatch.setattr(module, "_SECONDS", 0)
    folder.append([7], "", nothing)
    assert folder.saved == 1024


def test_record_replaces(folder: RunFolder) -> None:
    folder.record({"state": "running"})
    folder.record({"state": "finished", "path": folder.path})
    record = json.loads((folder.path / "run.json").read_text())
    assert record == {"schema": 2, "state": "finished", "path": str(folder.path), "checksum": checksum(record)}
    assert not list(folder.path.glob("*.new"))


def test_discard_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "new" / "er")
    folder.keep_prompt([1, 2])
    folder.discard()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    RunFolder.create(tmp_path / "old").discard()
    assert list((tmp_path / "old").iterdir()) == []


def test_a_folder_is_for_one(folder: RunFolder) -> None:
    assert in_use(folder.path)
    with pytest.raises(InputError, match=r"out: .* is in use by another run"):
        RunFolder.create(folder.path)
    folder.record({})
    with pytest.raises(InputError, match=r"out: .* is not empty"):
        RunFolder.create(folder.path)
    folder.close()
    assert not in_use(folder.path)
    assert not (folder.path / "lock").exists()


def test_what_was_killed_while_its_model_was_loading_is_begun_anew(tmp_path: Path) -> None:
    killed = RunFolder.create(tmp_path / "run")
    killed.keep_prompt([1, 2])
    killed.close()
    with pytest.raises(InputError, match=r"holds no run: it was stopped while the model was loading; --out begins"):
        read_record(tmp_path / "run")
    again = RunFolder.create(tmp_path / "run")
    again.append([5], "five", nothing)
    again.checkpoint({})
    again.close()
    with pytest.raises(InputError, match=r"out: .* is not empty"):
        RunFolder.create(tmp_path / "run")
    assert (tmp_path / "run" / "text.txt").read_text() == "five"


def test_reopened_where_it_was_left(folder: RunFolder) -> None:
    folder.append([1, 2], "one two", nothing)
    folder.checkpoint({})
    folder.append([3], " three", nothing)
    folder.checkpoint({})
    folder.close()
    checkpoint = read_saved(folder.path, [9, 9]).checkpoints[1]
    again = RunFolder.reopen(folder.path, Lock(folder.path), checkpoint, "one two")
    again.append([4], " four", nothing)
    again.checkpoint({})
    again.close()
    assert np.fromfile(folder.path / "tokens.u32", "<u4").tolist() == [1, 2, 4]
    assert (folder.path / "text.txt").read_text() == "one two four"
    assert read_saved(folder.path, [9, 9]).tokens == [1, 2, 4]


@pytest.mark.parametrize("name", ["tokens.u32", "journal"])
def test_a_link_is_not_written_through(folder: RunFolder, tmp_path: Path, name: str) -> None:
    folder.append([1, 2], "one two", nothing)
    folder.checkpoint({})
    folder.close()
    checkpoint = read_saved(folder.path, [9, 9]).checkpoints[-1]
    (folder.path / name).rename(tmp_path / "precious")
    (folder.path / name).symlink_to(tmp_path / "precious")
    before = (tmp_path / "precious").read_bytes()
    with Lock(folder.path) as lock, pytest.raises(SaveFailed):
        RunFolder.reopen(folder.path, lock, checkpoint, "")
    assert (tmp_path / "precious").read_bytes() == before


@pytest.mark.parametrize("goes", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_folder_that_goes_is_noticed(folder: RunFolder, goes: Callable[[Path], object]) -> None:
    folder.append([1, 2], "one two", nothing)
    goes(folder.path)
    with pytest.raises(SaveFailed, match="was removed or moved"):
        folder.checkpoint({})


def test_a_clock_that_was_set_back_takes_no_name_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(module.datetime):
        @classmethod
        def now(cls, tz=None) -> Stopped:
            return cls(2020, 1, 1, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "datetime", Stopped)
    first = default_path("ar")
    assert first.parent == Path("runs")
    first.mkdir(parents=True)
    assert default_path("ar") == first.with_name(f"{first.name}-2")
