"""``tswift roofline`` from the outside."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import tswift.benchmarking.roofline as roofline_module
from tests.helpers import CPU, read_json
from tswift.benchmarking.roofline import Machine

MEASURED = Path(__file__).parents[2] / "results" / "h100" / "figures-simulated.jsonl"
LLAMA = "roofline --model shape:llama3.1-8b --device"


def test_on_a_device_that_was_measured_passes_are_reckoned(tswift):
    """Those of 1 to 16 nodes that were measured there are as long as that."""
    words = f"{LLAMA} h100 --context 4096,100000 --nodes 1"
    record = tswift(words, "--json -").json
    reckoned = {each["context"]: 1e3 * each["reckoned_seconds"] for each in record["passes"]}
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    passes = [row for row in rows if row["table"] == "passes" and row["kind"] == "verify"]
    seen = [(row["context"], row["ms"]) for row in passes if row["nodes"] <= 16]
    assert len(seen) == 6
    for context, measured in seen:
        assert reckoned[context] == pytest.approx(measured, rel=0.08)
    assert "reckoned, not measured" in tswift(words).text
    assert "reckoned" not in tswift(f"{LLAMA} a100-80g --json -").text


def test_a_folder_as_far_as_it_goes_and_this_machine(tswift, checkpoint, monkeypatch):
    words = f"--model {checkpoint} --bandwidth 40 --flops 0.1 --len 500 --prefill 10"
    told = tswift("roofline", words, "--dtype float64").text
    for said in (f"{checkpoint}, float64, as given", "4,096"):
        assert said in told
    assert "20,000" not in told
    monkeypatch.setattr(
        roofline_module, "measure_machine", lambda device, dtype, shape: Machine(1.5e10, 3e10)
    )
    first, *lines = tswift("roofline --device here").text.splitlines()
    assert ["memory", "bandwidth", "15.0", "GB/s"] in [line.split() for line in lines]
    assert ", measured" in first
    if not torch.cuda.is_available():
        # what `generate` would run in, not what the weights are stored in
        assert first.startswith("Roofline: demo, float32, ")


def test_what_was_measured_beside_other_work_is_told(tswift, monkeypatch):
    for spread, told in ((None, False), (1.4, True)):
        machine = Machine(1.5e10, 3e10, spread)
        monkeypatch.setattr(roofline_module, "measure_machine", lambda *given, own=machine: own)
        said = " ".join(tswift("roofline --device here").text.split())
        assert ("measured beside other work (repeats usually took 1.40 times" in said) == told


def test_repeats_tell_of_other_work():
    pauses = iter([0.02, 0.01, 0.02, 0.02, 0.02, 0.02, *[0.02] * 50])
    least, spread = roofline_module._repeated(lambda: time.sleep(next(pauses)), CPU)
    assert least < 0.015
    assert spread > 1.3


def test_a_checkpoint_that_is_quantised_has_no_floor(tswift, checkpoint, tmp_path):
    config = read_json(checkpoint / "config.json")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tswift(f"roofline --model {tmp_path} --device h100").refused(
        "is quantised (gptq); its configuration does not tell what a pass reads"
    )


def test_nothing_is_built(tswift, monkeypatch):
    """Eight or fourteen billion weights fit no test machine:
    that this ends at all says that none were made.
    """
    empty = torch.empty

    def counted(*shape, **options):
        made = empty(*shape, **options)
        assert made.is_meta or made.numel() < 1_000_000
        return made

    monkeypatch.setattr(torch, "empty", counted)
    tswift("roofline --model shape:qwen2.5-14b --device h200").ok()
