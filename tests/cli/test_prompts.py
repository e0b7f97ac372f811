"""``tswift generate --prompts``: each text is that of its own run, whatever is killed,
and none is made twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tests.helpers import first, refused
from tests.jobs.killing import killed_before
from tests.rows import every_row
from tests.words import words_of
from tswift.cli import main
from tswift.files import unwritable
from tswift.jobs.batch import BATCH, OUT, Batch, reopen
from tswift.jobs.folder import FINISHED, RunFolder, SaveFailed, read_record
from tswift.jobs.job import Signals
from tswift.loading import model as loading
from tswift.loading.model import LoadedModel
from tswift.serving.requests import parse

pytestmark = pytest.mark.usefixtures("load_once")

LINES = [
    {"prompt": "The ship had lain three days becalmed,", "id": "sea", "seed": 4},
    {"question": "Who goes there?", "len": 9, "temperature": 0.5},
    {"instruction": "Say it.", "input": "Again."},
    {"turns": ["It was late.", "And then?"], "category": "writing"},
]
PROMPTS = [LINES[0]["prompt"], "Who goes there?", "Say it.\n\nAgain.", "It was late."]
LENGTH = 16
Words = list[object]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


@pytest.fixture
def words(checkpoint: Path, prompts: Path) -> str:
    return f"generate --model {checkpoint} --len {LENGTH} --method ar --prompts {prompts} --out"


def lines_of(text: bytes) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_text_is_that_of_its_own_run(width, tswift, words, checkpoint, tmp_path):
    """With the seed, the length and the sampling of its line; in the order of the file, and as they
    end on stdout.
    """
    out = tmp_path / "out"
    made = tswift(words, out, "--exact --parallel", width).ok()
    whole = lines_of((out / OUT).read_bytes())
    assert sorted(lines_of(made.out), key=lambda line: line["folder"]) == whole
    assert [(line["id"], line["tokens"]) for line in whole] == [
        ("sea", LENGTH),
        ("2", 9),
        ("3", LENGTH),
        ("4", LENGTH),
    ]
    own = [["--seed 4"], ["--temperature 0.5 --len 9"], [], []]
    for line, prompt, more in zip(whole, PROMPTS, own, strict=True):
        length = [] if "--len" in more else [f"--len {LENGTH}"]
        alone = [
            f"generate --model {checkpoint} --exact --method reuse --prompt-text",
            prompt,
            *length,
            *more,
        ]
        assert line["text"].encode() == tswift(*alone, "--out", tmp_path / line["folder"]).out
    again = tswift(f"generate --resume {out}")
    assert (again.code, again.out) == (0, b"")
    assert "0 texts were made; all 4 are in" in again.err


def test_shards_share_one_folder(tswift, words, tmp_path):
    out = tmp_path / "out"
    for shard, made in (("2/2", ["2", "4"]), ("1/2", ["sea", "3"])):
        assert not (out / OUT).exists()
        found = tswift(words, out, f"--shard {shard}")
        assert (found.code, [line["id"] for line in lines_of(found.out)]) == (0, made)
    assert [line["id"] for line in lines_of((out / OUT).read_bytes())] == ["sea", "2", "3", "4"]


@pytest.mark.parametrize("kills", first(1, [3, 25]))
def test_a_kill_at_any_moment_leaves_exactly_the_rest(kills, tswift, words, tmp_path):
    """Before any change of a file: while a folder is begun, while a text is made,
    while all are put together.
    """
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    random = Random(kills)
    tswift(words, whole, "--exact").ok()
    out.mkdir()
    (out / f"{BATCH}.new").write_text("{")  # as of a kill
    asked = words_of([words, out, "--quiet --exact --parallel 3"])
    killed = sum(killed_before(random.randrange(1, 60), lambda: main(asked)) for _ in range(kills))
    assert killed > 1
    assert main(asked) == 0
    assert (out / OUT).read_bytes() == (whole / OUT).read_bytes()
    assert [read_record(out / f"{place:06}").state for place in (1, 2, 3, 4)] == [FINISHED] * 4


def test_bad_lines_are_named_at_the_start(tmp_path):
    path = tmp_path / "p.jsonl"
    bad = [
        "{",
        '{"prompt": "a", "max_tokens": 0}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"prompt": "a", "len": 5, "max_tokens": 6}',
    ]
    path.write_text(
        "\n".join(['{"prompt": "right"}', *bad, '{"prompt": "a", "temperature": "warm"}'])
    )
    with refused() as raised:
        Batch(path, tmp_path / "out", {})
    assert raised.value.field == "prompts"
    for told in (
        "line 2 of p.jsonl is not JSON",
        "line 3 of p.jsonl: max_tokens must be at least 1, got 0",
        "line 4 of p.jsonl has messages, which need --chat",
        "line 5 of p.jsonl: len and max_tokens are both given",
        "line 6 of p.jsonl: temperature must be a number, got 'warm'",
    ):
        assert told in raised.value.message
    assert not (tmp_path / "out").exists()


@every_row(
    ("line", "told"),
    [
        (
            b'{"prompt": "a", "n": 2, "temprature": 0.1}',
            "line 2 of p.jsonl: nothing reads 'n', 'temprature'; did you mean temperature?",
        ),
        (b'{"prompt": "a", "text": "b"}', "nothing reads 'text'"),
        (b'{"question": "a", "input": "b"}', "nothing reads 'input'"),
        (b'{"prompt": "a", "id": "x"}', "line 2 of p.jsonl has the id of line 1 of p.jsonl"),
        (b'{"prompt": "a\xff"}', "line 2 of p.jsonl is not UTF-8 text"),
        (b'{"prompt": "a", "id": "\\ud800"}', "line 2 of p.jsonl is not UTF-8 text"),
        (b'{"prompt": "a\\u0000"}', "line 2 of p.jsonl is not text: it has NUL bytes"),
        (
            b'{"messages": [{"role": "system", "content": "\\u0000"},'
            b' {"role": "user", "content": "a"}]}',
            "line 2 of p.jsonl is not text: it has NUL bytes",
        ),
        (b'{"prompt": "a", "stop": "\\u0000"}', "line 2 of p.jsonl: stop a string is not text"),
        (b'{"prompt": "a", "seed": 1, "seed": 2}', "a name stands twice"),
        (
            b'{"prompt": "a", "max_completion_tokens": 5, "max_tokens": 6}',
            "max_completion_tokens and max_tokens are both given, and differ",
        ),
    ],
)
def test_a_line_that_is_none_is_named(line, told, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "right", "id": "x", "seed": null}\n' + line)
    with refused() as raised:
        Batch(path, tmp_path / "out", {})
    assert told in raised.value.message
    assert not (tmp_path / "out").exists()


def test_fields_are_those_of_the_server(tmp_path):
    own = {
        "max_completion_tokens": 4,
        "max_tokens": 4,
        "stop": "a",
        "stop_at_eos": True,
        "stop_on_loop": 3,
        "logit_bias": {"5": 1},
    }
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", **own}))
    served = parse({**own, "prompt": "a", "seed": 0}, False, {}, "demo").config
    (task,) = Batch(tmp_path / "p.jsonl", tmp_path / "out", {}).tasks
    assert task.config.recorded()["sampling"] == {"logit_bias": {5: 1.0}}
    for each in ("text", "stop", "stop_at_eos", "stop_on_loop", "sampling"):
        assert getattr(task.config, each) == getattr(served, each)


def test_texts_that_are_too_long_are_left_out_where_that_is_asked(tswift, words, prompts, tmp_path):
    """Which is told, and known by who goes on; and not the whole job refused."""
    prompts.write_text(prompts.read_text() + "\n" + json.dumps({"text": "becalmed " * 4000}))
    out = tmp_path / "out"
    told = "prompts/5 has "
    tswift(words, out).refused(told, "the model has 4,096 positions; --skip-too-long leaves")
    made = tswift(words, out, "--skip-too-long").ok()
    assert f"1 texts are skipped: {told}" in made.err
    *whole, skipped = lines_of((out / OUT).read_bytes())
    assert [line["id"] for line in whole] == ["sea", "2", "3", "4"]
    assert (skipped["tokens"], skipped["text"]) == (0, "")
    assert skipped["prompt_tokens"] > 4096
    assert skipped["end"] == {"reason": "too long"}
    again = tswift(f"generate --resume {out}").ok()
    assert (again.out, "skipped" in again.err) == (b"", False)
    assert "  skipped " in tswift(f"runs {out}").ok().out.decode()


@pytest.mark.parametrize(("where", "width"), [("text", 1), ("text", 3), ("folder", 3)])
def test_a_full_disk_is_told_with_what_goes_on_with_all(
    where, width, tswift, words, tmp_path, monkeypatch
):
    """Texts that are made beside the one that fails are made to their ends."""

    def full(self, *_, **__):
        if self.path.name == "000003":
            raise SaveFailed(f"{self.path} is full")
        return real(self, *_, **__)

    def unmade(path, *_):
        if path.name == "000003":
            raise unwritable(path, OSError(28, "No space left on device"))
        return made(path, *_)

    real, made = RunFolder.checkpoint, RunFolder.create
    if where == "text":
        monkeypatch.setattr(RunFolder, "checkpoint", full)
    else:
        monkeypatch.setattr(RunFolder, "create", unmade)
    out = tmp_path / "out"
    found = tswift(words, out, f"--shard 1/1 --exact --parallel {width}")
    again = f"tswift generate --resume {out} --shard 1/1"
    first, last = found.err.splitlines()
    assert found.code == (1 if where == "text" else 2)
    made = 3 if (where, width) == ("text", 3) else 2
    assert first == f"tswift: {made} texts were made, {again} makes the rest"
    assert "000003" in last
    assert "--resume" not in last.replace(again, "")


def test_chats(tiny, tmp_path):
    """A line's messages, up to what its user says last; a text is one message.

    A system prompt gives way to its own.
    """
    path = tmp_path / "p.jsonl"
    said = [
        {"role": role, "content": role[0]}
        for role in ("system", "user", "assistant", "user", "assistant")
    ]
    path.write_text(json.dumps({"messages": said}) + '\n{"turns": ["one", "two"]}')
    (tmp_path / "system.txt").write_text("be kind")
    asked: list[list[dict[str, str]]] = []

    class Tokenizer:
        chat_template = "there is one"

        def apply_chat_template(self, messages, **_):
            asked.append([*messages])
            return " ".join(each["content"] for each in messages)

    class Model(LoadedModel):
        def encode(self, text, bare=False):
            assert bare
            return [len(text)]

    batch = Batch(path, tmp_path / "out", {"chat": True, "system": str(tmp_path / "system.txt")})
    model = Model("m", Tokenizer(), None, None, ())
    assert [batch._ids(task, model) for task in batch.tasks] == [[7], [11]]
    assert asked[0] == said[:4]
    assert asked[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
    ]


def test_a_worker_loads_its_model_once(prompts, tmp_path, monkeypatch):
    """It asks for some texts at a time."""
    loads = []
    right = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda wanted: loads.append(1) or right(wanted))
    batch = Batch(prompts, tmp_path / "out", {"length": 2})
    batch.claim()
    with Signals() as signals:
        lines: list[str] = []
        for task in batch.tasks[:2]:
            batch.make([task], [], signals, lambda task, line: lines.append(line))
    assert (len(lines), len(loads)) == (2, 1)


def test_what_prompts_begin_with_is_forwarded_once(tswift, checkpoint, tmp_path):
    header = "The ship had lain three days becalmed. " * 8
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": header + more}) for more in ("A", "Bc", "")))
    words = f"generate --model {checkpoint} --dtype bfloat16 --len 9 --method ar --quiet"
    out = tmp_path / "out"
    made = lines_of(tswift(words, "--prompts", path, "--out", out).ok().out)
    copied = [read_record(out / line["folder"]).figures["prefill_copied"] for line in made]
    assert copied[0] == 0
    assert min(copied[1:]) > 64
    for line, more in zip(made, ("A", "Bc", ""), strict=True):
        alone = tswift(words, "--prompt-text", header + more, "--out", tmp_path / line["folder"])
        assert line["text"].encode() == alone.out
        assert tswift("verify", out / line["folder"]).code == 0


def test_a_folder_keeps_to_its_file_and_options(prompts, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        Batch(prompts, out, {"length": 5, "out": out}).claim()
    assert [task.config.text.length for task in reopen(out).tasks] == [5, 9, 5, 5]
    with refused("was made with 5, got 6; it keeps its options"):
        Batch(prompts, out, {"length": 6, "out": out}).claim()
    prompts.write_text(prompts.read_text().replace("late", "early"))
    with refused("is not the file that"):
        Batch(prompts, out, {"length": 5, "out": out}).claim()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    with refused("is not empty"):
        Batch(prompts, tmp_path / "other", {}).claim()
