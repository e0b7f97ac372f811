"""A terminal of one's own."""

from __future__ import annotations

import os
import sys

import pytest

pty = pytest.importorskip("pty")


def on_terminal(code: str, columns: int) -> bytes:
    """All that a Python program writes to the terminal that its stdout and stderr are."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS=str(columns), LINES="40", TERM="xterm", NO_COLOR="1")
        os.execv(sys.executable, [sys.executable, "-c", code])
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
    os.close(terminal)
    return seen
