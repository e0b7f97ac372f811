"""What is told before a job is started."""

from __future__ import annotations

import json

import pytest

from tswift.benchmarking.forecast import CONTEXTS, forecast
from tswift.benchmarking.question import Question
from tswift.benchmarking.roofline import MACHINES, Drafting, Machine, decode_seconds, pass_seconds
from tswift.errors import InputError
from tswift.models.shapes import shape_config, shape_of, skeleton

LLAMA = shape_of(skeleton(shape_config("shape:llama3.1-8b")), 2)
A100 = MACHINES["a100-80g"]


def test_the_first_table_is_the_papers_table_2() -> None:
    table, *_ = forecast(LLAMA, A100, Question(), 131_072).grids("llama, a100")
    rows = dict(table.rows)
    assert rows["memory bandwidth"] == "2.04 TB/s"
    assert rows["peak"] == "312 TFLOP/s"
    assert rows["model weights, read by every pass"] == "15.0 GB"
    assert rows["loading time of the weights"] == "7.4 ms"
    assert rows["computing time of a node at 131,072 tokens"] == "0.3 ms"
    assert rows["operations of a node at 131,072 tokens"] == "83.7 GFLOP"


def test_a_row_for_each_context_and_number_of_nodes() -> None:
    found = forecast(LLAMA, A100, Question(contexts=(100, 50_000), nodes=(1, 8, 41)), 131_072)
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
    found = forecast(LLAMA, A100, Question(prefill=10, length=500), 131_072)
    (plain,) = found.decodes
    assert plain.floor_seconds == decode_seconds(LLAMA, A100, 10, 500, 500, 500)
    assert (plain.method, plain.passes, plain.speedup) == ("ar", 500, 1.0)
    assert "--alpha predicts tokenswift too." in found.grids("label")[2].notes


def test_the_papers_job_at_the_papers_alpha() -> None:
    question = Question(prefill=4096, length=100_000, alpha=0.9)
    plain, ours = forecast(LLAMA, A100, question, 131_072).decodes
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
        question = Question(length=1000, alpha=0.5, **changes)  # type: ignore[arg-type]
        return forecast(LLAMA, A100, question, 131_072).decodes[1].floor_seconds

    assert seconds(depth=2) > seconds() > seconds(depth=6)
    assert seconds(budget=1000) < seconds()
    slow = Machine(2.04e12, 1e12)
    wide, narrow = (
        forecast(LLAMA, slow, Question(length=1000, alpha=0.5, nodes=nodes), 131_072).decodes[1].floor_seconds
        for nodes in ((1, 41), (1, 5))
    )
    assert wide > narrow  # computing decides there


def test_a_cheaper_draft_stands_beside_that_of_the_models_own_bits() -> None:
    question = Question(alpha=0.9, draft_weights="int4")
    plain, own, cheap = forecast(LLAMA, A100, question, 131_072).decodes
    assert (plain.draft_bits, own.draft_bits, cheap.draft_bits) == (None, 16, 4)
    assert (plain.draft_weights, own.draft_weights, cheap.draft_weights) == (None, None, "int4")
    eight, fp8 = (
        forecast(LLAMA, A100, Question(alpha=0.9, draft_weights=kind), 131_072).decodes[2] for kind in ("int8", "fp8")
    )
    assert eight.draft_bits == 8
    assert cheap.step_seconds < eight.step_seconds == fp8.step_seconds < own.step_seconds
    assert own == forecast(LLAMA, A100, Question(alpha=0.9), 131_072).decodes[1]
    spared = (LLAMA.read - 128_256 * 4096) * 1.5  # bytes; the LM head keeps its 16 bits
    assert own.step_seconds - cheap.step_seconds == pytest.approx(spared / A100.bandwidth)
    assert cheap.speedup == pytest.approx(own.speedup * own.step_seconds / cheap.step_seconds)
    for each in (plain, own, cheap):
        assert each.step_seconds * each.passes == pytest.approx(each.floor_seconds)
        assert each.needed == pytest.approx(each.tokens_per_step / each.speedup, rel=1e-4)  # passes are rounded up
    assert own.even_alpha is None
    even = Question(alpha=cheap.even_alpha, draft_weights="int4")
    assert forecast(LLAMA, A100, even, 131_072).decodes[2].speedup == pytest.approx(own.speedup, rel=1e-4)
    notes = forecast(LLAMA, A100, question, 131_072).grids("label")[2].notes
    assert f"is as quick at alpha {cheap.even_alpha:.2f} as one of 16 bits at 0.9." in notes[-1]


def test_a_draft_that_is_never_right_has_nothing_to_lose() -> None:
    *_, hopeless = forecast(LLAMA, A100, Question(alpha=0.0, draft_weights="int4"), 131_072).decodes
    assert hopeless.even_alpha == 0.0


def test_contexts_go_as_far_as_the_model() -> None:
    question = Question(prefill=10, length=10)
    assert [each.context for each in forecast(LLAMA, A100, question, 50_000).passes] == [
        context for context in CONTEXTS[:3] for _ in range(2)
    ]
    assert {each.context for each in forecast(LLAMA, A100, question, 100).passes} == {100}
    with pytest.raises(InputError, match=r"^--context: 60,000 is more than the model's 50,000 positions$"):
        forecast(LLAMA, A100, Question(contexts=(10, 60_000)), 50_000)
    with pytest.raises(InputError, match=r"^--len: 4,096 prompt tokens and 100,000 new ones need 104,096 positions"):
        forecast(LLAMA, A100, Question(), 50_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (5, 0)}, "--context: must be at least 1, got 0"),
        ({"nodes": (0,)}, "--nodes: must be at least 1"),
        ({"prefill": 0}, "--prefill: must be"),
        ({"length": -3}, "--len: must be at least 1, got -3"),
        ({"depth": 0}, "--depth: must be"),
        ({"budget": 0}, "--budget: must be"),
        ({"alpha": 0.5, "draft_weights": "int5"}, "--draft-weights: no 'int5'; there are int8, fp8, int4"),
        ({"alpha": 1.5}, "--alpha: must be between 0 and 1, got 1.5"),
        ({"alpha": float("nan")}, "--alpha: must be between 0 and 1, got nan"),
    ],
)
def test_questions_that_have_no_answer(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        Question(**changes)  # type: ignore[arg-type]


def test_everything_is_in_the_json() -> None:
    found = json.loads(json.dumps(forecast(LLAMA, A100, Question(alpha=0.9), 131_072).as_dict()))
    assert found["shape"]["weight_bytes"] == LLAMA.weight_bytes
    assert found["machine"] == {"bandwidth": 2.04e12, "flops": 312e12}
    assert found["question"]["contexts"] == list(CONTEXTS)
    assert len(found["passes"]) == 14
    assert [each["method"] for each in found["decodes"]] == ["ar", "tokenswift"]


def test_predictions_say_that_they_are() -> None:
    for alpha in (None, 0.9):
        notes = forecast(LLAMA, A100, Question(alpha=alpha), 131_072).grids("label")[2].notes
        assert notes[0].startswith("Predicted, not measured")
