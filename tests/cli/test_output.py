"""Tables on a terminal and in a pipe; and where JSON goes: by whatever name or link, and never over something else."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import on_terminal
from tswift.benchmarking.table import Table
from tswift.cli.output import show, writable


def test_a_link_stays_and_what_it_points_at_is_written(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    record = writable(tmp_path / "link.json")
    assert record is not None
    assert (tmp_path / "real.json").read_text() == "old"
    record.write({"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["a"] == 1


def test_to_ask_leaves_nothing_behind(tmp_path: Path) -> None:
    assert writable(tmp_path / "new.json") is not None
    assert list(tmp_path.iterdir()) == []
    assert writable(None) is None
    standard = writable(Path("-"))
    assert standard is not None
    assert standard.path is None


def test_names_that_are_no_text(tswift, checkpoint: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A file name is bytes, and the command line keeps them: half a character is written as JSON writes it."""
    prompt = tmp_path / "caf\udce9.txt"
    prompt.write_text("The ship had lain three days becalmed, and nobody spoke.")
    words = ["--model", checkpoint, "--prompt", prompt, "--len", 3, "--methods", "ar", "--json"]
    assert tswift("compare", *words, tmp_path / "found.json").code == 0
    told = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert told["prompt"]["source"] == str(prompt)
    result = tswift("compare", *words, "-")
    assert result.code == 0, result.err
    assert json.loads(result.out)["prompt"]["source"] == str(prompt)
    grid = ["--prefill", 8, "--lens", 4, "--methods", "ar", "--warmup", 0, "--no-plots", "--out", tmp_path / "out"]
    result = tswift("bench", "--model", checkpoint, "--prompts", prompt, *grid)
    assert result.code == 0, result.err
    assert "caf\\udce9.txt" in (tmp_path / "out" / "bench.md").read_text(encoding="utf-8")
    out = tmp_path / "run\udce9"
    assert tswift("generate", "--model", checkpoint, "--prompt", prompt, "--len", 3, "--out", out).code == 0
    assert tswift("generate", "--resume", out, "--len", 5, "--prompt", prompt).code == 0
    assert (out / "tokens.u32").stat().st_size == 4 * 5


def test_a_stdout_that_has_no_such_characters(tswift, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "größer").symlink_to(checkpoint)
    words = ["roofline", "--model", tmp_path / "größer", "--bandwidth", 1, "--flops", 1, "--len", 9, "--prefill", 9]
    for more, shown in ((["--json", "-"], rb"gr\u00f6\u00dfer"), ([], rb"gr\xf6\xdfer")):
        written = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
            assert tswift(*words, *more).code == 0
            assert shown in written.getvalue()


CODE = """
from tswift.benchmarking.table import Table
from tswift.cli.progress import Bars
from tswift.cli.output import show
with Bars(quiet=False, progress=True) as bars:
    bars.update("verify", 50, 100)
show(Table("A title", ("class", "tokens"), [("exact", "1,234")], left=1, notes=["[a] note"]), stderr=STDERR)
"""


@pytest.mark.parametrize("stderr", [False, True])
def test_on_a_terminal(stderr: bool) -> None:
    seen = on_terminal(CODE.replace("STDERR", str(stderr)), columns=80)
    for said in (b"verify", b"50/100", b"A title", b"1,234", b"[a] note"):
        assert said in seen, seen


@pytest.mark.parametrize("stderr", [False, True])
def test_in_a_pipe(stderr: bool, capsys: pytest.CaptureFixture[str]) -> None:
    grid = Table("A title", ("class", "tokens"), [("exact", "1,234")], left=1)
    show(grid, stderr)
    out, err = capsys.readouterr()
    assert (err if stderr else out) == grid.plain()
    assert (out if stderr else err) == ""
