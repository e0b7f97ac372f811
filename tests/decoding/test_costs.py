"""Costs of passes: measured, remembered, and measured anew where what is remembered is broken or of something else."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers import tiny_heads, tiny_target
from tswift.decoding import costs
from tswift.decoding.costs import costs_of, folder, measure

NEGATIVE = '{"nodes": [1, 2], "base": [1, -1], "per_key": [0, 0], "level": 0}'


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "_here", {})


def test_more_keys_cost_more() -> None:
    found = measure(tiny_target("gqa", torch.float32), tiny_heads(torch.float32, kind="conditioned"))
    assert found.sound
    assert found.nodes == costs.NODES
    assert found.level > 0
    assert found.seconds(8, 1000) >= found.seconds(8, 100)
    assert measure(tiny_target("gqa", torch.float32), None).level == 0


def test_what_was_measured_is_remembered(monkeypatch) -> None:
    target, heads = tiny_target(), tiny_heads()
    first = costs_of(target, heads)
    assert [json.loads(file.read_text())["base"] for file in folder().iterdir()] == [list(first.base)]
    assert costs_of(target, heads) == first
    costs_of(target, None)  # without heads it is something else
    costs_of(tiny_target("gqa", torch.float32), heads)
    assert len(list(folder().iterdir())) == 3
    calls = []
    monkeypatch.setattr(costs, "measure", lambda *given: calls.append(given) or first)
    costs_of(target, heads)
    assert not calls
    costs_of(target, heads, again=True)
    assert len(calls) == 1


def test_what_is_broken_is_measured_anew(monkeypatch) -> None:
    target = tiny_target()
    found = costs_of(target, None)
    monkeypatch.setattr(costs, "measure", lambda *given: found)
    (file,) = folder().iterdir()
    for broken in ("", "{}", "[1]", NEGATIVE):
        file.write_text(broken)
        costs._here.clear()  # as another process finds it
        assert costs_of(target, None) is found, broken
        assert json.loads(file.read_text())["nodes"] == [*costs.NODES]


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert costs_of(tiny_target(), None).sound
