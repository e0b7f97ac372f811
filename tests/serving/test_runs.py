"""A run's text, as readers see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tswift.decoding.stats import DecodeStats
from tswift.jobs.folder import FINISHED, INTERRUPTED, RUNNING
from tswift.serving import runs
from tswift.serving.runs import Run


def made(**changes: Any) -> Any:
    """What a run asks of a job."""
    about = {"options": {"length": 9}}
    job = {"about": about, "stats": DecodeStats(0), "before": "", "tokens": [], "length": 9}
    job |= {"state": RUNNING, "generation": SimpleNamespace(stop=(7,)), "end": lambda: {"reason": "eos"}, "rows": b""}
    return SimpleNamespace(**{**job, **changes})


def text_of(run: Run) -> str:
    return bytes(run.text).decode()


def test_what_is_held_back_is_sent_when_the_text_ends_and_not_when_it_is_interrupted() -> None:
    for state, text in ((INTERRUPTED, "Caf"), (FINISHED, "Caf\ufffd")):
        run, job = Run(Path("run")), made(end=lambda: {"reason": "length"})
        show = run.follow(job, {7: "</s>"}.__getitem__)
        show("Caf", DecodeStats(0, tokens=3))
        job.state = state
        show("\ufffd", DecodeStats(0, tokens=4))
        assert text_of(run) == text


@pytest.mark.parametrize("pieces", [("</s>", ""), ("</", "s>"), ("!</s", ">"), ("", "</s>")])
def test_an_end_of_text_token_is_no_part_of_it(pieces: tuple[str, str]) -> None:
    run, job = Run(Path("run")), made()
    show = run.follow(job, {7: "</s>"}.__getitem__)
    job.tokens += [3]
    show("One", DecodeStats(0, tokens=1))
    job.tokens += [7]
    show(pieces[0], DecodeStats(0, tokens=2))
    job.state = FINISHED
    show(pieces[1], DecodeStats(0, tokens=2))
    run.state = FINISHED
    assert text_of(run) == "One" + "".join(pieces).removesuffix("</s>")
    assert (run.finish_reason, run.tokens[-1]) == ("stop", 2)


def test_reading_by_pieces_gives_the_text_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MOST_TEXT", 5)
    run, words = Run(Path("run")), ["Café ", "größer", "", " 夜が明けた", "."]
    assert run.read(0, 0) is None
    for number, word in enumerate(words, 1):
        run.grow(word, number)
    for have in (0, 6, len("Café größer".encode())):
        text, tokens, start = "", 0, have
        while (piece := run.read(tokens, start)) is not None:
            assert piece[1] >= tokens
            assert start < piece[2] <= start + 5
            text, tokens, start = text + piece[0], piece[1], piece[2]
        assert text.encode() == "".join(words).encode()[have:]
        assert tokens == 5
    # one who was told more by a server that was killed waits
    assert run.read(9, 1000) is None
