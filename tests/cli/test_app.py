"""The command as a whole: help, version, usage errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tswift as package
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

    monkeypatch.setattr("tswift.jobs.start.start", broken)
    result = tswift("generate")
    assert result.code == 1
    assert result.err.startswith("tswift: error: ")
    assert result.err.count("\n") == 1
    assert ("unexpected" in result.err) == isinstance(error, ZeroDivisionError)
    assert ("no memory is left" in result.err) == isinstance(error, MemoryError)


def test_a_traceback_can_be_asked_for(tswift, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tswift.jobs.start.start", lambda *arguments: 1 / 0)
    monkeypatch.setenv("TSWIFT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        tswift("generate")
