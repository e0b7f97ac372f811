"""``tswift generate --resume`` and ``tswift runs``, as they are typed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Tswift
from tests.jobs.killing import result
from tswift.decoding.loop import Decoding


@pytest.fixture
def words(checkpoint: Path, prompt: Path) -> list[object]:
    sampling = ["--temperature", 1.3, "--min-p", 0, "--seed", 5]
    model = ["--model", checkpoint, "--dtype", "float64"]
    return ["generate", *model, "--prompt", prompt, "--method", "tokenswift", *sampling]


@pytest.fixture
def interrupted(tswift: Tswift, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 60 tokens that was interrupted about half way."""
    real = Decoding.steps

    def some(self: Decoding, *given: object):  # type: ignore[no-untyped-def]
        for made, step in enumerate(real(self, *given)):  # type: ignore[arg-type]
            yield step
            if made == 20:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "steps", some)
        found = tswift(*words, "--len", 60, "--out", tmp_path / "run")
    assert found.code == 130
    assert "goes on from there" in found.err
    return tmp_path / "run"


def test_goes_on(tswift: Tswift, words: list[object], interrupted: Path, tmp_path: Path) -> None:
    assert tswift(*words, "--len", 60, "--out", tmp_path / "whole").code == 0
    before = (interrupted / "text.txt").read_bytes()
    found = tswift("generate", "--resume", interrupted)
    assert found.code == 0, found.err
    assert re.search(r"going on after \d+ tokens", found.err)
    assert result(interrupted) == result(tmp_path / "whole")
    # stdout goes on where it stopped; a character that was cut in two is whole now
    assert (before.decode().rstrip("\ufffd").encode() + found.out).endswith(found.out)
    assert result(interrupted)[1].endswith(found.out)
    assert json.loads((interrupted / "run.json").read_text())["state"] == "finished"


def test_a_bias_is_kept(tswift: Tswift, words: list[object], tmp_path: Path) -> None:
    words = [*words, "--logit-bias", "40=2.5,7=-1"]
    assert tswift(*words, "--len", 40, "--out", tmp_path / "whole").code == 0
    assert tswift(*words, "--len", 9, "--out", tmp_path / "run").code == 0
    longer = ["generate", "--resume", tmp_path / "run", "--len", 40]
    refused = tswift(*longer, "--logit-bias", "40=2.5")
    assert (refused.code, "--logit-bias: the run was made with" in refused.err) == (2, True)
    assert tswift(*longer, "--logit-bias", "7=-1", "--logit-bias", "40=2.5").code == 0
    assert result(tmp_path / "run") == result(tmp_path / "whole")


def test_a_finished_run_says_so(tswift: Tswift, words: list[object], tmp_path: Path) -> None:
    tswift(*words, "--len", 9, "--out", tmp_path / "run")
    found = tswift("generate", "--resume", tmp_path / "run")
    assert (found.code, found.out) == (0, b"")
    assert "is finished; a larger --len goes on with it" in found.err
    assert tswift("generate", "--resume", tmp_path / "run", "--quiet").err == ""
    found = tswift("generate", "--resume", tmp_path / "run", "--verify")
    assert found.code == 0
    assert (tmp_path / "run" / "verify.json").exists()
    assert tswift("generate", "--resume", tmp_path / "run", "--len", 30).code == 0
    assert len(result(tmp_path / "run")[0]) == 4 * 30


def test_a_model_that_was_moved(
    tswift: Tswift, words: list[object], interrupted: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """By its new place, and the heads by another file of the same kind; from then on the run remembers them."""
    shutil.copytree(checkpoint, tmp_path / "moved")
    (tmp_path / "moved" / "heads.safetensors").rename(tmp_path / "mine.safetensors")
    before = {path.name: path.read_bytes() for path in interrupted.iterdir()}
    found = tswift("generate", "--resume", interrupted, "--model", tmp_path / "moved")
    assert (found.code, found.out) == (2, b"")
    assert {path.name: path.read_bytes() for path in interrupted.iterdir()} == before
    assert f"{tmp_path}/moved is not the model that {interrupted} was made with: heads differ" in found.err
    elsewhere = ["--model", tmp_path / "moved", "--heads", tmp_path / "mine.safetensors"]
    assert tswift("generate", "--resume", interrupted, *elsewhere).code == 0
    assert tswift("generate", "--resume", interrupted, "--len", 70).code == 0
    tswift(*words, "--len", 70, "--out", tmp_path / "whole")
    assert result(interrupted) == result(tmp_path / "whole")
    record = json.loads((interrupted / "run.json").read_text())
    assert (record["model"]["name"], record["options"]["heads"]) == tuple(map(str, elsewhere[1::2]))


def test_runs(tswift: Tswift, words: list[object], interrupted: Path, tmp_path: Path) -> None:
    tswift(*words, "--len", 9, "--method", "ar", "--out", tmp_path / "second")
    found = tswift("runs", tmp_path)
    assert found.code == 0
    lines = found.out.decode().splitlines()
    assert lines[0] == f"2 runs in {tmp_path}"
    assert re.search(r"^run +interrupted +tokenswift .* [0-9]+ +60 ", lines[2])
    assert re.search(r"^second +finished +ar .* 9 +9 ", lines[3])
    record = json.loads(tswift("runs", tmp_path, "--json", "-").out)
    assert [entry["state"] for entry in record["runs"]] == ["interrupted", "finished"]
    assert tswift("runs").code == 2  # there is no folder of runs here
    assert tswift("runs", interrupted).out.decode().startswith("1 run in")
