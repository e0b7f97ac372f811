"""What this project does on a GPU, within nine minutes on a machine that need not have all that
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
SECONDS = {EQUALITY: 200.0, MEASURED: 310.0}  # the most of each
# of what is measured alone, in order of value
SECTIONS = {
    **{"steps": 70.0, "passes": 10.0, "codes": 140.0, "parts": 20.0, "simulated": 15.0},
    "generate": 20.0,
}
# what of a model is held in fewer bits, in order of value: options of ``tswift.load``
HELD: tuple[dict[str, str], ...] = (
    *({"weights": "int4"}, {"kv_dtype": "int8"}, {"weights": "int8"}),
    {"weights": "int4", "kv_dtype": "int8"},
)


def figures(folder: Path) -> list[dict[str, Any]]:
    """All figures so far; the last line may be torn."""
    lines = (folder / FIGURES).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def note(folder: Path, section: str, table: str, **values: Any) -> None:
    """Write one figure, or one row of figures, at once."""
    with (folder / FIGURES).open("a") as file:
        file.write(json.dumps({"section": section, "table": table, **values}) + "\n")
