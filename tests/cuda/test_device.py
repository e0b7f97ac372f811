"""Every method on a simulated CUDA device: no mix of devices,
no wait and no copy that is not known of.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from benchmarks.architectures import ARCHITECTURES
from tests.drafters import RECURRENT
from tests.helpers import NO_PROGRAM, read_json

pytestmark = pytest.mark.slow  # two processes of a minute together
ROOT = Path(__file__).parents[2]
COUNTS = ("waits", "sent", "fetched", "kernels", "launches")
# What a step may ask of the host and of a device at most: lower it where a method comes to need
# less.
# by method and heads: waits, copies to the device, copies from it, kernels outside graphs, graph
# launches; medians
BOUNDS: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    ("ar", "chained"): (1, 0, 1, 0, 1),
    ("medusa", "chained"): (1, 0, 1, 0, 2),
    ("medusa", "conditioned"): (1, 0, 1, 0, 2),
    ("medusa", "trimmed"): (1, 0, 1, 0, 2),
    ("tokenswift", "chained"): (1, 1, 1, 0, 2),
    ("tokenswift", "conditioned"): (1, 1, 1, 0, 2),
    ("tokenswift", "trimmed"): (1, 1, 1, 0, 2),
    ("cascade", "chained"): (4, 8, 4, 150, 2),
    ("cascade", "conditioned"): (4, 9, 4, 210, 2),
    ("cascade", "trimmed"): (4, 9, 4, 220, 2),
    **({("recall", "chained"): (1, 1, 1, 0, 1)} if NO_PROGRAM is None else {}),
    ("reuse", "chained"): (1, 0, 1, 0, 1),
    ("magicdec", "chained"): (5, 2, 5, 9, 5),
    ("standalone", "chained"): (5, 2, 5, 6, 5),
    ("triforce", "chained"): (16, 15, 16, 111, 16),
    ("auto", "chained"): (1, 0, 1, 0, 2),
    ("auto", "conditioned"): (1, 0, 1, 0, 2),
    ("auto", "trimmed"): (1, 0, 1, 0, 2),
    ("ar-reference", "chained"): (1, 0, 1, 0, 1),
    ("medusa", "chained, counted"): (1, 0, 1, 0, 2),
    ("ar", "chained, int8 cache"): (1, 0, 1, 0, 1),
    ("tokenswift", "chained, int8 cache"): (1, 1, 1, 0, 2),
    ("magicdec", "chained, int8 cache"): (5, 2, 5, 11, 5),
    ("block", "dspark"): (2, 3, 2, 4, 2),
    ("block", "dflash"): (2, 3, 2, 4, 2),
    ("eagle", "eagle-safeai"): (2, 3, 2, 4, 2),
}
_OF_STATES = {
    "ar": (1, 0, 1, 0, 1),
    "medusa": (1, 0, 1, 0, 2),
    **({"recall": (1, 1, 1, 0, 1)} if NO_PROGRAM is None else {}),
    "reuse": (1, 1, 1, 0, 1),
    "standalone": (5, 2, 5, 6, 5),
    "auto": (1, 0, 1, 0, 2),
    "mtp": (2, 3, 2, 4, 2),
}
if ARCHITECTURES[RECURRENT].there:
    BOUNDS |= {(name, "states"): bounds for name, bounds in _OF_STATES.items()}

# where the host may wait for the device, and copy to it, once a text is under way
WAITS = frozenset(
    {
        "decoding/device_step.py:_read",
        "sampling/rule.py:draw_nodes",
        "drafting/heads.py:_candidates",
        "drafting/heads.py:propose",
        "drafting/networks.py:propose",
    }
)
# beside those places: by a copy that is waited for later
FETCHED = {"decoding/device_step.py:_launch"}
SENT = frozenset(
    {
        "decoding/device_state.py:send",
        "sampling/rule.py:noise_bits",
        "sampling/rule.py:extend",
        "decoding/loop.py:_walk",
        "drafting/heads.py:guess",
        "drafting/networks.py:committed",
        "drafting/chains.py:cache",
        "caches.py:commit",
        "caches.py:append",
        "caches.py:select",
        "caches.py:settle",
        "forward/eager.py:embed",
    }
)


def run(*arguments: str) -> str:
    """A process of its own, as the simulator patches PyTorch."""
    line = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory, worker_id: str) -> dict[str, Any]:
    """The figures of all methods; taken once, also by tests that run side by side."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder if worker_id == "master" else folder.parent) / "device.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(run("-m", "tests.cuda.table"))
    return read_json(path)


@pytest.fixture
def found(measured: dict[str, Any], case: tuple[str, str]) -> dict[str, Any]:
    [found] = [each for each in measured["found"] if (each["method"], each["kind"]) == case]
    return found


def test_no_method_is_left_out(measured):
    new = {(each["method"], each["kind"]) for each in measured["found"]} ^ {*BOUNDS}
    assert not new, f"BOUNDS lacks rows, or has too many: {new}; python -m tests.cuda.table counts"


@pytest.mark.parametrize("case", BOUNDS, ids="-".join)
def test_a_step_writes_the_hosts_text_and_asks_for_no_more_than_it_has_to(found, case):
    assert len(found["tokens"]) > 5
    assert found["same"]
    counts = [found["counts"][name] for name in COUNTS]
    more = [
        f"{name}: {count}, not {most}"
        for name, count, most in zip(COUNTS, counts, BOUNDS[case], strict=True)
        if count > most
    ]
    assert not more
    assert set(found["places"]["waits"]) <= WAITS
    assert set(found["places"]["fetched"]) <= WAITS | FETCHED
    assert set(found["places"]["sent"]) <= SENT


def test_the_simulator_sees_what_it_is_for():
    """Runs :mod:`tests.cuda.check`, whose first line of output says what did not show; there is
    none.
    """
    assert run("-m", "tests.cuda.check") == ""
