"""The files of a measurement: ``bench.json``, ``bench.csv``, ``bench.md`` and the plots.

Those of a simulated one are called ``bench-simulated.json`` and so on.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tswift.benchmarking import look
from tswift.benchmarking import plots as drawing
from tswift.benchmarking.grid import Grid, marks, quantity
from tswift.benchmarking.measurement import FILE, encode, file_name, simulation
from tswift.benchmarking.statistics import FIGURES, summarise
from tswift.benchmarking.tables import grids, source
from tswift.errors import InputError
from tswift.jobs.folder import write_whole


def write_reports(measurement: Mapping[str, Any], folder: Path, paper: bool, plots: bool) -> list[Path]:
    """Write the files, each whole or not at all. The measurement itself comes first.

    Args:
        measurement: as in ``bench.json``.
        folder: is made if need be; files of the same names are replaced.
        paper: put the paper's rows beside ours in ``bench.md``.
        plots: draw; nothing is drawn without matplotlib (see ``look.available``), or where no length was reached.

    Returns:
        The files.

    Raises:
        InputError: the folder cannot be written to.
    """
    makers = {FILE: lambda: encode(measurement), "bench.csv": lambda: csv_report(measurement)}
    makers["bench.md"] = lambda: markdown_report(measurement, paper)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, make in makers.items():
            path = folder / file_name(name, measurement["simulated"])
            write_whole(path, make().encode(errors="backslashreplace"))  # a file's name may hold half a character
            paths.append(path)
        for name, content in drawing.render(measurement).items() if plots and look.available() else ():
            write_whole(folder / name, content)
            paths.append(folder / name)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "--out") from None
    return paths


def write_measurement(measurement: Mapping[str, Any], folder: Path) -> Path:
    """Write ``bench.json`` alone, whole or not at all.

    Raises:
        InputError: the folder cannot be written to.
    """
    path = folder / file_name(FILE, measurement["simulated"])
    try:
        write_whole(path, encode(measurement).encode())
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "--out") from None
    return path


def csv_report(measurement: Mapping[str, Any]) -> str:
    """One line per method, prefill and length: of each figure n, mean and standard deviation; empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    about = ["model", "method", "prefill", "length", "simulated", "estimated", "runs", "varies"]
    writer.writerow(about + [f"{name}_{column}" for name in FIGURES for column in ("n", "mean", "std")])
    for cell in summarise(measurement):
        said = "".join(f" ({mark})" for mark in marks(measurement["simulated"]))
        line = [measurement["workload"]["model"], f"{cell.method}{said}", cell.prefill, cell.length]
        line += [str(flag).lower() for flag in (measurement["simulated"], cell.estimated)]
        line += [cell.runs, " ".join(cell.varies)]
        for name in FIGURES:
            figure = cell.figures[name]
            line += [figure.n, *("" if value is None else f"{value:.9g}" for value in (figure.mean, figure.std))]
        writer.writerow(line)
    return text.getvalue()


def markdown_report(measurement: Mapping[str, Any], paper: bool = False) -> str:
    """The tables of ``tables.grids``, then what they were measured on, when and with which command."""
    about = Grid("Run", ["what", "value"], list(settings_of(measurement).items()), left=2)
    environment = {name: "none" if value is None else str(value) for name, value in measurement["environment"].items()}
    simulated = " (simulated)" if measurement["simulated"] else ""
    return "\n".join(
        [
            f"# tswift bench: {measurement['workload']['model']}{simulated}\n",
            *(grid.markdown() for grid in grids(measurement, paper)),
            about.markdown(),
            f"```sh\n{shlex.join(measurement['command'])}\n```\n",
            Grid("Environment", ["what", "value"], list(environment.items()), left=2).markdown(),
        ]
    )


def settings_of(measurement: Mapping[str, Any]) -> dict[str, str]:
    """What a measurement was made with, in words."""
    workload = measurement["workload"]
    return {
        "measured on": source(measurement),
        "started": measurement["started"],
        "ended": measurement["ended"],
        "runs": str(len(measurement["samples"])),
        "seeds": ", ".join(map(str, workload["seeds"])),
        "prompts": ", ".join(prompt["name"] for prompt in workload["prompts"]),
        "dtype": workload["dtype"],
        "attention": workload["attention"],
        **({"layers": measurement["layers"]} if "layers" in measurement else {}),
        "heads": workload["heads"] or "none",
        "sampling": _settings(workload["sampling"]),
        **{f"drafting, {method}": _settings(options) for method, options in workload["drafting"].items()},
        "AR's time": {"full": "measured", "sampled": "estimated from sampled steps"}[workload["ar"]],
        **({"simulated": simulation(measurement)} if measurement["simulated"] else {}),
        **_machine(measurement),
        "workload hash": workload["hash"],
    }


def _machine(measurement: Mapping[str, Any]) -> dict[str, str]:
    """What was measured of the machine before the methods ran; nothing in older files."""
    machine = measurement.get("machine")
    if machine is None:
        return {}
    rates = f"{quantity(machine['bandwidth'], 'B/s')}, {quantity(machine['flops'], 'FLOP/s')}"
    return {"machine's rates": f"{rates} in {measurement['workload']['dtype']}"}


def _settings(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "none"
