"""Models around an ordinary decoder, which read images, too: the part that writes text is served,
nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    TimesFmConfig,
)

from benchmarks import classes
from recipes.corpus import train_tokenizer
from tests.conftest import SENTENCES
from tests.helpers import first, needs_program, options_for, refused, tokens_of
from tswift.caches import FullKV
from tswift.engine import generate
from tswift.forward.notes import PROGRAM
from tswift.forward.passes import Nodes
from tswift.loading.model import LoadedModel, adopt, load
from tswift.loading.plan import plan_model
from tswift.models.architecture import class_of
from tswift.models.checkpoint import Checkpoint
from tswift.models.config import ModelConfig
from tswift.sampling.parameters import SamplingParams

TOKENS = 300
TEXT = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
SEES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "head_dim": 8,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
SEES_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def mistral() -> PreTrainedModel:
    config = Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None}, vision_config=SEES
    )
    return Mistral3ForConditionalGeneration(config)


def qwen() -> PreTrainedModel:
    vision = {**SEES_QWEN, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**TEXT, **ROPE}, vision_config=vision)
    )


KINDS = {"mistral": mistral, "qwen": qwen}


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    KINDS[kind]().save_pretrained(folder)
    tokenizer = train_tokenizer(SENTENCES, TOKENS)
    tokenizer.chat_template = "{{ messages[0].content }}!"
    tokenizer.save_pretrained(folder)
    return folder


def text_of(model: LoadedModel, method: str) -> list[int]:
    params = SamplingParams(min_p=0.02)
    options = options_for(method, nodes=12, budget=64, sinks=4)
    steps = generate(
        model, model.encode(SENTENCES[0]), 100, method=method, options=options, params=params
    )
    return tokens_of(steps)


@needs_program
@pytest.mark.parametrize("kind", first(1, [*KINDS]))
def test_methods_give_the_tokens_of_plain_decoding(kind, tmp_path):
    model = load(str(saved(tmp_path, kind)))
    assert model.layers == PROGRAM
    assert model.tokenizer.chat_template == "{{ messages[0].content }}!"
    wanted = text_of(model, "ar")
    assert all(text_of(model, method) == wanted for method in ("recall", "magicdec"))


@pytest.mark.parametrize("kind", first(1, [*KINDS]))
def test_logits_are_those_of_the_whole_model(kind, tmp_path):
    target = load(str(saved(tmp_path, kind)), dtype="float64").target
    text = torch.arange(60) * 7 % TOKENS
    whole = type(KINDS[kind]()).from_pretrained(tmp_path, dtype=torch.float64)
    with torch.inference_mode():
        wanted = whole(text[None]).logits[0]
    found = target.logits(
        target.forward(Nodes(text, torch.arange(60), FullKV(target.kv_shape, 60), None)).hidden
    )
    assert (found - wanted).abs().max() < 1e-9 * wanted.std()


@pytest.mark.parametrize("kind", first(1, [*KINDS]))
def test_weights_that_see_are_not_read(kind, tmp_path):
    """They are noted in the file's header, and are no numbers."""
    folder = saved(tmp_path, kind)
    tensors = load_file(folder / "model.safetensors")
    seeing = [name for name in tensors if "vis" in name or "projector" in name]
    assert seeing
    for name in seeing:
        tensors[name].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    target = load(str(folder), dtype="float64").target
    assert all(weight.isfinite().all() for weight in target.model.parameters())
    text = sum(weight.numel() for weight in target.model.parameters())
    assert (
        plan_model(ModelConfig(model=str(folder), dtype="float64")).loaded_bytes["weights"]
        == 8 * text
    )


@needs_program
@pytest.mark.parametrize("kind", first(1, [*KINDS]))
def test_weights_are_rounded_whatever_names_the_file_has_for_them(kind, tmp_path):
    folder = str(saved(tmp_path, kind))
    model = load(folder, weights="int8")
    assert model.layers == PROGRAM
    assert text_of(model, "recall") == text_of(model, "ar")
    ours = model.target.open_logits(torch.ones(32))
    plain = load(folder).target.open_logits(torch.ones(32))
    assert 0 < (ours - plain).abs().max() < 0.1 * plain.std()


@pytest.mark.parametrize(("positions", "kept"), [(512, 2.0), (64, 1.0)])
def test_a_text_that_grows_long_turns_alike_from_its_start(positions, kept, tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    sizes = {
        **TEXT,
        "max_position_embeddings": positions,
        "head_dim": 8,
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(
        **sizes, rope_parameters=rope, pad_token_id=0, bos_token_id=0, eos_token_id=0
    )
    config.save_pretrained(tmp_path)
    read = Checkpoint.find(str(tmp_path)).config
    assert read.rope_parameters["short_factor"] == read.rope_parameters["long_factor"] == [kept] * 4
    with refused("rotary embeddings of type longrope"):
        # as transformers has loaded it
        adopt(Phi3ForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "became", "told"),
    first(
        1,
        [
            ("aya_vision", "equal", ""),  # without the factor of its decoder's own class
            ("qwen2_5_vl", "equal", ""),
            ("nemotron_h_omni", "equal", ""),  # it holds a language model, and not a decoder
            ("fast_vlm", "equal", ""),  # its tower is of a library that is not here
            ("gemma3n", "equal", ""),  # it asks other parts about every token
            ("blip", "refused", "does not run on text alone (its class asks for more than token"),
            ("bart", "refused", "logits differ; its decoder takes no positions"),
            ("xlnet", "refused", "has the architecture xlnet"),
            ("gemma4_assistant", "refused", "is a drafter, which --drafter takes"),
            ("glm4_moe", "equal", ""),  # whose configuration need not say a head's size
            ("qwen3_5_moe_text", "equal", ""),  # whose configuration says of no MLP but the experts
        ],
    ),
)
def test_what_becomes_of_a_class(kind, became, told, monkeypatch):
    monkeypatch.setattr(classes, "LENGTH", 30)
    if kind not in classes.kinds():
        pytest.skip("this transformers has no such class")
    cells = classes.row(kind)
    assert cells[2] == became
    assert told in cells[3]


def test_what_does_not_write_from_left_to_right_is_told():
    config = TimesFmConfig()
    config.canvas_length = 64
    with refused("a model that writes by diffusion"):
        class_of(config)
    with refused("no causal language model of the type timesfm"):
        class_of(TimesFmConfig())
    with refused("a model with an encoder \\(bart\\) is not served"):
        class_of(BartConfig())
