"""Running the command line in this process."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.words import words_of
from tswift.cli import main

if TYPE_CHECKING:
    from tswift.loading.model import LoadedModel


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


@pytest.fixture(scope="module")
def load_once() -> Iterator[Callable[..., LoadedModel]]:
    """For as long as this lasts, no model is loaded twice in the same way, by whoever loads it:
    what loads them.
    """
    import tswift.jobs.job
    import tswift.jobs.verification
    import tswift.machine
    from tswift.loading import model as loading

    real = loading.load_model
    remembered = functools.cache(loading.load_model)

    def cached(*arguments, **named) -> LoadedModel:
        try:
            return remembered(*arguments, **named)
        except TypeError:  # what cannot be remembered
            return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module in [
            module for name, module in sys.modules.items() if name.startswith("tswift.")
        ]:
            if getattr(module, "load_model", None) is real:
                patch.setattr(module, "load_model", cached)
        # asks git, which takes longer
        patch.setattr(tswift.machine, "_output", lambda command: None)
        yield cached


@pytest.fixture
def prompt(tmp_path) -> Path:
    """A file with a short prompt."""
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path
