"""Checkpoints that are broken or lack something: one line for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.loads import changed, refuse


def test_broken_files(checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"nothing of the kind")
    refuse(model, r"model\.safetensors is broken or no safetensors file")
    (tmp_path / "m" / "model.safetensors").unlink()
    refuse(model, r"has no weights that tswift reads \(no model\.safetensors\)")
    (tmp_path / "m" / "config.json").write_text("{")
    refuse(model, r"config\.json is not JSON")


def test_pickles_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "m" / "pytorch_model.bin")
    weights.unlink()
    refuse(model, r"only pytorch_model\.bin, a pickle, which could run code")


def test_missing_weights_are_not_made_up(checkpoint: Path, tmp_path: Path) -> None:
    model = changed(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    refuse(model, r"lacks weights for 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight")


@pytest.mark.parametrize("model", ["~nosuchuser/m", "a" * 300])
def test_paths_that_cannot_be_looked_at(model: str) -> None:
    refuse(model, "cannot be looked at", "model")
