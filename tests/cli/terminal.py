"""A terminal of one's own."""

from __future__ import annotations

import os
import sys
import traceback

import pytest

pty = pytest.importorskip("pty")


def on_terminal(code: str, columns: int) -> bytes:
    """All that Python code writes to the terminal that its stdout and stderr are.

    It runs in a fork of this process, so that nothing has to be imported anew.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(COLUMNS=str(columns), LINES="40", TERM="xterm", NO_COLOR="1")
        sys.stdout, sys.stderr = (
            open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            for number in (1, 2)
        )
        try:
            exec(compile(code, "code", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
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
