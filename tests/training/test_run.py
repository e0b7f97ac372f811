"""A whole training: what it learns, how it is interrupted and resumed, by one process and by two, and its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tswift
from benchmarks.architectures import ARCHITECTURES, checkpoint
from tests.helpers import tiny_heads
from tests.jobs.faults import FaultyOs
from tests.ranks import on_ranks
from tests.training.tiny import Tiny
from tswift.cli import main
from tswift.distributed import Dist, open_ranks
from tswift.errors import Fault, InputError
from tswift.jobs import folder as files
from tswift.kv import FullKV
from tswift.models.drafters_io import describe_drafter
from tswift.training.config import DraftConfig, HeadsConfig, Progress
from tswift.training.data import Documents
from tswift.training.run import CHECKPOINT, METRICS, RECORD, TrainFolder, resume, train
from tswift.training.tasks import HEADS, MODEL, DraftTrainee

STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "heads": {"batch": 2, "lr": 1e-2, "alpha_tokens": 0},
    "lm": {"batch": 4, "reach": 1000},
    "block": {"kind": "block", "batch": 2, "block": 3, "mlp": 32, "rank": 8, "markov": "rnn"},
}


def config_of(what: str, tiny: Tiny, /, **changes: object) -> HeadsConfig | DraftConfig:
    """Short settings of a training of heads, of a language model, of a block drafter."""
    model = tiny.deep if what == "block" else tiny.model
    common = {"corpus": str(tiny.corpus), "model": str(model), "seq_len": 64, "steps": STEPS, "accumulate": 2}
    common |= {"warmup": 2, "eval_every": 2, "device": "cpu"}
    return (HeadsConfig if what == "heads" else DraftConfig)(**{**common, **OPTIONS[what], **changes})


RESULT = {"heads": HEADS, "lm": MODEL, "block": MODEL}


def lines_of(folder: Path) -> list[dict]:
    """The log without its times."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(first: Path, second: Path, kind: str) -> None:
    """Two trainings have the same weights, optimizer states, result and log, bit for bit."""
    ours, theirs = load_file(first / CHECKPOINT), load_file(second / CHECKPOINT)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.0.") for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert (first / RESULT[kind]).read_bytes() == (second / RESULT[kind]).read_bytes()
    assert lines_of(first) == lines_of(second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_trains_beside_a_model_in_bfloat16(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    train(config_of(kind, tiny, steps=1, accumulate=1, warmup=0, dtype="bfloat16"), out)
    assert (out / RESULT[kind]).exists()


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of trainings that nothing interrupted."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in OPTIONS}
    for kind, folder in folders.items():
        assert train(config_of(kind, tiny), folder).signum is None
    return folders


class StopAt(Progress):
    """Sends a signal, or raises an error, when so many steps are done."""

    def __init__(self, step: int, what: int | Exception) -> None:
        self.step, self.what = step, what

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        if name == "train" and done == self.step:
            if isinstance(self.what, Exception):
                raise self.what
            os.kill(os.getpid(), self.what)


@pytest.mark.parametrize(("kind", "objective"), [("chained", "distill"), ("conditioned", "text")])
def test_every_heads_loss_falls_and_alpha_rises(tiny: Tiny, tmp_path: Path, kind: str, objective: str) -> None:
    config = config_of("heads", tiny, kind=kind, objective=objective, steps=20, batch=4, accumulate=1, alpha_tokens=100)
    before_weights = (tiny.model / "model.safetensors").read_bytes()
    outcome = train(config, tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert (outcome.steps, outcome.signum) == (20, None)
    for head in range(3):
        assert after["loss"][head] < before["loss"][head] - 0.1
        assert after["top"][head][2] > before["top"][head][2]
        assert after["top"][head] == sorted(after["top"][head])
    assert after["alpha"] > before["alpha"] + 0.08
    assert after["tokens_per_step"] == pytest.approx(1 + 4 * after["alpha"], abs=0.15)
    assert (tiny.model / "model.safetensors").read_bytes() == before_weights
    # what was measured is the file, and the file is what generate takes
    model = tswift.load(config.model, heads=tmp_path / "out" / HEADS)
    assert (model.heads.kind, model.heads.count) == (kind, 3)
    texts = [
        [token for step in tswift.generate(model, "the ship", 40, method=method) for token in step.tokens]
        for method in ("ar", "tokenswift")
    ]
    assert texts[0] == texts[1]


def test_a_draft_model_learns_to_draw_what_the_model_draws(tiny: Tiny, tmp_path: Path) -> None:
    outcome = train(config_of("lm", tiny, steps=15, accumulate=1, eval_every=0), tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert after["loss"] < before["loss"] - 1.5
    assert after["target_loss"] == before["target_loss"] < after["loss"]
    assert after["agreement"] > before["agreement"] + 0.2
    # what was measured is the folder, and the folder is what drafts
    draft, row = tswift.load(str(tiny.model), draft_model=str(tmp_path / "out")).draft, [5, 9, 4, 7, 7, 3]
    assert draft.max_positions == 1000
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(torch.tensor([row])).logits[0]
    hidden = [part.hidden for part in draft.chunks(row, FullKV(draft.kv_shape, len(row)))]
    torch.testing.assert_close(draft.logits(torch.cat(hidden)), wanted, rtol=0, atol=1e-5)
    assert {str(value.dtype) for value in load_file(tmp_path / "out" / MODEL).values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("objective", "markov"), [("text", "vanilla"), pytest.param("distill", "rnn", marks=pytest.mark.slow)]
)
def test_a_block_drafter_learns_and_drafts_for_its_model(
    tiny: Tiny, tmp_path: Path, objective: str, markov: str
) -> None:
    config = config_of(
        "block", tiny, steps=40, batch=4, accumulate=1, eval_every=0, lr=0.05, objective=objective, markov=markov
    )
    outcome = train(config, tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert len(after["loss"]) == 3
    for slot in range(3):
        assert after["loss"][slot] < before["loss"][slot] - (0.3 if objective == "text" else 0.01)
    # what was trained is what --drafter takes, in a published layout
    about = describe_drafter(tmp_path / "out")
    assert (about["layout"], about["kind"], about["count"]) == ("DeepSpec", "dspark", 3)
    assert (about["taps"], about["markov"], about["dtypes"]) == ((1,), f"{markov}, rank 8", ["BF16"])
    model = tswift.load(config.model, dtype="float64", drafter=str(tmp_path / "out"))
    texts = [
        [token for step in tswift.generate(model, "the ship", 60, method=method) for token in step.tokens]
        for method in ("ar", "block")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (None, "has a single layer, and a block drafter reads the states before"),
        ("Gemma 3 (windows)", "has no rope_theta for all layers, which a block drafter takes over"),
        ("GPT-2", "has no rms_norm_eps, which a block drafter takes over"),
    ],
)
def test_models_without_block_drafters(model: str | None, problem: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if model is not None:
        checkpoint(ARCHITECTURES[model], folder)
    with pytest.raises(InputError, match=rf"^model: .*{problem}"):
        train(config_of("block", tiny, model=str(folder if model else tiny.model)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_jump_as_far_as_the_draft_model_is_to_reach(tiny: Tiny) -> None:
    model = tswift.load(str(tiny.model), device="cpu")

    def places(key: tuple[int, ...], **changes: object) -> torch.Tensor | None:
        documents = Documents(None, np.array([]), np.array([]), np.array([]), 0, ())
        return DraftTrainee(config_of("lm", tiny, **changes), model, documents, Dist(), Progress()).places(40, key)[0]

    seen, again, other = (places(key, reach=100_000) for key in ((1, 2, 3), (1, 2, 3), (1, 2, 4)))
    steps = seen.diff(dim=1)
    assert (steps.min(), seen[:, 0].max()) == (1, 0)
    assert ((steps > 1).sum(1) <= 1).all()
    assert 30_000 < seen.max() < 100_000
    assert torch.equal(seen, again)
    assert not torch.equal(seen, other)
    assert places((1, 2, 3), reach=65) is None


@pytest.mark.parametrize(
    ("kind", "number"),
    [("heads", signal.SIGINT), ("heads", signal.SIGHUP), ("lm", signal.SIGTERM), ("block", signal.SIGINT)],
)
def test_stopped_by_a_signal_and_gone_on_with(tiny: Tiny, whole: dict, tmp_path: Path, kind: str, number: int) -> None:
    out, config = tmp_path / "out", config_of(kind, tiny)
    outcome = train(config, out, StopAt(3, number))
    assert (outcome.steps, outcome.signum, outcome.after) == (3, number, None)
    assert json.loads((out / RECORD).read_text())["state"] == "interrupted"
    assert not (out / RESULT[kind]).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outcome = resume(type(config), out)
    assert (outcome.steps, outcome.signum) == (STEPS, None)
    same(out, whole[kind], kind)
    assert not [path for path in out.iterdir() if path.is_dir() or path.name.endswith(".new")]
    again = resume(type(config), out)  # finished: nothing to do
    assert (again.before, again.after) == (outcome.before, outcome.after)
    other = DraftConfig if kind == "heads" else HeadsConfig
    with pytest.raises(InputError, match=rf"^resume: .*train\.json is of kind {config.COMMAND}"):
        resume(other, out)


def test_stopped_within_a_step_and_gone_on_with(
    tiny: Tiny, whole: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, keys = Documents.batch, []

    def interrupted(self: Documents, rows: int, length: int, key: tuple[int, ...]):
        if tuple(key) == (0, 2, 0) and key not in keys:
            os.kill(os.getpid(), signal.SIGINT)
        keys.append(key)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    assert train(config_of("heads", tiny), tmp_path / "out").steps == 2
    resume(HeadsConfig, tmp_path / "out")
    assert {*keys} == {(0, step, number) for step in range(STEPS) for number in range(2)}  # no rows are drawn again
    same(tmp_path / "out", whole["heads"], "heads")


@pytest.mark.parametrize("last", [0, 4])
def test_what_a_kill_leaves_is_gone_on_with_from_the_checkpoint(
    tiny: Tiny, whole: dict, tmp_path: Path, last: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):  # like a kill: nothing is saved on the way out
        train(config_of("heads", tiny, save_every=2 if last else None), out, StopAt(last + 1, ZeroDivisionError()))
    with (out / METRICS).open("a") as log:
        log.write('{"step": 6, "lo')  # torn
    checkpoint = TrainFolder(out, "train").load_checkpoint()
    assert (checkpoint[1] if checkpoint else 0) == last
    resume(HeadsConfig, out)
    same(out, whole["heads"], "heads")


def test_a_model_and_a_corpus_that_were_moved(tiny: Tiny, whole: dict, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(config_of("heads", tiny), out, StopAt(2, signal.SIGINT))
    moved = {name: str(shutil.copytree(getattr(tiny, name), tmp_path / name)) for name in ("model", "corpus")}
    with pytest.raises(InputError, match=r"^lr: the training in .* was begun with 0\.01, got 0\.5$"):
        resume(HeadsConfig, out, moved | {"lr": 0.5})
    text = max((tmp_path / "corpus").iterdir(), key=lambda path: path.stat().st_size)
    before = text.read_text()
    text.write_text(before + " And one word more.")
    with pytest.raises(InputError, match=r"^corpus: the corpus changed since the training in "):
        resume(HeadsConfig, out, moved)
    text.write_text(before)
    assert resume(HeadsConfig, out, moved | {"steps": STEPS, "alpha_tokens": 0}).steps == STEPS
    same(out, whole["heads"], "heads")
    plan = json.loads((out / RECORD).read_text())["plan"]
    assert {name: plan[name] for name in moved} == moved


def test_time_can_end_it(tiny: Tiny, tmp_path: Path) -> None:
    outcome = train(
        config_of("heads", tiny, steps=None, minutes=0.5 / 60, warmup=10_000, eval_every=0), tmp_path / "out"
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / METRICS).read_text().splitlines() if '"lr"' in line]
    assert outcome.steps == len(lines) > 3
    assert lines[-1]["seconds"] >= 0.5 >= lines[-2]["seconds"]  # rounded, so the last but one may say it, too
    rates = [line["lr"] for line in lines]
    assert max(rates) > 0.005  # the rise took a quarter of the time
    assert rates[-1] < 0.5 * max(rates)
    assert [line["tokens"] for line in lines] == [line["step"] * 64 * 2 * 2 for line in lines]


@pytest.fixture(scope="module")
def cut(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of heads that was interrupted."""
    folder = tmp_path_factory.mktemp("cut")
    train(config_of("heads", tiny), folder, StopAt(2, signal.SIGINT))
    return folder


@pytest.fixture
def out(cut: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(cut, tmp_path / "out"))


def test_another_model_or_corpus_or_damage_is_noticed(tiny: Tiny, out: Path, tmp_path: Path) -> None:
    record = json.loads((out / RECORD).read_text())
    changed = {
        **{json.dumps(record | {name: 7}): f"{option}: the .* changed since the training in " for name, option in
           {"base": "model", "corpus": "corpus", "processes": "resume", "dtype": "dtype"}.items()},
        json.dumps(record | {"plan": record["plan"] | {"kind": "odd"}}): "resume: .* holds a plan that is damaged",
        "{": r"resume: .*train\.json is damaged$",
        "[]": r"resume: .*train\.json is damaged$",
    }  # fmt: skip
    for text, message in changed.items():
        (out / RECORD).write_text(text)
        with pytest.raises(InputError, match=f"^{message}"):
            resume(HeadsConfig, out)
    (out / RECORD).write_text(json.dumps(record))
    checkpoint, model = (out / CHECKPOINT).read_bytes(), (tiny.model / "model.safetensors").read_bytes()
    for damaged in (checkpoint[:-100], b"", b"{}" * 100, model):
        (out / CHECKPOINT).write_bytes(damaged)
        with pytest.raises(InputError, match=r"^resume: .*checkpoint\.safetensors is damaged"):
            resume(HeadsConfig, out)
    with pytest.raises(InputError, match=r"^resume: .* holds no training"):
        resume(HeadsConfig, tmp_path)


@pytest.mark.parametrize("name", [RECORD, METRICS, CHECKPOINT])
def test_what_is_no_file_is_neither_waited_for_nor_followed(out: Path, tmp_path: Path, name: str) -> None:
    (out / name).rename(tmp_path / name)
    (out / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=rf"^resume: .*{name} cannot be read \(it is a link\)$"):
        resume(HeadsConfig, out)
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(InputError, match=rf"^resume: .*{name} cannot be read \(it is no regular file\)$"):
        resume(HeadsConfig, out)


def test_a_link_is_not_written_through_and_a_second_process_is_refused(out: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in (CHECKPOINT, HEADS):
        (out / f"{name}.new").symlink_to(precious)
    with (
        TrainFolder(out, "train").locked(),
        pytest.raises(InputError, match=r"^resume: another process is training in "),
    ):
        resume(HeadsConfig, out)
    assert resume(HeadsConfig, out).after is not None
    assert precious.read_text() == "precious"
    assert not [path for path in out.iterdir() if path.is_symlink()]


def test_a_loss_that_is_no_number_ends_it(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"^loss is NaN or infinite at step \d; a lower --lr may help"):
        train(config_of("heads", tiny, lr=1e30), tmp_path / "out")


def trained(words: list[str], cache: str) -> int:
    os.environ["HF_DATASETS_CACHE"] = cache
    return main(words)


@pytest.mark.slow
def test_two_processes_do_what_one_does_with_twice_the_batches(tiny: Tiny, tmp_path: Path, own_cache: Path) -> None:
    train(config_of("heads", tiny, dtype="float64", steps=3, accumulate=4), tmp_path / "one")
    words = (
        f"train --corpus {tiny.corpus} --model {tiny.model} --out {tmp_path / 'two'} --seq-len 64 --steps 3 --batch 2"
    )
    words += " --accumulate 2 --warmup 2 --lr 0.01 --alpha-tokens 0 --eval-every 2 --device cpu --dtype float64"
    first, second = on_ranks(tmp_path, 2, trained, words.split(), str(own_cache))
    assert (first.found, second.found) == (0, 0), first.err + second.err
    ours, theirs = load_file(tmp_path / "one" / CHECKPOINT), load_file(tmp_path / "two" / CHECKPOINT)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-9, atol=1e-12, msg=name)
    for one, two in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "two"), strict=True):
        assert one["step"] == two["step"]
        assert one.get("tokens") == two.get("tokens")
        assert two.get("loss", [0.0]) == pytest.approx(one.get("loss", [0.0]))
        assert two.get("top") == one.get("top")
    assert first.out.count(b"head  token") == 1
    assert first.err.count("tswift: model") == 1
    assert "2 processes" in first.err
    assert (second.out, second.err) == (b"", "")  # the first process alone prints


@pytest.fixture
def folder(tmp_path: Path) -> TrainFolder:
    made = TrainFolder(tmp_path / "train", "train-draft")
    with made.created():
        made.write_record({"state": "running"})
    return made


def save(folder: TrainFolder) -> None:
    folder.save_checkpoint({"weight": torch.ones(3)}, step=7, seconds=1.0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk(folder: TrainFolder, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """What was there before is there afterwards; and it is said how to go on, if there is anything to go on from."""
    if kept:
        save(folder)
    folder.log({"step": 1})
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    goes_on = f"; tswift train-draft --resume {folder.path} goes on from the last checkpoint" if kept else ""

    def full(path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(ENOSPC, "No space left on device")

    def broken(path: Path) -> None:
        raise SafetensorError("Error while serializing:\nI/O error")

    attempts: dict[str, Any] = {
        RECORD: lambda: folder.write_record({"state": "finished"}),
        METRICS: lambda: folder.truncate_log(1),
        CHECKPOINT: lambda: folder.write(CHECKPOINT, full),
        HEADS: lambda: folder.write(HEADS, broken),
    }
    for name, attempt in attempts.items():
        monkeypatch.setattr(files, "os", FaultyOs(2, "full"))
        with pytest.raises(Fault) as found:
            attempt()
        reason = "Error while serializing: I/O error" if name == HEADS else "No space left on device"
        assert str(found.value) == f"{folder.path / name} cannot be written ({reason}){goes_on}"
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^out: .* is no UTF-8"):
        TrainFolder(tmp_path / os.fsdecode(b"d\xff"), "train").created().__enter__()
    assert not list(tmp_path.iterdir())
    with TrainFolder(tmp_path / "größer", "train").created():
        assert (tmp_path / "größer").is_dir()


def test_a_folder_that_is_removed(folder: TrainFolder) -> None:
    shutil.rmtree(folder.path)
    for attempt in (lambda: folder.log({"step": 1}), lambda: save(folder), lambda: folder.write_record({})):
        with pytest.raises(Fault, match=rf"^{re.escape(str(folder.path))}/.* cannot be written \(.*No such file"):
            attempt()


def test_a_single_process_needs_nobody() -> None:
    with open_ranks("auto") as ranks:
        assert (ranks.first, ranks.count, ranks.device) == (True, 1, None)
        assert ranks.highest(3.0, 0.5) == (3.0, 0.5)
        assert ranks.wrap(tiny_heads()) is None
        value = torch.ones(2)
        ranks.total(value)
        ranks.wait()
        assert value.tolist() == [1, 1]


def test_several_processes_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^device: every rank has .* got 'cuda:1'$"):
        open_ranks("cuda:1").__enter__()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"^nproc_per_node: PyTorch finds 1 CUDA devices here, 2 ranks need"):
        open_ranks("cuda").__enter__()


def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(Fault, match=r"^the 2 ranks cannot connect to each other \(.*\)$"):
        open_ranks("cpu").__enter__()
