"""The text and the bar on one terminal: a pseudo-terminal's whole output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.cli.terminal import on_terminal
from tswift.cli.progress import Display, _clock

if TYPE_CHECKING:
    from tswift.decoding.stats import DecodeStats

CODE = """
import time
from types import SimpleNamespace
from tswift.cli.progress import Display
stats = SimpleNamespace(tokens=10, tokens_per_second=20.0, tokens_per_step=5.0, alpha=1.0)
with Display(100, quiet=False, progress=True) as display:
    for word in "one two three\\nfour [bold]five[/bold] six seven eight nine ten".split(" "):
        display.show(word + " ", stats)
        time.sleep(0.1)
"""


def test_text_goes_above_the_bar_in_whole_lines() -> None:
    text = on_terminal(CODE, columns=20).decode()
    # each line is printed once, unbroken, at the start of a line
    for line in ("one two three\r\n", "[bold]five[/bold]", "six seven eight\r\n", "nine ten"):
        assert text.count(line) == 1, text
    assert "\x1b[1m" not in text


def test_raw_when_stdout_is_no_terminal(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stats = cast("DecodeStats", SimpleNamespace(tokens=1))
    with Display(10, quiet=True, progress=True) as display:
        display.show("é\n", stats)
        display.show("[b]", stats)
    assert capfdbinary.readouterr().out == "é\n[b]".encode()


def test_clock() -> None:
    assert _clock(3725.4) == "1:02:05"
