"""``tswift train`` and ``train-draft``: what they print, how they are stopped, what breaks on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import Tiny, make_tiny
from tswift.training.data import Documents


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


@pytest.mark.slow
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
    heads = ["--heads", "new/heads.safetensors"]
    result = tswift("generate", "--model", tiny.model, *heads, "--len", 8, "--prompt-text", "Once")
    assert result.code == 0, result.err
    result = tswift("train", "--resume", "new")
    assert (result.code, result.out.decode().splitlines()[0]) == (0, title)
    assert "the training in new is finished" in result.err


def test_defaults_of_a_cpu_and_warnings(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tswift.training.config.TrainConfig.ON_CPU", {"batch": 2, "accumulate": 1, "minutes": 0.0005})
    words = ("--corpus", tiny.corpus, "--model", tiny.model, "--device", "cpu", "--seq-len", 64)
    result = tswift("train", *words, "--alpha-tokens", 0)
    assert result.code == 0, result.err
    chosen = "--batch 2 --accumulate 1 --minutes 0.0005"
    lines = result.err.splitlines()
    assert f"tswift: on a CPU, to end in minutes rather than days, the defaults are {chosen}" in lines
    warnings = [line for line in lines if "warning" in line]
    assert warnings[0] == (
        "tswift: warning: 6 of 25 documents are too short, of 64 tokens at most, and left out; a lower --seq-len keeps "
        "them"
    )
    assert re.fullmatch(r"tswift: warning: 0\.0005 minutes allow about \d+ steps; a higher --minutes, .*", warnings[1])
    assert len(warnings) == 2
    result = tswift("train-draft", *words, "--batch", 1, "--steps", 2)
    assert (result.code, result.err.count("on a CPU")) == (0, 0), result.err
    assert "tswift: warning: little is learnt in 2 steps; --steps 50 or more is advised\n" in result.err


@pytest.mark.parametrize("command", ["train", "train-draft"])
def test_help_begins_with_what_is_required(tswift, command: str) -> None:  # type: ignore[no-untyped-def]
    text, first, *_ = tswift(command, "--help").out.decode().split("╭─")
    assert "Required: --corpus, or --resume." in " ".join(text.split())
    assert re.search(r"--corpus .* Required", first)


def test_a_draft_model_is_said_and_measured(tswift, tiny: Tiny) -> None:  # type: ignore[no-untyped-def]
    result = tswift("train-draft", *words_of(tiny, "--out", "new", "--objective", "distill", "--reach", 500)[1:])
    assert result.code == 0, result.err
    title, columns, loss, same, note = result.out.decode().splitlines()
    assert title == "A draft model after 4 steps, and the model that it drafts for"
    assert columns.split() == ["untrained", "trained", "the", "model"]
    assert re.fullmatch(r"\s*loss on held-out text(\s+\d\.\d{3}){3}", loss)
    assert re.fullmatch(r"\s*draws the same token(\s+0\.\d{3}){2}\s+1\.000", same)
    assert note.startswith("Same token: both draw by the defaults")
    assert re.search(r"draft model of [\d,]+ parameters, 500 positions", result.err)
    assert result.err.endswith("written: new/model.safetensors\n")
    assert json.loads(Path("new/train.json").read_text())["command"][:2] == ["tswift", "train-draft"]
    # the folder is a model like any other
    result = tswift("generate", "--model", "new", "--method", "ar", "--len", 8, "--prompt-text", "Once")
    assert result.code == 0, result.err
    result = tswift("train-draft", "--resume", "new")
    assert (result.code, result.out.decode().splitlines()[0]) == (0, title)
    assert "the training in new is finished" in result.err
    result = tswift("train", "--resume", "new")
    assert (result.code, result.out) == (2, b"")
    assert "--resume: new/train.json is of kind train-draft" in result.err


@pytest.mark.parametrize(("command", "number", "code"), [("train", 2, 130), ("train-draft", 15, 143)])
def test_a_signal_is_told_with_the_way_on(  # type: ignore[no-untyped-def]
    tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, command: str, number: int, code: int
) -> None:
    batch = Documents.batch
    calls: list[object] = []

    def interrupted(self, rows, length, key):  # type: ignore[no-untyped-def]
        calls.append(key)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    result = tswift(command, *words_of(tiny, "--out", "new", "--accumulate", 2)[1:])
    assert (result.code, result.out) == (code, b"")
    assert result.err.endswith(f"interrupted after step 1; tswift {command} --resume new goes on\n")
    result = tswift(command, "--resume", "new", "--quiet")
    assert (result.code, result.err) == (0, "")


def test_a_signal_while_heads_are_judged(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    import tswift.training.tasks as module

    def interrupted(*arguments: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "begin", interrupted)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 20))
    assert result.code == 143
    assert "interrupted after step 0" in result.err
    assert json.loads(Path("new/train.json").read_text())["state"] == "interrupted"
    monkeypatch.undo()


def test_texts_beyond_the_models_positions(tswift, tiny: Tiny) -> None:  # type: ignore[no-untyped-def]
    """Other bad inputs are in ``tests/cli/bad_inputs``."""
    result = tswift(*words_of(tiny, "--alpha-tokens", 2048, "--quiet"))
    assert (result.code, result.err) == (
        2,
        "tswift: error: --alpha-tokens: must be below the model's 2,048 positions\n",
    )


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
    import tswift.training.run as module

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    result = tswift(*words_of(tiny, "--out", "new", "--alpha-tokens", 0, "--quiet"))
    assert result.code == 1
    assert re.fullmatch(r"tswift: error: new/checkpoint\.safetensors cannot be written \(.*\)\n", result.err)


def test_a_mistyped_option_does_not_wait_for_torch() -> None:
    code = "import sys; from tswift.cli import main; "
    code += "codes = main('train --corpus x --kind odd'.split()), main('train-draft --corpus x --lr 0'.split()); "
    code += "sys.exit(codes != (2, 2) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 2
