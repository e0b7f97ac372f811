"""Workloads: what is bundled, generated and read; tables by kind;
transformers' generate beside ours.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from tests.benchmarking.helpers import make_measurement, typed
from tests.rows import every_row
from tswift.benchmarking.config import BenchOptions, Plan, configure, parse_peers
from tswift.benchmarking.record import to_json
from tswift.benchmarking.report import csv_text, tables
from tswift.benchmarking.run import begin_measurement, measure
from tswift.benchmarking.workloads import Prompt, encode, read_workloads
from tswift.errors import InputError
from tswift.jobs.prompts import Text

PEERS = ("transformers", "prompt-lookup", "assisted")
PLAN = Plan((9,), (12, 30), warmup=2)


def test_the_bundled_ones() -> None:
    found = read_workloads(["prose", "reasoning", "structured"])
    assert Counter(text.kind for text in found) == {"prose": 5, "reasoning": 6, "structured": 3}
    assert [text.name for text in found][-3:] == [
        "structured/diary-0",
        "structured/building-0",
        "structured/log-0",
    ]
    assert len({text.text for text in found}) == len(found)


def test_a_structured_text_repeats_its_frame_and_not_its_content() -> None:
    texts = {text.name: text.text for text in read_workloads(["structured:7"])}
    assert len(texts) == len(set(texts.values())) == 7
    entries = [entry.split("\n", 1) for entry in texts["structured/diary-1"].split("\n\n")[1:-1]]
    assert [title for title, _ in entries] == [f"Week {number}" for number in range(1, 17)]
    assert len({content for _, content in entries}) == 16
    assert (
        len({tuple(line.split(":")[0] for line in content.split("\n")) for _, content in entries})
        == 1
    )
    # the same with every Python: results from elsewhere are of the same prompts
    digest = sha256("".join(texts.values()).encode()).hexdigest()
    assert digest == "1a6934dfd41f7b8ab967735b1aeef158b15190b12eb491d4f56579ce891a68b5"


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "aime.jsonl"
    lines = [
        {"ID": "2024-I-1", "Problem": "Find x.", "Answer": 7},
        {"question_content": "Sort.", "kind": "code"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = [(text.name, text.kind, text.text) for text in read_workloads([str(path)])]
    assert found == [("aime/2024-I-1", "aime", "Find x."), ("aime/3", "code", "Sort.")]
    assert [text.name for text in read_workloads([f"{path}:1"])] == ["aime/2024-I-1"]


def test_what_data_sets_for_drafters_have(tmp_path: Path) -> None:
    """Spec-Bench and SPEED-Bench: what a user says in turns, and a category; in parquet, too."""
    rows = [
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Write a post.", "Shorter."],
            "id": None,
            "messages": None,
        },
        {
            "id": "b",
            "category": "code",
            "messages": [{"role": "user", "content": "Sort."}],
            "turns": None,
        },
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(Table.from_pylist(rows), tmp_path / "s.parquet")
    for name in ("s.jsonl", "s.parquet"):
        found = read_workloads([str(tmp_path / name)])
        assert [(text.name, text.kind, text.text) for text in found] == [
            ("s/81", "writing", "Write a post."),
            ("s/b", "code", "Sort."),
        ]
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(InputError, match="parquet cannot be read"):
        read_workloads([str(tmp_path / "broken.parquet")])


@every_row(
    ("words", "line", "message"),
    [
        (
            ["poems"],
            "",
            "no workload 'poems'; there are prose, reasoning, structured and files, FILE.jsonl or "
            "FILE.parquet",
        ),
        (["pros"], "", "did you mean prose?"),
        (["prose:9"], "", "asks for 9 prompts, prose has 5"),
        (["prose:0"], "", "wants at least one prompt, got prose:0"),
        (["prose", "prose:1"], "", "two prompts are called prose/drawing-room"),
        (["nowhere.jsonl"], "", "there is no file nowhere.jsonl"),
        (["FILE"], "{", "line 1 of x.jsonl is not JSON"),
        (["FILE"], "[]", "line 1 of x.jsonl is no object"),
        (
            ["FILE"],
            '{"prompt": 7}',
            "line 1 of x.jsonl has no messages, turns, or text called prompt, problem, ",
        ),
        (["FILE"], '{"turns": []}', "line 1 of x.jsonl: its turns are no texts"),
        (
            ["FILE"],
            '{"messages": [{"role": "system", "content": "a"}]}',
            "line 1 of x.jsonl: its messages are no",
        ),
        (["FILE"], '{"prompt": " "}', "line 1 of x.jsonl has nothing but white space"),
        (["FILE"], '{"prompt": "a", "kind": 1}', "line 1 of x.jsonl: its kind or id is no text"),
    ],
)
def test_what_is_no_workload(tmp_path: Path, words: list[str], line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(InputError) as raised:
        read_workloads([word.replace("FILE", str(tmp_path / "x.jsonl")) for word in words])
    assert message in raised.value.message
    assert raised.value.field == "workload"


def test_a_table_by_kind() -> None:
    record = make_measurement(
        methods=("ar", "medusa"), prompts=("a", "bb", "c"), seeds=(0,), lens=(500,)
    )
    for prompt, kind, tokens in zip(
        record["workload"]["prompts"], ("prose", "prose", "log"), (90, 1024, 40), strict=True
    ):
        prompt.update(kind=kind, tokens=tokens)
    measurement = typed(record)
    (table,) = tables(measurement)
    assert [row[:5] for row in table.rows] == [
        ["AR", "prose", "2", "90 to 1,024", "500"],
        ["medusa", "prose", "2", "90 to 1,024", "500"],
        ["AR", "log", "1", "40", "500"],
        ["medusa", "log", "1", "40", "500"],
    ]
    steps = [row[table.columns.index("tokens/step")] for row in table.rows]
    # of medusa's two prompts 1 + 3 (0.40 + 0.02) and 1 + 3 * 0.40
    assert steps == ["1.00 ± 0.00", "2.23 ± 0.04", "1.00", "2.26"]
    lines = csv_text(measurement).splitlines()
    assert [line.split(",")[8] for line in lines] == ["workload", "prose", "prose", "log", "log"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from tests.conftest import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("small"), num_hidden_layers=1)


def beside(checkpoint: Path, small: Path, plan: Plan = PLAN, **sampling: float):
    """The record of a tiny benchmark with all peers, as a file has it, and its texts by label."""
    asked = {
        "model": str(checkpoint),
        "draft_model": str(small),
        "dtype": "float64",
        "peers": PEERS,
    }
    options = BenchOptions.of({}, {"methods": ("ar", "reuse"), **asked, **sampling})
    config, texts = configure(options), {}
    prompts = [Prompt("a/1", list(range(1, 9)), "a"), Prompt("b/1", list(range(3, 12)), "b")]
    record = begin_measurement(config, prompts, plan, ["tswift"])
    keep = lambda label, case, found, samples: texts.update({case.prompt.name: found})  # noqa: E731
    state = measure({"": config}, record, prompts, plan, lambda *at: None, lambda: None, keep)
    assert state == "finished"
    content = json.loads(json.dumps(to_json(record)))
    assert typed(content) == record
    return content, texts


@pytest.mark.slow
def test_greedy_peers_write_the_text_of_plain_decoding(checkpoint: Path, small: Path) -> None:
    # with a penalty the text does not loop, and shows that both sides penalise the same
    record, texts = beside(checkpoint, small, temperature=0.0, min_p=0.0, penalty=1.2)
    for found in texts.values():
        assert set(found) == {"ar", "reuse", *PEERS}
        assert all(found[name] == found["ar"][:30] for name in PEERS)
    for sample in record["samples"]:
        assert sample["same_as_ar"] is (None if sample["method"] == "ar" else True)
        assert sample["explained"] is None
        assert [point["len"] for point in sample["points"]] == [12, 30]
        for point in sample["points"]:
            assert (
                sum(count * steps for count, steps in enumerate(point["accepted"], 1))
                == point["tokens"]
            )
            assert (point["passes"] == point["tokens"]) >= (
                sample["method"] in ("ar", "transformers")
            )
    assert record["workload"]["peers"]["assisted"]["assistant_model"] == str(small)
    notes = " ".join(tables(typed(record))[0].notes)
    assert "10 tokens looked up: the text of AR in 2 of 2 runs." in notes
    assert "Same tokens as AR: yes (2 runs)." in notes


@pytest.mark.slow
def test_sampled_peers_are_said_to_draw_their_own(checkpoint: Path, small: Path) -> None:
    record, texts = beside(checkpoint, small, temperature=1.0)
    again, others = beside(checkpoint, small, Plan((9,), (12, 30), warmup=0), temperature=1.0)
    for name in PEERS:  # whatever else draws between its slices
        assert [found[name] for found in texts.values()] == [
            found[name] for found in others.values()
        ]
        assert texts["a/1"][name] != texts["a/1"]["ar"]
    assert all(one["same_as_ar"] is None for one in record["samples"] if one["method"] in PEERS)
    assert again["workload"] == record["workload"]
    assert "samples with torch's random numbers, so a text of its own" in " ".join(
        tables(typed(record))[0].notes
    )


def test_a_penalty_over_less_than_the_text_is_not_transformers() -> None:
    record = make_measurement(methods=("ar", "medusa"), prompts=("a",))
    record["workload"]["prompts"][0].update(kind="prose", tokens=9)
    record["workload"]["peers"] = {"transformers": {"do_sample": False}}
    assert "a text of its own, since its penalty is over more than the window" in " ".join(
        tables(typed(record))[0].notes
    )


def test_ctrl_c_waits_for_a_peer(checkpoint: Path, small: Path) -> None:
    asked = {
        "model": str(checkpoint),
        "draft_model": str(small),
        "dtype": "float64",
        "peers": PEERS,
    }
    options = BenchOptions.of({}, {"methods": ("ar",), **asked})
    config, prompts = configure(options), [Prompt("a", list(range(1, 9)))]
    record = begin_measurement(config, prompts, PLAN, ["tswift"])

    def press(label, number, cells, case, run) -> None:  # type: ignore[no-untyped-def]
        if run.label == "prompt-lookup" and run.stats.tokens > 20:
            raise KeyboardInterrupt

    assert measure({"": config}, record, prompts, PLAN, press, lambda: None) == "interrupted"
    assert {len(sample.points) for sample in record.samples} == {1}
    assert not {thread.name for thread in threading.enumerate()} & set(PEERS)


def test_what_no_peer_can_do() -> None:
    assert parse_peers("assisted, transformers,assisted") == ("assisted", "transformers")
    with pytest.raises(
        InputError, match=r"peers: knows transformers, prompt-lookup, assisted, got 'vllm'"
    ):
        parse_peers("vllm")
    for changes, message in (
        (
            {"simulate_alpha": 0.5},
            "peers: transformers' generate is not measured with simulated acceptance",
        ),
        (
            {"model": "shape:tiny"},
            "peers: transformers' generate is not measured with random weights",
        ),
        (
            {"model": "a-folder", "peers": ("assisted",)},
            "draft_model: is required: assisted drafts with a smaller model",
        ),
        ({"logit_bias": {3: 1.0}}, "logit_bias: is not handed to transformers' generate"),
    ):
        options = BenchOptions.of(
            {}, {"methods": ("ar", "reuse"), "peers": ("transformers",), **changes}
        )
        with pytest.raises(InputError, match=message):
            options.check()


def test_prompts_in_a_chat_template(tmp_path: Path) -> None:
    class Model:
        name, tokenizer = "m", None

        def encode(self, text: str, bare: bool = False) -> list[int]:
            return [int(bare)] * len(text)

    class Tokenizer:
        chat_template = "there is one"

        def apply_chat_template(self, messages, **_: object) -> str:
            return f"<{messages[-1]['content']}>"

    model = Model()
    model.tokenizer = Tokenizer()
    texts = [Text("a/1", "Sort.", "a"), Text("a/2", "b", "a", ({"role": "user", "content": "b"},))]
    assert [prompt.tokens for prompt in encode(texts, model, 7, chat=True)] == [[1] * 7, [1] * 3]
    with pytest.raises(InputError, match="of 6 tokens would cut a/1, which has 7 in its template"):
        encode(texts, model, 6, chat=True)
    with pytest.raises(
        InputError, match="a/2 has messages, which only --chat puts into a template"
    ):
        encode(texts, model, 9)
    with pytest.raises(InputError, match="goes with --workload"):
        Plan(chat=True)
