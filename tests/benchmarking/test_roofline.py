"""The roofline: rates, floors of passes, of decodes, of what a benchmark ran, and what is predicted."""

from __future__ import annotations

import csv
import json
import time
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tswift.benchmarking.roofline as module
from tests.benchmarking.helpers import MACHINE as RATES
from tswift.benchmarking.config import configure
from tswift.benchmarking.options import BenchOptions
from tswift.benchmarking.roofline import (
    CONTEXTS,
    MACHINES,
    Drafting,
    Floor,
    Machine,
    RooflineQuery,
    computing_seconds,
    decode_seconds,
    floor_of,
    loading_seconds,
    pass_seconds,
    predict,
)
from tswift.decoding.stats import DecodeStats
from tswift.errors import InputError
from tswift.models.shapes import Shape, shape_config, shape_of, skeleton

SMALL = Shape(120, 100, hidden_size=4, layers=2, query_heads=2, kv_heads=1, head_dim=2, itemsize=2, lm_head=20)


MACHINE = Machine(bandwidth=100.0, flops=1000.0)


def test_the_small_shape_is_as_said() -> None:
    assert (SMALL.weight_bytes, SMALL.kv_bytes, SMALL.flops(0), SMALL.flops(1)) == (200, 16, 200, 232)


def test_the_papers_table_2() -> None:
    text = (files("tswift.benchmarking") / "paper" / "table2_roofline.csv").read_text(encoding="utf-8")
    paper = {line["quantity"]: float(line["value"]) for line in csv.DictReader(text.splitlines())}
    machine, shape = MACHINES["a100-80g"], shape_of(skeleton(shape_config("shape:llama3.1-8b")), 2)
    assert machine == Machine(paper["memory bandwidth"], paper["bf16 peak"])
    assert round(shape.weight_bytes / 1e9, 1) == paper["model weights"]
    assert shape.flops(131_072) / 1e9 == pytest.approx(paper["max operations (128K context)"], rel=0.01)
    assert round(1e3 * loading_seconds(shape, machine, 0), 1) == paper["loading time"]
    assert round(1e3 * computing_seconds(shape, machine, 131_072, 1), 1) == paper["max computing time"]


def test_a_pass_takes_the_longer_of_loading_and_computing() -> None:
    assert loading_seconds(SMALL, MACHINE, 10) == (200 + 160) / 100
    assert loading_seconds(SMALL, MACHINE, 10, extra_bytes=40) == 4.0
    assert computing_seconds(SMALL, MACHINE, 10, 5) == 5 * 520 / 1000
    assert pass_seconds(SMALL, MACHINE, 10, 5) == 3.6
    assert pass_seconds(SMALL, MACHINE, 10, 50) == 26.0
    assert pass_seconds(SMALL, MACHINE, np.array([10, 0]), 5).tolist() == [3.6, 2.0]


@given(st.integers(0, 50), st.integers(1, 60))
def test_plain_decoding_is_the_sum_over_its_passes(context: int, length: int) -> None:
    one_by_one = sum(pass_seconds(SMALL, MACHINE, context + token, 1) for token in range(length))
    assert decode_seconds(SMALL, MACHINE, context, length, length, length) == pytest.approx(one_by_one)


def test_a_step_drafts_and_verifies() -> None:
    # four steps of three tokens from 6 on, 20 nodes each; drafting sees 8 tokens at most
    contexts = [6, 9, 12, 15]
    verified = [max((200 + 16 * c) / 100, 20 * (200 + 32 * c) / 1000) for c in contexts]
    drafted = [max((200 + 30 + 16 * min(c, 8)) / 100, (200 + 32 * min(c, 8)) / 1000) for c in contexts]
    arguments = (SMALL, MACHINE, 6, 12, 4, 80)
    assert decode_seconds(*arguments) == pytest.approx(sum(verified))
    assert decode_seconds(*arguments, Drafting(8, 30)) == pytest.approx(sum(verified) + sum(drafted))
    again = [each - 0.3 for each in drafted]  # a second drafting pass reads the heads no more
    assert decode_seconds(*arguments, Drafting(8, 30, 2)) == pytest.approx(sum(verified) + sum(drafted) + sum(again))
    assert decode_seconds(*arguments, Drafting(None, 30)) == pytest.approx(sum(verified) + 4 * 0.3)


def test_a_draft_of_fewer_bits_reads_less() -> None:
    """Of 200 B of weights 40 are the LM head's; at 4 bits the rest are 40 B, at 8 bits 80 B."""
    verified = decode_seconds(SMALL, MACHINE, 5, 6, 3, 9)
    read = [min(5 + 2 * i, 8) * 16 for i in range(3)]
    for bits, weights in ((4, 80), (8, 120), (16, 200)):
        once = sum((weights + 30 + kv) / 100 for kv in read)
        again = sum((weights + kv) / 100 for kv in read)
        assert decode_seconds(SMALL, MACHINE, 5, 6, 3, 9, Drafting(8, 30, bits=bits)) == pytest.approx(verified + once)
        both = decode_seconds(SMALL, MACHINE, 5, 6, 3, 9, Drafting(8, 30, 2, bits))
        assert both == pytest.approx(verified + once + again)


SHAPE = Shape(120, 100, hidden_size=4, layers=2, query_heads=2, kv_heads=1, head_dim=2, itemsize=2)


def mark(tokens: int, passes: int, nodes: int) -> DecodeStats:
    return DecodeStats(4, passes=passes, tokens=tokens, nodes=nodes)


def test_a_floor_is_the_sum_of_its_stretches() -> None:
    drafting = Drafting(8, 30)
    floor = Floor(SHAPE, MACHINE, {"tokenswift": drafting})
    marks = [mark(20, 10, 100), mark(50, 20, 300)]
    first = decode_seconds(SHAPE, MACHINE, 7, 20, 10, 100, drafting)
    second = decode_seconds(SHAPE, MACHINE, 27, 30, 10, 200, drafting)
    assert floor.seconds("tokenswift", 7, marks) == pytest.approx([first, first + second])
    assert floor.seconds("ar", 7, [mark(20, 20, 20)]) == [decode_seconds(SHAPE, MACHINE, 7, 20, 20, 20)]
    assert floor.seconds("ar", 7, []) == []


def test_what_each_method_reads_while_drafting(checkpoint) -> None:  # type: ignore[no-untyped-def]
    entry = BenchOptions(
        ("ar", "medusa", "tokenswift", "reuse", "magicdec"), drafting={"budget": 128}, model=str(checkpoint)
    )
    config = configure(entry)
    floor = floor_of(config, RATES)
    assert floor is not None
    heads = config.model.heads
    assert heads is not None
    read = sum(weight.nbytes for weight in heads.parameters())
    assert floor.drafting == {
        "ar": Drafting(),
        "medusa": Drafting(None, read),
        "tokenswift": Drafting(128, read),
        "reuse": Drafting(),
        "magicdec": Drafting(128, 0, 4),
    }
    whole = configure(BenchOptions(("ar", "tokenswift"), drafting={"kv": "full"}, model=str(checkpoint)))
    assert floor_of(whole, RATES).drafting["tokenswift"].budget > 10**9
    network = config.model.target.model
    embeddings = network.get_input_embeddings().weight.nbytes
    assert floor.shape.weight_bytes == sum(weight.nbytes for weight in network.parameters()) - embeddings


def test_experts_have_no_floor(checkpoint, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    config = configure(BenchOptions(("ar",), model=str(checkpoint)))
    monkeypatch.setattr(config.model.target.model.config, "num_experts", 8, raising=False)
    assert floor_of(config, RATES) is None


LLAMA = shape_of(skeleton(shape_config("shape:llama3.1-8b")), 2)


A100 = MACHINES["a100-80g"]


def test_a_row_for_each_context_and_number_of_nodes() -> None:
    found = predict(LLAMA, A100, RooflineQuery(contexts=(100, 50_000), nodes=(1, 8, 41)), 131_072)
    assert [(each.context, each.nodes) for each in found.passes] == [
        (context, nodes) for context in (100, 50_000) for nodes in (1, 8, 41)
    ]
    for each in found.passes:
        assert each.read_bytes == LLAMA.weight_bytes + each.context * 131_072
        assert each.floor_seconds == max(each.loading_seconds, each.computing_seconds)
        assert each.floor_seconds == pass_seconds(LLAMA, A100, each.context, each.nodes)
    table = found.grids("label")[1]
    assert table.rows[3][:4] == ["50,000", "1", "6.55 GB", "21.6 GB"]


def test_plain_decoding_alone_without_an_alpha() -> None:
    found = predict(LLAMA, A100, RooflineQuery(prefill=10, length=500), 131_072)
    (plain,) = found.decodes
    assert plain.floor_seconds == decode_seconds(LLAMA, A100, 10, 500, 500, 500)
    assert (plain.method, plain.passes, plain.speedup) == ("ar", 500, 1.0)
    assert "--alpha predicts tokenswift too." in found.grids("label")[2].notes


def test_the_papers_job_at_the_papers_alpha() -> None:
    question = RooflineQuery(prefill=4096, length=100_000, alpha=0.9)
    plain, ours = predict(LLAMA, A100, question, 131_072).decodes
    assert ours.tokens_per_step == 4.6
    assert ours.passes == 21_740  # 100,000 / 4.6, rounded up
    drafting = Drafting(4096, 3 * 4096**2 * 2)
    assert ours.floor_seconds == decode_seconds(LLAMA, A100, 4096, 100_000, 21_740, 41 * 21_740, drafting)
    assert ours.speedup == plain.floor_seconds / ours.floor_seconds
    # by the cost model: 4.6 plain passes of weights and 54K of KV, for one such pass and one of weights and 4K
    middle = LLAMA.weight_bytes + 54_096 * LLAMA.kv_bytes
    draft = LLAMA.weight_bytes + 4096 * LLAMA.kv_bytes + drafting.head_bytes
    assert ours.speedup == pytest.approx(4.6 * middle / (middle + draft), rel=0.01)


def test_the_question_shapes_the_draft() -> None:
    def seconds(**changes: int) -> float:
        question = RooflineQuery(length=1000, alpha=0.5, **changes)  # type: ignore[arg-type]
        return predict(LLAMA, A100, question, 131_072).decodes[1].floor_seconds

    assert seconds(depth=2) > seconds() > seconds(depth=6)
    assert seconds(budget=1000) < seconds()
    slow = Machine(2.04e12, 1e12)
    wide, narrow = (
        predict(LLAMA, slow, RooflineQuery(length=1000, alpha=0.5, nodes=nodes), 131_072).decodes[1].floor_seconds
        for nodes in ((1, 41), (1, 5))
    )
    assert wide > narrow  # computing decides there


def test_a_cheaper_draft_stands_beside_that_of_the_models_own_bits() -> None:
    question = RooflineQuery(alpha=0.9, draft_weights="int4")
    plain, own, cheap = predict(LLAMA, A100, question, 131_072).decodes
    assert (plain.draft_bits, own.draft_bits, cheap.draft_bits) == (None, 16, 4)
    assert (plain.draft_weights, own.draft_weights, cheap.draft_weights) == (None, None, "int4")
    eight, fp8 = (
        predict(LLAMA, A100, RooflineQuery(alpha=0.9, draft_weights=kind), 131_072).decodes[2]
        for kind in ("int8", "fp8")
    )
    assert eight.draft_bits == 8
    assert cheap.step_seconds < eight.step_seconds == fp8.step_seconds < own.step_seconds
    assert own == predict(LLAMA, A100, RooflineQuery(alpha=0.9), 131_072).decodes[1]
    spared = (LLAMA.read - 128_256 * 4096) * 1.5  # bytes; the LM head keeps its 16 bits
    assert own.step_seconds - cheap.step_seconds == pytest.approx(spared / A100.bandwidth)
    assert cheap.speedup == pytest.approx(own.speedup * own.step_seconds / cheap.step_seconds)
    for each in (plain, own, cheap):
        assert each.step_seconds * each.passes == pytest.approx(each.floor_seconds)
        assert each.needed == pytest.approx(each.tokens_per_step / each.speedup, rel=1e-4)  # passes are rounded up
    assert own.even_alpha is None
    even = RooflineQuery(alpha=cheap.even_alpha, draft_weights="int4")
    assert predict(LLAMA, A100, even, 131_072).decodes[2].speedup == pytest.approx(own.speedup, rel=1e-4)
    notes = predict(LLAMA, A100, question, 131_072).grids("label")[2].notes
    assert f"is as quick at alpha {cheap.even_alpha:.2f} as one of 16 bits at 0.9." in notes[-1]


def test_a_draft_that_is_never_right_has_nothing_to_lose() -> None:
    *_, hopeless = predict(LLAMA, A100, RooflineQuery(alpha=0.0, draft_weights="int4"), 131_072).decodes
    assert hopeless.even_alpha == 0.0


def test_contexts_go_as_far_as_the_model() -> None:
    question = RooflineQuery(prefill=10, length=10)
    assert [each.context for each in predict(LLAMA, A100, question, 50_000).passes] == [
        context for context in CONTEXTS[:3] for _ in range(2)
    ]
    assert {each.context for each in predict(LLAMA, A100, question, 100).passes} == {100}
    with pytest.raises(InputError, match=r"^context: 60,000 is more than the model's 50,000 positions$"):
        predict(LLAMA, A100, RooflineQuery(contexts=(10, 60_000)), 50_000)
    with pytest.raises(InputError, match=r"^length: 4,096 prompt tokens and 100,000 new ones need 104,096 positions"):
        predict(LLAMA, A100, RooflineQuery(), 50_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (5, 0)}, "context: must be at least 1, got 0"),
        ({"nodes": (0,)}, "nodes: must be at least 1"),
        ({"prefill": 0}, "prefill: must be"),
        ({"length": -3}, "length: must be at least 1, got -3"),
        ({"depth": 0}, "depth: must be"),
        ({"budget": 0}, "budget: must be"),
        ({"alpha": 0.5, "draft_weights": "int5"}, "draft_weights: no 'int5'; there are int8, fp8, int4"),
        ({"alpha": 1.5}, "alpha: must be between 0 and 1, got 1.5"),
        ({"alpha": float("nan")}, "alpha: must be between 0 and 1, got nan"),
    ],
)
def test_questions_that_have_no_answer(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        RooflineQuery(**changes)  # type: ignore[arg-type]


def test_everything_is_in_the_json() -> None:
    found = json.loads(json.dumps(predict(LLAMA, A100, RooflineQuery(alpha=0.9), 131_072).as_dict()))
    assert found["shape"]["weight_bytes"] == LLAMA.weight_bytes
    assert found["machine"] == {"bandwidth": 2.04e12, "flops": 312e12}
    assert found["question"]["contexts"] == list(CONTEXTS)
    assert len(found["passes"]) == 14
    assert [each["method"] for each in found["decodes"]] == ["ar", "tokenswift"]


CPU = torch.device("cpu")


def test_rates_follow_from_the_fastest_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda device: 4_000_000)
    monkeypatch.setattr(module, "_SIZES", (8, 16))
    seconds = iter([9.0, 2, 1, 4, 4, 4, *[0.001] * 6, *[5.0] * 6])  # a first try that does not count, then five
    readings = [0.0]

    def clock() -> float:
        readings.append(readings[-1] + (next(seconds) if len(readings) % 2 == 0 else 0.0))
        return readings[-1]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    found = module.measure_machine(CPU, torch.float32)
    assert found.bandwidth == 1_000_000  # a quarter of the free memory, in one second
    assert found.flops == pytest.approx(2 * 8**3 / 0.001)  # the larger product was slower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine(dtype: torch.dtype) -> None:
    started = time.monotonic()
    found = module.measure_machine(CPU, dtype)
    assert time.monotonic() - started < 30  # a second or two, and far more when everything else is busy
    assert 1e8 < found.bandwidth < 1e13
    assert 1e7 < found.flops < 1e16
