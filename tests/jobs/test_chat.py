"""A conversation's answers are those of a decode that forwards all of it anew, by every method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import METHODS, first, refused
from tests.serving.server import with_template
from tswift.decoding.text import TextStream
from tswift.jobs import chat
from tswift.jobs.chat import Chat
from tswift.jobs.config import RunConfig, Text
from tswift.jobs.job import begin_run
from tswift.loading.model import LoadedModel, load

SAID = (
    "The ship had lain three days becalmed when the captain came on deck, and nobody spoke. " * 4,
    "What did he say?",
    "And then?",
)


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory) -> LoadedModel:
    folder = with_template(checkpoint, tmp_path_factory.mktemp("chat") / "tiny")
    return load(str(folder), dtype="float64", draft_model=str(checkpoint))


def talk_by(model: LoadedModel, method: str, **values) -> tuple[Chat, list[str]]:
    given = {"length": 16, "seed": 4, "method": method, "draft_model": None, **values}
    if method in ("standalone", "triforce"):
        given["draft_model"] = "the model itself"
    config = RunConfig.of(**given, prompt_text="a line", chat=True)
    talk = Chat(model, config)
    answers, kept = [], []
    for said in SAID:
        answers.append("".join(talk.answer(said)))
        kept.append(talk.kept)
    assert kept[0] == 0
    # of what was said the cache holds all but what a template writes otherwise than was drawn
    assert 64 < kept[1] < kept[2]
    return talk, answers


def test_answers_are_those_of_a_decode_of_all_that_was_said(model, monkeypatch):
    """And so are keys and values, which random weights make little of."""
    config = RunConfig.of(length=16, seed=4, method="recall", prompt_text="a line", chat=True)
    talk = Chat(model, config)
    turns = []
    begun = lambda *given, **named: turns.append(begin_run(*given, **named)) or turns[-1]  # noqa: E731
    monkeypatch.setattr(chat, "begin_run", begun)
    said: list[dict[str, str]] = []
    answers = []
    for line in SAID:
        answers.append("".join(talk.answer(line)))
        said.append({"role": "user", "content": line})
        prompt = Text("chat", line, messages=tuple(said)).encode(model, chat=True)
        run = begin_run(model, prompt, config, talk.params)
        text = TextStream(model.tokenizer, run.rules)
        whole = "".join(text.add(step.tokens) for step in run.steps()) + text.finish()
        assert (whole, run.decoding.copied) == (answers[-1], 0)
        said.append({"role": "assistant", "content": whole})
        last = turns[-1].decoding
        for ours, theirs in zip(last._kv.buffers, run.decoding._kv.buffers, strict=True):
            held = len(prompt) + 12
            torch.testing.assert_close(ours[:, :, :held], theirs[:, :, :held])
        # what recalls the text knows what was likely after each token that was forwarded
        tables = [each._drafter.histories[0]._tables for each in (last, run.decoding)]
        ours, theirs = (each["ids"][talk.kept : len(prompt) - 1] for each in tables)
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("methods", first(1, [["tokenswift", "standalone"], [*METHODS]]), ids=len)
def test_answers_do_not_depend_on_the_method(model, methods):
    wanted = talk_by(model, "ar")[1]
    for method in methods:
        assert talk_by(model, method)[1] == wanted, method


def test_an_answer_that_is_left_was_said_so_far(model):
    talk = Chat(model, RunConfig.of(length=90, method="auto", prompt_text="a line", chat=True))
    pieces = talk.answer(SAID[0])
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert talk._said[-1] == {"role": "assistant", "content": begun}
    assert "".join(talk.answer(SAID[1]))
    assert talk.kept > 64


def test_what_leaves_no_room_was_not_said(model):
    talk = Chat(model, RunConfig.of(length=40, method="ar", prompt_text="a line", chat=True))
    with refused("positions"):
        next(talk.answer("too much " * model.target.max_positions))
    assert talk._said == []
