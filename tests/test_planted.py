"""Planted faults name places in the sources that are there, and tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import tswift
from tests.planted import FAULTS

TESTS = Path(__file__).parent
SOURCES = Path(tswift.__file__).parent


def test_every_fault_has_a_place_and_a_test():
    for fault in FAULTS:
        assert (SOURCES / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.new != fault.old, fault.name
        for name in fault.tests.split():
            file, _, test = name.partition("::")
            assert f"def {test}" in (TESTS / file).read_text(), fault.name


def test_no_two_have_one_name():
    counts = Counter(fault.name for fault in FAULTS)
    assert set(counts.values()) == {1}, counts.most_common(1)
