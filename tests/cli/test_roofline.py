"""``tswift roofline`` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tswift.benchmarking.roofline as roofline_module
from tswift.benchmarking.roofline import Machine

LLAMA = ("roofline", "--model", "shape:llama3.1-8b", "--device", "a100-80g")


def lines_of(result) -> list[list[str]]:  # type: ignore[no-untyped-def]
    return [line.split() for line in result.out.decode().splitlines()]


def test_the_papers_table_2(tswift) -> None:  # type: ignore[no-untyped-def]
    result = tswift(*LLAMA)
    assert (result.code, result.err) == (0, "")
    lines = lines_of(result)
    assert ["loading", "time", "of", "the", "weights", "7.4", "ms"] in lines
    assert ["computing", "time", "of", "a", "node", "at", "131,072", "tokens", "0.3", "ms"] in lines
    assert ["Roofline:", "shape:llama3.1-8b,", "bfloat16,", "a100-80g"] in lines


def test_json_of_a_job(tswift) -> None:  # type: ignore[no-untyped-def]
    job = ("--alpha", 0.9, "--len", 50_000, "--prefill", 2048, "--depth", 5, "--budget", 2000)
    result = tswift(*LLAMA, *job, "--context", "1000,2_000", "--nodes", "1,8,20", "--json", "-")
    record = json.loads(result.out)
    assert (record["kind"], record["device"], record["dtype"]) == ("roofline", "a100-80g", "bfloat16")
    asked = {"contexts": [1000, 2000], "nodes": [1, 8, 20], "prefill": 2048, "length": 50_000, "alpha": 0.9}
    assert record["question"] == {**asked, "depth": 5, "budget": 2000, "draft_weights": None}
    assert record["decodes"][1]["tokens_per_step"] == 5.5


def test_a_folder_as_far_as_it_goes(tswift, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    words = ("--model", checkpoint, "--bandwidth", 40, "--flops", 0.1, "--len", 500, "--prefill", 10)
    told = tswift("roofline", *words, "--dtype", "float64").out.decode()
    assert f"{checkpoint}, float64, as given" in told
    assert "4,096" in told
    assert "20,000" not in told


def test_this_machine(tswift, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(roofline_module, "measure_machine", lambda device, dtype: Machine(1.5e10, 3e10))
    result = tswift("roofline", "--device", "here")
    assert result.code == 0
    assert ["memory", "bandwidth", "15.0", "GB/s"] in lines_of(result)
    assert ", measured" in result.out.decode().splitlines()[0]
    if not torch.cuda.is_available():  # what `generate` would run in, not what the weights are stored in
        assert result.out.decode().startswith("Roofline: demo, float32, ")


def test_nothing_is_built(tswift, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Eight or fourteen billion weights fit no test machine: that this ends at all says that none were made."""
    empty = torch.empty

    def counted(*shape: object, **options: object) -> torch.Tensor:
        made = empty(*shape, **options)  # type: ignore[call-overload]
        assert made.is_meta or made.numel() < 1_000_000
        return made

    monkeypatch.setattr(torch, "empty", counted)
    assert tswift("roofline", "--model", "shape:qwen2.5-14b", "--device", "h200").code == 0


def test_a_published_drafter(tswift) -> None:  # type: ignore[no-untyped-def]
    words = ("roofline", "--model", "shape:qwen3-8b", "--device", "h200", "--alpha", 0.5, "--drafter")
    for kind, tokens in (("dspark", 4.5), ("dflash", 8.5), ("eagle3", 4.0)):
        record = json.loads(tswift(*words, kind, "--json", "-").out)
        found = record["decodes"][2]
        assert (found["method"], found["tokens_per_step"]) == (f"drafter {kind}", tokens)
        assert 1.1 < found["needed"] < 1.4
    assert tswift(*words, "odd").err.startswith("tswift: error: --drafter: ")
    refused = tswift("roofline", "--model", "shape:qwen3-8b", "--device", "h200", "--drafter", "dspark")
    assert refused.err == "tswift: error: --drafter: goes with --alpha\n"
