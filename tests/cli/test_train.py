"""``tswift train``: what it prints, how it is stopped, and every bad input in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.training.tiny import Tiny, make_tiny
from tswift.training.documents import Documents


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def words_of(tiny: Tiny, *more: object) -> list[object]:
    return [
        *("train", "--corpus", tiny.corpus, "--model", tiny.model, "--seq-len", 64, "--batch", 2, "--accumulate", 1),
        *("--steps", 4, "--device", "cpu", *more),
    ]


def test_it_says_what_it_trains_on_and_what_that_brought(tswift, tiny: Tiny) -> None:  # type: ignore[no-untyped-def]
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 20, "--kind", "chained", "--heads-count", 2))
    assert result.code == 0, result.err
    title, columns, *rows, note = result.out.decode().splitlines()
    assert title == "2 chained heads on held-out text, untrained -> after 4 steps"
    assert columns.split() == ["head", "token", "loss", "top-1", "top-2", "top-3"]
    number = r"\d+\.\d{3}"
    assert len(rows) == 2
    for head, row in enumerate(rows, start=1):
        assert re.fullmatch(rf"\s+{head}\s+{head + 1} on(\s+{number} -> {number}){{4}}", row)
    assert re.match(rf"alpha {number} -> {number}, tokens per step \d\.\d\d -> \d\.\d\d: 20 tokens after each", note)
    assert "18 of 25 documents have more than 64 tokens, 1 there twice; 1 of them held out" in result.err
    assert result.err.endswith("written: new/heads.safetensors\n")
    made = {path.name for path in Path("new").iterdir()}
    assert made == {"heads.safetensors", "checkpoint.safetensors", "metrics.jsonl", "train.json"}
    record = json.loads(Path("new/train.json").read_text())
    assert record["command"][:2] == ["tswift", "train"]
    assert record["plan"]["heads_count"] == 2
    assert Path("new/heads.safetensors").stat().st_mode == Path("new/train.json").stat().st_mode
    result = tswift("generate", "--model", tiny.model, "--heads", "new/heads.safetensors", "--len", 8, "--prefill", 9)
    assert result.code == 0, result.err
    result = tswift("train", "--resume", "new")
    assert (result.code, result.out.decode().splitlines()[0]) == (0, title)
    assert "the training in new is finished" in result.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_told_with_the_way_on(  # type: ignore[no-untyped-def]
    tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    batch = Documents.batch
    calls: list[object] = []

    def interrupted(self, rows, length, key):  # type: ignore[no-untyped-def]
        calls.append(key)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 0, "--accumulate", 2))
    assert (result.code, result.out) == (code, b"")
    assert result.err.endswith("interrupted after step 1; tswift train --resume new goes on\n")
    result = tswift("train", "--resume", "new", "--quiet")
    assert (result.code, result.err) == (0, "")


def test_a_signal_while_heads_are_judged(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import tswift.training.held_out as module

    def interrupted(*arguments: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "begin", interrupted)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 20))
    assert result.code == 143
    assert "interrupted after step 0" in result.err
    assert json.loads(Path("new/train.json").read_text())["state"] == "interrupted"
    monkeypatch.undo()


CHEAP = {
    "--kind odd": "--kind: is one of chained, conditioned, got 'odd'",
    "--objective both": "--objective: is one of text, distill, got 'both'",
    "--dtype float16": "--dtype: is one of auto, float32, float64, bfloat16, got 'float16'",
    "--heads-count 0": "--heads-count: must be at least 1, got 0",
    "--heads-count 999999": "--heads-count: must be at most 64, got 999999",
    "--seq-len 4": "--seq-len: must be at least 5, got 4",
    "--steps 0": "--steps: must be at least 1, got 0",
    "--steps 5 --minutes 1": "--minutes: cannot be given together with --steps",
    "--minutes 0": "--minutes: must be a number above 0, got 0.0",
    "--minutes nan": "--minutes: must be a number above 0, got nan",
    "--batch 0": "--batch: must be at least 1, got 0",
    "--accumulate 0": "--accumulate: must be at least 1, got 0",
    "--lr 0": "--lr: must be a number above 0, got 0.0",
    "--lr inf": "--lr: must be a number above 0, got inf",
    "--warmup -1": "--warmup: must be at least 0, got -1",
    "--weight-decay -1": "--weight-decay: must be a number >= 0, got -1.0",
    "--documents 1": "--documents: must be at least 2, got 1",
    "--held-out 0": "--held-out: must be at least 1, got 0",
    "--eval-every -1": "--eval-every: must be at least 0, got -1",
    "--save-every 0": "--save-every: must be at least 1, got 0",
    "--save-minutes 0": "--save-minutes: must be a number above 0, got 0.0",
    "--alpha-tokens -1": "--alpha-tokens: must be at least 0, got -1",
    "--seed -1": "--seed: must be at least 0, got -1",
    "--seed 99999999999999999999": "--seed: must be at most ",
    "--model shape:llama3.1-8b": "--model: shape:llama3.1-8b has random weights",
    "--model /nowhere": "--model: there is no folder '/nowhere'",
    "--device tpu": "--device: no device 'tpu'",
    "--attention odd": "--attention: no attention 'odd'",
    "--corpus /nowhere": "--corpus: there is no file or folder /nowhere",
    "--corpus nobody/nothing": "--corpus: nobody/nothing is no folder and cannot be loaded from the hub",
    "--corpus /etc/hostname": "--corpus: /etc/hostname is no folder, and no .parquet or .txt file",
    "--corpus /proc": "--corpus: /proc holds no .parquet or .txt files",
    "--resume /nowhere": "--resume: /nowhere holds no training: there is no train.json in it",
    "--resume . --out new": "--out: goes on in the folder of --resume",
    "--seq-len 3000": "--seq-len: is 3,000, the model has 2,048 positions",
    "--alpha-tokens 2048": "--alpha-tokens: must be below the model's 2,048 positions",
    "--seq-len 2000": "--corpus: ",
    "--out /proc/new": "--out: /proc/new cannot be written to",
    "--steps many": "Invalid value for '--steps'",
}


@pytest.mark.parametrize("words", CHEAP)
def test_bad_input_is_one_line(tswift, tiny: Tiny, words: str) -> None:  # type: ignore[no-untyped-def]
    defaults = {"--corpus": tiny.corpus, "--model": tiny.model, "--seq-len": 64}
    rest = [part for name, value in defaults.items() if name not in words for part in (name, value)]
    result = tswift("train", "--quiet", *rest, *words.split())
    assert result.code == 2, result
    assert result.out == b""
    assert result.err.startswith(f"tswift: error: {CHEAP[words]}"), result.err
    assert result.err.count("\n") == 1
    assert not [path for path in Path.cwd().rglob("*") if path.is_file()]
    assert not list(Path.cwd().glob("runs/*"))


def test_broken_heads_beside_the_model(tswift, tiny: Tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    (model / "heads.safetensors").write_bytes(b"none")
    result = tswift("train", "--corpus", tiny.corpus, "--model", model, "--seq-len", 64, "--quiet")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"tswift: error: --model: {model}/heads.safetensors is not a tswift heads file")


def test_no_corpus(tswift) -> None:  # type: ignore[no-untyped-def]
    result = tswift("train")
    assert (result.code, result.err) == (
        2,
        "tswift: error: --corpus: names a folder of .parquet or .txt files, or a hub id such as emozilla/pg19\n",
    )


def test_what_is_there_stays(tswift, tiny: Tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.txt").write_text("mine")
    result = tswift(*words_of(tiny, "--out", tmp_path))
    assert result.code == 2
    assert result.err.startswith(f"tswift: error: --out: {tmp_path} is not empty")


def test_memory_that_runs_out_is_one_line(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def broken(*arguments: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(Documents, "batch", broken)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 0, "--quiet"))
    assert result.code == 1
    assert result.err == (
        "tswift: error: memory ran out; a lower --batch or --seq-len takes less. Checkpoints are in new\n"
    )


def test_a_full_disk_is_one_line(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import tswift.training.folder as module

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 0, "--quiet"))
    assert result.code == 1
    assert re.fullmatch(r"tswift: error: new/checkpoint\.safetensors cannot be written \(.*\)\n", result.err)
