"""A run that is ended at any moment, in any way, goes on to the tokens of one that was never disturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.jobs.faults import FaultyOs, Killed, power_cut
from tswift.decoding.loop import DecodeStats
from tswift.decoding.sampling import row_type
from tswift.errors import Fault, InputError
from tswift.jobs import folder as files
from tswift.jobs import job as starting
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import list_runs, read_saved
from tswift.jobs.job import Job, resume, start
from tswift.models.load import LoadedModel
from tswift.models.load import load as real_load

LENGTH = 70
METHODS = ["ar", "medusa", "tokenswift", "reuse", "magicdec"]
MOMENTS = 40


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return real_load(str(checkpoint), dtype="float64", device="cpu")


@pytest.fixture(autouse=True)
def quick(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded once, and checkpoints are frequent."""
    monkeypatch.setattr(starting, "load", lambda *names, **how: model)
    monkeypatch.setattr(files, "_TOKENS", 16)


@pytest.fixture
def asked(checkpoint: Path, tmp_path: Path) -> RunConfig:
    (tmp_path / "prompt.txt").write_text("Once, and then again: naïve café.")
    sampling = {"temperature": 1.3, "min_p": 0.0, "window": 20}
    prompt, out = str(tmp_path / "prompt.txt"), tmp_path / "run"
    drafting = {"budget": 64}
    return RunConfig(
        length=LENGTH,
        method="tokenswift",
        prompt=prompt,
        seed=5,
        sampling=sampling,
        drafting=drafting,
        model=str(checkpoint),
        dtype="float64",
        out=out,
    )


def with_method(asked: RunConfig, method: str) -> RunConfig:
    drafting = asked.drafting if method in ("tokenswift", "magicdec") else {}
    return replace(asked, method=method, drafting=drafting)


def silent(text: str, stats: DecodeStats) -> None:
    pass


def run(job: Job) -> Job:
    job.run(silent)
    return job


def go_on(folder: Path, options: dict[str, Any] | None = None, discard_damaged: bool = False) -> Job:
    return run(resume(folder, options or {}, discard_damaged, []))


def tokens_in(folder: Path) -> list[int]:
    return np.fromfile(folder / "tokens.u32", "<u4").tolist()


@pytest.fixture
def whole(asked: RunConfig, tmp_path: Path) -> tuple[list[int], bytes]:
    """Tokens and text of an undisturbed run."""
    out = tmp_path / "whole"
    run(start(replace(with_method(asked, "ar"), out=out), []))
    return tokens_in(out), (out / "text.txt").read_bytes()


def release(job: Job) -> None:
    """What the system does when a process ends."""
    job.folder._lock.release()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(at: int, fault: str = "kill") -> FaultyOs:
        system = FaultyOs(at, fault)
        monkeypatch.setattr(files, "os", system)
        return system

    yield make
    monkeypatch.undo()


def calls_of(asked: RunConfig, faulty: Any) -> int:
    """How many calls that change files a whole run makes after it was set up."""
    job = start(replace(asked, out=asked.out.with_name("counted")), [])
    system = faulty(0)
    run(job)
    return int(system.calls)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name == "tokenswift" else pytest.mark.slow) for name in METHODS]
)
def test_killed_at_any_call(asked: RunConfig, whole: tuple[list[int], bytes], faulty: Any, method: str) -> None:
    """At random calls, in turn by a kill and by a power cut; killed once more while going on."""
    asked = with_method(asked, method)
    count, random = calls_of(asked, faulty), Random(method)
    folder = asked.out
    moments = random.sample(range(1, count + 1), min(count, MOMENTS // len(METHODS) + 1))
    for number, moment in enumerate(moments):
        faulty(0)
        job = start(asked, [])
        system = faulty(moment)
        with pytest.raises(Killed):
            run(job)
        release(job)
        if number % 2:
            power_cut(folder, system.written, random)
        faulty(0)
        if not (folder / "run.json").exists():
            shutil.rmtree(folder)
            continue
        again = resume(folder, {}, False, [])
        faulty(random.randint(1, count))
        try:
            if again:  # else it was killed when all had been done
                run(again)
        except Killed:
            release(again)
            faulty(0)
            last = resume(folder, {}, False, [])
            if last:
                run(last)
        assert (tokens_in(folder), (folder / "text.txt").read_bytes()) == whole, f"{method}, killed at call {moment}"
        shutil.rmtree(folder)


def test_killed_around_a_stop_string(asked: RunConfig, whole: tuple[list[int], bytes], faulty: Any) -> None:
    """At calls from a third of the way to the end: tokens, text, end and log-probabilities of an undisturbed run."""
    folder = asked.out
    text = whole[1].decode(errors="replace")
    stop = next(text[at : at + 2] for at in range(45, 60) if text.index(text[at : at + 2]) == at)
    asked = replace(asked, stop=("never", stop), logprobs=2)
    plain = replace(with_method(asked, "ar"), out=folder.with_name("plain"))
    run(start(plain, []))
    tokens, rows = tokens_in(plain.out), np.fromfile(plain.out / "logprobs.bin", row_type(2))
    assert 16 < len(tokens) < LENGTH
    assert len(rows) == len(tokens)
    count, random = calls_of(asked, faulty), Random(1)
    for moment in (*random.sample(range(count // 3, count), 6), count - 2, count - 1, count):
        faulty(0)
        job = start(asked, [])
        faulty(moment)
        with pytest.raises(Killed):
            run(job)
        release(job)
        faulty(0)
        again = resume(folder, {"stop": ("never", stop), "logprobs": 2}, False, [])
        if again:
            run(again)
        assert tokens_in(folder) == tokens, moment
        assert (folder / "text.txt").read_text(errors="replace") == text[: text.index(stop)]
        assert json.loads((folder / "run.json").read_text())["end"] == {"reason": "stop", "string": stop}
        found = np.fromfile(folder / "logprobs.bin", row_type(2))
        for name in ("raw", "warped", "raw_top", "warped_top"):
            np.testing.assert_allclose(found[name], rows[name], rtol=0, atol=1e-9)
        assert resume(folder, {"length": LENGTH + 5}, False, []) is None  # it has come to its end
        shutil.rmtree(folder)


def test_log_probabilities_that_are_missing_are_damage(asked: RunConfig) -> None:
    asked = replace(asked, logprobs=0)
    job = start(asked, [])
    with pytest.raises(KeyboardInterrupt):
        job.run(stopping_at(40, KeyboardInterrupt()))
    made, path = tokens_in(asked.out), asked.out / "logprobs.bin"
    path.write_bytes(path.read_bytes()[:320])
    for other in ({"logprobs": 1}, {"stop": ("x",)}):
        with pytest.raises(InputError, match=r"the run was made with"):
            resume(asked.out, other, True, [])
    with pytest.raises(InputError, match=r"logprobs.bin has 320 bytes, [0-9]+ tokens take more; --discard-damaged"):
        resume(asked.out, {}, False, [])
    assert go_on(asked.out, {}, True).resumed[-1]["at"] <= 20
    assert tokens_in(asked.out)[: len(made)] == made
    assert path.stat().st_size == 16 * LENGTH


def test_killed_while_the_prompt_is_prefilled(asked: RunConfig, whole: tuple[list[int], bytes], faulty: Any) -> None:
    job, system = start(asked, []), faulty(0)

    def kill(done: int, total: int) -> None:
        system.dead = True
        raise Killed

    with pytest.raises(Killed):
        job.run(silent, kill)
    release(job)
    faulty(0)
    assert [entry.state for entry in list_runs(asked.out)] == ["killed"]
    assert read_saved(asked.out, job.prompt).tokens == []
    assert tokens_in(asked.out) == []
    again = go_on(asked.out)
    assert (again.state, again.stats.tokens) == ("finished", LENGTH)
    assert (tokens_in(asked.out), (asked.out / "text.txt").read_bytes()) == whole


def test_a_power_cut_takes_nothing_from_a_finished_run(
    asked: RunConfig, whole: tuple[list[int], bytes], faulty: Any
) -> None:
    """Nobody would write its text anew: there is nothing left to go on with."""
    job = start(asked, [])
    system = faulty(0)
    run(job)
    for number in range(8):
        power_cut(asked.out, system.written, Random(number))
        assert (tokens_in(asked.out), (asked.out / "text.txt").read_bytes()) == whole


@pytest.mark.parametrize(("fault", "part"), [("full", 0.2), ("broken", 0.5), ("full", 0.9)])
def test_a_disk_that_fails(
    asked: RunConfig, whole: tuple[list[int], bytes], faulty: Any, fault: str, part: float
) -> None:
    count = calls_of(asked, faulty)
    faulty(0)
    job = start(asked, [])
    faulty(max(1, round(part * count)), fault)
    with pytest.raises(Fault, match=r"cannot be written to \((No space|Input/output).* saved in .*--resume"):
        run(job)
    assert job.state == "failed"
    faulty(0)
    saved = read_saved(asked.out, job.prompt)
    assert not saved.damage
    assert len(saved.tokens) == job.folder.saved
    go_on(asked.out)
    assert (tokens_in(asked.out), (asked.out / "text.txt").read_bytes()) == whole


def stopping_at(count: int, error: BaseException) -> Any:
    def show(text: str, stats: DecodeStats) -> None:
        if stats.tokens >= count:
            raise error

    return show


def interrupted(asked: RunConfig, count: int = 40) -> Path:
    job = start(asked, ["tswift", "generate"])
    with pytest.raises(KeyboardInterrupt):
        job.run(stopping_at(count, KeyboardInterrupt()))
    return asked.out


def test_what_a_resumed_run_records(asked: RunConfig, whole: tuple[list[int], bytes]) -> None:
    folder = interrupted(asked)
    before = json.loads((folder / "run.json").read_text())
    assert before["state"] == "interrupted"
    made = before["figures"]["tokens"]
    job = resume(folder, {"length": LENGTH, "seed": 5, "dtype": "float64", "nodes": 5}, False, ["tswift", "again"])
    run(job)
    record = json.loads((folder / "run.json").read_text())
    assert tokens_in(folder) == whole[0]
    assert record["state"] == "finished"
    assert (record["command"], record["started"]) == (["tswift", "generate"], before["started"])
    (session,) = record["resumed"]
    assert (session["at"], session["command"], session["drafting"]["nodes"]) == (made, ["tswift", "again"], 5)
    assert session["prefill_seconds"] > 0
    figures = record["figures"]
    assert figures["tokens"] == LENGTH
    assert figures["target_passes"] > before["figures"]["target_passes"]
    assert sum(record["accepted"].values()) == figures["target_passes"]
    assert figures["decode_seconds"] > before["figures"]["decode_seconds"]
    assert figures["distinct"]["1"] == len(set(whole[0])) / LENGTH


def test_a_finished_run_has_nothing_left_to_do_but_to_become_longer(
    asked: RunConfig, whole: tuple[list[int], bytes]
) -> None:
    run(start(replace(asked, length=50), []))
    before = {path.name: path.read_bytes() for path in asked.out.iterdir()}
    assert resume(asked.out, {"length": 50}, False, []) is None
    assert {path.name: path.read_bytes() for path in asked.out.iterdir()} == before
    go_on(asked.out, {"length": LENGTH})
    assert tokens_in(asked.out) == whole[0]
    assert json.loads((asked.out / "run.json").read_text())["options"]["length"] == LENGTH


def test_ended_by_an_end_of_text(asked: RunConfig, checkpoint: Path) -> None:
    sampling = {"temperature": 100.0, "min_p": 0.0}
    asked = replace(with_method(asked, "ar"), length=3000, stop_at_eos=True, sampling=sampling, seed=4)
    run(start(asked, []))
    text = tokens_in(asked.out)
    assert text[-1] == 0
    assert resume(asked.out, {"length": 4000}, False, []) is None
    # stopped between its last token and its last record
    record = json.loads((asked.out / "run.json").read_text())
    record["state"] = "running"
    record["checksum"] = files.checksum(record)
    (asked.out / "run.json").write_text(json.dumps(record))
    assert go_on(asked.out).state == "finished"
    assert tokens_in(asked.out) == text


@pytest.mark.parametrize(("recall", "reuses"), [(None, False), (0, True)])
def test_what_a_tree_that_pays_does_not_use_is_refused(asked: RunConfig, recall: int | None, reuses: bool) -> None:
    folder = interrupted(replace(asked, drafting={"tree": "auto", "budget": 64, "recall": recall}))
    message = "the run was made with 20, got 7" if reuses else "tokenswift does not use it with tree auto"
    with pytest.raises(InputError, match=f"ngrams: {message}"):
        resume(folder, {"ngrams": 7}, False, [])


def test_another_model_is_refused(asked: RunConfig, model: LoadedModel) -> None:
    folder = interrupted(asked)
    weight = model.target.model.get_input_embeddings().weight
    kept = weight[7, 3].item()
    weight.data[7, 3] = kept * (1 + 2**-50)
    try:
        with pytest.raises(InputError, match=r"is not the model that .* was made with: weights differ"):
            resume(folder, {}, False, [])
    finally:
        weight.data[7, 3] = kept


def test_damage_is_told_and_can_be_discarded(asked: RunConfig, whole: tuple[list[int], bytes]) -> None:
    folder = interrupted(asked)
    data = bytearray((folder / "tokens.u32").read_bytes())
    data[4 * 25] ^= 1
    (folder / "tokens.u32").write_bytes(data)
    with pytest.raises(
        InputError, match=r"tokens.u32 does not match its checksum between tokens \d+ and \d+; --discard-"
    ):
        resume(folder, {}, False, [])
    assert (folder / "tokens.u32").read_bytes() == data
    job = resume(folder, {}, True, [])
    assert any("is drawn again" in line for line in job.statement())
    run(job)
    assert tokens_in(folder) == whole[0]


def test_a_folder_that_was_removed_ends_the_job(asked: RunConfig) -> None:
    job = start(asked, [])
    folder = asked.out

    def show(text: str, stats: DecodeStats) -> None:
        if stats.tokens >= 40 and folder.exists():
            shutil.rmtree(folder)

    with pytest.raises(Fault, match=r"was removed or moved; [0-9]+ tokens could not be saved"):
        job.run(show)
    assert not folder.exists()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_memory_that_runs_out(asked: RunConfig, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    job = start(asked, [])
    target, real, calls = job.model.target, type(job.model.target).forward, []

    def forward(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 30:
            raise error
        return real(target, *arguments)

    monkeypatch.setattr(target, "forward", forward)
    with pytest.raises(Fault, match=r"cpu has no memory left after .* lower --nodes or --budget .* saved in"):
        run(job)
    assert job.state == "failed"
    assert read_saved(asked.out, job.prompt).tokens == job.tokens != []


def test_a_mistake_of_ours_is_not_hidden(asked: RunConfig) -> None:
    job = start(asked, [])
    with pytest.raises(ZeroDivisionError):
        job.run(stopping_at(40, ZeroDivisionError()))
    assert (job.state, job.reason) == ("failed", "ZeroDivisionError()")
    assert tokens_in(asked.out) == job.tokens
