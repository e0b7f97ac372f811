"""The paper's settings by name, and what wins over them."""

from __future__ import annotations

import csv

import pytest

from tswift.decoding.params import SamplingParams
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions, refuse_unused
from tswift.errors import InputError
from tswift.jobs.config import PRESETS, banned_ids, choose, find_preset, remark
from tswift.models.shapes import SHAPES

TABLE_10 = """\
model,ngram_k,temperature,top_p,min_p,penalty,penalty_window
LLaMA3.1-8b,20,1.0,,0.1,1.2,1024
YaRN-LLaMA2-7b-128k,20,1.0,0.9,,1.15,1024
Qwen2.5-1.5b,20,1.0,0.9,,1.15,1024
Qwen2.5-7b,20,1.0,,0.05,1.15,1024
Qwen2.5-14b,20,1.0,,0.05,1.13,1024
"""
LLAMA = PRESETS["llama3.1-8b"]


def test_presets_are_table_10() -> None:
    rows = {row["model"].lower(): row for row in csv.DictReader(TABLE_10.splitlines())}
    assert list(rows) == list(PRESETS) == list(SHAPES)
    for name, row in rows.items():
        params = SamplingParams(**PRESETS[name].sampling)
        assert params == SamplingParams(
            temperature=float(row["temperature"]),
            top_p=float(row["top_p"] or 1),
            min_p=float(row["min_p"] or 0),
            penalty=float(row["penalty"]),
            window=int(row["penalty_window"]),
        )
        assert PRESETS[name].ngrams == int(row["ngram_k"])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_given_what_it_uses(name: str, method: str) -> None:
    drafting = PRESETS[name].drafting(method)
    refuse_unused([method], drafting)
    DraftOptions(**drafting)
    tree = {"tokenswift": (1, 3, 3, 3), "medusa": (3, 3, 3)}.get(method)
    assert drafting.get("tree") == tree
    assert drafting.get("ngrams") == (20 if method in ("tokenswift", "reuse") else None)


def test_what_was_typed_wins() -> None:
    plain = choose("llama3.1-8b", "tokenswift", {}, {})
    assert (plain.model, plain.sampling, plain.instead) == (LLAMA.model, LLAMA.sampling, ())
    typed = choose(
        "llama3.1-8b", "tokenswift", {"min_p": 0.02, "window": 1024, "eta": 0.1}, {"nodes": 20}, model="demo"
    )
    assert typed.model == "demo"
    assert typed.sampling == {**LLAMA.sampling, "min_p": 0.02, "eta": 0.1}
    assert typed.drafting == {"ngrams": 20, "tree": (1, 3, 3, 3), "nodes": 20}
    assert typed.instead == ("model", "min_p", "eta")  # a window of 1,024 is the preset's
    tree = choose("llama3.1-8b", "medusa", {}, {"tree": (2, 2)})
    assert (tree.drafting, tree.instead) == ({"tree": (2, 2)}, ("tree",))
    assert choose("llama3.1-8b", "tokenswift", {}, {"gamma": 2}).drafting == {"ngrams": 20, "gamma": 2}
    auto = choose("llama3.1-8b", "tokenswift", {}, {"tree": "auto"})
    assert auto.drafting == {"tree": "auto"}
    refuse_unused(["tokenswift"], auto.drafting)  # what was not typed is not told to be ignored
    reuses = {"tree": "auto", "recall": 0}
    assert choose("llama3.1-8b", "tokenswift", {}, reuses).drafting == {"ngrams": 20, **reuses}


class Tokenizer:
    def __init__(self, **texts: str) -> None:
        self.texts = texts

    def decode(self, ids: list[int]) -> str:
        return self.texts.get(f"id{ids[0]}", "?")


def test_ids_are_banned_only_where_they_mean_what_they_should() -> None:
    right = Tokenizer(id18328=" assistant", id78191="assistant")
    assert banned_ids("llama3.1-8b", right, 128_256) == (18_328, 78_191)
    assert banned_ids("llama3.1-8b", right, 50_000) == ()
    assert banned_ids("llama3.1-8b", Tokenizer(id18328=" assistant", id78191="!"), 128_256) == ()
    assert banned_ids("qwen2.5-7b", right, 128_256) == ()


def test_what_is_said_of_a_preset() -> None:
    plain, typed = choose("llama3.1-8b", "ar", {}, {}), choose("llama3.1-8b", "ar", {"min_p": 0.2, "top_p": 0.5}, {})
    assert remark("llama3.1-8b", plain.instead, (18_328, 78_191)) == "preset llama3.1-8b; never drawn: 18328, 78191"
    said = remark("llama3.1-8b", typed.instead, ())
    assert said.startswith("preset llama3.1-8b; but for --top-p, --min-p; its banned ids mean something else")
    assert remark("qwen2.5-7b", (), ()) == "preset qwen2.5-7b"


def test_there_is_no_such_preset() -> None:
    with pytest.raises(InputError, match=r"preset: no preset 'gpt'; there are llama3\.1-8b, yarn-"):
        find_preset("gpt")
    with pytest.raises(InputError, match="method: no method"):
        choose("llama3.1-8b", "nope", {}, {})
