"""``tswift train``: what it prints, how it is stopped, what breaks on the way.

What is refused is in ``tests/cli/bad_inputs``.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import read_json
from tests.training.tiny import Tiny
from tswift.training import run as training
from tswift.training import tasks
from tswift.training.data import Documents

NUMBER = r"\d+\.\d{3}"


def words_of(tiny: Tiny, *more) -> list[object]:
    how = "--seq-len 64 --batch 2 --accumulate 1 --steps 4 --device cpu --out new"
    return ["train", f"--corpus {tiny.corpus} --model {tiny.model} {how}", *more]


@pytest.mark.slow
def test_heads_are_said_and_measured(tswift, tiny):
    result = tswift(*words_of(tiny, "--alpha-tokens 20 --kind chained --heads-count 2")).ok()
    title, columns, *rows, note, times = result.text.split("\nDrafting")[0].splitlines()
    assert title == "2 chained heads on held-out text, untrained -> after 4 steps"
    assert columns.split() == ["head", "token", "loss", "top-1", "top-2", "top-3"]
    assert len(rows) == 2
    for head, row in enumerate(rows, start=1):
        assert re.fullmatch(rf"\s+{head}\s+{head + 1} on(\s+{NUMBER} -> {NUMBER}){{4}}", row)
    assert re.match(
        rf"alpha {NUMBER} -> {NUMBER}, tokens per step \d\.\d\d -> \d\.\d\d: 20 tokens after each",
        note,
    )
    assert re.match(
        r"Decoding took \S+ s before and takes \S+ s now; .*: x \d\.\d\d -> \d\.\d\d\.$", times
    )
    assert (
        "18 of 25 documents have more than 64 tokens, 1 there twice; 1 of them held out"
        in result.err
    )
    assert "written: new/heads.safetensors\n" in result.err
    assert result.err.endswith("train --resume new --install puts them where --model finds them\n")
    assert Path("new/heads.safetensors").stat().st_mode == Path("new/train.json").stat().st_mode
    assert read_json(Path("new/train.json"))["command"][:2] == ["tswift", "train"]
    tswift(f"generate --model {tiny.model} --heads new --len 8 --prompt-text Once").ok()
    result = tswift("train --resume new")  # it is finished, and said again
    assert (result.code, result.text.splitlines()[0]) == (0, title)
    assert "the training in new is finished" in result.err


def test_defaults_of_a_cpu(tswift, tiny, monkeypatch):
    monkeypatch.setattr(
        "tswift.training.config.HeadsConfig.ON_CPU",
        {"batch": 2, "accumulate": 1, "minutes": 0.0005},
    )
    words = f"--corpus {tiny.corpus} --model {tiny.model} --device cpu --seq-len 64"
    result = tswift("train", words, "--alpha-tokens 0").ok()
    chosen = "--batch 2 --accumulate 1 --minutes 0.0005"
    assert (
        f"tswift: on a CPU, to end in minutes rather than days, the defaults are {chosen}\n"
        in result.err
    )
    (short,) = re.findall(r"^tswift: warning: (.*)$", result.err, re.M)
    assert short == (
        "6 of 25 documents are too short, of 64 tokens at most, and left out; a lower --seq-len "
        "keeps them"
    )


@pytest.mark.usefixtures("signals_heard")
def test_a_signal_is_told_with_the_way_on(tswift, tiny, monkeypatch):
    batch = Documents.batch

    def interrupted(self, rows, length, key):
        if key == (0, 2):  # the first row of the second step
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, rows, length, key)

    with monkeypatch.context() as patch:
        patch.setattr(Documents, "batch", interrupted)
        result = tswift(*words_of(tiny))
    assert (result.code, result.out) == (130, b"")
    assert result.err.endswith("interrupted after step 2; tswift train --resume new goes on\n")
    result = tswift("train --resume new --quiet")
    assert (result.code, result.err) == (0, "")


def killed(*arguments, **more):
    os.kill(os.getpid(), signal.SIGTERM)


def out_of_memory(*arguments):
    raise RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
    )


def full_disk(*arguments, **more):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("where", "broken", "code", "told"),
    [
        ((tasks, "begin"), killed, 143, "interrupted after step 0; .*"),
        (
            (Documents, "batch"),
            out_of_memory,
            1,
            r"error: memory ran out; a lower --batch or --seq-len takes less\. "
            "Checkpoints are in new",
        ),
        (
            (training, "save_file"),
            full_disk,
            1,
            r"error: new/checkpoint\.safetensors cannot be written \(.*\)",
        ),
    ],
)
def test_what_breaks_on_the_way_is_one_line(tswift, tiny, monkeypatch, where, broken, code, told):
    monkeypatch.setattr(*where, broken)
    result = tswift(*words_of(tiny, "--alpha-tokens", 20 * (code == 143)))
    assert (result.code, result.out) == (code, b"")
    assert re.fullmatch(rf"tswift: {told}", result.err.splitlines()[-1])
    assert read_json(Path("new/train.json"))["state"] == "interrupted"


def test_texts_beyond_the_models_positions(tswift, tiny):
    result = tswift(*words_of(tiny, "--alpha-tokens 2048 --quiet"))
    told = "tswift: error: --alpha-tokens: must be below the model's 2,048 positions\n"
    assert (result.code, result.err) == (2, told)
