"""What users see of every command and record, against ``golden/``;
TSWIFT_GOLDEN=write writes it anew.

Options and fields may be added without a change here; none may go.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from tests.conftest import SENTENCES
from tests.helpers import first, read_json
from tswift.benchmarking.record import read
from tswift.benchmarking.report import csv_text
from tswift.cli.app import app

pytestmark = pytest.mark.usefixtures("load_once")

GOLDEN = Path(__file__).parent / "golden"
RESULTS = Path(__file__).parents[2] / "results" / "paper-cpu"
GRID = "--lens 10,20 --warmup 0 --no-plots --quiet"
RECORDS = {
    "bench": f"bench --prefill 4 {GRID} --methods medusa,tokenswift --out b",
    "bench-sampled": f"bench --prefill 4 {GRID} --methods reuse --ar sampled --out b",
    "suite": f"bench --suite case-study --prefill 4 {GRID} --out b",
    "compare": "compare --methods medusa,tokenswift --len 20 --quiet --json b/compare.json",
    "roofline": "roofline --bandwidth 4 --flops 1 --len 9 --prefill 9 --json b/roofline.json",
}


def fields(value, place: str = "") -> Iterator[str]:
    """The place of every value in a record, as ``samples[].points[].alpha``."""
    if isinstance(value, dict):
        for name, item in value.items():
            name = "N" if name.isdigit() else name
            yield from fields(item, f"{place}.{name}" if place else name)
    elif isinstance(value, list) and value and not isinstance(value[0], int | float | str):
        for item in value:
            yield from fields(item, f"{place}[]")
    else:
        yield place


def golden(name: str, text: str) -> str:
    """What the golden file holds."""
    if os.environ.get("TSWIFT_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    return (GOLDEN / name).read_text()


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "heads"])
def test_help(name):
    command = COMMANDS[name]
    options = {
        " ".join([*option.opts, *option.secondary_opts]): f"{option.help} [{option.default}]"
        for option in command.params
        if option.param_type_name == "option"
    }
    known = json.loads(
        golden(f"help-{name}.json", json.dumps({"": command.help, **options}, indent=1) + "\n")
    )
    assert known.pop("") == command.help
    assert known.items() <= options.items()


@pytest.mark.parametrize("name", RECORDS)
def test_fields(tswift, checkpoint, tmp_path, name):
    text = tmp_path / "prompt.txt"
    text.write_text(" ".join(SENTENCES[:4]))
    Path("b").mkdir()
    prompt = {"bench": "--prompts", "compare": "--prompt"}.get(RECORDS[name].split()[0])
    if "--out" in RECORDS[name]:
        Path("b").rmdir()
    tswift(RECORDS[name], f"--model {checkpoint}", *((prompt, text) if prompt else ())).ok()
    (path,) = Path("b").glob("*.json")
    found = set(fields(read_json(path)))
    assert {*golden(f"fields-{name}.txt", "\n".join(sorted(found)) + "\n").split("\n")} - {
        ""
    } <= found


def test_fields_of_a_run(tswift, checkpoint, prompt):
    words = f"--model {checkpoint} --prompt {prompt} --len 20 --method tokenswift --quiet"
    tswift("generate", words, "--verify --out runs/one").ok()
    tswift("generate --resume runs/one --len 25 --quiet").ok()
    tswift("runs --json runs.json").ok()
    for name, path in (
        ("run", "runs/one/run.json"),
        ("verify", "runs/one/verify.json"),
        ("runs", "runs.json"),
    ):
        found = set(fields(read_json(Path(path))))
        assert {*golden(f"fields-{name}.txt", "\n".join(sorted(found)) + "\n").split("\n")} - {
            ""
        } <= found


@pytest.mark.parametrize(
    "path", first(7, sorted(RESULTS.glob("*/suite.csv"))), ids=lambda path: path.parent.name
)
def test_figures_of_suites_that_were_run(path):
    """The committed records still give the committed figures, row by row."""
    record = read(path.with_suffix(".json"), "resume")
    committed = list(csv.DictReader(path.read_text().splitlines()))
    ours = list(csv.DictReader(csv_text(record).splitlines()))
    assert all(line.items() <= known.items() for line, known in zip(ours, committed, strict=True))
