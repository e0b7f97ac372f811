"""Quantised weights: of a whole model, whose text is every method's; or of a copy for drafting passes only."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tswift
from tests import fake_torchao
from tests.cli.conftest import tswift as run_tswift  # noqa: F401
from tests.conftest import make_checkpoint
from tests.helpers import METHODS, options_for
from tests.models.refusals import refuse
from tswift import engine
from tswift.decoding import costs
from tswift.distributed import Dist
from tswift.drafting.options import DraftOptions
from tswift.engine import preflight
from tswift.errors import InputError
from tswift.models import load as loading
from tswift.models.adapting import wrap_model
from tswift.models.checkpoint import fingerprint_of, weights_hash
from tswift.models.heads import MedusaHeads
from tswift.models.hf import JoinedLinear, quantizer
from tswift.models.load import LoadedModel, inspect_model, load

FIELDS = {"nodes": 12, "budget": 64, "sinks": 4}
OPTIONS = DraftOptions(**FIELDS)


needs_torchao = pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")


class Int8Linear(nn.Module):
    """A layer as quantisers make them: no parameters, a weight that is no float, a scale for each row."""

    def __init__(self, whole: nn.Linear) -> None:
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
    return [token for step in steps for token in step.tokens]


def texts(model: LoadedModel) -> dict[str, list[int]]:
    return {method: text(model, method) for method in METHODS}


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


def test_a_quantised_model_is_decoded_as_it_is(quantised: str, checkpoint: Path) -> None:
    model = load(quantised, dtype="float64", device="cpu", draft_model=str(checkpoint))
    assert model.target.model.lm_head.weight.dtype == torch.int8
    assert model.target.dtype == torch.float64
    assert (model.about()["quantization"], model.about()["dtype"]) == ("homemade", "float64")
    assert model.besides().endswith(", weights quantised (homemade)")
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


@pytest.mark.parametrize("option", ["quantize", "draft_weights"])
def test_what_cannot_be_quantised(checkpoint: Path, quantised: str, monkeypatch, option: str) -> None:
    fake_torchao.install(monkeypatch)
    model = str(checkpoint)

    def refused(match: str, kind: str = "int8", model: str = model, field: str = option, **options: object) -> None:
        refuse(model, match, field, **{option: kind, "device": "cpu", **options})

    refused("must be one of .*int8, fp8, int4, got 'int3'", "int3")
    refused(r"quantised already \(homemade\)", model=quantised)
    if option == "quantize":
        refused("neither quantised nor split", model="shape:llama3.1-8b", field="model")
    else:
        refused("must be a text, got 8", 8)  # type: ignore[arg-type]
        refused(r"quantised already \(int8\)", quantize="int8")
        with monkeypatch.context() as split:
            split.setattr(Dist, "share", lambda self, asked: asked)
            refused("cannot be split over ranks", ranks=Dist(0, 2))
        monkeypatch.setattr("tswift.models.load._open", None)  # all of it is said before anything is loaded
    refused("not in float64", dtype="float64")
    refused("int4 needs a CUDA device and bfloat16", "int4")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    refused(r"needs torchao: pip install 'tswift\[quantize\]'")


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


@needs_torchao
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    model = load(str(checkpoint), device="cpu", quantize=kind, draft_model=str(checkpoint))
    found = texts(model)
    assert all(found[method] == found["ar"] for method in METHODS)
    shutil.copytree(checkpoint, tmp_path / "saved", ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    model.target.model.save_pretrained(tmp_path / "saved")
    saved = load(str(tmp_path / "saved"), device="cpu", draft_model=str(checkpoint))  # by its own configuration
    assert saved.about()["quantization"] == "torchao"
    assert texts(saved) == found


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in module.state_dict().items()}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_all_but_the_decoders_linear_layers_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    given = fake_torchao.install(monkeypatch)
    model = load(str(make_checkpoint(tmp_path / "m", **changes)), device="cpu", draft_weights="int8")
    assert model.drafting is not None
    assert given == [("Int8WeightOnlyConfig", {"set_inductor_config": False})]
    whole, copied = model.target.model, model.drafting.model
    own, theirs = pointers(whole), pointers(copied)
    assert own.keys() == theirs.keys()
    linear = {f"{name}.weight" for name, each in whole.model.named_modules() if isinstance(each, nn.Linear)}
    assert {name for name in own if own[name] != theirs[name]} == {f"model.{name}" for name in linear}
    assert len(linear) == 2 * 7
    assert copied.get_output_embeddings() is whole.get_output_embeddings()
    assert copied.get_input_embeddings() is whole.get_input_embeddings()
    assert model.drafting.kv_shape == model.target.kv_shape
    about = model.about()
    assert (about["draft_weights"], about["draft_layers"], about["quantization"]) == ("int8", "eager", None)
    assert model.besides() == ", drafting passes in int8"


@pytest.mark.parametrize("joined", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_faster_layers_are_copied_as_plain_ones(
    joined: bool, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """Those of oneDNN; and on CUDA queries, keys and values are one product, whose inputs are not the copy's."""
    fake_torchao.install(monkeypatch, *([fake_torchao.garbage] if joined else []))
    if joined:
        monkeypatch.setattr("tswift.models.load.wrap_model", partial(wrap_model, joined=True))
    name = str(checkpoint) if joined else "demo"
    model = load(name, device="cpu", draft_weights="fp8", dtype="float32")
    assert model.drafting is not None
    whole, copied = (
        {type(each) for each in target.model.model.modules() if isinstance(each, nn.Linear)}
        for target in (model.target, model.drafting)
    )
    assert (JoinedLinear in whole, copied) == (joined, {nn.Linear})
    assert model.drafting.model.lm_head is model.target.model.lm_head
    plain = text(load(name, device="cpu", dtype="float32"), "ar")
    assert all(text(model, method) == plain for method in ("tokenswift", "cascade", "magicdec")[: 1 + 2 * joined])


def test_heads_that_start_before_the_final_norm(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    """The copy gives them its own states, and leaves the model's alone."""
    heads = MedusaHeads(32, 2, 320)
    heads.pre_norm = True
    monkeypatch.setattr("tswift.models.load.attach_heads", lambda path, target, **_: (target.tap(), heads.eval())[1])
    fake_torchao.install(monkeypatch)
    model = load(str(checkpoint), device="cpu", draft_weights="int8")
    assert model.drafting is not None
    for target in (model.target, model.drafting):
        norm = target.model.model.norm
        assert len(norm._forward_pre_hooks) == 1
        zero = torch.zeros(1, dtype=torch.int64)
        forwarded = target.forward(zero, zero, tswift.kv.FullKV(target.kv_shape, 1), None)
        assert torch.equal(norm(forwarded.raw), forwarded.hidden)
    assert text(model, "tokenswift") == text(model, "ar")


def test_what_it_takes_is_foreseen(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)
    linear = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 64 * 32)  # weights of 2 layers
    rows = 2 * (2 * 32 + 2 * 16 + 2 * 64 + 32)
    assert inspect_model(str(checkpoint)).copy_bytes == 0
    ask = {"device": "cpu", "draft_weights": "int8"}
    ahead = preflight(str(checkpoint), 3, 50, "tokenswift", OPTIONS, **ask)
    plain = preflight(str(checkpoint), 3, 50, "tokenswift", OPTIONS, device="cpu")
    assert ahead.copy_bytes == linear + 4 * rows
    assert ahead.total_bytes == plain.total_bytes + ahead.copy_bytes
    assert "draft weights" in str(ahead)
    assert "draft weights" not in str(plain)
    monkeypatch.setattr(engine, "available_bytes", lambda device: plain.total_bytes)
    preflight(str(checkpoint), 3, 50, "tokenswift", OPTIONS, device="cpu")
    with pytest.raises(InputError, match="draft weights"):
        preflight(str(checkpoint), 3, 50, "tokenswift", OPTIONS, **ask)


def test_a_published_shape_takes_half_as_much_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA3.1-8b: 6.98e9 weights in linear layers; in int4 with a scale and a zero for each 128."""
    fake_torchao.install(monkeypatch)
    monkeypatch.setattr("tswift.models.devices.find_device", torch.device)
    found = {
        kind: inspect_model("shape:llama3.1-8b", device="cuda", draft_weights=kind).copy_bytes
        for kind in ("int8", "fp8", "int4")
    }
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert found["int8"] == found["fp8"] == pytest.approx(weights, rel=1e-3)
    assert found["int4"] == weights // 2 + weights // 128 * 4
    # 11,008 inputs are filled up to 11,264
    padded = 32 * (4 * 4096 * 4096 + 2 * 4096 * 11_008 + 4096 * 11_264)
    yarn = inspect_model("shape:yarn-llama2-7b-128k", device="cuda", draft_weights="int4").copy_bytes
    assert yarn == padded // 2 + padded // 128 * 4


@needs_torchao
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao_in_a_copy(checkpoint: Path, kind: str, dtype: str) -> None:
    process = torch.get_float32_matmul_precision(), torch._inductor.config.coordinate_descent_tuning
    model = load(str(checkpoint), device="cpu", draft_model=str(checkpoint), draft_weights=kind, dtype=dtype)
    assert model.drafting is not None
    assert (torch.get_float32_matmul_precision(), torch._inductor.config.coordinate_descent_tuning) == process
    layers = [each for each in model.drafting.model.model.modules() if isinstance(each, nn.Linear)]
    parts = [getattr(each.weight, name) for each in layers for name in ("qdata", "scale")]
    assert all(part.dtype in (torch.int8, torch.float8_e4m3fn) for part in parts[::2])
    foreseen = inspect_model(str(checkpoint), device="cpu", dtype=dtype, draft_weights=kind).copy_bytes
    assert foreseen == sum(part.nbytes for part in parts)
    assert costs._key(model.drafting, None) != costs._key(model.target, None)  # other passes, other costs
    if dtype == "float32":
        assert all(text(model, method) == text(model, "ar") for method in METHODS)
    assert model.drafting.compile(backend="aot_eager") is None  # as where passes are replayed
