"""Exact runs at the command line: what they record, going on with them, and what is refused."""

# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Tswift, prompt, tswift  # noqa: F401
from tests.helpers import read_json
from tests.jobs.killing import result, write_record
from tswift.jobs.folder import RECORD


@pytest.fixture
def words(checkpoint: Path, prompt: Path) -> str:
    return f"--model {checkpoint} --prompt {prompt} --dtype bfloat16 --seed 5 --min-p 0.05"


def record(run: Path) -> dict[str, Any]:
    return read_json(run / RECORD)


def edit(run: Path, change: Callable[[dict[str, Any]], None]):
    """Change a record, and its checksum with it."""
    found = record(run)
    change(found)
    write_record(run, found)


@pytest.mark.slow
def test_a_run_goes_on_the_same(tswift, words, tmp_path):
    for options, name in ((["--len 60 --method ar"], "whole"), (["--len 17"], "run")):
        found = tswift("generate", words, *options, f"--out {tmp_path}/{name}").ok()
        assert "exact in passes of 16 rows" in found.err
    found = tswift(f"generate --resume {tmp_path}/run --exact --len 60").ok()
    assert "rounds otherwise" not in found.err
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    made, plain = record(tmp_path / "run"), record(tmp_path / "whole")
    assert made["resumed"][0]["exact"] == made["model"]["exact"] == plain["model"]["exact"]
    assert (plain["model"]["exact"]["width"], len(plain["model"]["exact"]["bits"])) == (16, 16)


@pytest.mark.slow
def test_other_options_are_refused(tswift, words, tmp_path):
    tswift("generate", words, f"--len 9 --out {tmp_path}/exact")
    tswift("generate", words, f"--no-exact --len 9 --out {tmp_path}/inexact")
    assert record(tmp_path / "inexact")["model"]["exact"] is None
    for run, option, message in (
        ("exact", "--no-exact", "True, got False"),
        ("inexact", "--exact", "False, got True"),
    ):
        before = result(tmp_path / run)
        found = tswift(f"generate --resume {tmp_path}/{run}", option, "--len 20")
        assert (found.code, found.out) == (2, b"")
        assert f"exact: the run was made with {message}" in found.err
        assert result(tmp_path / run) == before


def test_a_machine_that_rounds_otherwise_says_so(tswift, words, tmp_path):
    run = tmp_path / "run"
    tswift("generate", words, f"--len 20 --out {run}")
    edit(run, lambda found: found["model"]["exact"].update(bits="0123456789abcdef"))
    found = tswift(f"generate --resume {run} --len 40").ok()
    assert (
        "this machine rounds otherwise than the one before: the text may go on differently than "
        "there" in found.err
    )
    made = record(run)
    assert made["model"]["exact"]["bits"] == "0123456789abcdef"
    assert made["resumed"][0]["exact"]["bits"] != "0123456789abcdef"


def test_reference_decoding_is_not_exact(tswift, words, tmp_path):
    tswift(
        "generate", words, f"--method ar-reference --exact --len 20 --out {tmp_path}/run"
    ).refused("exact: cannot be had with ar-reference")
    tswift("generate", words, f"--method ar-reference --len 150 --out {tmp_path}/run --verify").ok()
    assert record(tmp_path / "run")["model"]["exact"] is None


def test_a_text_without_a_run_is_judged_exactly_only_if_that_is_asked_for(tswift, words, tmp_path):
    tswift("generate", words, f"--len 60 --out {tmp_path}/run")
    given = [f"--tokens {tmp_path}/run/tokens.u32", words]
    for options, exact in (([], None), (["--no-exact"], None), (["--exact"], 16)):
        found = tswift("verify", *given, *options, "--json -").ok()
        assert found.json["width"] == exact


def test_a_long_chain_is_cut_and_can_be_asked_for_again(tswift, words, tmp_path):
    chain = "--method magicdec --gamma 24"
    found = tswift("generate", words, chain, f"--len 20 --out {tmp_path}/run").ok()
    assert "drafts are cut to 16 nodes" in found.err
    tswift(f"generate --resume {tmp_path}/run --gamma 24 --len 30").ok()


@pytest.mark.slow
def test_a_run_goes_on_without_where_exact_passes_cannot_be_had(
    tswift, words, tmp_path, monkeypatch
):
    tswift("generate", words, f"--len 20 --out {tmp_path}/run")
    monkeypatch.setattr(
        "tswift.loading.model.choose_fixed_rows",
        lambda target, attention, exact: "no" if exact else None,
    )
    tswift(f"generate --resume {tmp_path}/run --exact --len 30").refused(
        "exact: cannot be had here: no"
    )
    found = tswift(f"generate --resume {tmp_path}/run --len 30").ok()
    assert "rounds otherwise" in found.err
