"""Running the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tswift.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str


Tswift = Callable[..., Result]


@pytest.fixture
def tswift(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Run ``tswift`` with these words, in an empty working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*words: object) -> Result:
        capfdbinary.readouterr()
        code = main([str(word) for word in words])
        captured = capfdbinary.readouterr()
        return Result(code, captured.out, captured.err.decode())

    return run


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second is spent on measuring this machine for a benchmark of a tiny model."""
    import tswift.benchmarking.measure as module
    from tswift.benchmarking.roofline import Machine

    monkeypatch.setattr(module, "measured", lambda device, dtype: Machine(2e10, 1e11))


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A file with a short prompt."""
    path = tmp_path / "prompt.txt"
    path.write_text("The ship had lain three days becalmed, and nobody spoke.")
    return path
