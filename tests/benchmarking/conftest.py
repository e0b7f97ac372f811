"""The machine's speed is not measured by every benchmark of a tiny model; ``test_machine.py`` measures it."""

from __future__ import annotations

import pytest

from tests.benchmarking.helpers import MACHINE


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import tswift.benchmarking.run as module

    monkeypatch.setattr(module, "measure_machine", lambda device, dtype: MACHINE)
