"""``tswift train-draft`` and ``--draft-model``: what is printed, how a training is stopped, and bad inputs."""

from __future__ import annotations

import json
import os
import re
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
        *("train-draft", "--corpus", tiny.corpus, "--model", tiny.model, "--seq-len", 64, "--batch", 2),
        *("--steps", 4, "--reach", 500, "--device", "cpu", *more),
    ]


def test_it_says_what_it_trains_and_what_that_brought(tswift, tiny: Tiny) -> None:  # type: ignore[no-untyped-def]
    result = tswift(*words_of(tiny, "--out", "new", "--objective", "distill"))
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
    result = tswift("generate", "--model", "new", "--method", "ar", "--len", 8, "--prefill", 9)
    assert result.code == 0, result.err
    result = tswift("train-draft", "--resume", "new")
    assert (result.code, result.out.decode().splitlines()[0]) == (0, title)
    assert "the training in new is finished" in result.err
    result = tswift("train", "--resume", "new")
    assert (result.code, result.out) == (2, b"")
    assert "--resume: new/train.json is of kind train-draft" in result.err


def test_a_signal_is_told_with_the_way_on(tswift, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    batch = Documents.batch
    calls: list[object] = []

    def interrupted(self, rows, length, key):  # type: ignore[no-untyped-def]
        calls.append(key)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(self, rows, length, key)

    monkeypatch.setattr(Documents, "batch", interrupted)
    result = tswift(*words_of(tiny, "--out", "new", "--accumulate", 2))
    assert (result.code, result.out) == (130, b"")
    assert result.err.endswith("interrupted after step 1; tswift train-draft --resume new goes on\n")
    result = tswift("train-draft", "--resume", "new", "--quiet")
    assert (result.code, result.err) == (0, "")


BAD = {
    "--shape 7b": "--shape: is one of 205m, demo, got '7b'",
    "--reach 0": "--reach: must be at least 2, got 0",
    "--reach 63": "--seq-len: is 64, the draft model is to have 63 positions",
    "--objective both": "--objective: is one of text, distill, got 'both'",
    "--lr 0": "--lr: must be a number above 0, got 0.0",
    "--model /nowhere": "--model: there is no folder '/nowhere'",
    "--corpus /nowhere": "--corpus: there is no file or folder /nowhere",
    "--seq-len 3000 --reach 4000": "--seq-len: is 3,000, the model has 2,048 positions",
    "--resume . --out new": "--out: goes on in the folder of --resume",
    "--resume /nowhere": "--resume: /nowhere holds no training",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_inputs(tswift, tiny: Tiny, words: str) -> None:  # type: ignore[no-untyped-def]
    result = tswift(*words_of(tiny, *words.split()))
    assert (result.code, result.out) == (2, b"")
    assert result.err.count("\n") == 1
    assert BAD[words] in result.err
    assert not list(Path().iterdir())


def test_a_draft_model_that_no_method_needs(tswift, tiny: Tiny) -> None:  # type: ignore[no-untyped-def]
    for command in ("generate", "compare", "bench"):
        result = tswift(command, "--model", tiny.model, "--draft-model", tiny.model)
        assert (result.code, result.out) == (2, b"")
        assert re.fullmatch(r"tswift: error: --draft-model: .* (does not use|uses) it\n", result.err)
        assert not list(Path().iterdir())
