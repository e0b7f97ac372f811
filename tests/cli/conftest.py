"""Running the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.words import words_of
from tswift.cli import main

TEXT = "The ship had lain three days becalmed, and nobody spoke."


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self):
        return json.loads(self.out)

    def ok(self) -> Result:
        assert self.code == 0, self.err
        return self

    def refused(self, *said: str) -> Result:
        """In one line, which says all of this, with exit code 2."""
        assert (self.code, self.err.count("\n")) == (2, 1), self.err
        for each in said:
            assert each in self.err, self.err
        return self


Tswift = Callable[..., Result]


@pytest.fixture
def tswift(capfdbinary, tmp_path, monkeypatch) -> Callable[..., Result]:
    """Run ``tswift`` with these words, in an empty working directory."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*words) -> Result:
        capfdbinary.readouterr()
        code = main(words_of(words))
        captured = capfdbinary.readouterr()
        return Result(code, captured.out, captured.err.decode())

    return run


@pytest.fixture
def prompt(tmp_path) -> Path:
    """A file with a short prompt."""
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path
