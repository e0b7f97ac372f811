"""The roofline: rates, floors of passes, of decodes, of what a benchmark ran."""

from __future__ import annotations

import csv
import json
import subprocess
from ctypes import c_int32, c_int64
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tswift.benchmarking.roofline as module
import tswift.benchmarking.run as run_module
from tests.benchmarking.helpers import MACHINE as RATES
from tests.helpers import CPU, needs_program, read_json, refused
from tests.rows import every_row
from tswift.benchmarking.config import BenchOptions, configure
from tswift.benchmarking.roofline import (
    CONTEXTS,
    MACHINES,
    Floors,
    Machine,
    RooflineQuery,
    computing_seconds,
    floors,
    loading_seconds,
    pass_seconds,
    plain_floor,
    plain_seconds,
)
from tswift.cli import main
from tswift.models.architecture import skeleton
from tswift.models.checkpoint import shape_config
from tswift.models.shapes import Shape, shape_of
from tswift.native_build import build, compiler_command, widest_vectors

SMALL = Shape(120, 100, hidden_size=4, layers=2, query_heads=2, kv_heads=1, head_dim=2, itemsize=2)
_CHAINS = 12  # of rates.c
MACHINE = Machine(bandwidth=100.0, flops=1000.0)
LLAMA = shape_of(skeleton(shape_config("shape:llama3.1-8b")), 2)
A100 = MACHINES["a100-80g"]


def ask(machine: Machine = A100, positions: int = 131_072, **query) -> Floors:
    return floors(LLAMA, machine, RooflineQuery(**query), positions)


def test_the_papers_table_2():
    text = (files("tswift.benchmarking") / "paper" / "table2_roofline.csv").read_text(
        encoding="utf-8"
    )
    paper = {line["quantity"]: float(line["value"]) for line in csv.DictReader(text.splitlines())}
    assert Machine(paper["memory bandwidth"], paper["bf16 peak"]) == A100
    assert round(LLAMA.weight_bytes / 1e9, 1) == paper["model weights"]
    assert LLAMA.flops(131_072) / 1e9 == pytest.approx(
        paper["max operations (128K context)"], rel=0.01
    )
    assert round(1e3 * loading_seconds(LLAMA, A100, 0), 1) == paper["loading time"]
    assert round(1e3 * computing_seconds(LLAMA, A100, 131_072, 1), 1) == paper["max computing time"]


def test_a_pass_takes_the_longer_of_loading_and_computing():
    assert (SMALL.weight_bytes, SMALL.kv_bytes, SMALL.flops(0), SMALL.flops(1)) == (
        200,
        16,
        200,
        232,
    )
    assert loading_seconds(SMALL, MACHINE, 10) == (200 + 160) / 100
    assert computing_seconds(SMALL, MACHINE, 10, 5) == 5 * 520 / 1000
    assert pass_seconds(SMALL, MACHINE, 10, 5) == 3.6
    assert pass_seconds(SMALL, MACHINE, 10, 50) == 26.0
    assert pass_seconds(SMALL, MACHINE, np.array([10, 0]), 5).tolist() == [3.6, 2.0]


@given(st.integers(0, 50), st.integers(1, 60))
def test_plain_decoding_is_the_sum_over_its_passes(context, length):
    one_by_one = sum(pass_seconds(SMALL, MACHINE, context + token, 1) for token in range(length))
    assert plain_seconds(SMALL, MACHINE, context, length) == pytest.approx(one_by_one)


def test_a_benchmark_has_the_floor_of_plain_decoding(checkpoint, monkeypatch):
    options = {"methods": ("ar", "reuse"), "model": str(checkpoint), "exact": False}
    model = configure(BenchOptions.of({}, options)).model
    network = model.target.model
    embeddings = network.get_input_embeddings().weight.nbytes
    read = sum(weight.nbytes for weight in network.parameters()) - embeddings
    floor = plain_floor(model, Machine(bandwidth=read, flops=1e30))
    assert floor is not None
    assert floor(0, 1) == pytest.approx(1.0)
    assert floor(7, 20) == pytest.approx(20 + sum(range(7, 27)) * (floor(1, 1) - 1))
    monkeypatch.setattr(network.config, "num_experts", 8, raising=False)
    assert plain_floor(model, RATES) is None


def test_a_row_for_each_context_and_number_of_nodes():
    result = ask(contexts=(100, 50_000), nodes=(1, 8, 41), prefill=10, length=500)
    assert [(row.context, row.nodes) for row in result.passes] == [
        (c, n) for c in (100, 50_000) for n in (1, 8, 41)
    ]
    for row in result.passes:
        assert row.read_bytes == LLAMA.weight_bytes + row.context * 131_072
        assert row.floor_seconds == max(row.loading_seconds, row.computing_seconds)
        assert row.floor_seconds == pass_seconds(LLAMA, A100, row.context, row.nodes)
    rates, passes = result.tables("label")
    assert passes.rows[3][:4] == ["50,000", "1", "6.55 GB", "21.6 GB"]
    assert result.plain_seconds == plain_seconds(LLAMA, A100, 10, 500)
    assert rates.rows[-1] == ("plain decoding of 500 tokens after 10", "3.69 s")
    record = json.loads(json.dumps(result.as_dict()))
    assert record["shape"]["weight_bytes"] == LLAMA.weight_bytes
    assert record["plain_seconds"] == result.plain_seconds


@pytest.mark.slow
def test_rates_are_those_of_what_a_pass_reads_and_multiplies(
    monkeypatch,
):
    """Of as many bytes, which a cache may hold, and of the narrowest numbers."""
    read, multiplied = list[int](), list[int]()
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "ask_for_huge_pages", lambda numbers: read.append(numbers.nbytes))
    monkeypatch.setattr(module, "_multiplied", lambda bits: multiplied.append(bits) or 1e16)
    shape = Shape(3_000_000, 2_000_000, 64, 2, 4, 2, 16, itemsize=4)
    for each in (
        shape,
        replace(shape, kv_itemsize=2),
        replace(shape, coded_bytes=1),
        replace(shape, read=1 << 40),
    ):
        assert module.measure_machine(CPU, torch.float32, each).flops == 1e16
    assert multiplied == [32, 16, 8, 32]
    assert read == [8_000_000, 8_000_000, module._LEAST_READ, module._READ_BYTES["cpu"]]


@needs_program
def test_multiply_adds_are_counted_and_stay_in_registers(monkeypatch):
    """So that nothing but them takes the time: what a core can do is no less than it is said to."""
    for options in {(), widest_vectors()}:  # AVX2 alone has no instruction that does both
        command = [*compiler_command(options=options), "-S", "-o", "-", str(module._RATES)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [line.strip().removeprefix("{vex}").split(maxsplit=1) for line in said.splitlines()]
        for names in (("vfmadd",), ("vpdpwssd", "vpmaddwd"), ("vpdpbusd", "vpmaddubsw")):
            operands = [line[1] for line in lines if line and line[0].startswith(names)]
            assert len(operands) >= _CHAINS
            assert not [given for given in operands if "(" in given]  # memory
    library = build(module._RATES, options=widest_vectors())
    library.tswift_multiply.restype = c_int64
    lanes = 16 if "-mavx512f" in widest_vectors() else 8
    for bits in (32, 16, 8):
        done = library.tswift_multiply(c_int64(3), c_int64(bits), (c_int32 * 2)(3, 5))
        assert done == 3 * _CHAINS * lanes * 2 * 32 // bits
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.0)
    assert module._multiplied(32) > 0
    assert module._multiplied(64) == 0


@pytest.mark.slow
@needs_program
@pytest.mark.parametrize("weights", ["int4", None])
def test_plain_decoding_does_not_beat_its_floor(tmp_path, monkeypatch, weights):
    """On the bundled model, whose weights the processor's caches hold."""
    monkeypatch.setattr(run_module, "machine_for", module.machine_for)
    words = [
        *["bench", "--prefill", "300", "--lens", "20,60", "--methods", "recall", "--warmup", "8"]
    ]
    words += [] if weights is None else ["--weights", weights]
    assert main([*words, "--no-plots", "--quiet", "--out", str(tmp_path / "a")]) == 0
    samples = read_json(tmp_path / "a" / "bench.json")["samples"]
    shares = {
        (each["method"], point["len"]): point.get("of_floor")
        for each in samples
        for point in each["points"]
    }
    assert shares.pop(("recall", 60)) is shares.pop(("recall", 20)) is None
    assert shares.keys() == {("ar", 20), ("ar", 60)}
    assert min(shares.values()) >= 1


def test_contexts_go_as_far_as_the_model():
    short: dict[str, Any] = {"prefill": 10, "length": 10}
    assert [row.context for row in ask(positions=50_000, **short).passes[::2]] == list(CONTEXTS[:3])
    assert {row.context for row in ask(positions=100, **short).passes} == {100}


@every_row(
    ("changes", "message"),
    [
        ({"contexts": (5, 0)}, "contexts: must be at least 1, got 0"),
        ({"contexts": (10, 60_000)}, "context: 60,000 is more than the model's 50,000 positions$"),
        ({"nodes": (10**10,)}, "nodes: must be between 1 and 1,000,000,000"),
        *[({name: 0}, f"{name}: must be") for name in ("prefill", "length")],
        (
            {"given": frozenset({"length"})},
            "length: 4,096 prompt tokens and 100,000 new ones need 104,096 positions",
        ),
    ],
)
def test_queries_that_have_no_answer(changes, message):
    with refused(f"^{message}"):
        ask(positions=50_000, **changes)


def test_rates_follow_from_the_fastest_try(monkeypatch):
    monkeypatch.setattr(module, "available_bytes", lambda device: 4_000_000)
    monkeypatch.setattr(module, "_SIZES", (8, 16))
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.0)
    # a first try that does not count, then five
    seconds = iter([9.0, 2, 1, 4, 4, 4, *[0.001] * 6, *[5.0] * 6])
    readings = [0.0]

    def clock():
        readings.append(readings[-1] + (next(seconds) if len(readings) % 2 == 0 else 0.0))
        return readings[-1]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    machine = module.measure_machine(CPU, torch.float32)
    assert machine.bandwidth == 1_000_000  # a quarter of the free memory, in one second
    assert machine.flops == pytest.approx(2 * 8**3 / 0.001)  # the larger product was slower
