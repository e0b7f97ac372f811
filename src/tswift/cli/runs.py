"""``tswift runs``: what is in the folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options

if TYPE_CHECKING:
    from tswift.benchmarking.grid import Grid
    from tswift.jobs.recorded import Entry


def runs(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs, or one run's.")] = Path("runs"),
    json_file: options.Json = None,
) -> None:
    """List runs: state, tokens, method, model, speed. A killed or interrupted one goes on with generate --resume."""
    from tswift.cli import records, tables
    from tswift.jobs.recorded import list_runs

    record = records.writable(json_file)
    entries = list_runs(folder)
    if record is None or record.path:
        tables.show(_grid(folder, entries))
    if record:
        record.write({"kind": "runs", "command": context.obj, "runs": entries})


def _grid(folder: Path, entries: list[Entry]) -> Grid:
    from tswift.benchmarking.grid import NOTHING, Grid

    columns = ["run", "state", "method", "model", "started", "tokens", "of", "tokens/s"]
    rows = [
        [
            str(entry.path.name or entry.path),
            entry.state,
            entry.method or NOTHING,
            entry.model or NOTHING,
            (entry.started or NOTHING).replace("+00:00", "Z"),
            f"{entry.tokens:,}",
            NOTHING if entry.length is None else f"{entry.length:,}",
            NOTHING if entry.tokens_per_second is None else f"{entry.tokens_per_second:,.1f}",
        ]
        for entry in entries
    ]
    reasons = [f"{entry.path.name}: {entry.reason}" for entry in entries if entry.reason]
    many = "" if len(entries) == 1 else "s"
    return Grid(f"{len(entries):,} run{many} in {folder}", columns, rows, left=5, notes=reasons)
