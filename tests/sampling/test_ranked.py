"""Ranks that decode together: one rank's texts; and none of them goes on where another cannot."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from pathlib import Path

import pytest
from transformers.utils import logging

import tswift
from benchmarks.architectures import ARCHITECTURES, checkpoint, texts
from tests.helpers import options_for
from tests.ranks import Started, on_ranks
from tswift import engine, memory
from tswift.caches import PartialKV
from tswift.decoding.drafter import Drafter
from tswift.distributed import Gone, join
from tswift.loading.model import LoadedModel, load
from tswift.models.hashes import fingerprint_of
from tswift.sampling.rule import Sampler

# How much methods write: with grouped heads; with biases and a tied LM head; by a plan that leaves
# attention whole.
SPLIT = {
    "Llama, GQA": {
        **{"ar": 30, "tokenswift": 110, "medusa": 20, "reuse": 20},
        **{"magicdec": 60, "standalone": 20, "triforce": 60, "ar-reference": 10, "auto": 60},
    },
    "Qwen2.5, tied, YaRN": {"ar": 10, "tokenswift": 30, "medusa": 15, "reuse": 15},
    "Phi-3": {"ar": 10, "tokenswift": 15},
}
WHOLE = {"Phi-3"}
OPTIONS = {"tree": (1, 2, 2), "nodes": 12, "budget": 64, "sinks": 4, "reuse_recent": True}
PROMPT = list(range(3, 60))


@pytest.fixture(autouse=True)
def _silent():
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _loaded(folder: Path) -> LoadedModel:
    return load(str(folder), dtype="float64", device="cpu", ranks=join("cpu"))


def _asked(folder: Path, name: str) -> dict[str, str]:
    """What is loaded; where methods need a draft model, the model itself,
    of which every rank then holds the whole.
    """
    drafts = {"draft_model": str(folder / name)} if "standalone" in SPLIT[name] else {}
    return {"model": str(folder / name), **drafts}


def _texts(folder: Path) -> dict[str, object]:
    logging.disable_progress_bar()
    selected: list[int] = []
    right = PartialKV.select
    PartialKV.select = lambda self, *given: (selected.append(1), right(self, *given))[1]
    ranks = join("cpu")
    found = dict[str, object]()
    for name, lengths in SPLIT.items():
        # what a rank but the first asks for does not count
        asked = {**_asked(folder, name), "dtype": "float64"} if ranks.rank == 0 else {}
        model = load(**asked, ranks=ranks)
        selected.clear()
        written = texts(model, lengths), len(selected)
        found[name] = (
            *written,
            model.target.kv_shape.heads,
            fingerprint_of(model.target.model),
            model.about(),
        )
    return found


@pytest.mark.slow
def test_two_ranks_write_the_texts_of_one(tmp_path):
    for name in SPLIT:
        checkpoint(ARCHITECTURES[name], tmp_path / name)
    first, second = on_ranks(tmp_path, 2, _texts, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    for name, lengths in SPLIT.items():
        alone = load(**_asked(tmp_path, name), dtype="float64", device="cpu")
        wanted = texts(alone, lengths)
        kv_heads = alone.target.kv_shape.heads
        for rank in (first, second):
            found, selected, held, fingerprint, about = rank.found[name]
            assert found == wanted, name
            # the partial cache did select anew
            assert selected >= (2 if lengths["tokenswift"] > 100 else 0)
            assert held == (kv_heads if name in WHOLE else kv_heads // 2)
            assert fingerprint == fingerprint_of(alone.target.model)
            assert (about["ranks"], about["device"]) == (2, "cpu")
            assert about["layers"] == "eager, as ranks hold them together"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "model"
    checkpoint(ARCHITECTURES["Llama, GQA"], folder)
    return folder


def _steps(model: LoadedModel, method: str = "tokenswift", most: int | None = None):
    """What came of a decode: its tokens, or the error."""
    made = list[int]()
    options = options_for(method, **OPTIONS)
    try:
        for step in islice(
            tswift.generate(model, PROMPT, 60, method=method, options=options), most
        ):
            made += step.tokens
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), len(made)
    return made


def _troubles(folder: Path) -> dict[str, object]:
    model = _loaded(folder)
    found = dict[str, object]()
    draw = Sampler.draw
    propose = Drafter.propose
    second = model.ranks.rank == 1

    def more(self, context, wanted):
        tree = propose(self, context, wanted)
        tree.grow(0, 1 if tree.child(0, 1) is None else 2, "odd")
        return tree

    patches = {  # of a rank that computes something else, or breaks
        "tokens": (
            Sampler,
            "draw",
            lambda self, *given: [(token + 1) % 97 for token in draw(self, *given)],
        ),
        "drafts": (Drafter, "propose", more),
        "memory": (memory, "available_bytes", lambda device: 1),
        "breaks": (engine, "make_drafter", lambda *given: 1 / 0),
    }
    for what, patch in patches.items():
        with pytest.MonkeyPatch.context() as patching:
            if second:
                patching.setattr(*patch)
            found[what] = _steps(model, "ar" if what == "tokens" else "tokenswift")
    found["first stops"] = _steps(model, most=None if second else 3)
    found["second stops"] = _steps(model, most=3 if second else None)
    found["all"] = _steps(model)
    model.ranks.disconnect()
    return found


@pytest.mark.slow
def test_all_ranks_end_alike(folder, tmp_path):
    first, second = on_ranks(tmp_path, 2, _troubles, folder)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    whole = _steps(load(str(folder), dtype="float64", device="cpu"))
    assert first.found["all"] == second.found["all"] == whole
    for what in ("tokens", "drafts"):
        for rank in (first, second):
            kind, message, made = rank.found[what]
            assert (kind, message) == (
                "DecodeError",
                f"the 2 ranks have different {what}: they do not compute alike",
            )
            # it was drawn already when it was compared
            assert made == (1 if what == "tokens" else 0)
    for rank in (first, second):
        kind, message, made = rank.found["memory"]
        assert (kind, made) == ("InputError", 0)
        assert message.startswith("length: KV ")
        assert message.endswith("cpu has 0.0 MB free")
    assert first.found["breaks"] == ("DecodeError", "rank 1: division by zero", 0)
    assert second.found["breaks"] == ("ZeroDivisionError", "division by zero", 0)
    stopped = first.found["first stops"]
    assert second.found["first stops"] == stopped == whole[: len(stopped)]
    assert 3 <= len(stopped) < 60
    stopped = second.found["second stops"]
    assert first.found["second stops"] == (
        "KeyboardInterrupt",
        "rank 1 was asked to stop",
        len(stopped),
    )
    assert stopped == whole[: len(stopped)]


def _killed(folder: Path):
    model = _loaded(folder)
    steps = tswift.generate(model, PROMPT, 400, method="ar")
    for count, _ in enumerate(steps):
        if count == 5 and model.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


@pytest.mark.slow
def test_a_rank_that_is_gone_is_noticed(folder, tmp_path):
    ranks = Started(tmp_path, 2, _killed, folder)
    started = time.monotonic()
    first, second = ranks.end()
    assert second.code == -signal.SIGKILL
    assert first.code == 0
    assert (
        first.found == f"{Gone.__name__}: another rank is gone; it, or torchrun's report, says why"
    )
    assert time.monotonic() - started < 50


def _refusals(folder: Path) -> list[str]:
    ranks = join("cpu")
    found = []
    for model, more in (
        (folder / "mqa", {}),
        (folder / "gpt2", {}),
        ("shape:llama3.1-8b", {}),
        (folder / "mqa", {"device": "cuda"}),
    ):
        with pytest.raises(tswift.errors.InputError) as caught:
            load(str(model), **more, ranks=ranks)
        found.append(f"{caught.value}")
    return found


@pytest.mark.slow
def test_what_cannot_be_split_is_refused_by_name(tmp_path):
    checkpoint(ARCHITECTURES["Llama, MQA, biases"], tmp_path / "mqa")
    checkpoint(ARCHITECTURES["GPT-2"], tmp_path / "gpt2")
    wanted = [
        f"nproc_per_node: {tmp_path / 'mqa'} has 1 KV head, which 2 ranks cannot share evenly",
        f"model: transformers has no plan to split {tmp_path / 'gpt2'} (gpt2) over ranks",
        "model: shape:llama3.1-8b has random weights, which are not split",
        "device: the ranks are on cpu, got cuda",
    ]
    for rank in on_ranks(tmp_path, 2, _refusals, tmp_path):
        assert rank.found == wanted, rank.err
