"""What this project does on a GPU, in one call within nine minutes: ``make gpu`` (development only).

    python -m benchmarks.gpu --out runs/gpu/out --seconds 530
    python -m benchmarks.gpu --dry              # tiny shapes on the CPU: does it run at all?
    python -m benchmarks.gpu.estimate           # what the cost model expects

One process writes reports and archives; others measure, and append every figure to one file at once, so that nothing is
lost when one of them is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = "figures.jsonl"
LEAST = 10.0  # seconds; with less left no section is begun


def note(folder: Path, section: str, table: str, **values: Any) -> None:
    """Write one figure, or one row of figures, at once."""
    with (folder / FIGURES).open("a") as file:
        file.write(json.dumps({"section": section, "table": table, **values}) + "\n")
