"""Real processes that are really killed, or asked to stop."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import tswift
from tests.helpers import needs_program, tokens_of
from tests.jobs.killing import Process
from tswift.jobs import folder
from tswift.jobs.folder import list_runs, read_run
from tswift.jobs.job import Signals, Stopped
from tswift.jobs.resuming import resume


@pytest.fixture
def words(checkpoint: Path, tmp_path, monkeypatch) -> list[object]:
    monkeypatch.setattr(folder, "_TOKENS", 64)  # the processes are forked from this one
    (tmp_path / "prompt.txt").write_text("The ship had lain three days becalmed.")
    where = f"--model {checkpoint} --prompt {tmp_path}/prompt.txt --len 800 --quiet"
    return [where, "--dtype float64 --temperature 1.3 --min-p 0 --method"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop(words, tmp_path, number):
    process = Process(["generate", *words, "ar", f"--out {tmp_path}/run"], tmp_path / "out")
    process.begin()
    process.send(number)
    assert process.wait() == 128 + number
    (entry,) = list_runs(tmp_path / "run")
    assert entry.state == "interrupted"
    assert 0 < entry.tokens < 800


@pytest.mark.slow
def test_two_processes_on_one_folder(words, tmp_path):
    first = Process(["generate", *words, "ar", f"--out {tmp_path}/run"], tmp_path / "first.out")
    first.begin()
    second = Process([f"generate --resume {tmp_path}/run"], tmp_path / "second.out")
    assert second.wait() == 2
    first.send(signal.SIGKILL)
    first.wait()
    assert f"is in use: process {first.pid} on " in second.errors.read_text()
    assert second.errors.read_text().count("\n") == 1
    assert [entry.state for entry in list_runs(tmp_path / "run")] == ["killed"]


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_when_patience_is_at_its_end(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        signals.patience = 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.number == signal.SIGTERM
        with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as found:
            os.kill(os.getpid(), number)
    assert (found.value.code, signals.number) == (128 + number, signal.SIGTERM)
    assert isinstance(found.value, KeyboardInterrupt)
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


FOLDER = Path(__file__).parent / "interrupted"  # made at commit 53d1036, killed by SIGKILL


@pytest.mark.slow
@needs_program
def test_it_goes_on_to_the_text_it_would_have_become(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "run")
    before = np.fromfile(folder / "tokens.u32", "<u4").tolist()
    run = read_run(folder)
    job = resume(folder, {}, False, ["tswift"])
    job.run(lambda *progress: None)
    tokens = np.fromfile(folder / "tokens.u32", "<u4").tolist()
    assert 0 < len(before) < len(tokens) == 400
    model = tswift.load(dtype="float64")
    steps = tswift.generate(
        model, run.prompt, 400, method="ar", params=run.params, seed=run.config.text.seed
    )
    assert tokens == tokens_of(steps)
