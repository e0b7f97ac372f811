"""What this project does on a GPU, within seven minutes on a machine that need not have all that
tswift is installed with: ``make gpu`` (development only).

    python -m benchmarks.gpu --out runs/gpu            # --dry: tiny shapes on the CPU
    python -m benchmarks.gpu --site FOLDER             # with wheels that the machine lacks

First every method writes a text, in processes side by side, whose times mean nothing; then one
process measures, alone. Every figure is appended to one file at once, so that nothing is lost when
a process is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = "figures.jsonl"
EQUALITY, MEASURED = "equality", "measured"
SECONDS = {EQUALITY: 180.0, MEASURED: 180.0}  # the most of each
# of what is measured alone, in order; the first loads the model, and the last lets go of it
SECTIONS = {
    **{"steps": 85.0, "passes": 15.0, "parts": 25.0, "simulated": 15.0, "generate": 20.0},
    "codes": 100.0,
}


def figures(folder: Path) -> list[dict[str, Any]]:
    """All figures so far; the last line may be torn."""
    lines = (folder / FIGURES).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def note(folder: Path, section: str, table: str, **values: Any) -> None:
    """Write one figure, or one row of figures, at once."""
    with (folder / FIGURES).open("a") as file:
        file.write(json.dumps({"section": section, "table": table, **values}) + "\n")
