"""Loading: what loads, and one line for what does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig

from benchmarks import architectures
from tswift.errors import InputError
from tswift.models.loading import load
from tswift.models.refining_heads import ConditionedHeads
from tswift.models.source import read_config
from tswift.models.target import Target


def _copy(checkpoint: Path, folder: Path, **changes: object) -> str:
    shutil.copytree(checkpoint, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(folder)


def _refused(model: str, match: str, option: str = "--model", **options: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        load(model, **options)
    assert caught.value.option == option
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64", "bfloat16"])
def test_loads_a_folder(checkpoint: Path, dtype: str) -> None:
    loaded = load(str(checkpoint), device="cpu", dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert loaded.target.dtype == wanted
    assert loaded.heads is not None
    assert loaded.heads.count == 3
    assert loaded.heads.heads[0].linear.weight.dtype == wanted
    assert loaded.eos_ids == (0,)
    assert loaded.target.max_positions == 4096
    assert loaded.tokenizer.decode(loaded.encode("The ship")) == "The ship"


def test_no_heads_beside_the_model(checkpoint: Path, tmp_path: Path) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    (tmp_path / "m" / "heads.safetensors").rename(tmp_path / "elsewhere")
    assert load(model).heads is None
    assert load(model, heads=tmp_path / "elsewhere").heads is not None


def test_heads_by_kind(checkpoint: Path, tmp_path: Path) -> None:
    model = str(shutil.copytree(checkpoint, tmp_path / "m"))
    ConditionedHeads(32, 2).save(tmp_path / "m" / "heads-conditioned.safetensors")
    conditioned, default = load(model, heads="conditioned").heads, load(model).heads
    assert conditioned is not None
    assert (conditioned.kind, conditioned.count) == ("conditioned", 2)
    assert default is not None
    assert default.kind == "chained"
    _refused(model, "there is no file", "--heads", heads="chained")


def test_heads_that_are_none(checkpoint: Path, tmp_path: Path) -> None:
    _refused(str(checkpoint), "there is no file", "--heads", heads="/nowhere")
    _refused(str(checkpoint), "not a tswift heads file", "--heads", heads=str(checkpoint / "model.safetensors"))
    _refused(str(checkpoint), "not a tswift heads file", "--heads", heads=str(checkpoint / "config.json"))


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
    _refused(_copy(checkpoint, tmp_path / "m", **changes), match)


def test_rotary_embeddings_of_some_layers_only(tmp_path: Path) -> None:
    """Gemma 3 has them by the type of the layer."""
    ropes = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    Gemma3TextConfig(num_hidden_layers=2, rope_parameters=ropes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="rotary embeddings of type dynamic"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("changes", [{"use_sliding_window": False}, {}])
def test_a_window_that_is_not_used_is_fine(checkpoint: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """Llama knows of no windows, whatever its configuration says."""
    assert load(_copy(checkpoint, tmp_path / "m", sliding_window=64, **changes)).target.special == ""


def test_broken_files(checkpoint: Path, tmp_path: Path) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"nothing of the kind")
    _refused(model, r"model\.safetensors is broken or no safetensors file")
    (tmp_path / "m" / "model.safetensors").unlink()
    _refused(model, r"has no weights that tswift reads \(no model\.safetensors\)")
    (tmp_path / "m" / "config.json").write_text("{")
    _refused(model, r"config\.json is not JSON")


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
    model = _copy(checkpoint, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights[name][3] = value
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    reason = f"the first output that is not finite is that of {place}: its weights are broken, or {dtype} is too narrow"
    _refused(model, f"gives logits that are NaN or infinite; {reason} for it$", dtype=dtype)


def test_pickles_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "m" / "pytorch_model.bin")
    weights.unlink()
    _refused(model, r"only pytorch_model\.bin, a pickle, which could run code")


def test_missing_weights_are_not_made_up(checkpoint: Path, tmp_path: Path) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    _refused(model, r"lacks weights for 1 tensors, such as model\.layers\.1\.mlp\.up_proj\.weight")


def test_attention_that_cannot_be_replaced(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    folder = tmp_path / "m"
    BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(folder)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, folder)
    _refused(str(folder), "bloom")


def test_the_bundled_model_is_there() -> None:
    loaded = load("demo", device="cpu")  # fails in one clear line if src/tswift/models/demo is missing
    assert loaded.heads is not None
    assert loaded.target.max_positions == 131_072


def test_an_architecture_that_does_something_unheard_of_is_refused(checkpoint: Path, monkeypatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    right = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        out.logits *= 1.01
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    _refused(str(checkpoint), r"\(llama\) is not served exactly: logits differ", "--model")


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
    _refused(str(tmp_path), "is not served exactly: logits differ", "--model")


@pytest.mark.parametrize("model", ["~nosuchuser/m", "a" * 300])
def test_paths_that_cannot_be_looked_at(model: str) -> None:
    _refused(model, "cannot be looked at", "--model")


def test_a_prompt_longer_than_the_tokenizer_thinks_is_no_news(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 4}))
    loaded = load(model)
    capfd.readouterr()
    assert len(loaded.encode("The ship had lain three days becalmed.")) > 4
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_fails_on_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    model = _copy(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "many"}))
    loaded = load(model)
    with pytest.raises(InputError, match=r"^--model: .* cannot be loaded \(its tokenizer: "):
        loaded.encode("The ship")
