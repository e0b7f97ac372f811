"""The text and the bar on one terminal: a pseudo-terminal's whole output."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

CODE = """
import time
from collections import Counter
from tswift.cli.display import Display
from tswift.decoding.stats import DecodeStats
stats = DecodeStats(4, 1, 10, 5, 0.5, Counter({4: 1}))
with Display(100, quiet=False, progress=True) as display:
    for word in "one two three\\nfour [bold]five[/bold] six seven eight nine ten".split(" "):
        display.show(word + " ", stats)
        time.sleep(0.1)
"""


def test_text_goes_above_the_bar_in_whole_lines() -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS="20", LINES="40", TERM="xterm", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-c", CODE])
    seen = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    os.waitpid(child, 0)
    text = seen.decode()
    # each line is printed once, unbroken, at the start of a line
    for line in ("one two three\r\n", "four [bold]five[/bo", "seven eight nine"):
        assert Counter({line: text.count(line)})[line] == 1, text
    assert "\x1b[1m" not in text


def test_raw_when_stdout_is_no_terminal(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from tswift.cli.display import Display
    from tswift.decoding.stats import DecodeStats

    with Display(10, quiet=True, progress=True) as display:
        display.show("é\n", DecodeStats(0))
        display.show("[b]", DecodeStats(0))
    assert capfdbinary.readouterr().out == "é\n[b]".encode()


def test_paths_need_no_terminal(tmp_path: Path) -> None:
    from tswift.cli.display import _clock

    assert _clock(3725.4) == "1:02:05"
