"""Tables and progress on a terminal and elsewhere."""

from __future__ import annotations

import pytest

from tests.cli.terminal import on_terminal
from tswift.benchmarking.table import Table
from tswift.cli.tables import show

CODE = """
from tswift.benchmarking.table import Table
from tswift.cli.bars import Bars
from tswift.cli.tables import show
with Bars(quiet=False, progress=True) as bars:
    bars.update("verify", 50, 100)
show(Table("A title", ("class", "tokens"), [("exact", "1,234")], left=1, notes=["[a] note"]), stderr=STDERR)
"""


@pytest.mark.parametrize("stderr", [False, True])
def test_on_a_terminal(stderr: bool) -> None:
    seen = on_terminal(CODE.replace("STDERR", str(stderr)), columns=80)
    for said in (b"verify", b"50/100", b"A title", b"1,234", b"[a] note"):
        assert said in seen, seen


@pytest.mark.parametrize("stderr", [False, True])
def test_in_a_pipe(stderr: bool, capsys: pytest.CaptureFixture[str]) -> None:
    grid = Table("A title", ("class", "tokens"), [("exact", "1,234")], left=1)
    show(grid, stderr)
    out, err = capsys.readouterr()
    assert (err if stderr else out) == grid.plain()
    assert (out if stderr else err) == ""
