"""Every class of transformers that writes text, by a tiny random checkpoint of each: is it served,
or why not?

A class is one that transformers counts among causal or image-text language models. Its own default
configuration is made small, a model of it is drawn and saved by transformers, and loaded by its
path, in float64. A class is "equal" if every method writes plain decoding's tokens, and if logits
are those of transformers. A refusal is to be one line that says why. What is neither is told as it
came: "RAW", or "DIFFERS".

    python -m benchmarks.classes --part 1/4 --only gemma
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import tswift
from benchmarks.architectures import SENTENCES, WINDOW, apart, drawn, stock, texts
from recipes.corpus import train_tokenizer
from tswift.errors import InputError
from tswift.models.architecture import class_of
from tswift.models.checkpoint import Checkpoint

METHODS = ("ar", "recall", "magicdec", "reuse")
_RECURRENT = ("ar", "recall", "reuse")  # of models with recurrent layers
LENGTH = 90
HIDDEN, LAYERS, POSITIONS = 32, 4, 512
# most that logits may differ by, in units of their spread: norms and softmax are float32 in places,
# which random weights amplify (Gemma 3n by one draw 3e-5, by another 3e-4)
_CLOSE = 5e-4

# where states are float32 in both, and summed in other orders: random weights amplify that
_CLOSE_STATES = 5e-3
# by what the name of a field ends in, the first that fits: a small value
_SMALL: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "pad_vocab_size"), 300),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"), POSITIONS
    ),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "key_value_heads"), 2),
    **dict.fromkeys(
        ("attention_heads", "n_head", "num_heads", "n_heads", "n_groups", "num_heads_kv"), 4
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv"), 8),
    **dict.fromkeys(
        ("hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
        LAYERS,
    ),
    **dict.fromkeys(("depth",), 1),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "intermediate_dim", "ffn_hidden_size"),
        48,
    ),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "lora_rank", "_rank"), 8),
    **dict.fromkeys(("experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "local_experts", "routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("original_max_position_embeddings",), 64),
    **dict.fromkeys(("rotary_dim",), 4),
    **dict.fromkeys(("num_kv_shared_layers",), 0),
    **dict.fromkeys(("image_size",), 28),
    **dict.fromkeys(("patch_size",), 14),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "hidden_dim",
            "embedding_size",
            "out_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 0),
}
# of images and the like, which random models are not to draw
_TOKENS = ("_token_id", "_token_index", "_token")
_OUTSIDE = 1000  # beyond the vocabulary
# what the rules above do not make right; a dot leads into a part
_SCANNED = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_OF_TEXT = "text_config.rope_parameters"
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_SCANNED, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_SCANNED, "layer_types": ["linear_attention", "full_attention"] * 2},
    "falcon_h1": {**_SCANNED, "mamba_d_ssm": 64},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{kind: {"vocabulary_map": {"<image>": 9}} for kind in ("chameleon", "emu3")},
    "cohere_compass": {_OF_TEXT: {"full_attention": _ROPE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config.rope_theta": 10_000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"] * 2,
        "text_config.num_experts_per_tok": 2,
    },
    "diffusion_gemma": {
        **{"text_config.num_experts": 4, "text_config.top_k_experts": 2},
        "text_config.moe_intermediate_size": 16,
    },
    "granite4_vision": {
        **{"deepstack_layer_map": [[0, 1]], "downsample_rate": "1/2"},
        "vision_config.hidden_size": 64,
    },
    "molmo2": {"adapter_config.vision_feature_layer": [2, 1]},
    "perception_lm": {"vision_config.model_args": {"embed_dim": HIDDEN}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 8},
    "step3p7": {"text_config.sliding_window": WINDOW},
}
_TIMM = ("fast_vlm", "gemma3n", "perception_lm")  # whose other parts want a library of images
# sections of a rotary embedding for images, where the class's own are of its published size
_SECTIONS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"), (2, 1, 1)),
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glmga"), (2, 1, 1)),
    **dict.fromkeys(("paddleocr_vl", "hunyuan_vl"), (2, 1, 1)),
    "glm4v_moe": (1, 1, 0),
    "ernie4_5_vl_moe": (1, 1, 2),
}


def kinds() -> list[str]:
    """The types of models, as configurations name them."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return sorted({kind for mapping in mappings for kind in mapping if kind in CONFIG_MAPPING})


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values made small: sizes by their names;
    lists of the layers' values cut to those left.
    """
    count = next(
        (
            values[name]
            for name in ("num_hidden_layers", "n_layer", "num_layers")
            if values.get(name)
        ),
        0,
    )
    left = _layers_left(values.get("layer_types"), count)
    return {
        name: _shrunk(name, value, count, left)
        for name, value in values.items()
        if name not in _DERIVED
    }


_DERIVED = (
    "transformers_version",
    "architectures",
    "dtype",
    "auto_map",
    "_name_or_path",
    "per_layer_config",
)


def _layers_left(types: Sequence[str] | None, count: int) -> list[int]:
    """Which layers are kept: one of each type first, then others from the start."""
    if not types:
        return list(range(min(count, LAYERS)))
    firsts = [types.index(kind) for kind in dict.fromkeys(types)]
    others = [index for index in range(count) if index not in firsts]
    return sorted([*firsts, *others][: max(LAYERS, len(firsts))])


def _shrunk(name: str, value: Any, count: int, left: list[int]) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if all(isinstance(each, str) for each in value) else value
    if name == "head_dim" and value is None:
        return _SMALL[name]
    if isinstance(value, list | tuple) and value and len(value) == count:
        value = [value[index] for index in left]
    if isinstance(value, list | tuple):
        return [_shrunk(name, each, 0, []) for each in value]
    if type(value) is not int or value < 0:
        return value
    if name.endswith(_TOKENS) and name not in _SMALL:
        return value + _OUTSIDE
    small = next(
        (small for end, small in _SMALL.items() if name == end or name.endswith(f"_{end}")), value
    )
    if name == "num_hidden_layers" and left:
        return len(left)
    return min(small, value)


def made(kind: str, vocab_size: int) -> transformers.PreTrainedModel:
    """A small random model of a type, in float32."""
    config_class = CONFIG_MAPPING[kind]
    values = shrunk(config_class().to_dict())
    for name, value in _OWN.get(kind, {}).items():
        part, _, field = name.rpartition(".")
        (values.setdefault(part, {}) if part else values)[field] = value
    text = values.get("text_config", values)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if name in text:
            text[name] = vocab_size
    _fit_sections(text)
    if kind in _SECTIONS:
        text["rope_parameters"]["mrope_section"] = [*_SECTIONS[kind]]
    config = config_class(**values)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    alone = config.get_text_config() is config and type(config) in mapping
    if not alone and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    torch.manual_seed(1)
    if config_class.model_type in _TIMM:
        return drawn(class_of(config)(config))
    return drawn(mapping[type(config)](config))


def _fit_sections(text: dict[str, Any]) -> None:
    """Let the sections of a rotary embedding for images be of a small head's size."""
    for rope in text.values():
        if not (isinstance(rope, dict) and rope.get("mrope_section")):
            continue
        turned = (
            int((text.get("head_dim") or _SMALL["head_dim"]) * rope.get("partial_rotary_factor", 1))
            // 2
        )
        rope["mrope_section"] = [turned - 2 * (turned // 3), turned // 3, turned // 3]


def refusal_of(kind: str) -> str:
    """Why a configuration alone is refused, of the published size; empty where it is not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            CONFIG_MAPPING[kind]().save_pretrained(folder)
        except Exception:  # there is no default configuration
            (Path(folder) / "config.json").write_text(json.dumps({"model_type": kind}))
        try:
            class_of(Checkpoint.find(folder).config)
        except InputError as error:
            return error.message.replace(f"{folder} ", "")
        return ""


def row(kind: str) -> list[str]:
    """Type, class, what became of it, and how far logits are, or the reason."""
    tokenizer = train_tokenizer(SENTENCES, 300)
    try:
        own = made(kind, len(tokenizer))
    except Exception as error:  # the rules do not make every configuration small
        try:
            reason = refusal_of(kind)
        except Exception:
            reason = ""
        if reason:
            return [kind, "", "refused", reason]  # before weights are looked for
        return [
            kind,
            "",
            "not tried",
            f"no small one was made: {type(error).__name__} {str(error).splitlines()[:1]}"[:150],
        ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            own.save_pretrained(folder)
        except Exception as error:
            return [kind, type(own).__name__, "not tried", f"not saved: {error}"[:150]]
        tokenizer.save_pretrained(folder)
        try:
            model = tswift.load(folder, dtype="float64", device="cpu")
        except InputError as error:
            reason = error.message.replace(f"{folder} ", "")
            raw = "cannot be loaded" in reason
            return [kind, type(own).__name__, "RAW" if raw else "refused", reason]
        except Exception as error:
            return [kind, type(own).__name__, "RAW", f"{type(error).__name__}: {error}"[:200]]
        methods = METHODS if model.target.kv_shape.states is None else _RECURRENT
        written = texts(model, dict.fromkeys(methods, LENGTH))
        own.set_attn_implementation("eager")  # the one that does all that a model asks for
        far = apart(model, stock(own), written["prompt"] + written["ar"])
    other = [method for method in methods if written[method] != written["ar"]]
    close = _CLOSE if methods == METHODS else _CLOSE_STATES
    word = (
        f"DIFFERS: {', '.join(other)}" if other else "equal" if far < close else "DIFFERS: logits"
    )
    return [kind, type(own).__name__, word, f"{far:.0e} {model.target.attention_features}"]


def rows(only: str, part: str) -> Iterator[list[str]]:
    """Of a part of the types, those with something in their names."""
    index, count = map(int, part.split("/"))
    for kind in kinds()[index - 1 :: count]:
        if only in kind:
            yield row(kind)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="types with this in their names")
    parser.add_argument("--part", default="1/1", help="I/N: every Nth type, from the Ith on")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(
        f"transformers {transformers.__version__}, {LENGTH} tokens, float64, methods "
        f"{', '.join(METHODS)}\n"
    )
    for cells in (
        ["type", "class", "", "logits, what its layers want, or why it is refused"],
        ["---"] * 4,
    ):
        print(f"| {' | '.join(cells)} |")
    for cells in rows(args.only, args.part):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
