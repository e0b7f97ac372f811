"""A pytest plugin: writes each GPU test's outcome as soon as it is known, and ends the tests when their time is up."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import note

_note = partial(note, Path(os.environ.get("GPU_FOLDER", ".")), "equality")
_passed = False


def pytest_sessionstart() -> None:
    """Set the alarm."""
    seconds = float(os.environ["GPU_SECONDS"])
    _note("begun", until=time.time() + seconds)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C
    signal.setitimer(signal.ITIMER_REAL, seconds)


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test that has been called, or that could not be."""
    global _passed
    if report.when != "call" and report.outcome == "passed":
        return
    _passed |= report.outcome == "passed"
    why = str(report.longrepr[-1]) if report.outcome == "skipped" else ""
    if report.outcome == "failed":
        why = (str(report.longreprtext).strip().splitlines() or [""])[-1]
    name, seconds = report.nodeid.rpartition("::")[2], round(report.duration, 1)
    _note("tests", test=name, outcome=report.outcome, seconds=seconds, why=why[:200])


def pytest_sessionfinish(exitstatus: int) -> None:
    """Note how it ended."""
    ends = {0: "done" if _passed else "failed: no test has passed", 2: "cut short"}
    _note("ended", state=ends.get(int(exitstatus), f"failed: pytest ended with {int(exitstatus)}"))
