"""``tswift generate --resume`` and ``tswift runs``, as they are typed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Tswift
from tests.helpers import read_json
from tests.jobs.killing import result

pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture
def words(checkpoint: Path, prompt: Path) -> str:
    sampling = "--temperature 1.3 --min-p 0 --seed 5 --logit-bias 40=2.5,7=-1"
    model = f"--model {checkpoint} --dtype float64 --prompt {prompt} --method tokenswift"
    return f"generate {model} {sampling}"


@pytest.fixture
def short(tswift: Tswift, words: str, tmp_path) -> Path:
    """A run of 9 tokens, and beside it one of 40, ``whole``."""
    for name, length in (("run", 9), ("whole", 40)):
        tswift(words, f"--len {length} --out {tmp_path}/{name}").ok()
    return tmp_path / "run"


def test_a_finished_run_goes_on(tswift, short, tmp_path):
    found = tswift(f"generate --resume {short}")
    assert (found.code, found.out) == (0, b"")
    assert "is finished; a larger --len goes on with it" in found.err
    assert tswift(f"generate --resume {short} --quiet").err == ""
    tswift(f"generate --resume {short} --verify").ok()
    assert (short / "verify.json").exists()
    longer = f"generate --resume {short} --len 40"
    refused = tswift(longer, "--logit-bias 40=2.5")
    assert (refused.code, "--logit-bias: the run was made with" in refused.err) == (2, True)
    found = tswift(longer, "--logit-bias 7=-1 --logit-bias 40=2.5").ok()
    assert re.search(r"going on after \d+ tokens", found.err)
    assert result(short) == result(tmp_path / "whole")
    # stdout goes on where it stopped; a character that was cut in two is whole now
    assert result(short)[1].endswith(found.out)


@pytest.mark.slow
def test_a_model_that_was_moved(tswift, short, checkpoint, tmp_path):
    """By its new place, and the heads by another file of the same kind;
    from then on the run remembers them.
    """
    shutil.copytree(checkpoint, tmp_path / "moved")
    (tmp_path / "moved" / "heads.safetensors").rename(tmp_path / "mine.safetensors")
    before = {path.name: path.read_bytes() for path in short.iterdir()}
    found = tswift(f"generate --resume {short} --len 20 --model {tmp_path}/moved")
    assert (found.code, found.out) == (2, b"")
    assert (
        f"{tmp_path}/moved is not the model that {short} was made with: heads differ" in found.err
    )
    assert {path.name: path.read_bytes() for path in short.iterdir()} == before
    elsewhere = (f"{tmp_path}/moved", f"{tmp_path}/mine.safetensors")
    tswift(f"generate --resume {short} --len 20 --model {elsewhere[0]} --heads {elsewhere[1]}").ok()
    tswift(f"generate --resume {short} --len 40").ok()
    assert result(short) == result(tmp_path / "whole")
    record = read_json(short / "run.json")
    assert (record["model"]["name"], record["options"]["heads"]) == elsewhere


def test_runs(tswift, short, tmp_path):
    found = tswift(f"runs {tmp_path}").ok()
    lines = found.text.splitlines()
    assert lines[0] == f"2 runs in {tmp_path}"
    assert re.search(r"^run +finished +tokenswift .* 9 +9 ", lines[2])
    assert re.search(r"^whole +finished +tokenswift .* 40 +40 ", lines[3])
    record = tswift(f"runs {tmp_path} --json -").json
    assert [entry["tokens"] for entry in record["runs"]] == [9, 40]
    assert tswift("runs").code == 2  # there is no folder of runs here
    assert tswift(f"runs {short}").text.startswith("1 run in")
