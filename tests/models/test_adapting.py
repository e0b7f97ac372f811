"""Our attention in a network of transformers: what goes wrong shows before anything is decoded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import architectures
from benchmarks.architectures import ARCHITECTURES
from tests import fake_torchao
from tests.models.refusals import changed, refuse
from tswift.attention import backends
from tswift.attention.backends import BACKENDS, why_not
from tswift.attention.layout import AttentionSpec
from tswift.kv.cache import FullKV
from tswift.models import adapting
from tswift.models.adapting import compiled, wrap_model
from tswift.models.load import LoadedModel, _with_copy, load
from tswift.models.target import Target

NOTHING = AttentionSpec()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"final_logit_softcapping": 30.0},
            r"\(llama\) is not served exactly: logits differ",
        ),  # Llama does no such thing
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type chunked_attention"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary .* type dynamic"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    refuse(changed(checkpoint, tmp_path / "m", **changes), match)


@pytest.mark.parametrize(
    ("name", "value", "dtype", "place"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "float32", "model.layers.1"),
        ("model.layers.0.self_attn.q_proj.weight", float("inf"), "float64", "model.layers.0"),
        ("lm_head.weight", 60_000.0, "float16", "lm_head"),
    ],
)
def test_a_model_that_gives_no_numbers(
    checkpoint: Path, tmp_path: Path, name: str, value: float, dtype: str, place: str
) -> None:
    model = changed(checkpoint, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights[name][3] = value
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    reason = f"the first output that is not finite is that of {place}: its weights are broken, or {dtype} is too narrow"
    refuse(model, f"gives logits that are NaN or infinite; {reason} for it$", dtype=dtype)


def test_an_architecture_that_does_something_unheard_of_is_refused(checkpoint: Path, monkeypatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    right = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        out.logits *= 1.01
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    refuse(str(checkpoint), r"\(llama\) is not served exactly: logits differ", "model")


@pytest.mark.parametrize("mistake", ["positions", "ancestors", "cache"])
def test_the_check_of_logits_sees_what_goes_wrong_in_a_tree(tmp_path: Path, monkeypatch, mistake: str) -> None:
    architectures.checkpoint(architectures.ARCHITECTURES["Llama, GQA"], tmp_path)
    load(str(tmp_path))
    right = Target.forward

    def wrong(self, tokens, positions, kv, ancestors):
        if ancestors is not None and mistake == "positions":
            positions = torch.arange(len(positions)) + kv.length
        if ancestors is not None and mistake == "ancestors":
            ancestors = torch.ones_like(ancestors).tril()
        if ancestors is not None and mistake == "cache":
            kv.keys[:, :, kv.length - 1] = 0
        return right(self, tokens, positions, kv, ancestors)

    monkeypatch.setattr(Target, "forward", wrong)
    refuse(str(tmp_path), "is not served exactly: logits differ", "model")


@pytest.mark.slow
@pytest.mark.skipif(why_not("triton", torch.float32, torch.device("cpu")) is not None, reason="no interpreter")
@pytest.mark.parametrize("lies", [False, True])
def test_windows_and_soft_caps_that_a_backend_fails_at_are_plain_products(
    monkeypatch: pytest.MonkeyPatch, lies: bool
) -> None:
    from tswift.attention.triton import TritonAttention

    class Lying(TritonAttention):
        def __call__(self, query, keys, values, scale, wants=NOTHING):
            out = super().__call__(query, keys, values, scale, wants)
            return out * 1.001 if wants.softcap and not wants.window else out

    def network():
        return ARCHITECTURES["Gemma 2 (windows, soft caps)"].make(97)

    assert wrap_model(network(), "tiny", "sdpa").special_fault is None
    monkeypatch.setattr(adapting, "_DOUBTED", ("cpu",))
    # all cases are in tests/attention/test_backends.py; the interpreter takes a minute for them
    monkeypatch.setattr(backends, "_around", lambda window: ((1, 3, True), (window or 37, 4, False)))
    monkeypatch.setitem(BACKENDS, "triton", lambda: Lying if lies else TritonAttention)
    target = wrap_model(network(), "tiny", "triton")
    assert target.replays == target.serves(FullKV(target.kv_shape, 1)) == (not lies)
    model = LoadedModel("tiny", None, target, None, (), prepared=compiled(target, ""))
    words = (
        r"eager, as triton attention computes nonsense here \(off by 0\.001 of the largest output\) "
        "with sliding windows of 24 tokens and soft-capped scores"
    )
    assert re.fullmatch(words if lies else "eager", model.about()["layers"])
    if lies:
        monkeypatch.setattr(Lying, "__call__", None)
        target.prefill(list(range(60)), FullKV(target.kv_shape, 60))


def test_a_copy_of_the_model_trusts_what_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)
    model = load(device="cpu")
    model.target.special_fault = "a fault"
    copied = _with_copy(model, "int8")
    assert copied.drafting is not None
    assert copied.drafting.special_fault == "a fault"
    assert copied.about()["draft_layers"] == "eager, as a fault"
