"""``tswift bench`` from the outside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

WORDS = ("bench", "--prefill", 4, "--lens", "10,25", "--methods", "tokenswift", "--warmup", 4)


@pytest.fixture
def bench(tswift, checkpoint, prompt):
    return lambda *words: tswift(*WORDS, "--model", checkpoint, "--prompts", prompt, *words)


def test_outputs_and_the_gate(bench):
    result = bench("--out", "b", "--seeds", "1,2")
    assert result.code == 0
    plots = {f"{name}.{kind}" for name in ("time", "acceptance") for kind in ("png", "svg")}
    assert {path.name for path in Path("b").iterdir()} >= {"bench.json", "bench.csv", "bench.md", *plots}
    assert "tokenswift alpha" in result.out.decode()
    assert "T_method / floor" in result.out.decode()
    assert "| machine's rates | 20.0 GB/s, 100 GFLOP/s in float32 |" in Path("b/bench.md").read_text()
    baseline = json.loads(Path("b/bench.json").read_text())
    assert baseline["workload"]["seeds"] == [1, 2]
    words = ("--no-plots", "--against", "b/bench.json", "--fail-on", "alpha:0", "--fail-on", "passes")
    same = bench("--out", "c", *words, "--seeds", "1,2")
    assert same.code == 0
    assert "0 of 16 comparisons regressed" in same.out.decode()
    foreign = bench("--out", "e", *words, "--seeds", 3)
    assert foreign.code == 2
    assert "another workload: seeds differs" in foreign.err
    for sample in baseline["samples"]:
        for point in sample["points"]:
            point["passes"] -= sample["method"] == "tokenswift" and sample["seed"] == 2
    Path("b/bench.json").write_text(json.dumps(baseline))
    worse = bench("--out", "d", *words, "--seeds", "1,2")
    assert worse.code == 1
    regressed = [line.split()[:2] for line in worse.out.decode().splitlines() if "REGRESSED" in line]
    assert regressed == [["passes", "tokenswift"]] * 2


def test_a_workload_beside_transformers_is_resumed(tswift, checkpoint, tmp_path):
    lines = ({"id": 1, "prompt": "The ship had lain three days."}, {"id": 2, "prompt": "Nobody spoke of it."})
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ("--workload", tmp_path / "own.jsonl", "--workload", "structured:1", "--peer", "transformers")
    refused = tswift(*WORDS, "--model", checkpoint, *words, "--prompts", "x.txt")
    assert "--workload: cannot be given together with --prompts" in refused.err
    result = tswift(*WORDS, "--model", checkpoint, *words, "--out", "b", "--no-plots")
    assert result.code == 0, result.err
    lines = [line.split()[:4] for line in result.out.decode().splitlines() if line.startswith("transformers ")]
    assert lines == [["transformers", kind, n, "4"] for kind, n in (("own", "2"), ("structured", "1")) for _ in "ab"]
    record = json.loads(Path("b/bench.json").read_text())
    assert [len(session["cells"]) for session in record["sessions"]] == [3]
    record.update(state="running", sessions=[{**record["sessions"][0], "cells": record["sessions"][0]["cells"][:1]}])
    Path("b/bench.json").write_text(json.dumps(record))
    assert tswift("bench", "--resume", "b").code == 0
    again = json.loads(Path("b/bench.json").read_text())
    assert [len(session["cells"]) for session in again["sessions"]] == [1, 2]
    assert len(again["samples"]) == len(record["samples"]) == 9
    assert Path("b/acceptance.png").is_file()


def test_a_given_acceptance_is_labelled_everywhere(bench):
    result = bench("--out", "b", "--simulate-alpha", 0.75, "--lens", "40,100")
    assert result.code == 0
    assert "simulated: acceptance set to 0.75" in result.err
    files = {path.name for path in Path("b").iterdir()}
    assert files >= {"bench-simulated.json", "bench-simulated.csv", "time-simulated.png"}
    assert all("simulated" in name for name in files)
    found = json.loads(Path("b/bench-simulated.json").read_text())
    assert found["simulated"] is True
    assert found["workload"]["simulated"] == {"weights": False, "alpha": 0.75}
    assert found["samples"][1]["points"][-1]["alpha"] == pytest.approx(0.75, abs=0.03)
    rows = [line for line in result.out.decode().splitlines() if line.startswith("tokenswift")]
    assert len(rows) == 2
    assert all(row.startswith("tokenswift (simulated)") for row in rows)


@pytest.mark.slow
def test_random_weights_in_a_shape(tswift, tiny_shapes):
    words = ("bench", "--prefill", 8, "--lens", "10,30", "--methods", "medusa,tokenswift", "--warmup", 4)
    result = tswift(*words, "--model", "shape:tiny", "--simulate-alpha", 0.9, "--no-plots")
    assert result.code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-bench-simulated")
    text = (folder / "bench-simulated.md").read_text()
    assert "# tswift bench: shape:tiny (simulated)" in text
    assert "| simulated | random weights, acceptance set to 0.9 |" in text
    assert "simulated: random weights, acceptance set to 0.9" in result.err


def test_ctrl_c_before_the_first_length(bench, monkeypatch):
    from tswift.benchmarking.run import Run

    def press(self, goal):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "advance", press)
    result = bench("--out", "b")
    assert result.code == 130
    assert "interrupted; what was measured is in b" in result.err
    assert json.loads(Path("b/bench.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize("ar", ["full", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_wrong_text_exits_with_one(bench, monkeypatch, ar):
    from tswift.benchmarking import run

    begin = run.begin

    def made(*arguments, **named):
        generation = begin(*arguments, **named)
        if named["method"] == "tokenswift":
            sampler = generation.decoding._context.sampler
            sampler.params = dataclasses.replace(sampler.params, penalty=1.0)
        return generation

    monkeypatch.setattr(run, "begin", made)
    result = bench("--out", "b", "--ar", ar, "--lens", 80)
    assert result.code == 1
    assert "1 texts are not plain decoding's" in result.err
    assert "Not: tokenswift" in result.out.decode()
