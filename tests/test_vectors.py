"""The C programs on an ARM processor, compiled for it here and run by qemu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.foreign import DOTS, MISSING, hashes
from tests.helpers import needs_program

ROOT = Path(__file__).parents[1]


@needs_program
@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.parametrize("features", ["asimd", f"asimd {DOTS}"])
def test_c_programs_have_the_bits_of_an_x86_processor(features):
    given = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TSWIFT_ARM": features}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "tests.foreign"]
    said = subprocess.run(command, env=kept | given, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    assert json.loads(said.stdout.splitlines()[-1]) == hashes(integers_only=DOTS not in features)
