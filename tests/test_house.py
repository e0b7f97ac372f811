"""What the code costs its reader does not grow unseen: see tests/house.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import PARAMETERS, command_of, stops

MOST = 6  # functions that hold a parameter on its way


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_has_a_short_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = stops(PARAMETERS[name], command_of(str(tmp_path)))
    capsys.readouterr()  # the text
    assert len(passed) <= MOST, passed
