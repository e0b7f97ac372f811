"""The files of a suite: ``suite.json``, ``suite.csv``, ``suite.md``, its plot, and its texts as ``suite.html``."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tswift.benchmarking import look
from tswift.benchmarking.grid import Grid
from tswift.benchmarking.measurement import encode
from tswift.benchmarking.report import settings_of
from tswift.benchmarking.suites import drawing, texts
from tswift.benchmarking.suites.tables import table
from tswift.benchmarking.tables import source
from tswift.errors import InputError
from tswift.jobs.folder import write_whole

FILE = "suite.json"


def write_suite(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``suite.json`` alone, whole or not at all.

    Raises:
        InputError: the folder cannot be written to.
    """
    return _write(folder, {FILE: encode_suite(record).encode()})[0]


def write_reports(record: Mapping[str, Any], folder: Path, plots: bool) -> list[Path]:
    """Write all files, each whole or not at all.

    Args:
        record: as in ``suite.json``.
        folder: is made if need be; files of the same names are replaced.
        plots: draw; nothing is drawn without matplotlib.

    Returns:
        The files.

    Raises:
        InputError: the folder cannot be written to.
    """
    contents = {FILE: encode_suite(record), "suite.csv": csv_report(record), "suite.md": markdown_report(record)}
    if record["texts"]:
        contents["suite.html"] = texts.page(record, source(record["groups"][0]["measurement"]))
    files = {name: text.encode(errors="backslashreplace") for name, text in contents.items()}
    return _write(folder, {**files, **(drawing.render(record) if plots and look.available() else {})})


def encode_suite(record: Mapping[str, Any]) -> str:
    """The text of ``suite.json``: indented, with one row, pair or sample per line."""
    lists = {name: record[name] for name in ("rows", "published", "texts")}
    head = {name: value for name, value in record.items() if name not in (*lists, "groups", "conclusion")}
    parts = [json.dumps(head, indent=2)[:-2]]
    parts += [f'  "{name}": {_lines(values)}' for name, values in lists.items()]
    conclusion = record["conclusion"]
    told = f'{{"lines": {_lines(conclusion["lines"])}, "pairs": {_lines(conclusion["pairs"])}}}'
    groups = ",\n".join(
        f'{{"label": {json.dumps(group["label"])}, "measurement": {encode(group["measurement"])}}}'
        for group in record["groups"]
    )
    return ",\n".join([*parts, f'  "conclusion": {told}', f'  "groups": [{groups}]\n}}\n'])


def csv_report(record: Mapping[str, Any]) -> str:
    """One line per row, measured ones first: of each figure n, mean and standard deviation; empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = [*record["rows"], *record["published"]]
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    place = ["axis", "source", "prefill", "length"]
    writer.writerow(["suite", *place, *(f"{name}_{part}" for name in names for part in ("n", "mean", "std"))])
    for row in rows:
        line = [record["suite"], *("" if row[name] is None else row[name] for name in place)]
        for name in names:
            figure = row["figures"].get(name, {"n": 0, "mean": None, "std": None})
            line += [figure["n"], *("" if figure[part] is None else f"{figure[part]:.9g}" for part in ("mean", "std"))]
        writer.writerow(line)
    return text.getvalue()


def markdown_report(record: Mapping[str, Any]) -> str:
    """The table, then what each group was measured on and with."""
    groups = [(group["label"], group["measurement"]) for group in record["groups"]]
    parts = [f"# tswift bench --suite {record['suite']}\n", table(record).markdown()]
    for label, measurement in groups:
        title = f"Run: {label}" if label else "Run"
        parts.append(Grid(title, ["what", "value"], list(settings_of(measurement).items()), left=2).markdown())
    parts.append(f"```sh\n{shlex.join(record['command'])}\n```\n")
    environment = groups[0][1]["environment"]
    told = [(name, "none" if value is None else str(value)) for name, value in environment.items()]
    return "\n".join([*parts, Grid("Environment", ["what", "value"], told, left=2).markdown()])


def _lines(values: Any) -> str:
    lines = ",\n    ".join(json.dumps(value) for value in values)
    return f"[\n    {lines}\n  ]" if values else "[]"


def _write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror})", "--out") from None
    return [folder / name for name in files]
