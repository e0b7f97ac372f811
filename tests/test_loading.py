"""What loads: names, dtypes, heads, tokenizers, draft models, the hub;
and one line for what does not.
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, is_offline_mode
from huggingface_hub.utils import logging as hub_logging
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from recipes.corpus import train_tokenizer
from tests.conftest import SENTENCES, make_checkpoint
from tests.helpers import CPU, needs_program, read_json, refused
from tests.models.refusals import changed, refuse
from tests.rows import every_row
from tswift.caches import FullKV
from tswift.drafting.options import DraftOptions
from tswift.errors import Notice
from tswift.forward.text import chunks, prefill
from tswift.loading.model import LoadedModel, load, load_model
from tswift.loading.plan import plan_model
from tswift.memory import Demand, preflight
from tswift.models import checkpoint as module
from tswift.models.checkpoint import Checkpoint, hub
from tswift.models.config import ModelConfig
from tswift.models.devices import find_dtype, keep_precision
from tswift.speculators.heads import ConditionedHeads


@pytest.mark.parametrize("dtype", ["auto", "float64", "bfloat16"])
def test_loads_a_folder(checkpoint, dtype):
    loaded = load(str(checkpoint), device="cpu", dtype=dtype)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert loaded.target.dtype == expected
    assert loaded.heads is not None
    assert loaded.heads.count == 3
    assert loaded.heads.heads[0].linear.weight.dtype == expected
    assert loaded.eos_ids == (0,)
    assert loaded.target.max_positions == 4096
    assert loaded.tokenizer.decode(loaded.encode("The ship")) == "The ship"
    assert (loaded.draft, loaded.draft_name, "draft" in loaded.about()) == (None, None, False)


@every_row(
    ("name", "dtype"),
    [
        *(
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("half", torch.float16),
            ("fp32", torch.float32),
        ),
        *(
            ("fp64", torch.float64),
            ("torch.bfloat16", torch.bfloat16),
            (torch.float64, torch.float64),
        ),
    ],
)
def test_names_of_dtypes(name, dtype):
    assert find_dtype(name) == dtype


def test_a_dtype_that_is_not_the_checkpoints_is_said(checkpoint, tmp_path, tiny_shapes):
    model = changed(checkpoint, tmp_path / "m", dtype="bfloat16")
    for dtype, note in (
        ("auto", ", checkpoint in bfloat16"),
        ("bf16", ""),
        (torch.float64, ", checkpoint in bfloat16"),
    ):
        loaded = load(model, device="cpu", dtype=dtype, exact=False)
        assert loaded.remarks().partition(", layers by PyTorch")[0] == note
        assert (
            plan_model(ModelConfig(model=model, device="cpu", dtype=str(dtype))).kv_shape.dtype
            == loaded.target.dtype
        )
    # random weights have no checkpoint
    assert "checkpoint" not in load("shape:tiny", dtype="float32").remarks()
    refuse(model, "no dtype 'int8'; there are auto, float32, .*float16$", "dtype", dtype="int8")
    refuse(model, r"no dtype 'flaot32'; .*; did you mean float32\?$", "dtype", dtype="flaot32")


@pytest.mark.slow
def test_yarn_serves_more_positions(checkpoint, tmp_path):
    loaded = load(str(checkpoint), device="cpu", dtype="float64", yarn=4, exact=False)
    assert loaded.target.max_positions == 4 * 4096
    assert loaded.remarks().endswith("4 times its positions by YaRN")
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    stated = changed(
        checkpoint, tmp_path / "stated", rope_parameters=scaling, max_position_embeddings=4 * 4096
    )
    text = loaded.encode("The ship had lain three days becalmed,") * 600
    assert len(text) > 4200
    theirs = AutoModelForCausalLM.from_pretrained(stated, dtype=torch.float64)(
        torch.tensor([text])
    ).logits[0]
    kv = FullKV(loaded.target.kv_shape, len(text))
    ours = torch.cat(
        [loaded.target.logits(part.hidden) for part in chunks(loaded.target, text, kv)]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    refuse(stated, "yarn: the model has rotary embeddings of type yarn$", "yarn", yarn=2)
    refuse(str(checkpoint), "yarn: must be above 1 and at most 1,024, got 1$", "yarn", yarn=1)


def test_close_names_are_suggested(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "my-llama")
    (tmp_path / "my-lame").mkdir()  # no model
    monkeypatch.chdir(tmp_path)
    for name in ("my-lama", "./my-lama", str(tmp_path / "my-lama")):
        refuse(name, f"^model: there is no folder '{name}'; did you mean my-llama\\?$")
    refuse("dmeo", r"there is no folder 'dmeo'; did you mean demo\?$")
    refuse(
        "my-llama",
        r"there is no folder 'my-lama'; did you mean my-llama\?$",
        "draft_model",
        draft_model="my-lama",
    )
    refuse("shape:lama3.1-8b", r"no shape 'lama3.1-8b'; there are .*; did you mean llama3.1-8b\?$")
    for heads, meant in (
        ("conditoned", "conditioned"),
        ("my-llama/head.safetensors", "heads.safetensors"),
    ):
        refuse(
            "my-llama", rf"there is no file {heads}; did you mean {meant}\?$", "heads", heads=heads
        )
    refuse("my-llama", "there is no file x.bin$", "heads", heads="x.bin")


def test_heads_beside_the_model_of_a_kind_or_none(checkpoint, tmp_path):
    model = changed(checkpoint, tmp_path / "m")
    own = tmp_path / "m" / "heads.safetensors"
    ConditionedHeads(32, 2).save(tmp_path / "m" / "heads-conditioned.safetensors")
    conditioned = load(model, heads="conditioned").heads
    default = load(model).heads
    assert conditioned is not None
    assert (conditioned.kind, conditioned.count) == ("conditioned", 2)
    assert default is not None
    assert default.kind == "chained"
    refuse(model, "there is no file", "heads", heads="chained")
    refuse(model, "there are no heads in", "heads", heads=str(checkpoint / "model.safetensors"))
    refuse(
        model, "is broken or no safetensors file", "heads", heads=str(checkpoint / "config.json")
    )
    own.rename(tmp_path / "elsewhere")
    assert load(model).heads is None
    assert load(model, heads=tmp_path / "elsewhere").heads is not None


def test_a_command_finds_a_model_once_and_draws_it_once(checkpoint, monkeypatch):
    made: list[str] = []
    for name in ("find_source", "skeleton"):
        right = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda given, name=name, right=right: made.append(name) or right(given)
        )
    plan = plan_model(ModelConfig(model=str(checkpoint)))
    for method in ("ar", "medusa"):
        preflight(plan, Demand(1, 1, method, DraftOptions()))
    load_model(plan)
    assert sorted(made) == ["find_source", "skeleton"]


def test_a_model_that_nobody_has_any_more_is_free(checkpoint):
    """Memory of a copy that is not used must be there for what is loaded next."""
    gc.disable()
    try:
        kept = weakref.ref(load(str(checkpoint)).target)
        assert kept() is None
    finally:
        gc.enable()


def test_rotary_embeddings_of_some_layers_only(tmp_path):
    """Gemma 3 has them by the type of the layer."""
    ropes = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    Gemma3TextConfig(num_hidden_layers=2, rope_parameters=ropes).save_pretrained(tmp_path)
    with refused("rotary embeddings of type dynamic"):
        _ = Checkpoint.find(str(tmp_path)).config


def test_a_tokenizer_with_another_limit(checkpoint, tmp_path, capfd):
    model = changed(checkpoint, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    config = read_json(path)
    path.write_text(json.dumps({**config, "model_max_length": 4}))
    loaded = load(model)
    capfd.readouterr()
    assert len(loaded.encode("The ship had lain three days becalmed.")) > 4
    assert capfd.readouterr().err == ""  # that is no news
    path.write_text(json.dumps({**config, "model_max_length": "many"}))
    with refused(r"^model: .* cannot be loaded \(its tokenizer: "):
        load(model).encode("The ship")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A model with the vocabulary of ``checkpoint``, half as wide."""
    changes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
    folder = make_checkpoint(tmp_path_factory.mktemp("small") / "m", **changes)
    (folder / "heads.safetensors").write_bytes(b"what lies beside a draft model is not read")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_model_comes_as_the_target_does(checkpoint, small, dtype):
    loaded = load(str(checkpoint), dtype=dtype, attention="sdpa", draft_model=str(small))
    assert loaded.draft is not None
    assert (loaded.draft.dtype, loaded.draft.device) == (loaded.target.dtype, loaded.target.device)
    assert (loaded.draft.hidden_size, loaded.draft.max_positions) == (16, 64)
    assert loaded.draft.backend is loaded.target.backend
    assert loaded.draft.kv_shape.dtype == loaded.draft.dtype
    assert loaded.draft_name == str(small)
    assert loaded.about()["draft"] == {"name": str(small)}


@needs_program
def test_a_draft_models_cache_has_the_dtype_that_was_asked_for(small):
    for kv_dtype in ("int8", "float16"):
        loaded = load(str(small), heads="none", draft_model=str(small), kv_dtype=kv_dtype)
        assert loaded.draft is not None
        assert loaded.draft.kv_shape.dtype == loaded.target.kv_shape.dtype
        assert loaded.draft.kv_shape.dtype == getattr(torch, kv_dtype)


def test_a_draft_model_without_a_tokenizer_or_of_a_shape(checkpoint, small, tmp_path, tiny_shapes):
    folder = shutil.copytree(small, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    for model, draft in (
        (str(checkpoint), str(folder)),
        ("shape:tiny", "shape:tied"),
        ("shape:tiny", str(small)),
    ):
        loaded = load(model, dtype="float32", draft_model=draft)
        assert loaded.draft is not None
        assert (loaded.draft.vocab_size, loaded.draft.dtype) == (
            loaded.target.vocab_size,
            torch.float32,
        )


def test_what_cannot_draft(checkpoint, small, tmp_path):
    def refuse_draft(draft, match):
        refuse(str(checkpoint), match, "draft_model", draft_model=draft)

    refuse_draft(
        str(make_checkpoint(tmp_path / "n", vocab_size=321)), "has a vocabulary of 321, .* has 320$"
    )
    folder = shutil.copytree(small, tmp_path / "m")
    train_tokenizer(
        ["other words, other tokens: zig zag zig zag"] * 9 + SENTENCES, 320
    ).save_pretrained(folder)
    other = r"has another vocabulary than .*: '.*' has (no )?id ?\d* there, (no )?id ?\d* here$"
    refuse_draft(str(folder), other)
    refuse_draft(3, r"^draft_model: must be a text, got 3$")
    refuse_draft("/nowhere", "there is no folder '/nowhere'")
    refuse_draft(" ", "there is no folder")
    refuse_draft("shape:llama3.1-8b", "has random weights")
    config = read_json(folder / "config.json")
    for change, match in (
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"hidden_size": 20}, "of shape .* makes it"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        refuse_draft(str(folder), match)


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A model without heads that may be changed."""
    return shutil.copytree(
        checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("heads.safetensors")
    )


def add(folder: Path, config: dict[str, object], **tensors: torch.Tensor):
    """Change a model's configuration, and add tensors to its weights, or replace some."""
    path = folder / "config.json"
    path.write_text(json.dumps(read_json(path) | config))
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})


def logits(loaded: LoadedModel) -> torch.Tensor:
    """After a prompt."""
    target = loaded.target
    forwarded = prefill(target, [*range(1, 30)], FullKV(target.kv_shape, 29))
    return target.logits(forwarded.hidden)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_lm_head_beside_tied_embeddings_is_used(folder, checkpoint, attention, weights):
    """As transformers 5 uses it, so that ``custom_generate`` writes the same text."""
    options = {"device": "cpu", "attention": attention, "weights": weights}
    wanted = logits(load(str(checkpoint), **options))
    add(folder, {"tie_word_embeddings": True})

    def found():
        warnings.filterwarnings("ignore", "of numpy's")  # as others have set some for theirs
        return logits(load(str(folder), **options))

    with pytest.warns(Notice, match=r"tie_word_embeddings, and has another lm_head\.weight, which"):
        assert torch.equal(found(), wanted)
    embedded = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add(folder, {}, **{"lm_head.weight": embedded.clone()})
    assert Checkpoint.find(str(folder)).config.tie_word_embeddings


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_what_nothing_reads_is_told(folder, attention):
    others = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "model.visual.patch.weight": torch.ones(2),
    }
    computed = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    add(folder, {}, **others, **computed)
    said = r"nothing reads 2 of its tensors, such as model\.layers\.0\.self_attn\.q_proj\.bias$"
    with pytest.warns(Notice, match=said):
        load(str(folder), device="cpu", attention=attention)


@pytest.mark.parametrize(("dtype", "attention"), [("auto", "auto"), ("bfloat16", "sdpa")])
def test_fp8_with_scales_of_blocks_is_served_as_floats(folder, tmp_path, dtype, attention):
    pytest.importorskip("accelerate", reason="transformers reads no FP8 without it")
    network = AutoModelForCausalLM.from_pretrained(folder)
    made = {}
    for name, weight in network.model.named_parameters():
        if name.endswith("proj.weight"):
            blocks = weight.detach().unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scale).to(torch.float8_e4m3fn)
            made[f"model.{name}"] = codes.view(weight.shape)
            made[f"model.{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            weight.data = (codes.float() * scale).view(weight.shape)
    network.save_pretrained(tmp_path / "plain")
    shutil.copy(folder / "tokenizer.json", tmp_path / "plain")
    options = {"device": "cpu", "dtype": dtype, "attention": attention}
    plain = load(str(tmp_path / "plain"), **options)
    how = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    add(folder, {"quantization_config": how}, **made)
    found = load(str(folder), **options)
    assert torch.equal(logits(found), logits(plain))
    assert found.about() == {
        **plain.about(),
        **{"name": str(folder), "quantization": "fp8, dequantised"},
    }


def test_fp8_without_what_reads_it_is_one_line(folder, monkeypatch):
    module = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(module, "is_accelerate_available", lambda: False)
    add(folder, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}})
    with refused(r"^model: .* cannot be loaded .*accelerate"):
        load(str(folder), device="cpu")


def test_a_shape_drafts_for_no_real_model(checkpoint):
    with refused(r"^drafter: shape:llama3.1-8b has random weights"):
        load(str(checkpoint), drafter="shape:llama3.1-8b")


@pytest.fixture
def online(monkeypatch):
    """As far as anybody has said; nothing listens there."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def test_a_hub_that_cannot_be_reached_is_not_tried_again(online, capfd):
    verbosity = hub_logging.get_verbosity()
    began = time.monotonic()
    with hub():
        assert is_offline_mode()
        assert hub_logging.get_verbosity() == logging.CRITICAL
    assert not is_offline_mode()
    assert hub_logging.get_verbosity() == verbosity
    with refused(r"^model: no folder 'nobody/nothing', and the hub is unreachable$"):
        _ = Checkpoint.find("nobody/nothing").config
    assert time.monotonic() - began < 5  # its client would have tried for 23 s
    assert capfd.readouterr().err == ""


def test_no_product_on_cuda_has_fewer_digits_than_its_numbers():
    """Though the environment of an image for GPUs says so:
    rotary positions beyond 2,048 would be rounded.
    """
    flags = (
        "allow_tf32",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    )
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(matmul, flag, True)
        keep_precision(CPU)
        assert all(getattr(matmul, flag) for flag in flags)
        keep_precision(torch.device("cuda"))
        assert not any(getattr(matmul, flag) for flag in flags)
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(matmul, flag, value)
