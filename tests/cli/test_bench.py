"""``tswift bench`` from the outside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.helpers import read_json
from tswift.benchmarking import run

pytestmark = pytest.mark.usefixtures("load_once")

WORDS = "bench --prefill 4 --methods tokenswift --warmup 4"


@pytest.fixture
def bench(tswift, checkpoint, prompt):
    return lambda *words, lens="10,25": tswift(
        WORDS, f"--lens {lens} --model {checkpoint} --prompts {prompt}", *words
    )


def test_outputs_and_the_gate(bench):
    result = bench("--out b --seeds 1,2").ok()
    plots = {f"{name}.{kind}" for name in ("time", "acceptance") for kind in ("png", "svg")}
    assert {path.name for path in Path("b").iterdir()} >= {
        "bench.json",
        "bench.csv",
        "bench.md",
        *plots,
    }
    assert "time / floor" in result.text
    assert (
        "| machine's rates | 20.0 GB/s, 100 GFLOP/s in float32 |" in Path("b/bench.md").read_text()
    )
    baseline = read_json(Path("b/bench.json"))
    assert baseline["workload"]["seeds"] == [1, 2]
    words = "--no-plots --against b/bench.json --fail-on alpha:0 --fail-on passes"
    same = bench("--out c", words, "--seeds 1,2").ok()
    assert "0 of 16 comparisons regressed" in same.text
    bench("--out e", words, "--seeds 3").refused("another workload: seeds differs")
    for sample in baseline["samples"]:
        for point in sample["points"]:
            point["passes"] -= sample["method"] == "tokenswift" and sample["seed"] == 2
    Path("b/bench.json").write_text(json.dumps(baseline))
    worse = bench("--out d", words, "--seeds 1,2")
    assert worse.code == 1
    regressed = [line.split()[:2] for line in worse.text.splitlines() if "REGRESSED" in line]
    assert regressed == [["passes", "tokenswift"]] * 2


@pytest.mark.slow
def test_a_workload_is_resumed(tswift, checkpoint, tmp_path):
    lines = (
        {"id": 1, "prompt": "The ship had lain three days."},
        {"id": 2, "prompt": "Nobody spoke of it."},
    )
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = f"--workload {tmp_path}/own.jsonl --workload structured:1"
    tswift(WORDS, f"--lens 10,25 --model {checkpoint} {words}", "--out b --no-plots").ok()
    record = read_json(Path("b/bench.json"))
    assert [len(session["cells"]) for session in record["sessions"]] == [3]
    record.update(
        state="running",
        sessions=[{**record["sessions"][0], "cells": record["sessions"][0]["cells"][:1]}],
    )
    Path("b/bench.json").write_text(json.dumps(record))
    tswift("bench --resume b").ok()
    again = read_json(Path("b/bench.json"))
    assert [len(session["cells"]) for session in again["sessions"]] == [1, 2]
    assert len(again["samples"]) == len(record["samples"]) == 6
    assert Path("b/acceptance.png").is_file()


@pytest.mark.slow
def test_random_weights_in_a_shape(tswift, tiny_shapes):
    words = "bench --prefill 8 --lens 10,30 --methods medusa --warmup 4"
    result = tswift(words, "--model shape:tiny --simulate-alpha 0.9 --out b").ok()
    assert "simulated: random weights, acceptance set to 0.9" in result.err
    assert all("simulated" in path.name for path in Path("b").iterdir())


def test_ctrl_c_before_the_first_length(bench, monkeypatch):
    from tswift.benchmarking.run import BenchRun

    def press(self, goal):
        raise KeyboardInterrupt

    monkeypatch.setattr(BenchRun, "advance", press)
    result = bench("--out b --no-plots")
    assert result.code == 130
    assert "interrupted; what was measured is in b" in result.err
    assert read_json(Path("b/bench.json"))["state"] == "interrupted"


def penalise_not(monkeypatch, method):
    """A method that draws without the penalty."""
    begin = run.begin

    def made(model, request, **named):
        generation = begin(model, request, **named)
        if request.method == method:
            sampler = generation.decoding._context.sampler
            sampler.params = dataclasses.replace(sampler.params, penalty=1.0)
        return generation

    monkeypatch.setattr(run, "begin", made)


def test_a_wrong_text_exits_with_one(bench, monkeypatch):
    penalise_not(monkeypatch, "tokenswift")
    result = bench("--out b --no-plots", lens=80)
    assert result.code == 1
    assert "1 texts differ from plain decoding beyond rounding" in result.err
    assert "Not: tokenswift" in result.text


# -------------------------------------------------------------------------------------------------
# ``tswift compare``


def test_table_and_json(tswift, checkpoint, prompt):
    words = f"compare --len 30 --model {checkpoint} --prompt {prompt} --methods reuse --quiet"
    result = tswift(words, "--with-reference-ar")
    assert (result.code, result.err) == (0, "")
    lines = result.text.splitlines()
    assert "30 tokens" in lines[0]
    assert "x over reference style" in lines[1]
    assert [line.split("  ")[0] for line in lines[2:5]] == ["AR", "reuse", "AR, reference style"]
    assert "yes" in lines[3]
    record = tswift(words, "--json -").json
    assert (record["ok"], record["command"][:2]) == (True, ["tswift", "compare"])
    assert [outcome["method"] for outcome in record["outcomes"]] == ["ar", "reuse"]
    assert (record["drafting"]["reuse"]["ngrams"], record["sampling"]["banned"]) == (20, [0])


def test_a_wrong_method_exits_with_one(tswift, checkpoint, prompt, monkeypatch):
    penalise_not(monkeypatch, "medusa")
    result = tswift(f"compare --len 40 --model {checkpoint} --prompt {prompt} --methods medusa")
    assert result.code == 1
    assert "NOT rounding" in result.text
