"""What tells one network from another, and what heads remember of the one they were made for."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import make_checkpoint
from tests.helpers import tiny_llama
from tswift.errors import InputError
from tswift.models.checkpoint import fingerprint_in_any_dtype, fingerprint_of
from tswift.models.heads import ChainedHeads, ConditionedHeads
from tswift.models.heads_io import load_heads
from tswift.models.load import load

DTYPES = ("float64", "float32", "bfloat16", "float16")
CPU = torch.device("cpu")


def test_the_dtype_is_of_no_matter() -> None:
    network = tiny_llama("gqa", torch.float64)
    with torch.no_grad():  # what float16 rounds to zero
        network.lm_head.weight[0] *= 1e-12
    found = {fingerprint_in_any_dtype(deepcopy(network).to(getattr(torch, dtype))) for dtype in DTYPES}
    assert len(found) == 1
    assert len({fingerprint_of(deepcopy(network).to(getattr(torch, dtype))) for dtype in DTYPES}) > 1


@pytest.mark.parametrize("weight", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_another_sign_in_any_weight_is_another_network(weight: str) -> None:
    network = tiny_llama("gqa", torch.float32)
    before = fingerprint_in_any_dtype(network)
    with torch.no_grad():
        network.get_parameter(weight)[0, 3] *= -1
    assert fingerprint_in_any_dtype(network) != before


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of the same shape as the tiny checkpoint, trained otherwise."""
    folder = make_checkpoint(tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", [ChainedHeads, ConditionedHeads])
def test_heads_remember_their_base_model(checkpoint: Path, other: Path, tmp_path: Path, kind: type) -> None:
    path = tmp_path / "mine.safetensors"
    network = load(str(checkpoint), dtype="float32").target.model
    kind(32, 2).save(path, base=fingerprint_in_any_dtype(network))
    for dtype in ("float64", "bfloat16"):
        loaded = load(str(checkpoint), dtype=dtype, heads=path, exact=False).heads
        assert loaded is not None
        assert loaded.base == fingerprint_in_any_dtype(network)
    with pytest.raises(InputError, match=r"^heads: .*mine.safetensors was made for another model: ") as caught:
        load(str(other), heads=path)
    assert caught.value.field == "heads"


def test_heads_without_memory_go_with_every_model(checkpoint: Path, other: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    ChainedHeads(32, 2).save(path)
    for model in (checkpoint, other):
        loaded = load(str(model), heads=path).heads
        assert loaded is not None
        assert loaded.base is None


def test_what_is_remembered_is_kept_when_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    ChainedHeads(32, 2).save(path, base="abc")
    load_heads(path, 32, torch.float32, CPU).save(path)
    assert load_heads(path, 32, torch.float32, CPU).base == "abc"
    load_heads(path, 32, torch.float32, CPU).save(path, base="def")
    assert load_heads(path, 32, torch.float32, CPU).base == "def"


@pytest.mark.parametrize("base", [7, [], {"a": 1}, True])
def test_a_base_that_is_none(tmp_path: Path, base: object) -> None:
    path = tmp_path / "mine.safetensors"
    ChainedHeads(32, 2).save(path, base=base)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"heads: .* is not a tswift heads file \(its base model is "):
        load_heads(path, 32, torch.float32, CPU)


def test_random_weights_take_heads_of_any_model(tiny_shapes: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    ChainedHeads(32, 2).save(path, base="abc")
    assert load("shape:tiny", heads=path).heads is not None
