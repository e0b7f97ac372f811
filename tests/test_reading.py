"""Files from outside: read whole, or told in a line why not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.helpers import refused
from tests.rows import every_row
from tswift.errors import parse_json, read_file


def test_reads_all_of_it(tmp_path):
    path = tmp_path / "some"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    (tmp_path / "link").symlink_to(path)
    assert read_file(tmp_path / "link", 5) == b"12345"
    path.write_bytes(b"")
    assert read_file(path, 5) == b""


def test_what_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "some"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with refused(r"x: .*/some is too large, more than 9 bytes are not read"):
        read_file(path, 9, "x")
    if Path("/proc/self/maps").exists():  # says that it has no bytes
        with refused(r"x: /proc/self/maps is too large"):
            read_file(Path("/proc/self/maps"), 9, "x")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "there is no file .*/nowhere"),
        ("", r"cannot be read \(it is a folder\)"),
        ("pipe", r"pipe cannot be read \(it is a named pipe\)"),
        ("device", r"device cannot be read \(it is a device\)"),
        ("loop", r"loop cannot be read \(Too many levels of symbolic links\)"),
        ("a\0b", "invalid file name .*"),
        ("\ud800", "invalid file name .*"),
        ("x" * 999, r"cannot be read \(File name too long\)"),
    ],
)
def test_what_is_no_file(tmp_path, name, reason):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with refused(reason):
        read_file(tmp_path / name, 9)


def test_other_words_for_a_file_that_is_missing(tmp_path):
    with refused(r"^x: it went$"):
        read_file(tmp_path / "nowhere", 9, "x", missing="it went")


def test_a_pipe_that_is_open_already(tmp_path):
    reading, writing = os.pipe()
    writer = threading.Thread(
        target=lambda: (os.write(writing, b"12"), os.write(writing, b"345"), os.close(writing))
    )
    writer.start()
    assert read_file(Path(f"/dev/fd/{reading}"), 5) == b"12345"
    writer.join()
    os.close(reading)


@every_row("data", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b'{"a": 1} x'])
def test_what_is_no_json(data):
    with refused(r"^x: some.json is not JSON$"):
        parse_json(data, "some.json", "x")


def test_json():
    assert parse_json(b'{"a": [1, null]}', "x") == {"a": [1, None]}
