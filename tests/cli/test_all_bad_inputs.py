"""Every bad input of the tables, each refused in one clear line,
with nothing touched or left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

import pytest

from tests.cli.bad_inputs import CASES, Case, World, attempt, make_world, tree
from tests.cli.bad_inputs.models import MARKER
from tswift.loading.model import LoadedModel


@pytest.fixture(scope="module")
def world(tmp_path_factory, load_once: Callable[..., LoadedModel]) -> Iterator[World]:
    """What cases start from; no case may change it."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "here").mkdir()
    made = make_world(folder, folder / "here")
    before = tree(folder)
    yield made
    assert tree(folder) == before


def _group(case: Case) -> str:
    return f"{case.name.split()[0]}: {case.words.__module__.rpartition('.')[2]}"


# one test for what may be wrong with one thing that a command takes, such as its model's files
GROUPS = {name: list(cases) for name, cases in groupby(sorted(CASES, key=_group), _group)}


@pytest.mark.parametrize("name", GROUPS)
def test_are_refused_in_one_line(name, world, tmp_path):
    wrong = {}
    for number, case in enumerate(GROUPS[name]):
        here = tmp_path / str(number)
        here.mkdir()
        found = attempt(case, replace(world, here=here))
        ran = ["code of the checkpoint was run"] if list(here.rglob(MARKER)) else []
        if found.faults or ran:
            wrong[case.name] = [*found.faults, *ran, found.err]
    assert not wrong


def test_there_are_many():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 150
