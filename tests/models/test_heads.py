"""The file of heads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import HIDDEN, tiny_heads
from tswift.errors import InputError
from tswift.models.heads import KINDS, ChainedHeads
from tswift.models.heads_files import load_heads

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_what_was_saved(tmp_path, dtype: torch.dtype, kind: str) -> None:
    heads = tiny_heads(torch.float32, kind=kind)
    heads.save(tmp_path / "heads.safetensors", dtype)
    loaded = load_heads(tmp_path / "heads.safetensors", HIDDEN, torch.float32, CPU)
    assert (loaded.kind, loaded.count) == (kind, 3)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype).float())
    assert any(value.abs().sum() > 0 for value in loaded.state_dict().values())


def saved(path, hidden=8, **metadata):
    tensors = ChainedHeads(hidden, 2).state_dict()
    about = {"format": "tswift-heads-1", "kind": "chained", "count": 2, "hidden_size": hidden, "eps": 1e-5} | metadata
    save_file(tensors, path, metadata={"tswift": json.dumps(about)})


def truncated(path):
    saved(path)
    path.write_bytes(path.read_bytes()[:-20])


def cut_in_its_header(path):
    saved(path)
    path.write_bytes(path.read_bytes()[:40])


BAD = {
    "another hidden size": lambda path: saved(path, 16),
    "truncated": truncated,
    "cut in its header": cut_in_its_header,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no safetensors at all, only a text that is long enough to hold a length"),
    "a folder": lambda path: path.mkdir(),
    "missing": lambda path: None,
    "no metadata": lambda path: save_file({"x": torch.zeros(2)}, path),
    "foreign metadata": lambda path: save_file({"x": torch.zeros(2)}, path, metadata={"tswift": "[1]"}),
    "metadata of no kind": lambda path: save_file({"x": torch.zeros(2)}, path, metadata={"tswift": "{not json"}),
    "another kind": lambda path: saved(path, kind="conditioned"),
    "a later format": lambda path: saved(path, format="tswift-heads-9"),
    "more heads than weights": lambda path: saved(path, count=3),
    "wrong shapes": lambda path: saved(path, hidden_size=9),
    "a count that is none": lambda path: saved(path, count="two"),
    "a size that is none": lambda path: saved(path, hidden_size=None),
    "a kind that there is no more": lambda path: saved(path, kind="autoregressive"),
    "eps of nothing": lambda path: saved(path, eps=None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, name: str) -> None:
    path = tmp_path / "heads.safetensors"
    BAD[name](path)
    with pytest.raises(InputError, match=r"^heads: ") as error:
        load_heads(path, 8, torch.float32, CPU)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("heads: ") == 1
    assert error.value.field == "heads"
