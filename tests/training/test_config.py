"""Settings: the paper's defaults, the range of every field,
and what a resumed training may change.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.helpers import refused
from tswift.options import options_of, type_of
from tswift.training.config import HeadsConfig

SCHEDULE = ("seq_len", "batch", "accumulate", "steps", "minutes")


@pytest.mark.parametrize(
    ("typed", "schedule"),
    [
        (None, (8192, 3, 10, 200, None)),  # table 9
        ({}, (1024, 2, 1, None, 5.0)),
        ({"seq_len": 8192, "batch": 3, "steps": 7}, (8192, 3, 1, 7, None)),
        ({"minutes": 1.0}, (1024, 2, 1, None, 1.0)),
    ],
)
def test_defaults_of_a_gpu_and_of_a_cpu(typed, schedule):
    chosen = {} if typed is None else typed | HeadsConfig.cpu_defaults(typed)
    config = HeadsConfig("x", **chosen).resolved()
    assert tuple(getattr(config, name) for name in SCHEDULE) == schedule
    assert config.step_tokens == math.prod(schedule[:3])
    options = {each.name: carried for each, carried in options_of(HeadsConfig)}
    for name, value in HeadsConfig.ON_CPU.items():
        shown = f"{value:,}" if type(value) is int else f"{value:g}"
        assert shown in str(options["steps" if name == "minutes" else name].shown)


def test_every_number_has_a_range_and_every_choice_is_taken():
    for item, carried in options_of(HeadsConfig):
        if type_of(HeadsConfig, item.name) is not str:
            bad = carried.above if carried.least is None else carried.least - 1
            with refused(rf"^{item.name}: must be .*, got "):
                HeadsConfig("x", **{item.name: bad})
        for value in carried.choices:
            assert getattr(HeadsConfig("x", **{item.name: value}), item.name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 2**63}, "seed: must be at most 9,223,372,036,854,775,807, got"),
        (
            {"steps": 1, "minutes": 1.0},
            "minutes: cannot be given together with --steps",
        ),
        (
            {"model": "shape:llama3.1-8b"},
            "model: shape:llama3.1-8b has random weights",
        ),
    ],
)
def test_what_is_refused(values, message):
    with refused(rf"^{re.escape(message)}"):
        HeadsConfig("x", **values)


def test_resolved_settings_hold_in_another_folder(tmp_path, monkeypatch):
    for name in ("books", "demo"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    config = HeadsConfig("books").resolved()
    assert (config.corpus, config.model) == (str(tmp_path / "books"), "demo")
    assert HeadsConfig("emozilla/pg19").resolved().corpus == "emozilla/pg19"


def test_only_what_changes_no_weight_may_be_another(tmp_path):
    config = HeadsConfig(str(tmp_path)).resolved()
    free = {
        "device": "cpu",
        "save_minutes": 1.0,
        "alpha_tokens": 9,
        "eval_every": 0,
        "save_every": 3,
    }
    free |= {"attention": "sdpa", "install": True}
    assert config.resumed(free | {"lr": 5e-3, "steps": 200}, tmp_path) == replace(config, **free)
    fixed = {
        "lr": 0.5,
        "steps": 7,
        "minutes": 1.0,
        "kind": "chained",
        "batch": 3_000,
        "seed": 1,
        "held_out": 2,
    }
    fixed |= {
        "dtype": "float64",
        "seq_len": 9,
        "accumulate": 3,
        "warmup": 1,
        "weight_decay": 0.0,
        "documents": 9,
    }
    fixed |= {"objective": "distill", "heads_count": 2, "draft_vocabulary": 0, "keep_tokens": 5}
    assert {*free, *fixed, "corpus", "model"} == {item.name for item, _ in options_of(HeadsConfig)}
    for name, value in fixed.items():
        began = "none" if getattr(config, name) is None else getattr(config, name)
        says = f"was made with {began}, got {value}; it keeps its options$"
        with refused(rf"^{name}: the training in .* {says}"):
            config.resumed({name: value}, tmp_path)
    with refused(r"^lr: must be above 0, got -1$"):
        config.resumed({"lr": -1}, tmp_path)
