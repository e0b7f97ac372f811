"""A whole training: heads that get better, stopped and gone on with, by one process and by two."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tswift
from tests.ranks import on_ranks
from tests.training.tiny import Tiny
from tswift.cli import main
from tswift.errors import Fault, InputError
from tswift.models.kinds import KINDS
from tswift.training.course import Silence
from tswift.training.documents import Documents
from tswift.training.folder import CHECKPOINT, HEADS, METRICS, RECORD, TrainFolder
from tswift.training.plan import TrainPlan
from tswift.training.train import resume, train

STEPS = 6


def plan_of(tiny: Tiny, **changes: object) -> TrainPlan:
    plan = TrainPlan(
        corpus=str(tiny.corpus), model=str(tiny.model), seq_len=64, steps=STEPS, batch=2, accumulate=2, warmup=2,
        lr=1e-2, alpha_tokens=0, device="cpu",
    )  # fmt: skip
    return replace(plan, **changes)  # type: ignore[arg-type]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def same_weights(first: Path, second: Path) -> None:
    ours, theirs = load_file(first / CHECKPOINT), load_file(second / CHECKPOINT)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.0.") for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert (first / HEADS).read_bytes() == (second / HEADS).read_bytes()


def without_times(folder: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines_of(folder)]


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(plan_of(tiny, eval_every=2), folder)
    assert outcome.signum is None
    return folder


class StopAt(Silence):
    """Sends a signal, or raises an error, when so many steps are done."""

    def __init__(self, step: int, what: int | Exception) -> None:
        self.step, self.what = step, what

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        if name == "train" and done == self.step:
            if isinstance(self.what, Exception):
                raise self.what
            os.kill(os.getpid(), self.what)


@pytest.mark.parametrize("objective", ["text", "distill"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_heads_loss_falls_and_alpha_rises(tiny: Tiny, tmp_path: Path, kind: str, objective: str) -> None:
    plan = plan_of(tiny, kind=kind, objective=objective, steps=20, batch=4, accumulate=1, alpha_tokens=100)
    before_weights = (tiny.model / "model.safetensors").read_bytes()
    outcome = train(plan, tmp_path / "out")
    before, after = outcome.before, outcome.after
    assert (outcome.steps, outcome.signum) == (20, None)
    for head in range(3):
        assert after.loss[head] < before.loss[head] - 0.1
        assert after.top[head][2] > before.top[head][2]
        assert after.top[head] == sorted(after.top[head])
    assert after.alpha > before.alpha + 0.08
    assert after.tokens_per_step == pytest.approx(1 + 4 * after.alpha, abs=0.15)
    assert (tiny.model / "model.safetensors").read_bytes() == before_weights
    # what was measured is the file, and the file is what generate takes
    model = tswift.load(plan.model, heads=tmp_path / "out" / HEADS)
    assert (model.heads.kind, model.heads.count) == (kind, 3)
    texts = [
        [token for step in tswift.generate(model, "the ship", 40, method=method) for token in step.tokens]
        for method in ("ar", "tokenswift")
    ]
    assert texts[0] == texts[1]


def test_figures_are_kept(whole: Path) -> None:
    record = json.loads((whole / RECORD).read_text())
    assert (record["kind"], record["state"], record["steps"]) == ("train", "finished", STEPS)
    assert record["after"]["loss"] != record["before"]["loss"]
    lines = lines_of(whole)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "held_out" in line] == [0, 2, 4, 6]
    assert lines[0]["held_out"] == record["before"]
    assert lines[-1]["held_out"] == record["after"]
    for line in steps:
        assert len(line["loss"]) == 3
        assert [len(top) for top in line["top"]] == [3, 3, 3]
        assert line["tokens"] == line["step"] * 64 * 2 * 2
    assert not list(whole.glob("*.new"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_by_a_signal_and_gone_on_with(tiny: Tiny, whole: Path, tmp_path: Path, number: int) -> None:
    out = tmp_path / "out"
    outcome = train(plan_of(tiny, eval_every=2), out, StopAt(3, number))
    assert (outcome.steps, outcome.signum, outcome.after) == (3, number, None)
    assert json.loads((out / RECORD).read_text())["state"] == "interrupted"
    assert not (out / HEADS).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    outcome = resume(out, {})
    assert (outcome.steps, outcome.signum) == (STEPS, None)
    same_weights(out, whole)
    assert without_times(out) == without_times(whole)
    again = resume(out, {})  # finished: nothing to do
    assert (again.before, again.after) == (outcome.before, outcome.after)


def test_stopped_within_a_step_and_gone_on_with(
    tiny: Tiny, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Documents.batch

    def interrupted(self: Documents, rows: int, length: int, key: tuple[int, ...]):  # type: ignore[no-untyped-def]
        if tuple(key) == (0, 2, 0):
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    out = tmp_path / "out"
    assert train(plan_of(tiny, eval_every=2), out).steps == 2
    monkeypatch.setattr(Documents, "batch", batch)
    resume(out, {})
    same_weights(out, whole)


def test_what_a_kill_leaves_is_gone_on_with_from_the_checkpoint(tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):  # like a kill: nothing is saved on the way out
        train(plan_of(tiny, eval_every=2, save_every=2), out, StopAt(5, ZeroDivisionError()))
    (out / METRICS).open("a").write('{"step": 6, "lo')  # torn
    assert TrainFolder(out).kept()[1] == 4
    resume(out, {})
    same_weights(out, whole)
    assert without_times(out) == without_times(whole)


def test_killed_before_the_first_checkpoint(tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        train(plan_of(tiny, eval_every=2), out, StopAt(1, ZeroDivisionError()))
    resume(out, {})
    same_weights(out, whole)


def test_a_model_and_a_corpus_that_were_moved(tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan_of(tiny, eval_every=2), out, StopAt(2, signal.SIGINT))
    moved = {name: str(shutil.copytree(getattr(tiny, name), tmp_path / name)) for name in ("model", "corpus")}
    assert resume(out, moved).steps == STEPS
    same_weights(out, whole)
    plan = json.loads((out / RECORD).read_text())["plan"]
    assert {name: plan[name] for name in moved} == moved


def test_time_can_end_it(tiny: Tiny, tmp_path: Path) -> None:
    outcome = train(plan_of(tiny, steps=None, minutes=0.5 / 60, warmup=10_000), tmp_path / "out")
    lines = [line for line in lines_of(tmp_path / "out") if "loss" in line]
    assert outcome.steps == len(lines) > 3
    assert lines[-1]["seconds"] >= 0.5 >= lines[-2]["seconds"]  # rounded, so the last but one may say it, too
    rates = [line["lr"] for line in lines]
    assert max(rates) > 0.005  # the rise took a quarter of the time
    assert rates[-1] < 0.5 * max(rates)


def test_an_option_that_decides_about_weights_cannot_change(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan_of(tiny), out, StopAt(2, signal.SIGINT))
    kept = (out / CHECKPOINT).read_bytes()
    for name, value in {"lr": 0.5, "steps": 7, "minutes": 1.0, "kind": "chained", "batch": 3, "seed": 1}.items():
        began = getattr(plan_of(tiny), name)
        told = "nothing" if began is None else began
        with pytest.raises(InputError, match=rf"^--{name}: the training in .* was begun with {told}, got {value}$"):
            resume(out, {name: value})
    shutil.copytree(tiny.corpus, tmp_path / "corpus")
    with max((tmp_path / "corpus").iterdir(), key=lambda path: path.stat().st_size).open("a") as text:
        text.write(" And one word more.")
    with pytest.raises(InputError, match=r"^--corpus: the corpus changed since the training in "):
        resume(out, {"corpus": str(tmp_path / "corpus")})
    assert (out / CHECKPOINT).read_bytes() == kept
    outcome = resume(out, {"corpus": str(tiny.corpus), "steps": STEPS, "eval_every": 1, "alpha_tokens": 0})
    assert outcome.steps == STEPS


def test_another_model_or_corpus_or_damage_is_noticed(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan_of(tiny), out, StopAt(2, signal.SIGINT))
    record = json.loads((out / RECORD).read_text())
    for name, option in {"base": "--model", "corpus": "--corpus", "processes": "--resume"}.items():
        (out / RECORD).write_text(json.dumps(record | {name: 7}))
        with pytest.raises(InputError, match=f"^{option}: the .* changed since the training in "):
            resume(out, {})
    (out / RECORD).write_text(json.dumps(record | {"plan": record["plan"] | {"kind": "odd"}}))
    with pytest.raises(InputError, match=r"^--resume: .* holds a plan that is damaged"):
        resume(out, {})
    (out / RECORD).write_text("{")
    with pytest.raises(InputError, match=r"^--resume: .*train\.json is damaged$"):
        resume(out, {})
    (out / RECORD).write_text(json.dumps(record))
    whole = (out / CHECKPOINT).read_bytes()
    for damaged in (whole[:-100], whole[:50], b"", b"{}" * 100):
        (out / CHECKPOINT).write_bytes(damaged)
        with pytest.raises(InputError, match=r"^--resume: .*checkpoint\.safetensors is damaged"):
            resume(out, {})
    (out / CHECKPOINT).unlink()
    (out / CHECKPOINT).write_bytes((tiny.model / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"^--resume: .* is damaged"):
        resume(out, {})
    with pytest.raises(InputError, match=r"^--resume: .* holds no training"):
        resume(tmp_path, {})


@pytest.mark.parametrize("name", [RECORD, METRICS, CHECKPOINT])
def test_what_is_no_file_is_neither_waited_for_nor_followed(tiny: Tiny, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    train(plan_of(tiny), out, StopAt(1, signal.SIGINT))
    (out / name).rename(tmp_path / name)
    (out / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=rf"^--resume: .*{name} cannot be read \(it is a link\)$"):
        resume(out, {})
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(InputError, match=rf"^--resume: .*{name} cannot be read \(it is no regular file\)$"):
        resume(out, {})


def test_a_link_is_not_written_through(tiny: Tiny, tmp_path: Path) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    train(plan_of(tiny), out, StopAt(1, signal.SIGINT))
    precious.write_text("precious")
    for name in (CHECKPOINT, HEADS):
        (out / f"{name}.new").symlink_to(precious)
    assert resume(out, {}).after is not None
    assert precious.read_text() == "precious"
    assert not [path for path in out.iterdir() if path.is_symlink()]


def test_a_loss_that_is_no_number_ends_it(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"^the loss of step \d is no number; a lower --lr may help"):
        train(plan_of(tiny, lr=1e30), tmp_path / "out")


def test_a_second_process_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(plan_of(tiny), out, StopAt(2, signal.SIGINT))
    with TrainFolder(out).held(), pytest.raises(InputError, match=r"^--resume: another process is training in "):
        resume(out, {})


def trained(words: list[str], cache: str) -> int:
    os.environ["HF_DATASETS_CACHE"] = cache
    return main(words)


def test_two_processes_do_what_one_does_with_twice_the_batches(tiny: Tiny, tmp_path: Path, own_cache: Path) -> None:
    plan = plan_of(tiny, dtype="float64", steps=3, accumulate=4)
    train(plan, tmp_path / "one")
    words = [
        *(
            "--corpus",
            tiny.corpus,
            "--model",
            tiny.model,
            "--seq-len",
            64,
            "--steps",
            3,
            "--batch",
            2,
            "--accumulate",
            2,
        ),
        *("--warmup", 2, "--lr", 0.01, "--alpha-tokens", 0, "--device", "cpu", "--dtype", "float64"),
    ]
    command = ["train", *map(str, words), "--out", str(tmp_path / "two")]
    first, second = on_ranks(tmp_path, 2, trained, command, str(own_cache))
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
