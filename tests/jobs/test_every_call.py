"""A process that is killed before any of its file calls leaves a folder that ``--resume`` or
``--out`` takes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.killing import killed_before
from tswift.errors import InputError
from tswift.jobs import folder as files
from tswift.jobs import job as jobs
from tswift.jobs import resuming
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import RECORD, list_runs
from tswift.jobs.job import Job, start
from tswift.jobs.resuming import resume
from tswift.loading.model import load as real_load
from tswift.options import changed

LENGTH, LONGER = 12, 18
# of the calls, every third one of those up to the first tokens, or all
BEGINNING, ALL = range(1, 40, 3), range(1, 1000)


@pytest.fixture
def asked(checkpoint: Path, tmp_path, monkeypatch) -> RunConfig:
    """A short run with frequent checkpoints and log-probabilities; the model is loaded once."""
    model = real_load(str(checkpoint), dtype="float64", device="cpu")
    for module in (jobs, resuming):
        monkeypatch.setattr(module, "load_model", lambda config: model)
    monkeypatch.setattr(files, "_TOKENS", 5)
    monkeypatch.setattr(files, "_SECONDS", 3600.0)
    sampling = {"temperature": 1.3, "min_p": 0.0}
    text = {
        "prompt_text": "Once, and then again: naïve café.",
        "length": LENGTH,
        "seed": 5,
        **sampling,
    }
    return RunConfig.of(
        **text,
        method="ar",
        model=str(checkpoint),
        dtype="float64",
        logprobs=1,
        out=tmp_path / "run",
    )


def run(job: Job | None):
    if job is not None:
        job.run(lambda text, stats: None)


def go_on(path: Path, length: int | None = None):
    run(resume(path, {} if length is None else {"length": length}, False, []))


def content(path: Path) -> dict[str, bytes]:
    """What a run has made."""
    return {
        name: (path / name).read_bytes()
        for name in ("prompt.u32", "tokens.u32", "text.txt", "logprobs.bin")
    }


def check(path: Path, wanted: dict[str, bytes]):
    """A run is finished, and has made what it was to make."""
    assert content(path) == wanted
    assert [entry.state for entry in list_runs(path)] == ["finished"]


def whole(asked: RunConfig, length: int = LENGTH) -> dict[str, bytes]:
    out = asked.out.with_name(f"whole-{length}")
    run(start(changed(asked, {"length": length, "out": out}), []))
    return content(out)


def failures(
    path: Path,
    before: Path | None,
    work: Callable[[], object],
    after: Callable[[], object],
    calls: Iterable[int],
) -> tuple[int, list[str]]:
    """Kill some work before its file calls: at which it came to its end first,
    and what is wrong ``after`` which.
    """
    found = []
    for call in calls:
        shutil.rmtree(path, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, path)
        if not killed_before(call, work):
            break
        try:
            after()
        except (InputError, AssertionError, OSError) as error:
            found.append(f"{call}: {str(error).splitlines()[0]}")
    return call, found


@pytest.mark.parametrize("calls", [BEGINNING, pytest.param(ALL, marks=pytest.mark.slow)])
def test_a_run(asked, calls):
    path = asked.out
    wanted = whole(asked)

    def after():
        if (path / RECORD).exists():
            go_on(path)
        else:
            run(start(asked, []))
        check(path, wanted)

    last, found = failures(path, None, lambda: run(start(asked, [])), after, calls)
    assert (last > 30, found) == (True, []), f"{len(found)} of {last}"


@pytest.mark.slow
@pytest.mark.parametrize(("length", "calls"), [(LENGTH, ALL), (LONGER, ALL)])
def test_a_run_that_goes_on(asked, tmp_path, length, calls):
    """One that was killed, and one that is finished and made longer."""
    path = asked.out
    before = tmp_path / "before"
    if length == LENGTH:
        assert killed_before(45, lambda: run(start(asked, [])))
        path.rename(before)
    else:
        run(start(replace(asked, out=before), []))

    def after():
        go_on(path)
        assert content(path)["text.txt"] in texts
        go_on(path, length)
        check(path, wanted)

    texts = [whole(asked)["text.txt"], whole(asked, LONGER)["text.txt"]]
    wanted = content(path.with_name(f"whole-{length}"))
    last, found = failures(path, before, lambda: go_on(path, length), after, calls)
    assert (last > 20, found) == (True, []), f"{len(found)} of {last}"
