"""A run that an earlier version began, killed on the way: it goes on to the text it would have become."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import tswift
from tswift.jobs.folder import read_run
from tswift.jobs.start import resume

FOLDER = Path(__file__).parent / "interrupted"  # made at commit 53d1036, killed by SIGKILL


@pytest.mark.slow
def test_it_goes_on_to_the_text_it_would_have_become(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "run")
    before = np.fromfile(folder / "tokens.u32", "<u4").tolist()
    run = read_run(folder)
    job = resume(folder, {}, False, ["tswift"])
    job.run(lambda *progress: None)
    tokens = np.fromfile(folder / "tokens.u32", "<u4").tolist()
    assert 0 < len(before) < len(tokens) == 400
    model = tswift.load(dtype="float64")
    steps = tswift.generate(model, run.prompt, 400, method="ar", params=run.params, seed=run.config.seed)
    assert tokens == [token for step in steps for token in step.tokens]
