"""Workloads: what is bundled, generated and read; tables by kind."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256

from pyarrow import Table, parquet

from tests.benchmarking.helpers import make_measurement, typed
from tests.helpers import refused
from tests.rows import every_row
from tswift.benchmarking.config import KINDS, Plan
from tswift.benchmarking.report import csv_text, tables
from tswift.benchmarking.workloads import encode, read_workloads
from tswift.jobs.config import Text


def test_the_bundled_ones():
    found = read_workloads(["prose", "reasoning", "structured"])
    assert Counter(text.kind for text in found) == {"prose": 5, "reasoning": 6, "structured": 3}
    assert [text.name for text in found][-3:] == [
        "structured/diary-0",
        "structured/building-0",
        "structured/log-0",
    ]
    assert len({text.text for text in found}) == len(found)


def test_a_structured_text_repeats_its_frame_and_not_its_content():
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


def test_jsonl(tmp_path):
    path = tmp_path / "aime.jsonl"
    lines = [
        {"ID": "2024-I-1", "Problem": "Find x.", "Answer": 7},
        {"question_content": "Sort.", "kind": "code"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = [(text.name, text.kind, text.text) for text in read_workloads([str(path)])]
    assert found == [("aime/2024-I-1", "aime", "Find x."), ("aime/3", "code", "Sort.")]
    assert [text.name for text in read_workloads([f"{path}:1"])] == ["aime/2024-I-1"]


def test_what_data_sets_for_drafters_have(tmp_path):
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
    with refused("parquet cannot be read"):
        read_workloads([str(tmp_path / "broken.parquet")])


@every_row(
    ("words", "line", "message"),
    [
        (
            ["poems"],
            "",
            f"no workload 'poems'; there are {', '.join(KINDS)} and files, FILE.jsonl or "
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
def test_what_is_no_workload(tmp_path, words, line, message):
    (tmp_path / "x.jsonl").write_text(line)
    with refused() as raised:
        read_workloads([word.replace("FILE", str(tmp_path / "x.jsonl")) for word in words])
    assert message in raised.value.message
    assert raised.value.field == "workload"


def test_a_table_by_kind():
    record = make_measurement(
        methods=("ar", "medusa"), prompts=("a", "bb", "c"), seeds=(0,), lens=(500,)
    )
    for prompt, kind, tokens in zip(
        record["workload"]["prompts"], ("prose", "prose", "log"), (90, 1024, 40), strict=True
    ):
        prompt.update(kind=kind, tokens=tokens)
    measurement = typed(record)
    (table,) = tables(measurement)
    assert [row[:4] for row in table.rows] == [
        [method, kind, "1,024", "500"] for kind in ("prose", "log") for method in ("AR", "medusa")
    ]
    steps = [row[table.columns.index("tokens/step")] for row in table.rows]
    # of medusa's two prompts 1 + 3 (0.40 + 0.02) and 1 + 3 * 0.40
    assert steps == ["1.00 ± 0.00", "2.23 ± 0.04", "1.00", "2.26"]
    lines = csv_text(measurement).splitlines()
    assert [line.split(",")[8] for line in lines] == ["workload", "prose", "prose", "log", "log"]


def test_prompts_in_a_chat_template(tmp_path):
    class Model:
        name = "m"
        tokenizer = None

        def encode(self, text, bare=False):
            return [int(bare)] * len(text)

    class Tokenizer:
        chat_template = "there is one"

        def apply_chat_template(self, messages, **_):
            return f"<{messages[-1]['content']}>"

    model = Model()
    model.tokenizer = Tokenizer()
    texts = [Text("a/1", "Sort.", "a"), Text("a/2", "b", "a", ({"role": "user", "content": "b"},))]
    assert [prompt.tokens for prompt in encode(texts, model, 7, chat=True)] == [[1] * 7, [1] * 3]
    with refused("of 6 tokens would cut a/1, which has 7 in its template"):
        encode(texts, model, 6, chat=True)
    with refused("a/2 has messages, which only --chat puts into a template"):
        encode(texts, model, 9)
    with refused("goes with --workload"):
        Plan(chat=True)
