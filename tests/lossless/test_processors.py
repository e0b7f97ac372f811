"""What differs between processors and what does not,
under the instruction sets that this one can stand in for.

Run by ``make test-isa``. Each setting is a process of its own, as libraries choose their code when
they are loaded.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
import torch

from tests.helpers import NO_PROGRAM
from tests.jobs.killing import result
from tests.lossless.bits import PROMPT as NOVEL
from tswift.cli import main as tswift

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "its own": {},
    # our C program, too, follows the first
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "AVX-512 without bfloat16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
    "no AVX2": {"ATEN_CPU_CAPABILITY": "default"},  # and no C program
}
if find_spec("ziglang"):  # its compiler is found where there is no other
    SETTINGS |= {"Zig": {"PATH": ""}, "Zig, AVX2": {"PATH": "", **SETTINGS["AVX2"]}}
EXACT = ["lossless/test_bits.py", "lossless/test_tokens.py"]
ROUNDED = [
    "decoding/test_audit.py",
    "sampling/test_rule.py",
    "training/test_golden.py",
    "training/test_losses.py",
]
# Tests that rounding could turn, by setting. Only products in bfloat16 are others in the second.
TURNED = {"AVX2": [*EXACT, *ROUNDED], "AVX-512 without bfloat16": EXACT}
TEXT = "bd198316e0ba3a52"  # of the bundled model in float32 and float64, on every processor


def start(setting: str, *words) -> subprocess.Popen[str]:
    """A Python module under a setting."""
    given = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **SETTINGS[setting]}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=kept | given, stdout=PIPE, stderr=STDOUT, text=True, pipesize=4096
    )


def run(setting: str, *words) -> str:
    """What a Python module says under a setting, which must not fail."""
    process = start(setting, *words)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


@functools.cache
def bits(setting: str) -> dict[str, Any]:
    return json.loads(run(setting, "tests.lossless.bits").splitlines()[-1])


@pytest.mark.parametrize("setting", ["its own", "AVX2", "no AVX2", "Zig", "Zig, AVX2"])
def test_the_program_has_the_same_bits_and_the_bundled_model_writes_the_same_text(
    setting,
):
    if setting not in SETTINGS:
        pytest.skip("the package ziglang is not installed")
    found = bits(setting)
    assert found["texts"] == {"float32": TEXT, "float64": TEXT}
    if NO_PROGRAM is None:
        expected = {} if setting == "no AVX2" else bits("its own")["program"]["1"]
        assert found["program"] == {"1": expected, "2": expected}  # threads


@pytest.mark.parametrize("setting", TURNED)
def test_what_rounding_could_turn(setting):
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("without AVX-512 these are the usual tests")
    tests = [f"tests/{name}" for name in TURNED[setting]]
    run(setting, "pytest", "-x", "--tb=short", "-p", "no:cacheprovider", *tests)


def test_a_run_killed_under_one_setting_goes_on_under_another(tmp_path):
    words = ["tswift", "generate", "--seed", 7, "--len", 2000, "--quiet"]
    words += ["--prompt", NOVEL, "--out"]
    with start("its own", *words, tmp_path / "run", "--method", "ar") as process:
        assert tswift([*map(str, words[1:]), str(tmp_path / "whole")]) == 0
        assert process.stdout is not None
        # behind the first checkpoint, which comes after 512 tokens; the pipe holds 4,096 bytes
        # more, so a text of 6,800 waits for its reader, however late that is
        left = 2200
        while left:
            came = os.read(process.stdout.fileno(), left)
            assert came
            left -= len(came)
        process.kill()
    assert 0 < len(result(tmp_path / "run")[0]) < len(result(tmp_path / "whole")[0]) == 4 * 2000
    said = run("AVX2", "tswift", "generate", "--resume", tmp_path / "run")
    assert "rounds otherwise" not in said
    assert result(tmp_path / "run") == result(tmp_path / "whole")
