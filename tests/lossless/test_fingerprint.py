"""What a model must not do if its passes are to be exact: it is found when it is loaded, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.architectures import ARCHITECTURES, checkpoint
from tests.cli.conftest import prompt, tswift  # noqa: F401
from tests.lossless.models import DTYPES, network
from tswift.attention.chunked import ChunkedAttention
from tswift.errors import InputError
from tswift.models.adapting import Inexact, fingerprint
from tswift.models.checkpoint import silence
from tswift.models.load import load
from tswift.models.target import Target


class OverRows(nn.Module):
    """A norm that also looks at the other rows."""

    def forward(self, hidden):
        return hidden / hidden.std(dim=(1, 2), keepdim=True)


class ByPlace(nn.Module):
    """Of rows that stand further back a little more."""

    def forward(self, hidden):
        rows = torch.arange(hidden.shape[1]).view(1, -1, 1).to(hidden)
        return hidden + hidden * rows * torch.finfo(hidden.dtype).eps


class ByNumber(nn.Module):
    """Of many rows more than of few."""

    def forward(self, hidden):
        return hidden + hidden * (hidden.shape[1] * torch.finfo(hidden.dtype).eps)


PLACES = ["model.layers.0.mlp.act_fn", "model.layers.1.post_attention_layernorm", "model.norm"]


def with_module(place: str, module: type, dtype: torch.dtype) -> Target:
    """A model with another module behind the one at ``place``."""
    model = network("Llama, GQA", dtype)
    model.set_submodule(place, nn.Sequential(model.get_submodule(place), module()))
    target = Target(model, ChunkedAttention)
    target.width = 16
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [OverRows, ByPlace])
@pytest.mark.parametrize("place", PLACES)
def test_a_module_that_looks_beyond_its_row_is_named(place: str, module: type, dtype: torch.dtype) -> None:
    with pytest.raises(Inexact, match=rf"^the result of {place}\.1 depends on"):
        fingerprint(with_module(place, module, dtype))


@pytest.mark.parametrize("place", PLACES)
def test_the_number_of_rows_may_be_looked_at_as_it_is_always_the_same(place: str, monkeypatch) -> None:
    target = with_module(place, ByNumber, torch.float32)
    fingerprint(target)
    monkeypatch.setattr(Target, "_rows", lambda self, kv, nodes: nodes)
    with pytest.raises(Inexact, match="depends on"):
        fingerprint(target)


@pytest.mark.parametrize("name", ["Qwen3 MoE", "Mixtral", "OLMoE"])
def test_experts_are_named(name: str, tmp_path: Path) -> None:
    """How many rows an expert gets depends on the others; in 16 bits a tiny one rounds alike by chance."""
    with silence():
        checkpoint(ARCHITECTURES[name], tmp_path)
    with pytest.raises(InputError, match=r"^exact: cannot be had here: an expert takes as many rows as choose it$"):
        load(str(tmp_path), dtype="float16", device="cpu", exact=True)
    model = load(str(tmp_path), dtype="float16", device="cpu")
    assert (model.exact, model.target.width) == (None, None)
    assert model.about()["inexact"] == "an expert takes as many rows as choose it"


def test_learned_positions_that_end_early(tmp_path: Path) -> None:
    with silence():
        checkpoint(ARCHITECTURES["GPT-2"], tmp_path)
    assert load(str(tmp_path), dtype="bfloat16", device="cpu").exact is not None


@pytest.mark.parametrize("row", range(1, 16))
def test_every_row_is_looked_at(row: int) -> None:
    class AtOnePlace(nn.Module):
        def forward(self, hidden):
            scale = torch.ones(hidden.shape[1]).to(hidden)
            if hidden.shape[1] > row:
                scale[row] = 1.01
            return hidden * scale[:, None]

    with pytest.raises(Inexact, match=r"^the result of model.norm\.1 depends on its place"):
        fingerprint(with_module("model.norm", AtOnePlace, torch.float32))
