"""A whole training: what it learns, how it is interrupted and resumed, by one process and by two,
and its folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from errno import ENOSPC
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import tswift
from tests.helpers import first, read_json, refused, tokens_of
from tests.jobs.killing import signals_heard
from tests.ranks import on_ranks
from tests.training.tiny import Tiny
from tests.words import words_of
from tswift.cli import main
from tswift.errors import DecodeError, InputError
from tswift.files import LOCK, NEW
from tswift.tables import Reporter
from tswift.training import run as module
from tswift.training.config import HeadsConfig
from tswift.training.data import Documents
from tswift.training.ranks import open_ranks
from tswift.training.run import CHECKPOINT, METRICS, RECORD, TrainFolder, resume, train
from tswift.training.tasks import HEADS, TEACHER

STEPS = 6


def config_of(tiny: Tiny, **changes) -> HeadsConfig:
    """Short settings."""
    common: dict[str, Any] = {
        "corpus": str(tiny.corpus),
        "model": str(tiny.model),
        "seq_len": 64,
        "steps": STEPS,
        "accumulate": 2,
    }
    common |= {"warmup": 2, "eval_every": 2, "device": "cpu", "batch": 2, "lr": 1e-2}
    common |= {"alpha_tokens": 0, "keep_tokens": 10 * 64, "draft_vocabulary": 200}
    return HeadsConfig(**{**common, **changes})


def lines_of(folder: Path) -> list[dict]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(first: Path, second: Path):
    """Two trainings have the same weights, optimizer states, result and log, bit for bit."""
    ours, theirs = load_file(first / CHECKPOINT), load_file(second / CHECKPOINT)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.0.") for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert (first / HEADS).read_bytes() == (second / HEADS).read_bytes()
    assert lines_of(first) == lines_of(second)


class StopAt(Reporter):
    """Sends a signal, or raises an error, when so many steps are done."""

    def __init__(self, step: int, what: int | Exception):
        self.step, self.what = step, what

    def update(self, name: str, done: int, total: int, figures: str = ""):
        if name == "train" and done == self.step:
            if isinstance(self.what, Exception):
                raise self.what
            os.kill(os.getpid(), self.what)


@pytest.mark.parametrize("changes", first(1, [{"kind": "chained", "objective": "distill"}, {}]))
def test_what_is_trained_learns_and_drafts_for_its_model(tiny, tmp_path, changes):
    more = {"accumulate": 1, "eval_every": 0, "alpha_tokens": 100, "steps": 20, "batch": 4}
    config = config_of(tiny, **more, **changes)
    weights = (Path(config.model) / "model.safetensors").read_bytes()
    outcome = train(config, tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert (outcome.steps, outcome.signum) == (config.steps, None)
    assert (np.array(after["loss"]) < np.array(before["loss"]) - 0.1).all()
    # of all heads together: of 60 places, one head's best 3 may be no better on some processor
    assert np.array(after["top"])[:, 2].sum() > np.array(before["top"])[:, 2].sum() + 0.1
    assert (np.diff(after["top"]) >= 0).all()
    assert after["alpha"] > before["alpha"] + 0.08
    assert after["tokens_per_step"] == pytest.approx(1 + 4 * after["alpha"], abs=0.15)
    weights_kept = load_file(tmp_path / "out" / HEADS)
    del weights_kept["draft_ids"]
    assert {value.dtype for value in weights_kept.values()} == {torch.bfloat16}
    model = tswift.load(config.model, dtype="float64", heads=str(tmp_path / "out" / HEADS))
    plain, drafted = (
        tokens_of(tswift.generate(model, "the ship", 40, method=each))
        for each in ("ar", "tokenswift")
    )
    assert drafted == plain
    assert (Path(config.model) / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_trains_beside_a_model_in_bfloat16(tiny, tmp_path):
    train(config_of(tiny, steps=1, accumulate=1, warmup=0, dtype="bfloat16"), tmp_path / "out")
    assert (tmp_path / "out" / HEADS).exists()


# -------------------------------------------------------------------------------------------------
# interrupted and resumed


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory) -> Path:
    """The folder of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("heads")
    assert train(config_of(tiny), folder).signum is None
    assert [line["step"] for line in lines_of(folder)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    return Path(folder)


@pytest.mark.usefixtures("signals_heard")
def test_stopped_within_a_step_and_gone_on_with(tiny, whole, tmp_path, monkeypatch):
    batch = Documents.batch
    keys = []

    def interrupted(self, rows, length, key):
        if key == (0, 8) and key not in keys:
            os.kill(os.getpid(), signal.SIGINT)
        keys.append(key)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    out = tmp_path / "out"
    outcome = train(config_of(tiny), out)
    assert (outcome.steps, outcome.signum, outcome.after) == (2, signal.SIGINT, None)
    assert not (out / HEADS).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outcome = resume(out)
    assert (outcome.steps, outcome.signum) == (STEPS, None)
    assert keys == [(0, number) for number in range(10)]  # none passes the model twice
    same(out, whole)
    assert not [path for path in out.iterdir() if path.is_dir() or path.name.endswith(".new")]
    assert resume(out) == outcome  # finished: nothing to do


def test_minutes_include_evaluation(tiny, tmp_path, monkeypatch):
    """What is left for training is half of them at least."""
    training = module._Training.__new__(module._Training)
    for evaluating, allowed in ((0.0, 120.0), (10.0, 100.0), (50.0, 60.0)):
        training._record = {module.EVALUATING: evaluating}
        assert training._allowed(2.0) == allowed


@pytest.mark.parametrize(
    ("saving", "last"),
    first(1, [({}, 0), ({"save_every": 2}, 4), ({"save_minutes": 1e-9}, 4)]),
    ids=["none", "steps", "time"],
)
def test_what_a_kill_leaves_is_gone_on_with_from_the_checkpoint(
    tiny, whole, tmp_path, saving, last
):
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):  # like a kill: nothing is saved on the way out
        train(config_of(tiny, **saving), out, StopAt(last + 1, ZeroDivisionError()))
    with (out / METRICS).open("a") as log:
        log.write('{"step": 6, "lo')  # torn
    checkpoint = TrainFolder(out).load_checkpoint()
    assert (checkpoint[1] if checkpoint else 0) == last
    resume(out)
    same(out, whole)


def test_time_can_end_it(tiny, tmp_path, monkeypatch):
    ticks = count(0.0, 1 / 32)  # a step takes one, however busy the machine is
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    config = config_of(tiny, steps=None, minutes=0.5 / 60, warmup=10_000, eval_every=0)
    outcome = train(config, tmp_path / "out")
    lines = [
        json.loads(line)
        for line in (tmp_path / "out" / METRICS).read_text().splitlines()
        if '"lr"' in line
    ]
    assert outcome.steps == len(lines) > 3
    evaluating = read_json(tmp_path / "out" / RECORD)["evaluation_seconds"]
    limit = max(0.25, 0.5 - 2 * evaluating)  # what is left of the time for training
    assert lines[-1]["seconds"] >= limit - 0.001  # they are rounded
    assert lines[-2]["seconds"] <= limit + 0.001
    rates = [line["lr"] for line in lines]
    assert max(rates) > 0.005  # the rise took a quarter of the time
    assert rates[-1] < 0.5 * max(rates)
    assert [line["tokens"] for line in lines] == [line["step"] * 64 * 2 * 2 for line in lines]


@pytest.fixture(scope="module")
def cut(tiny: Tiny, tmp_path_factory) -> Path:
    """The folder of a training of heads that was interrupted."""
    folder = tmp_path_factory.mktemp("cut")
    with signals_heard():
        train(config_of(tiny), folder, StopAt(2, signal.SIGINT))
    return folder


@pytest.fixture
def out(cut: Path, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(cut, tmp_path / "out"))


def test_a_model_and_a_corpus_that_were_moved(tiny, whole, out, tmp_path):
    moved = {
        name: str(shutil.copytree(getattr(tiny, name), tmp_path / name))
        for name in ("model", "corpus")
    }
    with refused(r"^lr: the training in .* was made with 0\.01, got 0\.5; it keeps its options$"):
        resume(out, moved | {"lr": 0.5})
    text = max((tmp_path / "corpus").iterdir(), key=lambda path: path.stat().st_size)
    before = text.read_text()
    text.write_text(before + " And one word more.")
    with refused(r"^corpus: the corpus changed since the training in "):
        resume(out, moved)
    text.write_text(before)
    assert resume(out, moved | {"steps": STEPS, "alpha_tokens": 0}).steps == STEPS
    same(out, whole)
    plan = read_json(out / RECORD)["plan"]
    assert {name: plan[name] for name in moved} == moved


@pytest.mark.slow
def test_another_model_or_corpus_or_damage_is_noticed(tiny, out, tmp_path):
    record = read_json(out / RECORD)
    changed = "the .* changed since the training in "
    rows = [
        ({name: 7}, f"{option}: {changed}")
        for name, option in {
            "base": "model",
            "corpus": "corpus",
            "processes": "resume",
            "dtype": "dtype",
        }.items()
    ]
    rows.append(
        ({"plan": record["plan"] | {"kind": "odd"}}, "resume: .* holds a plan that is damaged")
    )
    rows.append(({"kind": "train-draft"}, r"resume: .*train\.json is of kind train-draft"))
    damaged = r"resume: .*train\.json is broken: it is no"
    for text, message in [(json.dumps(record | new), told) for new, told in rows] + [
        ("{", damaged),
        ("[]", damaged),
    ]:
        (out / RECORD).write_text(text)
        with refused(f"^{message}"):
            resume(out)
    (out / RECORD).write_text(json.dumps(record))
    for content in (
        (out / CHECKPOINT).read_bytes()[:-100],
        b"",
        (tiny.model / "model.safetensors").read_bytes(),
    ):
        (out / CHECKPOINT).write_bytes(content)
        with refused(r"^resume: .*checkpoint\.safetensors is damaged"):
            resume(out)
    with refused(r"^resume: .* holds no training"):
        resume(tmp_path)


@pytest.mark.parametrize("name", [RECORD, METRICS, CHECKPOINT, LOCK, TEACHER.format(0)])
def test_what_is_no_file_is_neither_waited_for_nor_followed(out, tmp_path, name):
    (tmp_path / name).touch()
    if (out / name).exists():
        (out / name).rename(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    (out / name).symlink_to(tmp_path / name)
    with refused(rf"{name} cannot be used \(it is a link\)$"):
        resume(out)
    assert (tmp_path / name).read_bytes() == before
    (out / name).unlink()
    os.mkfifo(out / name)
    with refused(rf"{name} cannot be used \(it is a named pipe\)$"):
        resume(out)


def test_a_link_is_not_written_through_and_a_second_process_is_refused(out, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (out / NEW).symlink_to(precious)
    with TrainFolder(out).locked(), refused(r"^resume: another process is training in "):
        resume(out)
    assert resume(out).after is not None
    assert precious.read_text() == "precious"
    assert not [path for path in out.iterdir() if path.is_symlink()]


def test_a_loss_that_is_no_number_ends_it(tiny, tmp_path):
    with pytest.raises(
        DecodeError, match=r"^loss is NaN or infinite at step \d; a lower --lr may help"
    ):
        train(config_of(tiny, lr=1e30), tmp_path / "out")


# -------------------------------------------------------------------------------------------------
# several processes


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_twice_the_batches(tiny, tmp_path):
    train(
        config_of(tiny, dtype="float64", steps=3, accumulate=4, keep_tokens=0),
        tmp_path / "one",
    )
    words = (
        f"train --corpus {tiny.corpus} --model {tiny.model} --out {tmp_path / 'two'} --seq-len 64 "
        "--steps 3 --batch 2"
    )
    words += " --accumulate 2 --warmup 2 --lr 0.01 --alpha-tokens 0 --eval-every 2"
    words += " --device cpu --dtype float64"
    # else each learns again from rows of its own
    words += " --draft-vocabulary 200 --keep-tokens 0"
    first, second = on_ranks(tmp_path, 2, main, words_of([words]))
    assert (first.found, second.found) == (0, 0), first.err + second.err
    ours, theirs = (
        load_file(tmp_path / "one" / CHECKPOINT),
        load_file(tmp_path / "two" / CHECKPOINT),
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-12, msg=name)
    for one, two in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "two"), strict=True):
        for name in ("step", "tokens", "top"):
            assert two.get(name) == one.get(name)
        assert two.get("loss", [0.0]) == pytest.approx(one.get("loss", [0.0]))
    assert first.out.count(b"head  token") == 1
    assert first.err.count("tswift: model") == 1
    assert "2 processes" in first.err
    assert (second.out, second.err) == (b"", "")  # the first process alone prints


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda:1", InputError, r"device: every rank has .* got 'cuda:1'$"),
        ("cuda", InputError, r"nproc_per_node: PyTorch finds 1 CUDA devices here, 2 ranks need"),
        ("cpu", DecodeError, r"the 2 ranks cannot connect to each other \(.*\)$"),
    ],
)
def test_processes_that_cannot_work_together(monkeypatch, device, error, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(error, match=rf"^{message}"):
        open_ranks(device).__enter__()


# -------------------------------------------------------------------------------------------------
# files that cannot be written


@pytest.fixture
def folder(tmp_path) -> TrainFolder:
    made = TrainFolder(tmp_path / "a run")
    with made.created():
        made.write_record({"state": "running"})
    return made


def save(folder: TrainFolder):
    folder.save_checkpoint({"weight": torch.ones(3)}, step=7, seconds=1.0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk(folder, kept):
    """What was there before is there afterwards; and it is said how to go on,
    if there is anything to go on from.
    """
    if kept:
        save(folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    goes_on = (
        f"; tswift train --resume '{folder.path}' goes on from the last checkpoint" if kept else ""
    )

    def full(path):
        path.write_bytes(b"a part")
        raise OSError(ENOSPC, "No space left on device")

    def broken(path):
        raise SafetensorError("Error while serializing:\nI/O error")

    for name, reason, attempt in (
        (f"/{CHECKPOINT}", "No space left on device", lambda: folder.write(CHECKPOINT, full)),
        (f"/{HEADS}", "Error while serializing: I/O error", lambda: folder.write(HEADS, broken)),
    ):
        with pytest.raises(
            DecodeError,
            match=rf"^{re.escape(f'{folder.path}{name} cannot be written ({reason}){goes_on}')}$",
        ):
            attempt()
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_what_a_killed_process_left_of_a_save_goes_with_the_next(folder):
    """safetensors writes beside what it is to write, by another name."""
    before = {path.name for path in folder.path.iterdir()}
    (folder.path / NEW).mkdir()
    (folder.path / NEW / ".tmpk5wO2B").write_bytes(b"a part")
    folder.write(HEADS, Path.touch)
    save(folder)
    assert {path.name for path in folder.path.iterdir()} == {*before, HEADS, CHECKPOINT}


def test_names_and_folders_that_cannot_be(tmp_path, folder):
    with refused(r"^out: .* is no UTF-8"):
        TrainFolder(tmp_path / os.fsdecode(b"d\xff")).created().__enter__()
    assert [*tmp_path.iterdir()] == [folder.path]
    shutil.rmtree(folder.path)
    for attempt in (
        lambda: folder.log({"step": 1}),
        lambda: save(folder),
        lambda: folder.write_record({}),
    ):
        with pytest.raises(
            DecodeError,
            match=rf"^{re.escape(str(folder.path))}/.* cannot be written \(.*No such file",
        ):
            attempt()
