"""Our attention in a network of transformers: what goes wrong shows before anything is decoded."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

import tswift
from benchmarks import architectures
from benchmarks.architectures import ARCHITECTURES
from tests.helpers import CPU, needs_program, needs_triton, tiny_llama, tiny_target, tokens_of
from tests.lossless.models import network
from tests.models.refusals import changed, refuse
from tests.rows import every_row
from tswift.attention import backends_check
from tswift.attention.backends import BACKENDS
from tswift.attention.native import NativeAttention
from tswift.attention.sdpa import AttentionSpec
from tswift.caches import FullKV
from tswift.errors import NoFault, SlowWarning
from tswift.forward import adapting
from tswift.forward.adapting import wrap_model
from tswift.forward.notes import warn_of_fallbacks
from tswift.forward.passes import Nodes
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.loading.model import LoadedModel, load
from tswift.models import shapes
from tswift.models.architecture import heads_of

NOTHING = AttentionSpec()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        # Llama does no such thing
        ({"final_logit_softcapping": 30.0}, r"\(llama\) is not served exactly: logits differ"),
        (
            {"layer_types": ["linear_attention"]},
            "layers of type linear_attention",
        ),
        (
            {"layer_types": ["chunked_attention"]},
            "layers of type chunked_attention",
        ),
        ({"kv_lora_rank": 8}, "latent attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary .* type dynamic",
        ),
    ],
)
def test_refuses_what_it_would_compute_wrongly(checkpoint, tmp_path, changes, match):
    refuse(changed(checkpoint, tmp_path / "m", **changes), match)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "dtype", "place"),
    [
        ("model.layers.0.mlp.down_proj.weight", float("nan"), "float32", "model.layers.0"),
        ("lm_head.weight", 60_000.0, "float16", "lm_head"),
    ],
)
def test_a_model_that_gives_no_numbers(checkpoint, tmp_path, name, value, dtype, place):
    model = changed(checkpoint, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights[name][3] = value
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    reason = (
        f"the first output that is not finite is that of {place}: its weights are broken, or "
        f"{dtype} is too narrow"
    )
    refuse(model, f"gives logits that are NaN or infinite; {reason} for it$", dtype=dtype)


def test_the_check_of_logits_sees_what_goes_wrong_in_a_tree(tmp_path, monkeypatch):
    architectures.checkpoint(architectures.ARCHITECTURES["Llama, GQA"], tmp_path)
    load(str(tmp_path))
    right = Target.forward
    for mistake in ("positions", "ancestors", "cache"):

        def wrong(self, nodes, mistake=mistake):
            kv, ancestors = nodes.kv, nodes.ancestors
            if ancestors is not None and mistake == "positions":
                nodes = replace(nodes, positions=torch.arange(len(nodes)) + kv.length)
            if ancestors is not None and mistake == "ancestors":
                nodes = replace(nodes, ancestors=torch.ones_like(ancestors).tril())
            if ancestors is not None and mistake == "cache":
                kv.buffers[0][:, :, kv.length - 1] = 0
            return right(self, nodes)

        monkeypatch.setattr(Target, "forward", wrong)
        refuse(str(tmp_path), "is not served exactly: logits differ", "model")


def test_logits_are_compared_but_for_what_a_row_has_in_common(tmp_path, monkeypatch):
    architectures.checkpoint(architectures.ARCHITECTURES["Llama, GQA"], tmp_path)
    right = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, hidden: right(self, hidden) + 1.0)
    load(str(tmp_path))

    def one_of_them(self, hidden):
        logits = right(self, hidden)
        logits[-1, 7] += 0.01
        return logits

    monkeypatch.setattr(Target, "logits", one_of_them)
    refuse(str(tmp_path), "is not served exactly: logits differ", "model")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("lies", [False, True])
def test_windows_and_soft_caps_that_a_backend_fails_at_are_plain_products(monkeypatch, lies):
    from tswift.attention.triton import TritonAttention

    class Lying(TritonAttention):
        def __call__(self, query, keys, values, scale, spec=NOTHING):
            out = super().__call__(query, keys, values, scale, spec)
            return out * 1.05 if spec.softcap and not spec.window else out

    def network():
        return ARCHITECTURES["Gemma 2 (windows, soft caps)"].make(97).half()

    assert wrap_model(network(), "tiny", "sdpa").fallbacks == {}
    monkeypatch.setattr(adapting, "_DOUBTED", ("cpu",))
    # all cases are in tests/attention/test_backends.py; the interpreter takes a minute for them
    monkeypatch.setattr(
        backends_check, "_around", lambda window: ((1, 3, True), (window or 37, 4, False))
    )
    monkeypatch.setitem(BACKENDS, "triton", lambda: Lying if lies else TritonAttention)
    target = wrap_model(network(), "tiny", "triton")
    assert target.replays == target.serves(FullKV(target.kv_shape, 1)) == (not lies)
    model = LoadedModel("tiny", None, target, None, ())
    words = (
        r"eager, as triton attention fails here \(outputs of .* by up to [\d.]+\) "
        "with sliding windows of 24 tokens and soft-capped scores"
    )
    assert re.fullmatch(
        words if lies else "eager, as no kernels are written for gemma2", model.about()["layers"]
    )
    if lies:
        monkeypatch.setattr(Lying, "__call__", None)
        prefill(target, list(range(60)), FullKV(target.kv_shape, 60))


# -------------------------------------------------------------------------------------------------
# Attention that is not to be trusted: their twins take over, and the records say why


@pytest.mark.slow
@needs_program
def test_attention_that_lies_in_one_element_is_not_used(monkeypatch):
    right = NativeAttention.__call__

    def lying(self, query, keys, values, scale):
        out = right(self, query, keys, values, scale)
        if query.shape[1] == 17:
            out[0, 5, 7] += 1
        return out

    trusted = tswift.load(device="cpu")
    assert trusted.about()["attention"] == "native"
    monkeypatch.setattr(NativeAttention, "__call__", lying)
    model = tswift.load(device="cpu")
    assert model.about()["attention"] == "sdpa"
    assert "as native attention fails here (outputs of " in model.about()["layers"]
    refuse("demo", "native attention fails here", "attention", attention="native")
    texts = [
        tokens_of(list(tswift.generate(each, "The ship", 40, seed=1))) for each in (model, trusted)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_what_many_layers_round_is_no_fault(monkeypatch):
    """A pass over 48 layers of random weights in bfloat16 and one in float32:
    as far apart as wide models' are.
    """
    # products gain as with a hidden size of 4096 and 0.02
    monkeypatch.setattr(shapes, "_STD", 1.28 / 256**0.5)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=48,
        num_attention_heads=4,
        num_key_value_heads=1,
    )
    network = shapes.random_weights(config, torch.bfloat16, CPU, "random")
    narrow, wide = Target(deepcopy(network)), Target(network.float())
    places = torch.arange(80)
    hidden = []
    for target in (narrow, wide):
        kv = FullKV(target.kv_shape, len(places))
        hidden.append(target.forward(Nodes(places, places, kv, None)).hidden.double())
    apart = ((hidden[0] - hidden[1]).norm(dim=-1) / hidden[1].norm(dim=-1)).max()
    assert tiny_target("gqa", torch.bfloat16).kv_shape.rounding < apart < narrow.kv_shape.rounding
    assert wide.kv_shape.rounding < 0.01


@every_row(
    ("config", "heads"),
    [
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, (8, 4)),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, (4, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, (1, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": 0}, (1, 1)),
        ({"num_attention_heads": 4, "num_key_value_heads": None}, (1, 1)),
        ({}, (1, 1)),
    ],
)
def test_heads_by_the_configuration(config, heads):
    text = SimpleNamespace(**config)
    assert heads_of(SimpleNamespace(get_text_config=lambda: text))[:2] == heads


def told(target: Target) -> list[str]:
    """What is said to be slow."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_fallbacks(target)
    assert all(each.category is SlowWarning for each in caught)
    return [str(each.message) for each in caught]


@needs_triton
def test_kernels_that_fail_are_told_once_and_those_that_nobody_wrote_are_not(monkeypatch):
    fault = "no kernel image is available"
    monkeypatch.setattr(adapting, "layer_fault", lambda *given: fault)
    monkeypatch.setattr(adapting, "_TRIED", 4)  # the interpreter is slow
    monkeypatch.setattr("tswift.forward.cuda.layer_kernels.STEP", 8)  # a row of 32 is a multiple
    target = wrap_model(tiny_llama("gqa", torch.bfloat16, layers=1), "tiny", "triton")
    line = f"layers by stock operators (several times as long), as {fault}"
    assert told(target) == [f"decoding is slower than it could be: {line}"]
    assert told(target) == []
    target.fallbacks.note("sampler", "1 of 4 rows had other tokens")
    target.fallbacks.note("trees", NoFault("no trees are walked"))
    assert told(target) == [
        "decoding is slower than it could be: the sampler by PyTorch (0.1 to 0.8 ms a step more on "
        "an H100), as 1 of 4 rows had other tokens"
    ]
    unwritten = wrap_model(network("Phi-3", torch.bfloat16), "tiny", "triton")
    assert unwritten.fallbacks["layers"] == "no kernels are written for phi3"
    assert told(unwritten) == []


@pytest.mark.parametrize("name", ["Llama, GQA", "Command R (Cohere)"])
def test_what_is_as_fast_as_it_can_be_is_not_warned_of(recwarn, tmp_path, name):
    """Cohere's layers have no program; a CPU has no CUDA."""
    architectures.checkpoint(ARCHITECTURES[name], tmp_path)
    load(str(tmp_path), device="cpu")
    assert not [each for each in recwarn if each.category is SlowWarning]


@pytest.mark.parametrize("why", ["fails", "why_not"])
def test_an_attention_that_fails_on_cuda_is_told_with_what_that_costs(monkeypatch, why):
    cuda = torch.device("cuda")
    reason = "triton attention fails here"
    monkeypatch.setattr(adapting, "fails", lambda *given: reason if why == "fails" else None)
    monkeypatch.setattr(adapting, "choose", lambda *given: "triton" if why == "fails" else "sdpa")
    monkeypatch.setattr(adapting, "why_not", lambda *given: reason)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    backend, note = adapting.select_backend("auto", torch.bfloat16, cuda, config)
    assert (backend, note) == ("sdpa", reason)
    target = Target(tiny_llama("gqa", torch.float32))
    target.device = cuda
    target.fallbacks.note("attention", note)
    assert told(target) == [
        "decoding is slower than it could be: attention and layers by stock operators (up to 77 "
        f"times as long on an H100), as {reason}"
    ]
