"""What loads, and the heads that come with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig

from tests.models.loads import changed, refuse
from tswift.errors import InputError
from tswift.models.heads import ConditionedHeads
from tswift.models.loading import load
from tswift.models.source import read_config


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64", "bfloat16"])
def test_loads_a_folder(checkpoint: Path, dtype: str) -> None:
    loaded = load(str(checkpoint), device="cpu", dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert loaded.target.dtype == wanted
    assert loaded.heads is not None
    assert loaded.heads.count == 3
    assert loaded.heads.heads[0].linear.weight.dtype == wanted
    assert loaded.eos_ids == (0,)
    assert loaded.target.max_positions == 4096
    assert loaded.tokenizer.decode(loaded.encode("The ship")) == "The ship"


def test_no_heads_beside_the_model(checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "m")
    (tmp_path / "m" / "heads.safetensors").rename(tmp_path / "elsewhere")
    assert load(model).heads is None
    assert load(model, heads=tmp_path / "elsewhere").heads is not None


def test_heads_by_kind(checkpoint: Path, tmp_path: Path) -> None:
    model = str(shutil.copytree(checkpoint, tmp_path / "m"))
    ConditionedHeads(32, 2).save(tmp_path / "m" / "heads-conditioned.safetensors")
    conditioned, default = load(model, heads="conditioned").heads, load(model).heads
    assert conditioned is not None
    assert (conditioned.kind, conditioned.count) == ("conditioned", 2)
    assert default is not None
    assert default.kind == "chained"
    refuse(model, "there is no file", "heads", heads="chained")


def test_heads_that_are_none(checkpoint: Path, tmp_path: Path) -> None:
    refuse(str(checkpoint), "there is no file", "heads", heads="/nowhere")
    refuse(str(checkpoint), "not a tswift heads file", "heads", heads=str(checkpoint / "model.safetensors"))
    refuse(str(checkpoint), "not a tswift heads file", "heads", heads=str(checkpoint / "config.json"))


def test_rotary_embeddings_of_some_layers_only(tmp_path: Path) -> None:
    """Gemma 3 has them by the type of the layer."""
    ropes = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    Gemma3TextConfig(num_hidden_layers=2, rope_parameters=ropes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="rotary embeddings of type dynamic"):
        read_config(str(tmp_path))


def test_the_bundled_model_is_there() -> None:
    loaded = load("demo", device="cpu")  # fails in one clear line if src/tswift/models/demo is missing
    assert loaded.heads is not None
    assert loaded.target.max_positions == 131_072
