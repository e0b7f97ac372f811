"""A model whose weights somebody else has quantised: its text is every method's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import tswift
from tests.helpers import METHODS, options_for, read_json, tokens_of
from tswift.drafting.options import DraftOptions
from tswift.loading.model import LoadedModel, load
from tswift.models.hashes import fingerprint_of, weights_hash

pytest.importorskip("triton", reason="triton is not installed")

FIELDS = {"nodes": 12, "budget": 64, "sinks": 4}
OPTIONS = DraftOptions(**FIELDS)


class Int8Linear(nn.Module):
    """A layer as quantisers make them: no parameters, a weight that is no float,
    a scale for each row.
    """

    def __init__(self, whole: nn.Linear):
        super().__init__()
        scale = whole.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (whole.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, self.weight.to(given.dtype) * self.scale)


def text(model: LoadedModel, method: str, length: int = 50) -> list[int]:
    prompt = model.encode("The ship had lain three days becalmed, and the captain")
    options = options_for(method, **FIELDS, reuse_recent=True)
    steps = tswift.generate(model, prompt, length, method=method, options=options)
    return tokens_of(steps)


def texts(model: LoadedModel) -> dict[str, list[int]]:
    return {method: text(model, method) for method in METHODS}


@pytest.fixture
def quantised(checkpoint: Path, tmp_path, monkeypatch) -> str:
    """A folder whose model comes with all linear layers quantised, the LM head's too,
    by a method of nobody's.
    """
    folder = tmp_path / "quantised"
    shutil.copytree(checkpoint, folder)
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "homemade"}})
    )
    right = LlamaForCausalLM.from_pretrained

    def from_pretrained(kind, source, **asked):
        network, info = right(str(checkpoint), **asked)
        for name, module in list(network.named_modules()):
            if isinstance(module, nn.Linear):
                holder, _, last = name.rpartition(".")
                setattr(network.get_submodule(holder), last, Int8Linear(module))
        network.hf_quantizer = "homemade"
        return network, info

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(from_pretrained))
    return str(folder)


@pytest.mark.slow
def test_a_quantised_model_is_decoded_as_it_is(quantised, checkpoint):
    model = load(quantised, dtype="float64", device="cpu", draft_model=str(checkpoint))
    assert model.target.model.lm_head.weight.dtype == torch.int8
    assert model.target.dtype == torch.float64
    assert (model.about()["quantization"], model.about()["dtype"]) == ("homemade", "float64")
    assert model.remarks().endswith(", weights quantised (homemade)")
    found = texts(model)
    assert all(found[method] == found["ar"] for method in METHODS)


def test_quantised_weights_count(quantised):
    network = load(quantised, device="cpu").target.model
    before = fingerprint_of(network), weights_hash(network)
    layer = network.model.layers[0].mlp.up_proj
    layer.weight[0, 0] += 1
    assert fingerprint_of(network) != before[0]
    layer.weight[0, 0] -= 1
    assert (fingerprint_of(network), weights_hash(network)) == before
    layer.weight[-1, -1] += 1
    assert weights_hash(network) != before[1]
