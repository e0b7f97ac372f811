"""The paper's settings by name, and what wins over them."""

from __future__ import annotations

import csv
from types import SimpleNamespace

from tests.rows import every_row
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import METHODS
from tswift.jobs.config import PRESETS, RunConfig, banned_ids, preset_note
from tswift.models.shapes import SHAPES

TABLE_10 = """\
model,ngram_k,temperature,top_p,min_p,penalty,penalty_window
LLaMA3.1-8b,20,1.0,,0.1,1.2,1024
YaRN-LLaMA2-7b-128k,20,1.0,0.9,,1.15,1024
Qwen2.5-1.5b,20,1.0,0.9,,1.15,1024
Qwen2.5-7b,20,1.0,,0.05,1.15,1024
Qwen2.5-14b,20,1.0,,0.05,1.13,1024
"""


def test_presets_are_table_10() -> None:
    rows = {row["model"].lower(): row for row in csv.DictReader(TABLE_10.splitlines())}
    assert list(rows) == list(PRESETS)
    assert rows.keys() <= SHAPES.keys()
    for name, row in rows.items():
        config = RunConfig.of(preset=name, method="tokenswift", prompt="x")
        assert config.model == PRESETS[name]["model"]
        assert config.params() == SamplingParams(
            temperature=float(row["temperature"]),
            top_p=float(row["top_p"] or 1),
            min_p=float(row["min_p"] or 0),
            penalty=float(row["penalty"]),
            window=int(row["penalty_window"]),
        )
        assert config.drafting == {"ngrams": int(row["ngram_k"]), "tree": (1, 3, 3, 3)}


@every_row("method", [name for name, method in METHODS.items() if not (method.draft or method.networks)])
def test_a_method_gets_what_it_uses(method: str) -> None:
    drafting = RunConfig.of(preset="llama3.1-8b", method=method, prompt="x").drafting  # which refuses what is not used
    tree = {"tokenswift": (1, 3, 3, 3), "medusa": (3, 3, 3)}.get(method)
    assert drafting.get("tree") == tree
    assert drafting.get("ngrams") == (20 if method in ("tokenswift", "reuse") else None)


def test_what_was_typed_wins() -> None:
    plain = RunConfig.of(preset="llama3.1-8b", method="tokenswift", prompt="x")
    typed = {"model": "demo", "min_p": 0.02, "window": 1024, "eta": 0.1, "nodes": 20}
    config = RunConfig.of(preset="llama3.1-8b", method="tokenswift", **typed)
    assert config.model == "demo"
    assert config.sampling == {**plain.sampling, "min_p": 0.02, "eta": 0.1}
    assert config.drafting == {"ngrams": 20, "tree": (1, 3, 3, 3), "nodes": 20}
    for typed, drafting in (
        ({"method": "medusa", "tree": (2, 2)}, {"tree": (2, 2)}),
        ({"gamma": 2}, {"ngrams": 20, "gamma": 2}),
        ({"tree": "auto"}, {"tree": "auto"}),
        ({"tree": "auto", "recall": 0}, {"ngrams": 20, "tree": "auto", "recall": 0}),
    ):
        typed = {"method": "tokenswift", **typed}
        assert RunConfig.of(preset="llama3.1-8b", prompt="x", **typed).drafting == drafting


def test_ids_are_banned_only_where_they_mean_what_they_should() -> None:
    texts = {18_328: " assistant", 78_191: "assistant"}
    right = SimpleNamespace(decode=lambda ids: texts[ids[0]])
    assert banned_ids("llama3.1-8b", right, 128_256) == (18_328, 78_191)
    assert banned_ids("llama3.1-8b", right, 50_000) == ()
    assert banned_ids("qwen2.5-7b", right, 128_256) == ()
    texts[78_191] = "!"
    assert banned_ids("llama3.1-8b", right, 128_256) == ()
    assert preset_note("llama3.1-8b", (18_328, 78_191)) == "preset llama3.1-8b; never drawn: 18328, 78191"
    assert preset_note("llama3.1-8b", ()).startswith("preset llama3.1-8b; its banned ids mean something else")
    assert preset_note("qwen2.5-7b", ()) == "preset qwen2.5-7b"
