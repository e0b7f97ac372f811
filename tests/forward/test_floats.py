"""Matrices that are held once, packed: the weights come back,
and 16 bits give the tokens of float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from tests.conftest import make_checkpoint
from tests.helpers import first, needs_program, refused
from tswift.engine import generate
from tswift.forward.adapting import wrap_model
from tswift.forward.cpu.products import HALVES, PackedFloats, PackedLinear, pack
from tswift.forward.notes import PROGRAM
from tswift.loading.model import LoadedModel, adopt, load
from tswift.loading.plan import plan_model
from tswift.models.config import ModelConfig
from tswift.models.hashes import fingerprint_in_any_dtype, fingerprint_of, weights_hash
from tswift.sampling.parameters import SamplingParams

pytestmark = needs_program


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 48), (97, 64), (130, 33)])
def test_weights_come_back_as_they_were_packed(dtype, outputs, inputs):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).to(dtype)
    for given in (weight, weight.float()):
        packed = PackedFloats(given)
        wanted = torch.tensor([[0, outputs - 1], [outputs // 2, 0]])
        assert packed.kind == dtype
        assert torch.equal(packed.rows(torch.arange(outputs)), weight.float())
        assert torch.equal(packed.rows(wanted), weight.float()[wanted])


def test_gradients_flow_through_it():
    layer = nn.Linear(40, 24).requires_grad_(False)
    rows = torch.randn(3, 40, requires_grad=True)
    PackedLinear(layer.weight, layer.bias)(rows).sum().backward()
    assert torch.allclose(rows.grad, layer.weight.sum(0).expand(3, -1), atol=1e-5)


def tokens_of(model: LoadedModel, method: str, prompt: str | list[int] = "The ship") -> list[int]:
    # without the end, which a model that has no tokenizer does not know
    params = SamplingParams(banned=(0,))
    steps = generate(model, prompt, 200, method=method, params=params, seed=2)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("tied", first(1, [False, True]))
@pytest.mark.parametrize("dtype", first(1, ["bfloat16", "float16"]))
def test_16_bits_give_the_tokens_of_float32(tmp_path, dtype, tied):
    """All but the weights is float32 then."""
    folder = make_checkpoint(tmp_path / "m", head_dim=16, tie_word_embeddings=tied)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    network.save_pretrained(folder)
    narrow, wide = (load(str(folder), device="cpu", dtype=each) for each in (dtype, "float32"))
    assert narrow.layers == wide.layers == PROGRAM
    assert (narrow.about()["dtype"], narrow.about()["kv_dtype"], narrow.dtype_note) == (
        dtype,
        "int16",
        "",
    )
    assert all(weight.dim() < 2 for weight in narrow.target.model.parameters())
    assert tokens_of(narrow, "ar") == tokens_of(narrow, "tokenswift") == tokens_of(wide, "ar")
    embeddings = [model.target.embed(torch.tensor([3, 77])) for model in (narrow, wide)]
    assert torch.equal(*embeddings)
    sizes = [plan_model(ModelConfig(model=str(folder), dtype=each)) for each in (dtype, "float32")]
    assert [each.dtype for each in sizes] == [torch.float32] * 2
    assert 2 * sizes[0].loaded_bytes["weights"] <= sizes[1].loaded_bytes["weights"]


def test_float32_is_held_once(tmp_path):
    """Texts, hashes of weights and heads are those of a model that PyTorch holds."""
    folder = str(make_checkpoint(tmp_path / "m", head_dim=16))
    network = AutoModelForCausalLM.from_pretrained(folder)
    packed = load(folder, device="cpu")
    assert all(weight.dim() < 2 for weight in packed.target.model.parameters())
    assert (packed.layers, packed.about()["dtype"]) == (PROGRAM, "float32")
    for hashed in (weights_hash, fingerprint_of, fingerprint_in_any_dtype):
        assert hashed(packed.target.model) == hashed(network)
    prompt = [3, 1, 4, 1, 5]
    assert tokens_of(packed, "ar", prompt) == tokens_of(adopt(network), "ar", prompt)


def test_products_that_are_wrong_are_refused(tmp_path, monkeypatch):
    folder = str(make_checkpoint(tmp_path / "m", head_dim=16))
    monkeypatch.setattr(
        "tswift.forward.cpu.products.multiply", lambda c, rows: torch.ones(c.outputs)
    )
    with refused("are wrong on this machine"):
        load(folder, device="cpu")
    assert load(folder, device="cpu", attention="sdpa").layers != PROGRAM


def test_embeddings_that_are_scaled():
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    network = Gemma3ForCausalLM(config).eval().requires_grad_(False)
    ids = torch.arange(30)[None]
    wanted = network(ids).logits
    pack(network)
    assert torch.allclose(network(ids).logits, wanted, atol=1e-4)
    assert wrap_model(network, "m", "native").runner.program is not None
