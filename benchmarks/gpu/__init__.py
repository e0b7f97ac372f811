"""What this project does on a GPU, in one call within nine minutes:
``make gpu`` (development only).

    python -m benchmarks.gpu --out runs/gpu/out --seconds 530
    python -m benchmarks.gpu --dry              # tiny shapes on the CPU: does it run at all?

One process writes reports and archives; others measure, and append every figure to one file at
once, so that nothing is lost when one of them is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = "figures.jsonl"
# exit code of a probe in which a capture has failed: another process goes on where it stopped
SPOILED = 3
LEAST = 10.0  # seconds; with less left no section is begun
GRACE = 15.0  # seconds beyond its time after which a section is killed
# In order of value, with the most seconds that each may take.
FIRST = "first contact"
SECTIONS = {
    FIRST: 240.0,
    "equality": 170.0,
    "probe": 120.0,
    "passes": 60.0,
    "steps": 90.0,
    "simulated": 75.0,
    "shapes": 90.0,
    "generate": 45.0,
}
# Of first contact: the most seconds of each probe, and how many processes ask it, each with empty
# caches. The first one tells most, and is over within 90 seconds.
PROBES = {
    "model": (90.0, 1),
    "setitem": (20.0, 1),
    "poison": (20.0, 1),
    "inference": (20.0, 1),
    "commit": (20.0, 1),
    "products": (30.0, 1),
    "bits": (60.0, 3),
}


def figures(folder: Path) -> list[dict[str, Any]]:
    """All figures so far; the last line may be torn."""
    lines = (folder / FIGURES).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def note(folder: Path, section: str, table: str, **values: Any) -> None:
    """Write one figure, or one row of figures, at once."""
    with (folder / FIGURES).open("a") as file:
        file.write(json.dumps({"section": section, "table": table, **values}) + "\n")
