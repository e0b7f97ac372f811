"""A run that is ended at any moment, in any way,
goes on to the tokens of one that was never disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.helpers import first, needs_program, read_json, refused
from tests.jobs.faults import FaultyOs, Killed, power_cut
from tests.jobs.killing import write_record
from tswift import files as saving
from tswift.drafting.options import DraftOptions
from tswift.errors import DecodeError
from tswift.files import in_use
from tswift.jobs import folder as files
from tswift.jobs import job as jobs
from tswift.jobs import resuming
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import list_runs, read_run, read_saved
from tswift.jobs.job import Job, Signals, Stopped, start
from tswift.jobs.resuming import resume
from tswift.jobs.verification import with_model
from tswift.loading.model import LoadedModel
from tswift.loading.model import load as real_load
from tswift.options import changed
from tswift.sampling.rule import row_type

LENGTH = 70
METHODS = ["ar", "medusa", "tokenswift", "reuse", "magicdec"]
MOMENTS = 40
Faulty = Callable[..., FaultyOs]
Files = tuple[list[int], bytes]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return real_load(str(checkpoint), dtype="float64", device="cpu")


@pytest.fixture(autouse=True, scope="module")
def quick(model: LoadedModel) -> Iterator[None]:
    """The model is loaded once, and checkpoints are frequent."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (jobs, resuming):
            patch.setattr(module, "load_model", lambda config: model)
        patch.setattr(files, "_TOKENS", 16)
        yield


def asked_for(checkpoint: Path, out: Path) -> RunConfig:
    sampling = {"temperature": 1.3, "min_p": 0.0, "window": 20}
    text = {
        "prompt_text": "Once, and then again: naïve café.",
        "length": LENGTH,
        "seed": 5,
        **sampling,
    }
    how = {"method": "tokenswift", "budget": 64, "model": str(checkpoint), "dtype": "float64"}
    return RunConfig.of(**text, **how, out=out)


@pytest.fixture
def asked(checkpoint: Path, tmp_path) -> RunConfig:
    return asked_for(checkpoint, tmp_path / "run")


def with_method(asked: RunConfig, method: str, **changes) -> RunConfig:
    if method not in ("tokenswift", "magicdec"):
        asked = replace(
            asked, method=method, drafting=DraftOptions(), given=asked.given - {"budget"}
        )
    return changed(asked, {"method": method, **changes})


def run(job: Job | None) -> Job:
    assert job is not None
    job.run(lambda text, stats: None)
    return job


def go_on(
    folder: Path, options: dict[str, Any] | None = None, discard_damaged: bool = False
) -> Job:
    return run(resume(folder, options or {}, discard_damaged, []))


def in_folder(folder: Path) -> Files:
    """Tokens and text."""
    return np.fromfile(folder / "tokens.u32", "<u4").tolist(), (folder / "text.txt").read_bytes()


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "run.json")
    return found


@pytest.fixture(scope="module")
def whole(checkpoint: Path, quick: None, tmp_path_factory) -> Files:
    """Tokens and text of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(start(with_method(asked_for(checkpoint, out), "ar"), []))
    return in_folder(out)


@pytest.fixture
def faulty(monkeypatch) -> Iterator[Faulty]:
    def make(at: int, fault: str = "kill") -> FaultyOs:
        system = FaultyOs(at, fault)
        for written_by in (files, saving):
            monkeypatch.setattr(written_by, "os", system)
        return system

    yield make
    monkeypatch.undo()


def calls_of(asked: RunConfig, faulty: Faulty) -> int:
    """How many calls that change files a whole run makes after it was set up."""
    job = start(replace(asked, out=asked.out.with_name("counted")), [])
    system = faulty(0)
    run(job)
    return system.calls


def killed_at(moment: int, job: Job | None, faulty: Faulty) -> FaultyOs:
    """Run a job whose process is killed at a call, if it makes so many;
    nothing goes wrong after that.
    """
    system = faulty(moment)
    try:
        run(job)
    except Killed:
        job.folder._lock.release()  # as the system does when a process ends
    faulty(0)
    return system


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name == "tokenswift" else pytest.mark.slow)
        for name in METHODS
    ],
)
def test_killed_at_any_call(asked, whole, faulty, method):
    """At random calls, in turn by a kill and by a power cut; killed once more while going on."""
    asked = with_method(asked, method)
    count = calls_of(asked, faulty)
    random = Random(method)
    folder = asked.out
    for number, moment in enumerate(
        random.sample(range(1, count + 1), min(count, MOMENTS // len(METHODS) + 1))
    ):
        faulty(0)
        system = killed_at(moment, start(asked, []), faulty)
        assert system.dead
        if number % 2:
            power_cut(folder, system.written, random)
        if (folder / "run.json").exists():
            if again := resume(folder, {}, False, []):  # else it was killed when all had been done
                killed_at(random.randint(1, count), again, faulty)
            if last := resume(folder, {}, False, []):
                run(last)
            assert in_folder(folder) == whole, f"{method}, killed at call {moment}"
        shutil.rmtree(folder)


@pytest.mark.slow
def test_killed_around_a_stop_string(asked, whole, faulty):
    """At calls from a third of the way to the end: tokens, text,
    end and log-probabilities of an undisturbed run.
    """
    folder = asked.out
    text = whole[1].decode(errors="replace")
    stop = next(text[at : at + 2] for at in range(45, 60) if text.index(text[at : at + 2]) == at)
    asked = replace(asked, stop=("never", stop), logprobs=2)
    plain = with_method(asked, "ar", out=folder.with_name("plain"))
    run(start(plain, []))
    tokens = in_folder(plain.out)[0]
    rows = np.fromfile(plain.out / "logprobs.bin", row_type(2))
    assert 16 < len(tokens) == len(rows) < LENGTH
    count = calls_of(asked, faulty)
    random = Random(1)
    for moment in (*random.sample(range(count // 3, count), 6), count - 2, count - 1, count):
        faulty(0)
        assert killed_at(moment, start(asked, []), faulty).dead
        if again := resume(folder, {"stop": ("never", stop), "logprobs": 2}, False, []):
            run(again)
        assert in_folder(folder)[0] == tokens, moment
        assert (folder / "text.txt").read_text(errors="replace") == text[: text.index(stop)]
        assert record_of(folder)["end"] == {"reason": "stop", "string": stop}
        found = np.fromfile(folder / "logprobs.bin", row_type(2))
        for name in ("raw", "warped", "raw_top", "warped_top"):
            np.testing.assert_allclose(found[name], rows[name], rtol=0, atol=1e-9)
        assert resume(folder, {"length": LENGTH + 5}, False, []) is None  # it has come to its end
        shutil.rmtree(folder)


def test_killed_while_the_prompt_is_prefilled(asked, whole, faulty):
    job = start(asked, [])
    system = faulty(0)

    def kill(done, total):
        system.dead = True
        raise Killed

    with pytest.raises(Killed):
        job.run(lambda *given: None, kill)
    job.folder._lock.release()
    faulty(0)
    assert [entry.state for entry in list_runs(asked.out)] == ["killed"]
    assert read_saved(asked.out, job.prompt).tokens == []
    assert go_on(asked.out).state == "finished"
    assert in_folder(asked.out) == whole


def test_a_power_cut_takes_nothing_from_a_finished_run(asked, whole, faulty):
    """Nobody would write its text anew: there is nothing left to go on with."""
    job = start(asked, [])
    system = faulty(0)
    run(job)
    for number in range(8):
        power_cut(asked.out, system.written, Random(number))
        assert in_folder(asked.out) == whole


@pytest.mark.parametrize(
    ("fault", "part"), first(1, [("full", 0.2), ("broken", 0.5), ("full", 0.9)])
)
def test_a_disk_that_fails(asked, whole, faulty, fault, part):
    count = calls_of(asked, faulty)
    faulty(0)
    job = start(asked, [])
    system = faulty(max(1, round(part * count)), fault)
    with pytest.raises(
        DecodeError, match=r"cannot be written to \((No space|Input/output).* saved in .*--resume"
    ):
        run(job)
    # a second sync, which could succeed although the first lost something, is not tried: run.json
    # alone is written
    assert fault == "full" or system.calls <= system.at + 6
    faulty(0)
    saved = read_saved(asked.out, job.prompt)
    assert (job.state, saved.damage) == ("failed", "")
    # what was told to be saved is there; where the journal's sync is what failed, more may be
    assert job.folder.saved <= len(saved.tokens) <= len(job.tokens)
    go_on(asked.out)
    assert in_folder(asked.out) == whole


def stopping_at(count: int, error: BaseException):
    def show(text: str, stats):
        if stats.tokens >= count:
            raise error

    return show


def interrupted(asked: RunConfig) -> Path:
    with pytest.raises(KeyboardInterrupt):
        start(asked, ["tswift", "generate"]).run(stopping_at(40, KeyboardInterrupt()))
    return asked.out


def test_log_probabilities_that_are_missing_are_damage(asked):
    folder = interrupted(replace(asked, logprobs=0))
    made = in_folder(folder)[0]
    path = folder / "logprobs.bin"
    path.write_bytes(path.read_bytes()[:320])
    for other in ({"logprobs": 1}, {"stop": ("x",)}):
        with refused(r"the run was made with"):
            resume(folder, other, True, [])
    with refused(r"logprobs.bin has 320 bytes, [0-9]+ tokens take more; --discard-damaged"):
        resume(folder, {}, False, [])
    assert go_on(folder, {}, True).resumed[-1]["at"] <= 20
    assert in_folder(folder)[0][: len(made)] == made
    assert path.stat().st_size == 16 * LENGTH


@pytest.mark.parametrize("old", [False, True])
def test_a_changed_bit_of_log_probabilities_is_damage(asked, whole, old):
    """Wherever it is, at every resumption; an older journal has no checksum of them,
    and vouches for tokens alone.
    """
    folder = interrupted(replace(asked, logprobs=2))
    path, journal = folder / "logprobs.bin", folder / "journal"
    content = path.read_bytes()
    kind = row_type(2)
    if old:
        checkpoints = files.parse_journal(journal.read_bytes()).checkpoints
        journal.write_bytes(b"".join(replace(each, rows_crc32=None).line() for each in checkpoints))
        go_on(folder)  # from there on there is one
        content = path.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with refused(r"logprobs.bin does not match its checksum between .*; --discard-damaged"):
            resume(folder, {}, False, [])
    go_on(folder, {}, True)
    assert in_folder(folder) == whole
    rows, again = (np.frombuffer(each, kind)["raw"] for each in (content, path.read_bytes()))
    np.testing.assert_allclose(again[: len(rows)], rows, rtol=0, atol=1e-9)


def test_another_text_than_that_of_the_tokens_is_refused(asked, whole):
    run(start(asked, []))
    path = asked.out / "text.txt"
    for forged in (b"", whole[1][:-1], whole[1] + b"!", b"!" + whole[1][1:]):
        path.write_bytes(forged)
        with refused(r"text.txt is not the text of tokens.u32: .* from byte \d+ on; --discard"):
            resume(asked.out, {}, False, [])
    assert resume(asked.out, {}, True, []) is None
    assert in_folder(asked.out) == whole
    path.unlink()
    with refused(r"there is no file .*text.txt"):
        resume(asked.out, {}, False, [])


def test_what_a_resumed_run_records(asked, whole):
    folder = interrupted(asked)
    before = record_of(folder)
    assert before["state"] == "interrupted"
    typed = {"length": LENGTH, "seed": 5, "dtype": "float64", "nodes": 5}
    run(resume(folder, typed, False, ["tswift", "again"]))
    record = record_of(folder)
    assert in_folder(folder) == whole
    assert record["state"] == "finished"
    assert (record["command"], record["started"]) == (["tswift", "generate"], before["started"])
    (session,) = record["resumed"]
    assert (session["at"], session["command"]) == (before["figures"]["tokens"], ["tswift", "again"])
    assert session["drafting"]["nodes"] == 5
    figures = record["figures"]
    assert figures["prefill_seconds"] == record["prefill_seconds"] + session["prefill_seconds"]
    assert (
        figures["target_passes"]
        == sum(record["accepted"].values())
        > before["figures"]["target_passes"]
    )
    assert figures["decode_seconds"] > before["figures"]["decode_seconds"]
    assert (figures["tokens"], figures["distinct"]["1"]) == (LENGTH, len(set(whole[0])) / LENGTH)


def test_a_finished_run_has_nothing_left_to_do_but_to_become_longer(asked, whole):
    run(start(changed(asked, {"length": 50}), []))
    before = {path.name: path.read_bytes() for path in asked.out.iterdir()}
    assert resume(asked.out, {"length": 50}, False, []) is None
    with refused(r"^length: .* has 50 tokens already, got 49$"):
        resume(asked.out, {"length": 49}, False, [])
    assert {path.name: path.read_bytes() for path in asked.out.iterdir()} == before
    go_on(asked.out, {"length": LENGTH})
    assert in_folder(asked.out) == whole
    assert record_of(asked.out)["options"]["length"] == LENGTH


def test_ended_by_an_end_of_text(asked):
    sampling = {"temperature": 100.0, "min_p": 0.0}
    run(start(with_method(asked, "ar", length=3000, stop_at_eos=True, seed=4, **sampling), []))
    text = in_folder(asked.out)
    assert text[0][-1] == 0
    assert resume(asked.out, {"length": 4000}, False, []) is None
    # stopped between its last token and its last record
    record = {**record_of(asked.out), "state": "running"}
    write_record(asked.out, record)
    assert go_on(asked.out).state == "finished"
    assert in_folder(asked.out) == text


def test_a_run_keeps_the_ends_that_it_was_begun_with(asked, model, whole):
    """Of another version, which knew of others: it bans what it banned."""
    folder = interrupted(asked)
    made = len(in_folder(folder)[0])
    other = next(token for token in whole[0][made:] if token not in whole[0][:made])
    knowing = replace(model, eos_ids=(*model.eos_ids, other))
    job = resume(folder, {}, False, [], loaded=knowing)
    assert job is not None
    job.run(lambda piece, stats: None)
    assert in_folder(folder) == whole
    assert record_of(folder)["model"]["eos_ids"] == [0]


@pytest.mark.parametrize(
    ("recall", "reuses"), [pytest.param(None, False, marks=needs_program), (0, True)]
)
def test_what_a_tree_that_pays_does_not_use_is_refused(asked, recall, reuses):
    folder = interrupted(changed(asked, {"tree": "auto", "recall": recall}))
    with refused(f"ngrams: the run was made with {20 if reuses else 'none'}, got 7"):
        resume(folder, {"ngrams": 7}, False, [])


def test_another_model_is_refused(asked, model, monkeypatch):
    """By one bit of its weights; nothing is changed, and the folder is free again."""
    folder = interrupted(asked)
    weight = model.target.model.get_input_embeddings().weight
    kept = weight[7, 3].item()
    weight.data[7, 3] = kept * (1 + 2**-50)
    monkeypatch.setattr(resuming, "load_model", lambda config: replace(model, weights=None))
    try:
        with refused(r"is not the model that .* was made with: weights differ"):
            resume(folder, {}, False, [])
    finally:
        weight.data[7, 3] = kept
    assert not in_use(folder)


def test_another_tokenizer_is_refused(asked, model, whole, monkeypatch):
    """Of a run whose record tells of one, which those of earlier versions did not."""
    folder = interrupted(asked)
    other = deepcopy(model.tokenizer)
    other.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    again = replace(model, tokenizer=other)
    says = f"has another tokenizer than {folder} was made with$"
    with refused(says):
        with_model(read_run(folder), again)
    with refused(says):
        resume(folder, {}, False, [], loaded=again)
    record = record_of(folder)
    del record["model"]["tokenizer"]
    write_record(folder, record)
    monkeypatch.setattr(resuming, "load_model", lambda config: again)
    assert go_on(folder).tokens == whole[0]


def test_damage_is_told_and_can_be_discarded(asked, whole):
    folder = interrupted(asked)
    data = bytearray((folder / "tokens.u32").read_bytes())
    data[4 * 25] ^= 1
    (folder / "tokens.u32").write_bytes(data)
    damage = r"tokens.u32 does not match its checksum between tokens \d+ and \d+; --discard-"
    with refused(damage):
        resume(folder, {}, False, [])
    assert (folder / "tokens.u32").read_bytes() == data
    job = resume(folder, {}, True, [])
    assert any("is drawn again" in line for line in job.statement())
    run(job)
    assert in_folder(folder) == whole


def test_a_folder_that_was_removed_ends_the_job(asked):
    def show(text, stats):
        if stats.tokens >= 40 and asked.out.exists():
            shutil.rmtree(asked.out)

    with pytest.raises(
        DecodeError, match=r"was removed or moved; [0-9]+ tokens could not be saved"
    ):
        start(asked, []).run(show)
    assert not asked.out.exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        ZeroDivisionError(),
    ],
)
def test_what_breaks_in_a_step(asked, monkeypatch, error):
    """Memory that runs out is told in a line; a mistake of ours is not hidden.

    What was made is saved.
    """
    job = start(asked, [])
    target = job.model.target
    real = type(job.model.target).forward
    calls = []

    def forward(*arguments):
        calls.append(1)
        if len(calls) > 30:
            raise error
        return real(target, *arguments)

    monkeypatch.setattr(target, "forward", forward)
    ours = isinstance(error, ZeroDivisionError)
    message = (
        None if ours else r"cpu has no memory left after .* lower --nodes or --budget .* saved in"
    )
    with pytest.raises(ZeroDivisionError if ours else DecodeError, match=message):
        run(job)
    assert (job.state, job.reason == "ZeroDivisionError()") == ("failed", ours)
    assert read_saved(asked.out, job.prompt).tokens == job.tokens != []


def test_a_signal_lets_the_step_under_way_finish(asked, monkeypatch):
    job = start(asked, [])
    made = list[int]()
    target = job.model.target
    real = type(job.model.target).forward

    def forward(*arguments):
        if len(job.tokens) > 20 and not made:
            made.append(len(job.tokens))
            os.kill(os.getpid(), signal.SIGTERM)
        return real(target, *arguments)

    monkeypatch.setattr(target, "forward", forward)
    with Signals() as signals, pytest.raises(Stopped, match="SIGTERM"):
        job.run(lambda *given: None, signals=signals)
    assert len(job.tokens) > made[0]
    assert in_folder(asked.out)[0] == job.tokens


def test_a_job_that_cannot_begin_leaves_no_folder(asked, tmp_path):
    with refused(r"^prefill: asks for 99 tokens"):
        start(changed(asked, {"prefill": 99, "out": tmp_path / "deep" / "run"}), [])
    assert list(tmp_path.iterdir()) == []
