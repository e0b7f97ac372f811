"""Quantised models: what is decoded is the quantised one, and its plain text is every method's."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tswift
from tests import fake_torchao
from tests.cli.conftest import tswift as run_tswift  # noqa: F401
from tests.models.loads import refuse
from tswift.drafting.methods import METHODS
from tswift.drafting.options import DraftOptions
from tswift.kv.full import FullKV
from tswift.models import loading
from tswift.models.fingerprint import fingerprint_of, weights_hash
from tswift.models.loaded import LoadedModel
from tswift.models.loading import load
from tswift.models.quantizing import quantizer

OPTIONS = DraftOptions(nodes=12, budget=64, sinks=4, reuse_recent=True)


class Int8Linear(nn.Module):
    """A layer as quantisers make them: no parameters, a weight that is no float, a scale for each row."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        scale = whole.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (whole.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, self.weight.to(given.dtype) * self.scale)


def texts(model: LoadedModel, length: int = 70) -> dict[str, list[int]]:
    prompt = model.encode("The ship had lain three days becalmed, and the captain")
    return {
        method: list(
            itertools.chain.from_iterable(
                step.tokens for step in tswift.generate(model, prompt, length, method=method, options=OPTIONS)
            )
        )
        for method in METHODS
    }


@pytest.fixture
def quantised(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder whose model comes with all linear layers quantised, the LM head's too, by a method of nobody's."""
    folder = tmp_path / "quantised"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "homemade"}}))
    right = AutoModelForCausalLM.from_pretrained

    def from_pretrained(source, **asked):
        network, info = right(str(checkpoint), **asked)
        for name, module in list(network.named_modules()):
            if isinstance(module, nn.Linear):
                holder, _, last = name.rpartition(".")
                setattr(network.get_submodule(holder), last, Int8Linear(module))
        network.hf_quantizer = "homemade"
        return network, info

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_quantised_model_is_decoded_as_it_is(quantised: str, checkpoint: Path, dtype: str) -> None:
    model = load(quantised, dtype=dtype, device="cpu", draft=str(checkpoint))
    assert model.target.model.lm_head.weight.dtype == torch.int8
    assert model.target.dtype == getattr(torch, dtype)
    assert (model.about()["quantization"], model.about()["dtype"]) == ("homemade", dtype)
    assert model.besides() == ", weights quantised (homemade)"
    found = texts(model)
    assert all(found[method] == found["ar"] for method in METHODS)


def test_quantised_weights_count(quantised: str) -> None:
    network = load(quantised, device="cpu").target.model
    before = fingerprint_of(network), weights_hash(network)
    layer = network.model.layers[1].mlp.up_proj
    layer.weight[0, 0] += 1
    assert fingerprint_of(network) != before[0]
    layer.weight[0, 0] -= 1
    assert (fingerprint_of(network), weights_hash(network)) == before
    layer.weight[-1, -1] += 1
    assert weights_hash(network) != before[1]


def test_what_cannot_be_quantised(checkpoint: Path, quantised: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(checkpoint)
    refuse(model, "no 'int3'; there are int8, fp8, int4", "quantize", quantize="int3")
    refuse(model, "not in float64", "quantize", quantize="int8", dtype="float64")
    refuse(model, "int4 needs a CUDA device and bfloat16", "quantize", quantize="int4", device="cpu")
    refuse(quantised, r"quantised already \(homemade\)", "quantize", quantize="int8", device="cpu")
    refuse("shape:llama3.1-8b", "neither quantised nor split", "model", quantize="int8")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    refuse(model, r"needs torchao: pip install 'tswift\[quantize\]'", "quantize", quantize="int8", device="cpu")


@pytest.mark.parametrize(("kind", "wanted"), [("int8", "Int8WeightOnlyConfig"), ("fp8", "Float8WeightOnlyConfig")])
def test_what_transformers_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str, wanted: str) -> None:
    """Without torchao: what is asked of it, and that the rest goes its way."""
    fake_torchao.install(monkeypatch)
    monkeypatch.setattr("transformers.TorchAoConfig", lambda config: config)
    right, told = AutoModelForCausalLM.from_pretrained, {}

    def from_pretrained(source, quantization_config, **asked):
        told["config"] = quantization_config
        return right(source, **asked)

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    model = load(str(checkpoint), device="cpu", quantize=kind)
    assert told["config"] == (wanted, {"set_inductor_config": False})  # the process is ours
    assert model.about()["quantization"] == f"{kind}, torchao"
    config, cuda = model.target.model.config, torch.device("cuda")
    name, asked = quantizer("int4", config, cuda, torch.bfloat16)
    layout = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d", "set_inductor_config": False}
    assert (name, asked) == ("Int4WeightOnlyConfig", layout)


@pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao(checkpoint: Path, run_tswift, tmp_path: Path, kind: str) -> None:  # noqa: F811
    words = ["model", checkpoint, "device", "cpu", "length", 60, "method", "reuse", "quiet", "out", "run"]
    done = run_tswift("generate", *words, "quantize", kind, "verify")
    assert done.code == 0, done.err
    record = json.loads(Path("run/run.json").read_text())
    assert record["model"]["quantization"] == f"{kind}, torchao"
    assert run_tswift("verify", "run", "json", "-").code == 0
    assert run_tswift("generate", "resume", "run", "length", 70, "quiet").code == 0
    other = run_tswift("generate", "resume", "run", "length", 80, "quantize", "int4")
    assert other.err.startswith(f"tswift: error: --quantize: the run was made with {kind}, got int4")
    model = load(str(checkpoint), device="cpu", quantize=kind, draft=str(checkpoint))
    found = texts(model)
    assert all(found[method] == found["ar"] for method in METHODS)
    assert weights_hash(model.target.model) == record["model"]["weights"]
    plain = load(str(checkpoint), device="cpu")
    quantised_logits, own = (_logits(each) for each in (model, plain))
    assert 0 < (quantised_logits - own).abs().max() < 0.1 * own.std()
    shutil.copytree(checkpoint, tmp_path / "saved", ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    model.target.model.save_pretrained(tmp_path / "saved")
    saved = load(str(tmp_path / "saved"), device="cpu", draft=str(checkpoint))  # quantised by its own configuration
    assert saved.about()["quantization"] == "torchao"
    assert texts(saved) == found


def _logits(model: LoadedModel) -> Tensor:
    target, prompt = model.target, model.encode("The ship had lain three days becalmed")
    forwarded = target.prefill(prompt, FullKV(target.kv_shape, len(prompt)))
    assert forwarded is not None
    return target.logits(forwarded.hidden)
