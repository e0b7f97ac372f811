"""Every method on a simulated CUDA device: no mix of devices, no wait and no copy that is not known of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.cuda.bounds import BOUNDS, SENT, WAITS

pytestmark = pytest.mark.slow  # two processes of half a minute
ROOT = Path(__file__).parents[2]
COUNTS = ("waits", "sent", "fetched", "kernels", "launches")


def run(*arguments: str) -> str:
    """A process of its own, as the simulator patches PyTorch."""
    line = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """The figures of all methods; taken once, also by tests that run side by side."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder if worker_id == "master" else folder.parent) / "device.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(run("-m", "tests.cuda.table", "--steps", "5", "--nodes", "20"))
    return json.loads(path.read_text())


@pytest.fixture
def found(measured: dict[str, Any], case: tuple[str, str]) -> dict[str, Any]:
    [found] = [each for each in measured["found"] if (each["method"], each["kind"]) == case]
    return found


def test_no_method_is_left_out(measured) -> None:
    assert [(each["method"], each["kind"]) for each in measured["found"]] == list(BOUNDS)


@pytest.mark.parametrize("case", BOUNDS, ids="-".join)
def test_the_text_is_that_of_the_host(measured, found, case) -> None:
    assert len(found["tokens"]) > 5
    assert found["tokens"] == measured["plain"][: len(found["tokens"])]


@pytest.mark.parametrize("case", BOUNDS, ids="-".join)
def test_a_step_asks_for_no_more_than_it_has_to(found, case) -> None:
    counts = [found["counts"][name] for name in COUNTS]
    more = [
        f"{name}: {count}, not {most}"
        for name, count, most in zip(COUNTS, counts, BOUNDS[case], strict=True)
        if count > most
    ]
    assert not more


@pytest.mark.parametrize("case", BOUNDS, ids="-".join)
def test_a_step_waits_and_copies_only_where_it_is_known_to(found, case) -> None:
    assert set(found["places"]["waits"]) <= WAITS
    assert set(found["places"]["fetched"]) <= WAITS
    assert set(found["places"]["sent"]) <= SENT


def test_the_simulator_sees_what_it_is_for() -> None:
    """Runs :mod:`tests.cuda.check`, whose first line of output says what did not show; there is none."""
    assert run("-m", "tests.cuda.check") == ""
