"""Costs of steps: measured, remembered, and measured anew where what is remembered is broken or of
something else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import outlived, read_json, tiny_heads, tiny_target
from tswift.decoding import pass_costs
from tswift.decoding.loop import HostStepper
from tswift.decoding.pass_costs import NOMINAL
from tswift.drafting import costs
from tswift.drafting.costs import costs_of, folder, measure
from tswift.errors import SlowWarning

SOUND = {"nodes": [1, 2], "base": [1e-3, 2e-3], "per_key": [0, 1e-8], "level": 0}
LONG = int("9" * 400)
BROKEN = {
    **dict.fromkeys(("", "{}", "[1]", "[" * 100_000, "null", '"nodes"', "\udcff")),
    "falling": {"base": [2e-3, 1e-3]},
    "keys falling": {"per_key": [1e-8, 0]},
    "negative": {"base": [1, -1]},
    "none": {"base": [0, 0]},
    "denormal": {"base": [5e-324, 5e-324]},
    **{f"400 digits of {name}": {name: [1, LONG]} for name in ("nodes", "base", "per_key")},
    "400 digits of a level": {"level": LONG},
    "not a number": {"base": [float("nan"), float("nan")]},
    "infinite": {"level": float("inf")},
    "words": {"base": ["1", "2"]},
    "no list": {"base": 3},
    "parts of nodes": {"nodes": [1, 1.5]},
    "another length": {"nodes": [1, 2, 3]},
    "one": {"nodes": [1], "base": [1], "per_key": [0]},
    "lists": {"level": [1]},
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "_here", {})
    monkeypatch.setattr(costs, "_SECONDS", 0.1)
    monkeypatch.setattr(costs, "_REPEATS", (5, 30))


def test_more_keys_cost_more():
    found = measure(
        tiny_target("gqa", torch.float32), tiny_heads(torch.float32, kind="conditioned")
    )
    assert found.sound
    assert found.nodes == costs.NODES
    assert found.level > 0
    assert found.seconds(8, 1000) >= found.seconds(8, 100)
    assert measure(tiny_target("gqa", torch.float32), None).level == 0


def test_the_cache_that_was_read_goes_with_the_trial(monkeypatch):
    """It may be of gigabytes on a GPU."""
    target, heads = tiny_target(), tiny_heads()
    assert not outlived(monkeypatch, {"measured": lambda: measure(target, heads)})


def test_they_are_those_of_the_steps_that_a_decode_takes(monkeypatch):
    taken = []
    own = HostStepper.step

    def noted(*given):
        step = own(*given)
        taken.append((step.nodes, step.accepted))
        return replace(step, seconds=2.0 * step.nodes)

    monkeypatch.setattr(HostStepper, "step", noted)
    found = measure(tiny_target("gqa", torch.float32), None)
    assert [found.seconds(nodes, 64) for nodes in costs.NODES] == [
        2.0 * nodes for nodes in costs.NODES
    ]
    assert {accepted for nodes, accepted in taken if nodes > 3} == {3}


def test_on_a_gpu_they_hold_for_texts_in_which_keys_take_the_time(monkeypatch):
    """LLaMA3.1-8b on an H200: up to some thousand keys its attention takes what launches and
    latency take, 8 us a layer, so that few keys say nothing of many.
    """

    def gpu_s(nodes, keys):
        return 4e-3 + 0.05e-3 * nodes + max(32 * 8e-6, keys * shape.bytes_per_token / 4.3e12)

    shape = SimpleNamespace(bytes_per_token=2 * 32 * 8 * 128 * 2)
    target = SimpleNamespace(
        device=torch.device("cuda"),
        kv_shape=shape,
        max_positions=131_072,
        most_nodes=None,
        fixed_rows=32,
    )
    monkeypatch.setattr(costs, "available_bytes", lambda device: 120 << 30)
    monkeypatch.setattr(costs, "_Trial", lambda *given: SimpleNamespace(step_s=gpu_s))
    found = measure(target, None)
    for nodes in (1, 16, 32):
        for keys in (49_152, 100_000):
            assert found.seconds(nodes, keys) == pytest.approx(gpu_s(nodes, keys), rel=0.05)


def test_what_was_measured_beside_other_work_is_not_remembered(monkeypatch):
    target = tiny_target()
    busy = replace(NOMINAL, spread=1.4)
    monkeypatch.setattr(costs, "measure", lambda *given: busy)
    assert costs_of(target, None) is busy
    assert not folder().exists()
    monkeypatch.setattr(costs, "measure", None)
    assert costs_of(target, None) is busy  # by this process it is
    costs._here.clear()
    monkeypatch.setattr(costs, "measure", lambda *given: NOMINAL)
    assert costs_of(target, None) is NOMINAL
    assert len(list(folder().iterdir())) == 1


@pytest.mark.slow
def test_busy_moments_are_seen(monkeypatch):
    own = HostStepper.step
    count = 0

    def slow(share):
        def step(*given):
            nonlocal count
            count += 1
            return replace(own(*given), seconds=1.5 if count % 10 < 10 * share else 1.0)

        return step

    for share, busy in ((0.0, False), (0.1, False), (0.7, True)):
        monkeypatch.setattr(HostStepper, "step", slow(share))
        assert measure(tiny_target("gqa", torch.float32), None).busy is busy


def test_a_model_that_draws_nothing_has_some_costs():
    target = tiny_target("gqa", torch.float32)
    weight = target.model.get_output_embeddings().weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    assert measure(target, None) is NOMINAL
    weight.copy_(kept)  # other tests have this model, too


@pytest.mark.slow
def test_what_was_measured_is_remembered(monkeypatch):
    monkeypatch.setattr(pass_costs, "STEADY", 1e9)
    target = tiny_target()
    heads = tiny_heads()
    first = costs_of(target, heads)
    assert [read_json(file)["base"] for file in folder().iterdir()] == [list(first.base)]
    assert costs_of(target, heads) == first
    costs_of(target, None)  # without heads it is something else
    costs_of(tiny_target("gqa", torch.float32), tiny_heads(torch.float32))
    assert len(list(folder().iterdir())) == 3
    calls = []
    monkeypatch.setattr(costs, "measure", lambda *given: calls.append(given) or first)
    costs_of(target, heads)
    assert not calls
    costs_of(target, heads, again=True)
    assert len(calls) == 1


def test_what_is_broken_is_measured_anew(monkeypatch):
    monkeypatch.setattr(pass_costs, "STEADY", 1e9)
    target = tiny_target()
    found = costs_of(target, None)
    monkeypatch.setattr(costs, "measure", lambda *given: found)
    (file,) = folder().iterdir()
    for name, change in BROKEN.items():
        content = name if change is None else json.dumps(SOUND | change)
        file.write_text(content, errors="surrogateescape")
        costs._here.clear()  # as another process finds it
        with pytest.warns(SlowWarning, match=r"\.json is broken: it is made anew$"):
            assert costs_of(target, None) is found, name
        assert read_json(file)["nodes"] == [*costs.NODES]
    file.write_text(json.dumps(SOUND))
    costs._here.clear()
    assert costs_of(target, None).base == (1e-3, 2e-3)


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert costs_of(tiny_target(), None).sound
