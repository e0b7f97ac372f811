"""What the code costs its reader does not grow unseen: see tests/house.py."""

from __future__ import annotations

import pytest

from tests.house import PARAMETERS, asked, circles, command_of, stops

MOST = 6  # functions that hold a parameter on its way
# what may only become fewer: where the device is asked, and how passes are made
DEVICES, RUNNERS = 67, 13


def test_modules_import_each_other_in_no_circle():
    assert circles() == []


def test_what_is_decided_once_is_asked_seldom():
    assert asked(r"device\.type\b") <= DEVICES
    assert asked(r"target\.replays\b|\brunner\.", but="forward/") <= RUNNERS


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_has_a_short_way(name, tmp_path, capsys):
    passed = stops(PARAMETERS[name], command_of(str(tmp_path)))
    capsys.readouterr()  # the text
    assert len(passed) <= MOST, passed
