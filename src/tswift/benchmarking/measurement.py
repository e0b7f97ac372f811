"""A measurement's file, ``bench.json``: its workload's identity, written, read back.

Its form is ``bench.schema.json``. Within a schema version keys may be added that older files lack: whatever reads a
file does without them. A key that is taken away, or means something else, is a new version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tswift.benchmarking.schema import bench_schema, complaints
from tswift.benchmarking.statistics import summarise
from tswift.errors import InputError
from tswift.reading import MOST_RECORD, parse_json, read_file

SCHEMA = 1
KIND = "bench"
FILE = "bench.json"
FINISHED = "finished"

BASELINE = "ar"
REFERENCE = "ar-reference"  # plain decoding with the attention of reference implementations
DRAFTLESS = (BASELINE, REFERENCE)


def workload_hash(workload: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the workload as canonical JSON, its own ``hash`` left out."""
    content = {name: value for name, value in workload.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode(measurement: Mapping[str, Any]) -> str:
    """The text of ``bench.json``: indented, with one sample per line, so that a diff is short."""
    head = json.dumps({name: value for name, value in measurement.items() if name != "samples"}, indent=2)
    samples = ",\n    ".join(json.dumps(sample) for sample in measurement["samples"])
    return f'{head[:-2]},\n  "samples": [\n    {samples}\n  ]\n}}\n'


def load_measurement(path: Path, option: str = "--against") -> dict[str, Any]:
    """Read a ``bench.json`` that is whole.

    Args:
        path: the file.
        option: the option that named it, for errors.

    Raises:
        InputError: it cannot be read, is no ``bench.json``, is of another schema version, lacks figures, or did not run
            to its end.
    """
    content = parse_json(read_file(path, MOST_RECORD, option), path, option)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise InputError(f"{path} is not a {FILE} of tswift bench", option)
    if content.get("schema") != SCHEMA:
        found = f"{content.get('schema')}"[:40]
        raise InputError(f"{path} has schema version {found}, this tswift reads {SCHEMA}", option)
    wrong = next(complaints(content, bench_schema()), None)
    if wrong:
        raise InputError(f"{path} {wrong}", option)
    if content["simulated"] != ("simulated" in content["workload"]):
        raise InputError(
            f"{path} is damaged (simulated is {content['simulated']}, its workload says otherwise)", option
        )
    if content["state"] != FINISHED:  # what it has not reached would never be missed
        raise InputError(f"{path} did not run to its end, it is {content['state']}", option)
    if not summarise(content):
        raise InputError(f"{path} holds no samples", option)
    return content


def machine(environment: Mapping[str, Any]) -> str:
    """The machine in words: the GPU, or the CPU and its threads in use."""
    threads = environment["threads"]
    return environment["gpu"] or f"{environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}"


def file_name(name: str, simulated: bool) -> str:
    """``bench.json``, or ``bench-simulated.json``: a file says what it holds wherever it is copied to."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}-simulated.{kind}" if simulated else name


def simulation(measurement: Mapping[str, Any]) -> str:
    """What a measurement simulates, in words; empty if nothing."""
    what, alpha = measurement["workload"].get("simulated") or {}, given_alpha(measurement)
    words = ["random weights"] if what.get("weights") else []
    return ", ".join(words if alpha is None else [*words, f"acceptance set to {alpha:g}"])


def given_alpha(measurement: Mapping[str, Any]) -> float | None:
    """The acceptance that was set, whatever was drawn; None where what was drawn decided."""
    return (measurement["workload"].get("simulated") or {}).get("alpha")
