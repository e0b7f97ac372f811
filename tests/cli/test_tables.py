"""Tables and progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import sys

import pytest

from tswift.benchmarking.grid import Grid
from tswift.cli.tables import show

pty = pytest.importorskip("pty")

CODE = """
from tswift.benchmarking.grid import Grid
from tswift.cli.bars import Bars
from tswift.cli.tables import show
with Bars(quiet=False, progress=True) as bars:
    bars.update("verify", 50, 100)
show(Grid("A title", ("class", "tokens"), [("exact", "1,234")], left=1, notes=["[a] note"]), stderr=STDERR)
"""


@pytest.mark.parametrize("stderr", [False, True])
def test_on_a_terminal(stderr: bool) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS="80", LINES="40", TERM="xterm", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-c", CODE.replace("STDERR", str(stderr))])
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
    for said in (b"verify", b"50/100", b"A title", b"1,234", b"[a] note"):
        assert said in seen, seen


@pytest.mark.parametrize("stderr", [False, True])
def test_in_a_pipe(stderr: bool, capsys: pytest.CaptureFixture[str]) -> None:
    grid = Grid("A title", ("class", "tokens"), [("exact", "1,234")], left=1)
    show(grid, stderr)
    out, err = capsys.readouterr()
    assert (err if stderr else out) == grid.plain()
    assert (out if stderr else err) == ""
