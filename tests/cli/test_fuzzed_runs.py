"""Damaged run folders: listed; verified or gone on with, or refused in one line;
never a pass for other tokens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.bad_inputs import run as tswift
from tests.cli.bad_inputs import tree
from tests.cli.bad_inputs.runs import record
from tests.fuzzing import damage, fuzzed, other_values
from tswift.loading.model import LoadedModel

LENGTH, LONGER = 24, 30
few = settings(fuzzed, max_examples=40)


@pytest.fixture(scope="module")
def run(
    checkpoint: Path,
    load_once: Callable[..., LoadedModel],
    tmp_path_factory,
) -> Path:
    """A finished run in float64."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "prompt.txt").write_text("The ship had lain three days becalmed, and nobody spoke.")
    words = [
        "generate",
        "--model",
        checkpoint,
        "--prompt",
        "prompt.txt",
        "--len",
        LENGTH,
        "--dtype",
        "float64",
    ]
    made = tswift([*words, "--temperature", 1.3, "--out", "run"], folder)
    assert made.code == 0, made.err
    return folder / "run"


def spoilt(run: Path, spoil: Callable[[Path], object], resumed: bool = False) -> tuple[int, bytes]:
    """The exit code of ``tswift verify`` or ``generate --resume`` on a copy that was spoilt;
    the tokens after it.
    """
    folder = Path(tempfile.mkdtemp(dir=run.parent)) / "run"
    shutil.copytree(run, folder)
    spoil(folder)
    before = tree(folder.parent)
    listed = tswift(["runs", folder.parent], folder.parent)
    assert (listed.code, listed.err) == (0, "")
    words = (
        ["generate", "--quiet", "--len", LONGER, "--resume", folder]
        if resumed
        else ["verify", folder]
    )
    found = tswift(words, folder.parent)
    assert not found.traceback, found.err
    assert found.code in ((0, 2) if resumed else (0, 1, 2))
    if found.code == 2:
        assert found.out == b""
        assert found.err.startswith("tswift: error: ")
        assert found.err.count("\n") == 1
    if found.code == 2 or not resumed:
        assert tree(folder.parent) == before
    tokens = folder / "tokens.u32"
    left = tokens.read_bytes() if tokens.is_file() else b""
    shutil.rmtree(folder.parent)
    return found.code or 0, left


@pytest.fixture(scope="module")
def longer(run: Path) -> bytes:
    """The tokens of the sound run, gone on with."""
    code, tokens = spoilt(run, lambda folder: None, resumed=True)
    assert code == 0
    assert len(tokens) == 4 * LONGER
    return tokens


@pytest.mark.slow
@few
@given(data=st.data(), done=damage(), resumed=st.booleans())
def test_any_file_damaged(run, longer, data, done, resumed):
    name = data.draw(
        st.sampled_from(sorted(path.name for path in run.iterdir() if path.stat().st_size))
    )
    code, tokens = spoilt(
        run, lambda folder: (folder / name).write_bytes(done((folder / name).read_bytes())), resumed
    )
    if resumed and code == 0:
        assert tokens == longer  # what was not sound was drawn again


@pytest.mark.slow
@few
@given(
    change=other_values(),
    part=st.sampled_from(["model", "options", "sampling", "drafting", "prompt", "state", ""]),
    resumed=st.booleans(),
)
def test_other_values_in_the_record(run, change, part, resumed):
    """With the checksum that goes with them: it is made for accidents,
    and keeps nobody from writing it.
    """

    def spoil(told):
        chosen = {name: told.pop(name) for name in ([part] if part else list(told))}
        told.update(change(chosen))

    spoilt(run, record(spoil), resumed)
