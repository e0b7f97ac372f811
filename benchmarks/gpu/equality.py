"""A pytest plugin that writes each GPU test's outcome to the file of figures as soon as it is known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu import FIGURES


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test that has been called, or that could not be."""
    if report.when != "call" and report.outcome == "passed":
        return
    why = ""
    if report.outcome == "skipped":
        why = str(report.longrepr[-1])
    elif report.outcome == "failed":
        why = (str(report.longreprtext).strip().splitlines() or [""])[-1]
    name = report.nodeid.rpartition("::")[2]
    line = {"section": "equality", "table": "tests", "test": name, "outcome": report.outcome}
    with (Path(os.environ["GPU_FOLDER"]) / FIGURES).open("a") as file:
        file.write(json.dumps({**line, "seconds": round(report.duration, 1), "why": why[:200]}) + "\n")
