"""The command as a whole: help, version, usage errors."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

import tswift as package
from tests.cli.terminal import on_terminal
from tswift.cli.output import Display
from tswift.errors import Fault


def test_help_does_not_import_torch() -> None:
    code = "import sys; from tswift.cli import main; main(['--help']); main(['generate', '--help']); "
    code += "main(['verify', '--help']); main(['bench', '--help']); main(['roofline', '--help']); "
    code += "main(['train', '--help']); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    assert "--no-shared-noise" in done.stdout
    assert "first 1,024 tokens" in " ".join(done.stdout.split())


def test_version(tswift) -> None:  # type: ignore[no-untyped-def]
    result = tswift("--version")
    assert (result.code, result.out.decode()) == (0, f"tswift {package.__version__}\n")


def test_no_command_is_help(tswift) -> None:  # type: ignore[no-untyped-def]
    result = tswift()
    assert result.code == 0
    assert b"generate" in result.out


@pytest.mark.parametrize(
    "error", [Fault("the disk\nis full"), ZeroDivisionError("oops"), OSError(28, "No space left"), MemoryError()]
)
def test_what_breaks_on_the_way_is_one_line(tswift, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:  # type: ignore[no-untyped-def]
    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("tswift.jobs.job.start", broken)
    result = tswift("generate")
    assert result.code == 1
    assert result.err.startswith("tswift: error: ")
    assert result.err.count("\n") == 1
    assert ("unexpected" in result.err) == isinstance(error, ZeroDivisionError)
    assert ("no memory is left" in result.err) == isinstance(error, MemoryError)


def test_a_traceback_can_be_asked_for(tswift, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tswift.jobs.job.start", lambda *arguments: 1 / 0)
    monkeypatch.setenv("TSWIFT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        tswift("generate")


# ---------------------------------------------------------------------------------------------------------------------
# ``tswift env``


def test_machine_and_costs(tswift, checkpoint) -> None:  # type: ignore[no-untyped-def]
    asked = ("env", "--model", checkpoint, "--dtype", "float32")
    found = tswift(*asked)
    assert found.code == 0
    told = json.loads(tswift(*asked, "--json", "-").out)
    assert told["kind"] == "env"
    text = found.out.decode()
    assert told["environment"]["torch"] in text
    first = told["costs"]["base"][0] + 100 * told["costs"]["per_key"][0]
    assert f"{1e3 * first:.2f}" in text  # remembered, not measured anew


# ---------------------------------------------------------------------------------------------------------------------
# The text and the bar on one terminal: a pseudo-terminal's whole output


if TYPE_CHECKING:
    from tswift.decoding.loop import DecodeStats

CODE = """
import time
from types import SimpleNamespace
from tswift.cli.output import Display
stats = SimpleNamespace(tokens=10, tokens_per_second=20.0, tokens_per_step=5.0, alpha=1.0)
with Display(100, quiet=False, progress=True) as display:
    for word in "one two three\\nfour [bold]five[/bold] six seven eight nine ten".split(" "):
        display.show(word + " ", stats)
        time.sleep(0.1)
"""


def test_text_goes_above_the_bar_in_whole_lines() -> None:
    text = on_terminal(CODE, columns=20).decode()
    # each line is printed once, unbroken, at the start of a line
    for line in ("one two three\r\n", "[bold]five[/bold]", "six seven eight\r\n", "nine ten"):
        assert text.count(line) == 1, text
    assert "\x1b[1m" not in text


def test_raw_when_stdout_is_no_terminal(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    stats = cast("DecodeStats", SimpleNamespace(tokens=1))
    with Display(10, quiet=True, progress=True) as display:
        display.show("é\n", stats)
        display.show("[b]", stats)
    assert capfdbinary.readouterr().out == "é\n[b]".encode()
