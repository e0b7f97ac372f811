"""Checkpoints with heads as TokenSwift and Medusa publish them, random and tiny."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from benchmarks.architectures import ARCHITECTURES, HIDDEN, checkpoint
from tests.helpers import read_json

NAME = "Llama, GQA"
COUNT, EPS = 3, 1e-3
PARTS = ("linear", "input_layernorm", "post_layernorm")


def make_base(folder: Path) -> Path:
    """A tiny Llama in shards, with an epsilon of its own, and no heads."""
    logging.disable_progress_bar()
    checkpoint(ARCHITECTURES[NAME], folder)
    (folder / "heads.safetensors").unlink()
    say(folder, rms_norm_eps=EPS)
    return folder


def say(folder: Path, **changes):
    path = folder / "config.json"
    config = read_json(path) | changes
    path.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.3


def tokenswift_tensors(prefix: str = "model.") -> dict[str, Tensor]:
    torch.manual_seed(8)
    found = {}
    for head in range(COUNT):
        at = f"{prefix}medusa_layers.{head}"
        found[f"{at}.linear.weight"] = drawn(HIDDEN, HIDDEN)
        found[f"{at}.input_layernorm.weight"] = 1 + drawn(HIDDEN)
        found[f"{at}.post_layernorm.weight"] = 1 + drawn(HIDDEN)
    return found


def medusa_tensors(vocab: int, layers: int = 1, prefix: str = "") -> dict[str, Tensor]:
    torch.manual_seed(9)
    found = {}
    for head in range(COUNT):
        for block in range(layers):
            found[f"{prefix}{head}.{block}.linear.weight"] = drawn(HIDDEN, HIDDEN)
            found[f"{prefix}{head}.{block}.linear.bias"] = drawn(HIDDEN)
        found[f"{prefix}{head}.{layers}.weight"] = drawn(vocab, HIDDEN)
    return found


def add_shard(folder: Path, tensors: dict[str, Tensor]):
    """Put more tensors among a model's, in a shard of their own."""
    save_file(tensors, folder / "model-extra.safetensors", metadata={"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    index["weight_map"] |= dict.fromkeys(tensors, "model-extra.safetensors")
    path.write_text(json.dumps(index))


def tokenswift_model(base: Path, folder: Path, **changes) -> Path:
    """As TokenSwift publishes a model: heads among the base weights,
    and said in the configuration.
    """
    shutil.copytree(base, folder)
    add_shard(folder, tokenswift_tensors())
    say(folder, **({"medusa_heads": COUNT} | changes))
    return folder


def medusa_file(base: Path, folder: Path, layers: int = 1, **changes) -> Path:
    """As Medusa publishes heads: a folder with a file and a configuration of its own."""
    folder = folder / "heads"
    folder.mkdir()
    vocab = read_json(base / "config.json")["vocab_size"]
    save_file(medusa_tensors(vocab, layers), folder / "medusa_lm_head.safetensors")
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "a/b",
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
