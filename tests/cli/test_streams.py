"""A reader of stdout that goes away is no violation."""

from __future__ import annotations

import os
import subprocess
import sys

from tswift.cli.codes import CLOSED_PIPE


def test_a_closed_pipe_has_its_own_exit_code(checkpoint, prompt):
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
    code = f"import sys; from tswift.cli import main; sys.exit(main({words!r}))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == CLOSED_PIPE
    assert done.stderr == ""
