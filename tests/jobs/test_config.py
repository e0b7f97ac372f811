"""Values of a run's options that are out of range, or do not go together: refused before anything is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.rows import every_row
from tswift.drafting.options import parse_tree
from tswift.errors import InputError
from tswift.jobs.config import RunConfig, loading
from tswift.models.config import ModelConfig

HUGE = 10**40
AUTO: dict[str, Any] = {"tree": "auto"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # one option
    ({"length": 0}, "length: must be at least 1, got 0"),
    ({"length": HUGE}, "length: must be at most 1,099,511,627,776"),
    ({"prefill": 0}, "prefill: must be at least 1, got 0"),
    ({"temperature": -1.0}, "temperature: must be at least 0, got -1.0"),
    ({"temperature": float("nan")}, "temperature: must be at least 0, got nan"),
    ({"temperature": float("inf")}, "temperature: must be "),
    ({"temperature": 1e-320}, "temperature: "),
    ({"temperature": 1e200}, "temperature: "),
    ({"top_k": -1}, "top_k: must be at least 0, got -1"),
    ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0"),
    ({"top_p": 1.0001}, "top_p: must be above 0 and at most 1"),
    ({"min_p": 2.0}, "min_p: must be between 0 and 1, got 2.0"),
    ({"min_p": -0.1}, "min_p: must be between 0 and 1, got -0.1"),
    ({"eta": -0.5}, "eta: must be at least 0 and below 1, got -0.5"),
    ({"eta": 1.0}, "eta: must be at least 0 and below 1, got 1.0"),
    ({"penalty": 0.5}, "penalty: must be at least 1, got 0.5"),
    ({"penalty": 1e300}, "penalty: "),
    ({"window": -1}, "window: must be at least 0, got -1"),
    ({"window": 1_099_511_627_777}, "window: must be at most"),
    ({"method": "nope"}, "method: no method 'nope'; there are ar, medusa, tokenswift, cascade, recall, reuse"),
    ({"method": "AR"}, "method: no method 'AR'"),
    ({"tree": (1, 0)}, "tree: wants auto, or numbers above 0"),
    ({"tree": (200, 200)}, "tree: "),
    ({"gamma": -1}, "gamma: must be "),
    ({"method": "triforce", "inner_gamma": 0}, "inner_gamma: must be "),
    ({"nodes": 1}, "nodes: must be at least 2, got 1"),
    ({"nodes": HUGE}, "nodes: must be at most"),
    ({"ngrams": -1}, "ngrams: must be at least 0, got -1"),
    ({**AUTO, "recall": -1}, "recall: must be "),
    ({**AUTO, "costs": "nope"}, "costs: must be one of "),
    ({"kv": "none"}, "kv: must be one of "),
    ({"budget": 63}, "budget: must be at least 64, got 63"),
    ({"budget": HUGE}, "budget: must be at most"),
    ({"sinks": -1}, "sinks: must be at least 0, got -1"),
    ({"quantize": "int2"}, "quantize: "),
    ({"draft_weights": "int2"}, "draft_weights: "),
    ({"attention": "eager"}, "attention: no attention 'eager'; there are auto, sdpa, native, triton, flash"),
    ({"model": "shape:qwen2.5-14b"}, "model: shape:qwen2.5-14b has random weights: its text says nothing"),
    ({"preset": "demo"}, "preset: no preset 'demo'"),
    # several
    ({"tree": (1, 2), "gamma": 2}, "gamma: cannot be given together with tree"),
    ({"budget": 64, "sinks": 17}, "sinks: "),
    ({"prompt": "x", "prompt_text": "y"}, "prompt_text: cannot be given together with "),
    ({"system": "s.txt"}, "system: goes with --chat"),
    ({"chat": True}, "chat: wants a --prompt"),
    ({"chat": True, "prompt": "-", "system": "-"}, "system: cannot be standard input"),
    ({"chat": True, "prompt": "p", "prefill": 3}, "prefill: cannot be given together with --chat"),
    ({"method": "ar-reference", "exact": True}, "exact: cannot be had with ar-reference"),
    ({"method": "standalone", "model": "x", "prompt": "x"}, "draft_model: names a smaller model with the tokens of x"),
    *(
        ({"method": method, **options}, f"{next(reversed(options))}: {method} does not ")
        for method, several in {
            "ar": [
                *({name: value} for name, value in {"tree": (1, 2), "gamma": 2, "nodes": 8, "ngrams": 8}.items()),
                *({name: value} for name, value in {"budget": 64, "sinks": 4, "reuse_recent": True}.items()),
                *({name: value} for name, value in {"shared_noise": False, "heads": "x", "draft_model": "x"}.items()),
            ],
            "medusa": [
                *({name: value} for name, value in {"budget": 512, "sinks": 4, "ngrams": 3, "kv": "dynamic"}.items()),
                *({name: value} for name, value in {"reuse_recent": False, "draft_weights": "int8"}.items()),
                *({"tree": (1, 1), name: value} for name, value in {"recall": 3, "costs": "nominal"}.items()),
            ],
            "magicdec": [{"nodes": 8}, {"inner_gamma": 2}, {"tree": (1, 2)}],
            "reuse": [
                *({name: value} for name, value in {"tree": (3, 3), "recall": 3, "gamma": 1, "budget": 64}.items()),
                *({name: value} for name, value in {"shared_noise": True, "heads": "x", "costs": "nominal"}.items()),
            ],
            "recall": [{"ngrams": 3}, {"tree": (1, 1)}, {"draft_weights": "int8"}],
            "cascade": [{"ngrams": 3}, {"tree": "auto"}],
            "tokenswift": [
                *({**AUTO, "ngrams": count} for count in (3, 20)),
                *({**AUTO, "recall": 5, "ngrams": 20}, {**AUTO, "reuse_recent": False}, {"kv": "full", "sinks": 4}),
            ],
        }.items()
        for options in several
    ),
    ({"method": "magicdec", "gamma": 1001}, "gamma: "),
]


@every_row(("options", "message"), REFUSED)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as caught:
        RunConfig.of(**{"method": "tokenswift", **options})
    assert "\n" not in str(caught.value)


@every_row("text", ["", ",", "1,,2", "1,", "abc", "1.5", "1 2"])
def test_no_tree(text: str) -> None:
    with pytest.raises(InputError, match=r"^tree: wants auto, or numbers and commas, such as 1,3,3,3, got "):
        parse_tree(text)


@every_row(
    "options",
    [
        {},
        {"chat": True, "prompt": "p", "system": "s"},
        {"method": "ar", "prefill": 3, "seed": -(2**70)},
        {"tree": "auto", "recall": 0, "ngrams": 3},
        {"method": "cascade", "gamma": 3, "kv": "dynamic", "budget": 64},
        {"method": "standalone"},
    ],
)
def test_right(options: dict[str, Any]) -> None:
    config = RunConfig.of(**{"method": "tokenswift", **options})
    recorded = config.as_dict()
    assert {name: {**recorded, **recorded["drafting"]}[name] for name in options} == options


@every_row(
    ("methods", "asked", "found"),
    [
        ("ar tokenswift", {}, {"draft_model": None, "draft_weights": None, "drafter": None}),
        ("ar standalone", {}, {"draft_model": "demo-draft"}),
        ("ar standalone", {"draft_model": "mine"}, {"draft_model": "mine"}),
        ("standalone", {"model": "theirs", "draft_model": "mine"}, {"draft_model": "mine"}),
        ("ar tokenswift", {"draft_weights": "int8"}, {"draft_weights": "int8"}),
        ("cascade", {"draft_weights": "none"}, {"draft_weights": None}),
        (
            "ar standalone",
            {"model": "theirs"},
            "draft_model: names a smaller model with the tokens of theirs, which sta",
        ),
        ("tokenswift", {"draft_model": "x"}, "draft_model: tokenswift does not use it; standalone, triforce, auto do"),
        ("ar reuse", {"draft_model": "x"}, "draft_model: none of ar, reuse uses it; standalone, triforce, auto do"),
        ("ar block", {}, "drafter: names a drafter (dspark or dflash), which block needs"),
        ("ar", {"drafter": "x"}, "drafter: ar does not use it; "),
        *(
            (method, {"draft_weights": "int8"}, f"draft_weights: {method} does not draft with the model itself; ")
            for method in ("ar", "medusa", "reuse", "recall", "standalone", "ar-reference")
        ),
        ("ar medusa", {"draft_weights": "none"}, "draft_weights: none of ar, medusa drafts with the model itself; "),
    ],
)
def test_what_is_loaded_for_methods(methods: str, asked: dict[str, Any], found: Any) -> None:
    config = ModelConfig(**asked)
    if isinstance(found, dict):
        arguments = loading(config, methods.split())
        assert {name: arguments[name] for name in found} == found
    else:
        with pytest.raises(InputError, match=f"^{re.escape(found)}"):
            loading(config, methods.split())
