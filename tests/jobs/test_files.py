"""Files that are whole or not there, and files that only grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.jobs.faults import FaultyOs
from tswift.jobs import folder as files
from tswift.jobs.folder import AppendedFile, refuse_other, write_whole


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, fault: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(files, "os", FaultyOs(call, fault))
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


def test_what_is_added_waits_for_a_sync(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "file")
    file.add(b"one")
    assert (tmp_path / "file").read_bytes() == b""
    file.sync()
    file.add(b"two")
    file.close()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one"


def test_cut_and_continued(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    file = AppendedFile(tmp_path / "file", 4)
    file.add(b"!")
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"0123!"


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendedFile(tmp_path / "file")
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:3]))
    file.add(b"0123456789")
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_only_what_is_not_there_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        AppendedFile(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError):  # noqa: PT011
        AppendedFile(tmp_path / "link", 0)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    refuse_other(tmp_path / "none")
    refuse_other(tmp_path / "file")
    with pytest.raises(OSError, match="it is a link"):
        refuse_other(tmp_path / "link")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="it is no regular file"):
            refuse_other(path)
