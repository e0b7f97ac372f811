"""A server that is killed before any of its file calls loses no request that it has accepted."""

from __future__ import annotations

import pytest

from tests.jobs.killing import killed_before
from tests.jobs.test_every_call import ALL, BEGINNING, failures
from tests.serving.test_service import ASKED, done, serving
from tswift.jobs import folder as files
from tswift.loading.model import load

BODY = {**ASKED, "max_tokens": 12, "logprobs": 1}


@pytest.mark.parametrize(
    ("again", "calls"),
    [
        (False, BEGINNING[9::4]),
        *(pytest.param(again, ALL[again::3], marks=pytest.mark.slow) for again in (False, True)),
    ],
)
def test_a_server(
    checkpoint,
    tmp_path,
    monkeypatch,
    again,
    calls,
):
    """While it makes a request's text, and, where ``again``,
    while another one takes up what was left of it.
    """
    model = load(str(checkpoint))
    runs = tmp_path / "runs"
    before = tmp_path / "before"
    accepted = tmp_path / "accepted"
    monkeypatch.setattr(files, "_TOKENS", 5)
    monkeypatch.setattr(files, "_SECONDS", 3600.0)
    before.mkdir()
    with serving(model, before) as service:
        whole = bytes(done(service.accept_one(BODY, False)).text)
    next(before.iterdir()).rename(tmp_path / "whole")

    def answer(accept):
        if accept:
            accepted.write_text("")
        with serving(model, runs) as service:
            if accept:
                accepted.write_text(service.accept_one(BODY, False).id)
            for path in runs.iterdir():
                if (path / "request.json").exists():
                    assert bytes(done(service.find(path.name)).text) == whole
                    assert service.find(path.name).state == "finished"
                    assert service.find(path.name).text == whole
        name = accepted.read_text()
        assert not name or (runs / name / "request.json").exists()

    runs.mkdir()
    if again:
        assert killed_before(40, lambda: answer(True))
        before.rmdir()
        runs.rename(before)
    before.mkdir(exist_ok=True)
    last, found = failures(runs, before, lambda: answer(not again), lambda: answer(False), calls)
    assert (last > 20, found) == (True, []), f"{len(found)} of {last}"
