"""What the code costs its reader does not grow unseen: see tests/house.py."""

from __future__ import annotations

import pytest

from tests.helpers import needs_program
from tests.house import (
    ROOT,
    asked,
    calls,
    circles,
    command_of,
    stops,
    tokens_of,
    uses_of_any,
)
from tswift import remembered
from tswift.cli import main
from tswift.drafting.methods import resolve
from tswift.forward.cpu.program import PassProgram
from tswift.models.hashes import weights_hash

MOST = 6  # functions that hold a parameter on its way
# What may only become fewer: where the device is asked, and how passes are made; tokens of the
# sources, and what they say of types with ``Any``. What has to raise one of these says in its issue
# and its commit what that buys.
DEVICES, RUNNERS = 45, 13
TOKENS, ANYS = 254_725, 128


def test_modules_import_each_other_in_no_circle():
    assert circles() == []


def test_what_is_decided_once_is_asked_seldom():
    assert asked(r"device\.type\b") <= DEVICES
    assert asked(r"target\.replays\b|\brunner\.", but="forward/") <= RUNNERS


def test_the_sources_grow_no_more():
    paths = [*ROOT.rglob("*.py")]
    assert sum(map(tokens_of, paths)) <= TOKENS
    assert sum(map(uses_of_any, paths)) <= ANYS


@needs_program
def test_what_a_command_decides_it_decides_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(remembered, "cache_folder", lambda: tmp_path)
    once = (resolve, weights_hash, PassProgram.__init__)
    command = f"generate --len 5 --prompt-text a --quiet --out {tmp_path}".split()
    main([*command[:-1], f"{tmp_path}/first"])  # whose checks are remembered
    assert calls(once, [*command[:-1], f"{tmp_path}/second"]) == dict.fromkeys(
        [each.__qualname__ for each in once], 1
    )
    capsys.readouterr()  # the text


@pytest.mark.slow
def test_a_parameter_has_a_short_way(tmp_path, capsys):
    passed = stops(command_of(str(tmp_path)))
    capsys.readouterr()  # the text
    for name, places in passed.items():
        assert 0 < len(places) <= MOST, (name, places)
