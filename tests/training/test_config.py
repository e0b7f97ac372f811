"""Settings: the paper's defaults, the range of every field, and what a resumed training may change."""

from __future__ import annotations

import csv
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tswift.errors import InputError
from tswift.models.config import DEMO as BUNDLED
from tswift.models.heads import HEAD_TYPES
from tswift.models.shapes import skeleton
from tswift.training.config import DEMO, SHAPES, DraftConfig, HeadsConfig, TrainConfig


def test_the_defaults_are_those_of_table_9() -> None:
    config = HeadsConfig("anywhere")
    assert (config.heads_count, config.seq_len, config.batch, config.accumulate, config.last_step) == (
        3,
        8192,
        3,
        10,
        200,
    )
    assert (config.lr, config.warmup, config.weight_decay) == (5e-3, 50, 0.1)
    assert config.step_tokens == 3 * 10 * 8192


def test_the_shape_of_table_11() -> None:
    """Its rows, as the paper's appendix has them, and the number in its title."""
    table = """hidden_size,768
hidden_act,silu
intermediate_size,3072
max_position_embeddings,2048
num_attention_heads,12
num_key_value_heads,12
rope_theta,500000
vocab_size,128256"""
    config = LlamaConfig(**SHAPES["205m"])
    for key, value in csv.reader(table.splitlines()):
        found = config.rope_parameters[key] if key == "rope_theta" else getattr(config, key)
        assert found == (value if key == "hidden_act" else int(value)), key
    assert sum(weight.numel() for weight in skeleton(config).parameters()) == 215_879_424
    assert 215_879_424 >> 20 == 205
    assert 450_000 < sum(w.numel() for w in skeleton(LlamaConfig(**SHAPES["demo"])).parameters()) < 550_000


def test_names_that_are_written_without_importing_torch() -> None:
    kinds = next(each.metadata["bounds"]["choices"] for each in fields(HeadsConfig) if each.name == "kind")
    assert (sorted(kinds), DEMO) == (sorted(HEAD_TYPES), BUNDLED)


@pytest.mark.parametrize("kind", [HeadsConfig, DraftConfig])
def test_every_field_is_held_to_its_range(kind: type[TrainConfig]) -> None:
    for each in fields(kind):
        rule, bad, fine = {"choices": (), **each.metadata["bounds"]}, [], []
        if rule["choices"]:
            bad, fine = ["odd", ""], rule["choices"]
        if "above" in rule:
            bad, fine = [rule["above"], -1.0, math.nan, math.inf], [1e-9]
        if "least" in rule:
            number = type(each.default) if each.default is not None else int
            bad = [number(rule["least"] - 1), *([math.nan, math.inf] if number is float else [])]
        if "most" in rule:
            bad.append(rule["most"] + 1)
        for value in bad:
            with pytest.raises(InputError, match=rf"^{each.name}: .*, got "):
                kind("x", **{each.name: value})
        for value in fine:
            assert getattr(kind("x", **{each.name: value}), each.name) == value


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: HeadsConfig("x", seq_len=4), "seq_len: must be at least 5, got 4"),
        (lambda: HeadsConfig("x", heads_count=0), "heads_count: must be at least 1, got 0"),
        (lambda: HeadsConfig("x", seed=2**63), "seed: must be at most 9223372036854775807, got"),
        (lambda: HeadsConfig("x", documents=1), "documents: must be at least 2, got 1"),
        (lambda: HeadsConfig("x", warmup=-1), "warmup: must be at least 0, got -1"),
        (lambda: HeadsConfig("x", lr=0.0), "lr: must be a number above 0, got 0.0"),
        (lambda: HeadsConfig("x", minutes=math.nan), "minutes: must be a number above 0, got nan"),
        (lambda: HeadsConfig("x", weight_decay=math.inf), "weight_decay: must be a number >= 0, got inf"),
        (
            lambda: HeadsConfig("x", dtype="float16"),
            "dtype: is one of auto, float32, float64, bfloat16, got 'float16'",
        ),
        (lambda: HeadsConfig("x", steps=1, minutes=1.0), "minutes: cannot be given together with --steps"),
        (lambda: HeadsConfig("x", model="shape:llama3.1-8b"), "model: shape:llama3.1-8b has random weights"),
        (lambda: DraftConfig("x", batch=(1 << 20) + 1), "batch: must be at most 1048576, got"),
        (lambda: DraftConfig("x", reach=1), "reach: must be at least 2, got 1"),
        (lambda: DraftConfig("x", reach=1 << 40), "reach: must be at most 16777216, got"),
        (lambda: DraftConfig("x", seq_len=1), "seq_len: must be at least 2, got 1"),
        (lambda: DraftConfig("x", shape="205m", seq_len=4096), "seq_len: is 4,096, the draft model is to have 2,048"),
    ],
)
def test_what_is_refused(config, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError) as caught:
        config()
    assert str(caught.value).startswith(message)


def test_resolved_settings_hold_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    config = HeadsConfig("books").resolved()
    assert (config.corpus, config.model, config.steps) == (str(tmp_path / "books"), "demo", 200)
    assert config.resolved() == config
    assert HeadsConfig("emozilla/pg19", minutes=2).resolved() == HeadsConfig("emozilla/pg19", minutes=2)


def test_only_what_changes_no_weight_may_be_another(tmp_path: Path) -> None:
    config = HeadsConfig(str(tmp_path)).resolved()
    free = {
        "device": "cpu",
        "save_minutes": 1.0,
        "alpha_tokens": 9,
        "eval_every": 0,
        "save_every": 3,
        "attention": "sdpa",
    }
    assert config.resumed(free | {"lr": 5e-3, "steps": 200}, tmp_path) == replace(config, **free)
    fixed = {"lr": 0.5, "steps": 7, "minutes": 1.0, "kind": "chained", "batch": 3_000, "seed": 1, "held_out": 2}
    fixed |= {"dtype": "float64", "seq_len": 9, "accumulate": 3, "warmup": 1, "weight_decay": 0.0, "documents": 9}
    for name, value in (fixed | {"objective": "distill", "heads_count": 2}).items():
        began = "nothing" if getattr(config, name) is None else getattr(config, name)
        message = rf"^{name}: the training in .* was begun with {began}, got {value}$"
        with pytest.raises(InputError, match=message):
            config.resumed({name: value}, tmp_path)
    with pytest.raises(InputError, match=r"^lr: must be a number above 0, got -1$"):
        config.resumed({"lr": -1}, tmp_path)
