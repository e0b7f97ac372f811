"""What goes to a terminal is not obeyed by it; a reader of stdout that goes away is no violation."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.jobs.killing import Process
from tests.rows import every_row
from tswift.cli import main
from tswift.cli.streams import CLOSED_PIPE, one_line, visible


@every_row(
    ("text", "seen"),
    [
        ("a name, größer: 名前 ± 1", "a name, größer: 名前 ± 1"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("half \udcff", r"half \udcff"),
        ("a\0b", r"a\x00b"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text, seen):
    assert visible(text) == seen
    assert visible(seen) == seen


def test_a_message_is_one_line_of_words_none_of_them_endless():
    assert one_line(" a\n\tb\x1b  c\u2028d ") == r"a b\x1b c d"
    line = one_line(f"there is no file {'x' * 5000}")
    assert line == f"there is no file {'x' * 120}...{'x' * 120}"


def test_names_in_tables_and_lines_are_not_obeyed(tswift, checkpoint, prompt, tmp_path):
    """The escapes of a model's name reach neither the lines on stderr nor the table on stdout."""
    model = tmp_path / "red\x1b[31m"
    model.symlink_to(checkpoint)
    words = ["--model", model, "--prompt", prompt, "--len", 3]
    result = tswift("compare", *words, "--methods", "ar")
    assert result.code == 0
    assert r"red\x1b[31m" in result.err
    made = tswift("generate", *words, "--method", "ar", "--out", tmp_path / "run\x1b[0m")
    assert made.code == 0
    resumed = tswift("generate", "--resume", tmp_path / "run\x1b[0m")
    assert r"run\x1b[0m is finished" in resumed.err
    told = tswift("heads", "inspect", model / "heads.safetensors")
    assert r"red\x1b[31m" in told.out.decode()
    listed = tswift("runs", tmp_path)
    assert r"run\x1b[0m" in listed.out.decode()
    table = tswift("roofline", "--model", model, "--bandwidth", 1, "--flops", 1, "--len", 9, "--prefill", 9)
    assert r"red\x1b[31m" in table.out.decode()
    shown = [each.out.decode() for each in (result, told, listed, table)]
    for said in (result.err, made.err, resumed.err, *shown):
        assert "\x1b" not in said


def of_nine_tokens(checkpoint, prompt, out):
    return ["generate", "--len", 9, "--model", checkpoint, "--prompt", prompt, "--out", out]


def finished(run):
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert (run / "tokens.u32").stat().st_size == 4 * 9


@pytest.mark.slow
def test_streams_that_are_closed_from_the_start(checkpoint, prompt, tmp_path):
    """The text goes to the run's folder as ever, and nothing else does."""
    command = [sys.executable, "-m", "tswift", *of_nine_tokens(checkpoint, prompt, tmp_path / "run")]
    closed = f"{shlex.join(map(str, command))} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", closed], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    finished(tmp_path / "run")


@pytest.mark.parametrize("closed", [1, 2])
def test_one_stream_that_is_closed_from_the_start(checkpoint, prompt, tmp_path, closed):
    process = Process(of_nine_tokens(checkpoint, prompt, tmp_path / "run"), tmp_path / "out", [closed])
    assert process.wait(60) == 0, process.errors.read_text()
    finished(tmp_path / "run")
    text = (tmp_path / "run" / "text.txt").read_bytes()
    assert process.output.read_bytes() == (text if closed == 2 else b"")
    assert bool(process.errors.read_text()) is (closed == 1)


def test_a_closed_pipe_has_its_own_exit_code(checkpoint, prompt, monkeypatch, capfd):
    """And nothing is left in the stream over which Python would stumble at its exit."""
    words = [
        "compare",
        "--len",
        "5",
        "--methods",
        "reuse",
        "--quiet",
        "--model",
        str(checkpoint),
        "--prompt",
        str(prompt),
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words) == CLOSED_PIPE
        stdout.flush()
        monkeypatch.undo()
    assert capfd.readouterr().err == ""
