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


def test_outputs(bench):
    result = bench("--out", "b", "--seeds", "1,2")
    assert result.code == 0
    written = {path.name for path in Path("b").iterdir()}
    assert written >= {
        "bench.json",
        "bench.csv",
        "bench.md",
        "time.png",
        "time.svg",
        "acceptance.png",
        "acceptance.svg",
    }
    assert "tokenswift alpha" in result.out.decode()
    assert json.loads(Path("b/bench.json").read_text())["workload"]["seeds"] == [1, 2]


def test_an_equal_baseline_passes_and_a_doctored_one_fails(bench):
    assert bench("--out", "b", "--no-plots").code == 0
    rules = ("--fail-on", "alpha:0", "--fail-on", "passes", "--fail-on", "tokens_per_step:0")
    result = bench("--out", "c", "--no-plots", "--against", "b/bench.json", *rules)
    assert result.code == 0
    assert "0 of 12 comparisons regressed" in result.out.decode()
    baseline = json.loads(Path("b/bench.json").read_text())
    for sample in baseline["samples"]:
        for point in sample["points"]:
            point["passes"] -= sample["method"] == "tokenswift"
    Path("b/bench.json").write_text(json.dumps(baseline))
    result = bench("--out", "d", "--no-plots", "--against", "b/bench.json", *rules)
    assert result.code == 1
    regressed = [line.split()[:2] for line in result.out.decode().splitlines() if "REGRESSED" in line]
    assert regressed == [["passes", "tokenswift"]] * 2
    foreign = bench("--out", "e", "--no-plots", "--against", "b/bench.json", *rules, "--seeds", 3)
    assert foreign.code == 2
    assert "another workload: seeds differs" in foreign.err


def test_sampled(bench):
    result = bench("--out", "b", "--no-plots", "--ar", "sampled")
    assert result.code == 0
    assert "est." in result.out.decode()


def test_ctrl_c_before_the_first_length(bench, monkeypatch):
    from tswift.benchmarking.lanes import Lane

    def press(self, goal):
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "advance", press)
    result = bench("--out", "b")
    assert result.code == 130
    assert "interrupted; what was measured is in b" in result.err
    assert json.loads(Path("b/bench.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize("ar", ["full", "sampled"])
def test_a_wrong_text_exits_with_one(bench, monkeypatch, ar):
    from tswift.benchmarking.lineup import Lineup

    lanes = Lineup.lanes

    def made(self, *arguments):
        found = lanes(self, *arguments)
        sampler = found[-1].generation.decoding._context.sampler
        sampler.params = dataclasses.replace(self.params, penalty=1.0)
        return found

    monkeypatch.setattr(Lineup, "lanes", made)
    result = bench("--out", "b", "--ar", ar, "--lens", 80)
    assert result.code == 1
    assert "1 texts are not plain decoding's" in result.err
    assert "Not: tokenswift" in result.out.decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lens", "a"], "--lens: wants numbers and commas, got 'a'"),
        (["--seeds", ""], "--seeds: wants numbers and commas"),
        (["--lens", "0"], "--lens: must be at least 1"),
        (["--prefill", "1"], "--prefill: must be at least 2"),
        (["--fail-on", "alpha:0"], "wants both"),
        (["--against", "x.json"], "wants both"),
        (["--against", "x.json", "--fail-on", "alpha:0"], "--against: x.json cannot be read"),
        (["--against", "x.json", "--fail-on", "beauty:0"], "--fail-on: knows alpha"),
        (["--prompts", "/nowhere"], "--prompts: there is no file /nowhere"),
        (["--out", "/dev/null/x"], "--out: /dev/null/x cannot be written to"),
        (["--force"], "--force: goes with --against"),
        (["--lens", "5000"], "--lens: "),
        (["--ar", "none"], "--ar: is full or sampled"),
        (["--prefill", "4000"], "--prefill: asks for 4,000 tokens"),
        (["--heads", "/nowhere"], "--heads: there is no file /nowhere"),
    ],
)
def test_bad_input(bench, words, message):
    result = bench(*words)
    assert result.code == 2, result
    assert result.err.count("\n") == 1
    assert message in result.err
