"""The package as users have it: a wheel, installed beside the libraries of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LEN = 60


def ran(*words, cwd: Path, sources: str = "") -> str:
    """What a command prints; ``sources`` is where packages are looked for first."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of commands of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", folder, ROOT]
    built = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    if "hatchling" in built.stderr:
        pytest.skip("what builds the wheel cannot be had")
    assert built.returncode == 0, built.stderr
    venv.create(folder / "env", with_pip=True)
    commands = folder / "env" / "bin"
    python = commands / "python"
    ran(python, "-m", "pip", "install", "--no-deps", *folder.glob("*.whl"), cwd=folder)
    own = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # an environment's own links to source trees are not followed from there
    Path(own.strip(), "beside.pth").write_text(sysconfig.get_path("purelib"))
    return commands


def test_it_makes_the_text_of_the_source_tree(installed, tmp_path):
    """The bundled model, its heads, prompt and C files are in it."""
    where = ran(installed / "python", "-c", "import tswift; print(tswift.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    command = ["generate", "--len", LEN, "--quiet", "--out"]
    text = ran(installed / "tswift", *command, "wheel", cwd=tmp_path)
    own = [sys.executable, "-m", "tswift", *command, "tree"]
    assert text == ran(*own, cwd=tmp_path, sources=str(ROOT / "src"))
    ids = [(tmp_path / name / "tokens.u32").read_bytes() for name in ("wheel", "tree")]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 4 * LEN


def test_its_tables_and_pages_are_in_it(installed, tmp_path):
    """The paper's suites and figures, shapes, workloads, the server's page."""
    code = (
        "from tswift.benchmarking.suites import SUITES, published_rows; "
        "from tswift.benchmarking.workloads import read_workloads; "
        "from tswift.models.checkpoint import SHAPES; "
        "from importlib.resources import files; "
        "page = files('tswift.serving') / 'page.html'; "
        "assert all(SUITES.values()) and published_rows(SUITES['table3']) and SHAPES; "
        "assert read_workloads(['structured', 'reasoning', 'prose']) and page.is_file()"
    )
    ran(installed / "python", "-c", code, cwd=tmp_path)
