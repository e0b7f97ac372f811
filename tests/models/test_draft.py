"""A small model loaded to draft for another one: what loads, and one line for what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recipes.corpus import train_tokenizer
from tests.conftest import SENTENCES, make_checkpoint
from tswift.errors import InputError
from tswift.models.loading import load


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of ``checkpoint``, half as wide."""
    changes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    folder = make_checkpoint(tmp_path_factory.mktemp("small") / "m", **changes)
    (folder / "heads.safetensors").write_bytes(b"what lies beside a draft model is not looked at")
    return folder


def _refused(checkpoint: Path, draft: str | Path, match: str, option: str = "draft_model", **how: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load(str(checkpoint), draft=str(draft), **how)
    assert caught.value.field == option
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_it_comes_as_the_target_does(checkpoint: Path, small: Path, dtype: str) -> None:
    loaded = load(str(checkpoint), dtype=dtype, device="cpu", attention="sdpa", draft=str(small))
    assert loaded.draft is not None
    assert (loaded.draft.dtype, loaded.draft.device) == (loaded.target.dtype, loaded.target.device)
    assert (loaded.draft.hidden_size, loaded.draft.max_positions) == (16, 64)
    assert loaded.draft._attention is loaded.target._attention
    assert loaded.draft_name == str(small)
    assert loaded.about()["draft"] == {"name": str(small)}


def test_none_is_loaded_unasked(checkpoint: Path) -> None:
    loaded = load(str(checkpoint))
    assert (loaded.draft, loaded.draft_name) == (None, None)
    assert "draft" not in loaded.about()


def test_without_a_tokenizer_the_size_counts(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    loaded = load(str(checkpoint), draft=str(folder))
    assert loaded.draft is not None
    assert loaded.draft.vocab_size == loaded.target.vocab_size


def test_another_number_of_tokens(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", vocab_size=321)
    _refused(checkpoint, folder, "has a vocabulary of 321, .* has 320$")


def test_another_meaning_of_a_token(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small, tmp_path / "m")
    train_tokenizer(["other words, other tokens: zig zag zig zag"] * 9 + SENTENCES, 320).save_pretrained(folder)
    _refused(checkpoint, folder, r"has another vocabulary than .*: '.*' has (no )?id ?\d* there, (no )?id ?\d* here$")


def test_what_is_refused_of_a_model_is_refused_of_a_draft(checkpoint: Path, small: Path, tmp_path: Path) -> None:
    _refused(checkpoint, "/nowhere", "there is no folder '/nowhere'")
    _refused(checkpoint, " ", "there is no folder")
    _refused(checkpoint, "shape:llama3.1-8b", "has random weights")
    folder = shutil.copytree(small, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 8}))
    _refused(checkpoint, folder, "latent attention")
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 20}))
    _refused(checkpoint, folder, "of shape .* makes it")
    (folder / "config.json").write_text("{")
    _refused(checkpoint, folder, "is not JSON")
    weights = torch.zeros(2)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    _refused(checkpoint, folder, "a pickle, which could run code")
    with pytest.raises(InputError, match=r"^draft_model: wants a name, got 3$"):
        load(str(checkpoint), draft=3)  # type: ignore[arg-type]


def test_a_shape_goes_with_a_shape(tiny_shapes: None, small: Path) -> None:
    loaded = load("shape:tiny", dtype="float32", draft="shape:tied")
    assert loaded.draft is not None
    assert loaded.draft.dtype == torch.float32
    assert load("shape:tiny", draft=str(small)).draft is not None
