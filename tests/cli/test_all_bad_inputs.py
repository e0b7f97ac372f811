"""Every bad input of the table, each refused in one clear line; ``python -m tests.cli.bad_inputs`` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.bad_inputs import CASES, Case, World, attempt, make_world, tree
from tests.cli.bad_inputs.models import MARKER
from tswift.models.load import LoadedModel


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, load_once: Callable[..., LoadedModel]) -> Iterator[World]:
    """What cases start from; no case may change it."""
    import tswift.benchmarking.run as module
    from tswift.benchmarking.roofline import Machine

    folder = tmp_path_factory.mktemp("world")
    (folder / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measure_machine", lambda device, dtype: Machine(2e10, 1e11))
        made = make_world(folder, folder / "here")
    before = tree(folder)
    yield made
    assert tree(folder) == before


@pytest.mark.parametrize("case", CASES, ids=[ascii(case.name) for case in CASES])
def test_is_refused_in_one_line(case: Case, world: World, tmp_path: Path) -> None:
    found = attempt(case, replace(world, here=tmp_path))
    assert not found.faults, found.err
    assert not list(tmp_path.rglob(MARKER))  # code of the checkpoint was run


def test_there_are_many() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 300
