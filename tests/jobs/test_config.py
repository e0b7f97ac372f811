"""A run's options: what is refused before anything is read, presets,
and what is loaded for which method.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import refused
from tests.rows import every_row
from tswift.drafting.options import METHODS, NGRAMS, DraftOptions, parse_tree
from tswift.jobs.config import PRESETS, RunConfig, banned_ids, preset_note, to_load
from tswift.models.checkpoint import SHAPES
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams

HUGE = 10**40
ENDS: list[dict[str, Any]] = [
    {"stop_at_eos": True},
    {"stop": ("x",)},
    {"stop_token_ids": (5,)},
    {"chat": True},
]
VALUES: dict[str, Any] = {
    **{
        "tree": (1, 2),
        "gamma": 2,
        "nodes": 8,
        "ngrams": 8,
        "budget": 64,
        "sinks": 4,
        "reuse_recent": True,
    },
    **{
        "shared_noise": False,
        "heads": "x",
        "draft_model": "x",
        "kv": "dynamic",
    },
    **{"costs": "nominal", "recall": 5, "inner_gamma": 3},
}
# by method (and what else is typed): options that it does not use
UNUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ar": ({}, "tree gamma nodes ngrams budget sinks reuse_recent shared_noise heads draft_model"),
    "medusa": ({"tree": (1, 1)}, "budget sinks ngrams kv reuse_recent recall costs"),
    "magicdec": ({}, "nodes inner_gamma tree"),
    "reuse": ({}, "tree recall gamma budget shared_noise heads costs"),
    "recall": ({}, "ngrams tree"),
    "cascade": ({}, "ngrams tree"),
    "tokenswift": ({"tree": "auto"}, "ngrams reuse_recent"),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # one option
    ({"length": 0}, "length: must be at least 1, got 0"),
    ({"length": HUGE}, "length: must be at most 1,099,511,627,776"),
    ({"prefill": 0}, "prefill: must be at least 1, got 0"),
    *(
        ({"temperature": value}, "temperature: ")
        for value in (-1.0, float("nan"), float("inf"), 1e-320, 1e200)
    ),
    ({"top_k": -1}, "top_k: must be at least 0, got -1"),
    ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0"),
    ({"top_p": 1.0001}, "top_p: must be above 0 and at most 1"),
    ({"min_p": 2.0}, "min_p: must be between 0 and 1, got 2.0"),
    ({"eta": -0.5}, "eta: must be at least 0 and below 1, got -0.5"),
    ({"eta": 1.0}, "eta: must be at least 0 and below 1, got 1.0"),
    ({"penalty": 0.5}, "penalty: must be at least 1, got 0.5"),
    ({"penalty": 1e300}, "penalty: "),
    ({"window": -1}, "window: must be at least 0, got -1"),
    ({"window": 1_099_511_627_777}, "window: must be at most"),
    (
        {"method": "nope"},
        "method: no method 'nope'; there are ar, medusa, tokenswift, cascade, recall, reuse",
    ),
    ({"tree": (1, 0)}, "tree: wants auto, or numbers above 0"),
    ({"tree": (200, 200)}, "tree: "),
    ({"gamma": -1}, "gamma: must be "),
    ({"method": "magicdec", "gamma": 1001}, "gamma: "),
    ({"method": "triforce", "inner_gamma": 0}, "inner_gamma: must be "),
    ({"nodes": 1}, "nodes: must be at least 2, got 1"),
    ({"nodes": HUGE}, "nodes: must be at most"),
    ({"ngrams": -1}, "ngrams: must be at least 0, got -1"),
    ({"tree": "auto", "recall": -1}, "recall: must be "),
    ({"tree": "auto", "costs": "nope"}, "costs: must be one of "),
    ({"kv": "none"}, "kv: must be one of "),
    ({"budget": 63}, "budget: must be at least 64, got 63"),
    ({"sinks": -1}, "sinks: must be at least 0, got -1"),
    (
        {"attention": "eager"},
        "attention: no attention 'eager'; there are auto, sdpa, native, triton, flash",
    ),
    (
        {"model": "shape:qwen2.5-14b"},
        "model: shape:qwen2.5-14b has random weights: its text says nothing",
    ),
    ({"preset": "demo"}, "preset: no preset 'demo'"),
    # several
    ({"tree": (1, 2), "gamma": 2}, "gamma: cannot be given together with tree"),
    ({"budget": 64, "sinks": 17}, "sinks: "),
    ({"prompt": "x", "prompt_text": "y"}, "prompt_text: cannot be given together with "),
    ({"system": "s.txt"}, "system: goes with --chat"),
    ({"chat": True}, "chat: needs --prompt"),
    ({"chat": True, "prompt": "-", "system": "-"}, "system: cannot be standard input"),
    ({"chat": True, "prompt": "p", "prefill": 3}, "prefill: cannot be given together with --chat"),
    ({"stop": ("a", "b\udcff")}, "stop: a string is not text: it is not UTF-8"),
    ({"stop_on_loop": 10_001}, "stop_on_loop: must be between 1 and 10,000"),
    ({"method": "ar-reference", "exact": True}, "exact: cannot be had with ar-reference"),
    ({"kv": "full", "sinks": 4}, "sinks: tokenswift does not "),
    *(
        ({"method": method, **others, name: VALUES[name]}, f"{name}: {method} does not ")
        for method, (others, names) in UNUSED.items()
        for name in names.split()
    ),
]


@every_row(("options", "message"), REFUSED)
def test_refused(options, message):
    with refused(f"^{re.escape(message)}") as caught:
        RunConfig.of(**{"method": "tokenswift", **options})
    assert "\n" not in str(caught.value)


@every_row("text", ["", ",", "1,,2", "1,", "abc", "1.5", "1 2"])
def test_no_tree(text):
    with refused(r"^tree: wants auto, or numbers and commas, such as 1,3,3,3, got "):
        parse_tree(text)


@every_row(
    "options",
    [
        {},
        {"chat": True, "prompt": "p", "system": "s"},
        {"method": "ar", "prefill": 3, "seed": -(2**70)},
        {"tree": "auto", "recall": 0, "ngrams": 3},
        {"method": "cascade", "gamma": 3, "kv": "dynamic", "budget": 64},
        {"method": "medusa", "min_p": 0.2, "nodes": 16},
    ],
)
def test_right(options):
    config = RunConfig.of(**{"method": "tokenswift", **options})
    recorded = config.recorded()
    assert {
        name: {**recorded, **recorded["sampling"], **recorded["drafting"]}[name] for name in options
    } == options
    assert config.sampling == SamplingParams(**recorded["sampling"])
    assert config.drafting == DraftOptions(**recorded["drafting"])


@every_row(
    ("methods", "asked", "found"),
    [
        ("ar tokenswift", {}, {"draft_model": None, "drafter": None}),
        ("ar standalone", {}, {"draft_model": "demo-draft"}),
        ("standalone", {"model": "theirs", "draft_model": "mine"}, {"draft_model": "mine"}),
        (
            "ar standalone",
            {"model": "theirs"},
            "draft_model: is required: standalone drafts with a smaller model ",
        ),
        (
            "tokenswift",
            {"draft_model": "x"},
            "draft_model: tokenswift does not use it; standalone, triforce, auto do",
        ),
        (
            "ar reuse",
            {"draft_model": "x"},
            "draft_model: none of ar, reuse uses it; standalone, triforce, auto do",
        ),
        (
            "ar block",
            {},
            "drafter: is required: block drafts with a drafter (dspark or dflash or dflash2)",
        ),
        ("mtp", {}, {"drafter": None}),  # it is the model's own
        ("mtp", {"drafter": "x"}, "drafter: mtp does not use it; block, eagle, auto do"),
        ("ar", {"drafter": "x"}, "drafter: ar does not use it; "),
        ("ar reuse", {"heads": "x"}, "heads: none of ar, reuse uses it; medusa, tokenswift, "),
        ("ar", {"heads": "none"}, {"heads": "none"}),
    ],
)
def test_what_is_loaded_for_methods(methods, asked, found):
    config = ModelConfig(**asked)
    if isinstance(found, dict):
        loaded = to_load(config, methods.split())
        assert {name: getattr(loaded, name) for name in found} == found
    else:
        with refused(f"^{re.escape(found)}"):
            to_load(config, methods.split())


@every_row("name", ["length", "method", "seed", "stop_at_eos", "heads"])
def test_a_record_without_what_all_versions_wrote_is_none(name):
    asked = {"method": "tokenswift", "length": 7, "seed": 3, "stop": ("a", "b")}
    options = RunConfig.of(prompt="p", **asked).recorded()
    loaded = {"name": "x", "device": "cpu", "dtype": "float32", "attention": "native"}
    found = RunConfig.from_record({**options, "stop": ["a", "b"]}, loaded, {"tree": [1, 2]})
    assert (found.text.length, found.text.seed, found.stop) == (7, 3, ("a", "b"))
    assert (found.model.model, found.model.attention, found.drafting.tree) == ("x", "auto", (1, 2))
    del options[name]
    with pytest.raises(KeyError, match=name):
        RunConfig.from_record(options, loaded, {})


def test_a_recorded_loop_is_meant_as_it_was_when_the_run_was_made():
    """Of exactly so many tokens, before it was of up to so many."""
    options = RunConfig.of(prompt="p", stop_on_loop=9).recorded()
    loaded = {"name": "x", "device": "cpu", "dtype": "float32", "attention": "native"}
    for least in (1, 9):
        found = RunConfig.from_record(options, loaded, {}).text_rules
        assert (found.loop, found.least_loop) == (9, least)
        options.pop("least_loop", None)


@every_row(
    ("options", "named"),
    [
        ({"temperature": 0.0, "top_k": 5, "min_p": 0.2}, "--top-k, --min-p"),
        ({"penalty": 1.0, "window": 100}, "--window"),
        ({"min_tokens": 20, "length": 9}, "--min-tokens"),
        ({"include_stop_str_in_output": True}, "--include-stop-str-in-output"),
        ({"temperature": 0.0, "min_tokens": 2, "window": 9}, "--window, --min-tokens"),
        *(({**ends, "min_tokens": 2, "include_stop_str_in_output": True}, None) for ends in ENDS),
        ({"window": 9, "top_k": 5, "temperature": 0.5}, None),
        ({"temperature": 0.0}, None),
    ],
)
def test_what_is_given_and_changes_nothing_is_told(options, named):
    config = RunConfig.of(prompt="p", **options)
    assert config.idle(config.sampling) == ([f"without effect here: {named}"] if named else [])


# --- presets

TABLE_10 = """\
model,ngram_k,temperature,top_p,min_p,penalty,penalty_window
LLaMA3.1-8b,20,1.0,,0.1,1.2,1024
YaRN-LLaMA2-7b-128k,20,1.0,0.9,,1.15,1024
Qwen2.5-1.5b,20,1.0,0.9,,1.15,1024
Qwen2.5-7b,20,1.0,,0.05,1.15,1024
Qwen2.5-14b,20,1.0,,0.05,1.13,1024
"""


def test_presets_are_table_10():
    rows = {row["model"].lower(): row for row in csv.DictReader(TABLE_10.splitlines())}
    assert list(rows) == list(PRESETS)
    assert rows.keys() <= SHAPES.keys()
    for name, row in rows.items():
        config = RunConfig.of(preset=name, prompt="x")
        assert (config.model.model, config.method) == (PRESETS[name]["model"], "tokenswift")
        assert config.sampling == SamplingParams(
            temperature=float(row["temperature"]),
            top_p=float(row["top_p"] or 1),
            min_p=float(row["min_p"] or 0),
            penalty=float(row["penalty"]),
            window=int(row["penalty_window"]),
        )
        assert config.recorded()["drafting"] == {"tree": (1, 3, 3, 3)}
        assert int(row["ngram_k"]) == NGRAMS  # the default


@every_row(
    "method",
    [
        name
        for name, method in METHODS.items()
        if not ("draft_model" in method.needs or method.speculator_kinds)
    ],
)
def test_a_method_gets_what_it_uses_of_a_preset(method):
    # which refuses what is not used
    config = RunConfig.of(preset="llama3.1-8b", method=method, prompt="x")
    drafting = config.recorded()["drafting"]
    tree = {"tokenswift": (1, 3, 3, 3), "medusa": (3, 3, 3)}.get(method)
    assert drafting.get("tree") == tree


@every_row(
    ("typed", "drafting"),
    [
        ({"min_p": 0.02, "eta": 0.1, "nodes": 20}, {"tree": (1, 3, 3, 3), "nodes": 20}),
        ({"method": "medusa", "tree": (2, 2)}, {"tree": (2, 2)}),
        ({"gamma": 2}, {"gamma": 2}),
        ({"tree": "auto"}, {"tree": "auto"}),
        ({"tree": "auto", "recall": 0}, {"tree": "auto", "recall": 0}),
    ],
)
def test_what_was_typed_wins(typed, drafting):
    plain = RunConfig.of(preset="llama3.1-8b", prompt="x")
    config = RunConfig.of(preset="llama3.1-8b", model="demo", **typed)
    assert (config.model.model, config.recorded()["drafting"]) == ("demo", drafting)
    sampling = {name: typed[name] for name in ("min_p", "eta") if name in typed}
    assert config.sampling == replace(plain.sampling, **sampling)


def test_ids_are_banned_only_where_they_mean_what_they_should():
    texts = {18_328: " assistant", 78_191: "assistant"}
    right = SimpleNamespace(decode=lambda ids: texts[ids[0]])
    assert banned_ids("llama3.1-8b", right, 128_256) == (18_328, 78_191)
    assert banned_ids("llama3.1-8b", right, 50_000) == ()
    assert banned_ids("qwen2.5-7b", right, 128_256) == ()
    texts[78_191] = "!"
    assert banned_ids("llama3.1-8b", right, 128_256) == ()
    assert (
        preset_note("llama3.1-8b", (18_328, 78_191))
        == "preset llama3.1-8b; never drawn: 18328, 78191"
    )
    assert preset_note("llama3.1-8b", ()).startswith(
        "preset llama3.1-8b; its banned ids mean something else"
    )
    assert preset_note("qwen2.5-7b", ()) == "preset qwen2.5-7b"
