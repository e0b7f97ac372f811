"""Quantised weights: of a whole model, whose text is every method's;
or of a copy for drafting passes only.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import tswift
from tests.conftest import make_checkpoint
from tests.helpers import METHODS, options_for, read_json, tokens_of
from tests.models.refusals import refuse
from tswift import memory
from tswift.distributed import Dist
from tswift.drafting import costs
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.forward.adapting import measured_pass
from tswift.forward.cuda.coded import CodedLinear
from tswift.forward.target import Target
from tswift.jobs.config import to_load
from tswift.loading import model as loading
from tswift.loading.model import LoadedModel, load, load_model
from tswift.loading.plan import plan_model
from tswift.memory import Demand, preflight
from tswift.models.config import ModelConfig
from tswift.models.hashes import fingerprint_of, weights_hash
from tswift.speculators.heads import MedusaHeads

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
    layer = network.model.layers[1].mlp.up_proj
    layer.weight[0, 0] += 1
    assert fingerprint_of(network) != before[0]
    layer.weight[0, 0] -= 1
    assert (fingerprint_of(network), weights_hash(network)) == before
    layer.weight[-1, -1] += 1
    assert weights_hash(network) != before[1]


@pytest.fixture
def on_cpu(monkeypatch):
    """Such weights on a CPU, where PyTorch multiplies: kernels are slow if they are interpreted."""
    monkeypatch.setattr("tswift.forward.cuda.draft_weights._DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(CodedLinear, "forward", multiplied)


def multiplied(self: CodedLinear, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, self.weight.to(rows.dtype), self.bias)


SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}
HALF = {"device": "cpu", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def units(tmp_path_factory) -> Path:
    """A checkpoint whose rows are whole units of codes."""
    return make_checkpoint(tmp_path_factory.mktemp("units") / "m", **SIZES)


def test_drafting_weights_that_cannot_be_had(checkpoint, quantised, tmp_path, monkeypatch):
    model = str(checkpoint)

    def refused(match, kind="int4", model=model, **options):
        refuse(model, match, "draft_weights", **{"draft_weights": kind, **HALF, **options})

    refused("of fewer bits for drafts need a CUDA device")
    monkeypatch.setattr("tswift.forward.cuda.draft_weights._DEVICES", ("cpu",))
    refused("must be one of auto, none, int4, int8, got 'fp8'", "fp8")
    refused("must be a text, got 8", 8)
    refused(r"quantised already \(homemade\)", model=quantised)
    refused("need a model in bfloat16 or float16", dtype="float32")
    odd = str(make_checkpoint(tmp_path / "odd", intermediate_size=48))
    refused("no linear layer of .* has rows of a multiple of 64", model=odd)
    with monkeypatch.context() as split:
        split.setattr(Dist, "share", lambda self, asked: asked)
        refused("cannot be split over ranks", ranks=Dist(0, 2))


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in module.state_dict().items()}


@pytest.mark.parametrize("wrong", [30.0, torch.nan])
def test_products_that_are_wrong_here_are_refused(units, on_cpu, monkeypatch, wrong):
    right = CodedLinear.forward
    monkeypatch.setattr(CodedLinear, "forward", lambda self, rows: right(self, rows) * wrong)
    refuse(
        str(units),
        "the kernel of products computes something else than PyTorch",
        "draft_weights",
        draft_weights="int4",
        **HALF,
    )


@pytest.mark.parametrize(
    ("kind", "changes"), [("int4", {}), ("int8", {"tie_word_embeddings": True})]
)
def test_all_but_the_decoders_linear_layers_is_shared(tmp_path, on_cpu, kind, changes):
    folder = make_checkpoint(tmp_path / "m", **SIZES, **changes)
    model = load(str(folder), draft_weights=kind, **HALF)
    assert model.drafting is not None
    whole = model.target.model
    copied = model.drafting.model
    own, theirs = pointers(whole), pointers(copied)
    linear = {
        f"model.{name}" for name, each in whole.model.named_modules() if isinstance(each, nn.Linear)
    }
    assert {name for name in own if own[name] != theirs.get(name)} == {
        f"{name}.weight" for name in linear
    }
    assert theirs.keys() - own.keys() == {
        f"{name}.packed.{part}" for name in linear for part in ("bytes", "factors")
    }
    assert len(linear) == 2 * 7
    assert copied.get_output_embeddings() is whole.get_output_embeddings()
    assert copied.get_input_embeddings() is whole.get_input_embeddings()
    assert model.drafting.kv_shape == model.target.kv_shape
    about = model.about()
    assert (about["draft_weights"], about["draft_layers"], about["quantization"]) == (
        kind,
        "eager",
        None,
    )
    assert model.remarks().endswith(f", drafting passes in {kind}")
    # other passes, other costs
    assert costs._key(model.drafting, None) != costs._key(model.target, None)
    config = ModelConfig(model=str(folder), draft_weights=kind, **HALF)
    foreseen = plan_model(config).loaded_bytes["draft weights"]
    parts = [each for each in copied.modules() if isinstance(each, CodedLinear)]
    assert foreseen == sum(each.nbytes for part in parts for each in part.packed.buffers())
    assert text(model, "tokenswift") == text(model, "ar")


def test_heads_that_start_before_the_final_norm(units, on_cpu, monkeypatch):
    """The copy gives them its own states, and leaves the model's alone."""
    heads = MedusaHeads(64, 2, 320).bfloat16()
    heads.pre_norm = True
    monkeypatch.setattr(
        "tswift.speculators.heads_files.attach_heads",
        lambda path, target, *_: (target.tap(), heads.eval())[1],
    )
    model = load(str(units), draft_weights="int4", **HALF)
    assert model.drafting is not None
    for target in (model.target, model.drafting):
        norm = target.model.model.norm
        assert len(norm._forward_pre_hooks) == 1
        zero = torch.zeros(1, dtype=torch.int64)
        forwarded = target.forward(zero, zero, tswift.caches.FullKV(target.kv_shape, 1), None)
        assert torch.equal(norm(forwarded.pre_norm), forwarded.hidden)
    assert text(model, "tokenswift") == text(model, "ar")


def test_what_it_takes_is_foreseen(units, on_cpu, monkeypatch):
    linear = 2 * (4 * 64 * 64 + 3 * 128 * 64)  # weights of 2 layers
    held = linear // 2 + linear // 32 * 4  # and a scale and a minimum of every block
    assert plan_model(ModelConfig(model=str(units))).loaded_bytes["draft weights"] == 0
    ask = {"draft_weights": "int4", **HALF}
    ahead = preflight(
        plan_model(ModelConfig(model=str(units), **ask)), Demand(3, 50, "tokenswift", OPTIONS)
    )
    plain = preflight(
        plan_model(ModelConfig(model=str(units), **HALF)), Demand(3, 50, "tokenswift", OPTIONS)
    )
    assert ahead.parts["draft weights"] == held
    assert ahead.total_bytes == plain.total_bytes + held
    assert "draft weights" in str(ahead)
    assert "draft weights" not in str(plain)
    monkeypatch.setattr(memory, "available_bytes", lambda device: plain.total_bytes)
    preflight(
        plan_model(ModelConfig(model=str(units), **HALF)), Demand(3, 50, "tokenswift", OPTIONS)
    )
    with pytest.raises(InputError, match="draft weights"):
        preflight(
            plan_model(ModelConfig(model=str(units), **ask)), Demand(3, 50, "tokenswift", OPTIONS)
        )


def test_a_published_shapes_copy_takes_five_bits_a_weight(monkeypatch):
    """LLaMA3.1-8b: 6.98e9 weights in linear layers."""
    monkeypatch.setattr("tswift.models.devices.find_device", torch.device)
    config = ModelConfig(model="shape:llama3.1-8b", device="cuda", draft_weights="int4")
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert plan_model(config).loaded_bytes["draft weights"] == weights // 8 * 5


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_drafts_have_fewer_bits_by_themselves_where_that_is_quicker(
    units, on_cpu, monkeypatch, seconds
):
    """Of methods that draft with the model itself, if there is room for the copy."""
    timed: list[Target] = []

    def took(target):
        timed.append(target)
        return (seconds if len(timed) % 2 else 1.0), measured_pass(target)[1]  # the copy's first

    monkeypatch.setattr(loading, "measured_pass", took)
    asked = ModelConfig(model=str(units), **HALF)
    assert to_load(asked, ["ar", "medusa"]).draft_weights is None
    config = to_load(asked, ["ar", "tokenswift"])
    assert config.draft_weights == "auto"
    plain = replace(asked, draft_weights="none")
    assert to_load(plain, ["tokenswift"]).draft_weights is None
    model = load_model(config)
    assert len(timed) == 2
    assert model.about().get("draft_weights") == ("int8" if seconds < 1 else None)
    assert (model.drafting is None) == (seconds == 1)
    assert text(model, "tokenswift") == text(model, "ar")
    assert plan_model(config).loaded_bytes["draft weights"] == 0
    with monkeypatch.context() as patched:
        patched.setattr(loading, "available_bytes", lambda device: 1000)
        assert load_model(config).drafting is None
    assert load_model(replace(config, dtype="float32")).drafting is None
    assert len(timed) == 2


def broken(self: CodedLinear, rows: Tensor) -> Tensor:
    raise RuntimeError("no product for this")


def nothing(self: CodedLinear, rows: Tensor) -> Tensor:
    return torch.full_like(rows @ self.weight.to(rows).t(), torch.nan)


@pytest.mark.parametrize(
    ("product", "reason"),
    [(broken, "no product for this"), (nothing, "the kernel of products computes something else")],
)
def test_a_copy_that_nobody_asked_for_stops_nothing(units, on_cpu, monkeypatch, product, reason):
    monkeypatch.setattr(CodedLinear, "forward", product)
    config = to_load(ModelConfig(model=str(units), **HALF), ["tokenswift"])
    model = load_model(config)
    assert model.drafting is None
    assert "drafts by the model's own weights: " in model.layers
    assert reason in model.layers
    with pytest.raises((InputError, RuntimeError), match=reason):
        load_model(replace(config, draft_weights="int4"))
