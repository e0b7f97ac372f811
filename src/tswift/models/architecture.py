"""What a configuration says of a model: its class in transformers, what of it is served, and what
its layers keep of a text.

Many models are published as one that reads images, too: around an ordinary decoder there are a
vision tower and what joins the two. A text needs the decoder and its LM head; of the rest no
weights are read, and no memory is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from tswift.attention.backends import USUAL_HEAD_SIZE
from tswift.caches import LayerKV, StateShape
from tswift.errors import InputError

# types of layers that have a state; those of the last one have keys and values, too
_CONVOLVED, _STEPPED, _BOTH = ("conv", "linear_attention", "hybrid")
_KEYLESS = (_CONVOLVED, _STEPPED, "mlp", "moe")
# recurrent layers that are served, and those without attention, by type, and how the types of
# models that have them begin
_RECURRENT = {
    "conv": ("lfm2", "lfm3"),
    "linear_attention": (
        *("qwen3_next", "qwen3_5", "olmo_hybrid"),
        *("granitemoehybrid", "bamba", "nemotron_h"),
    ),
    "hybrid": ("falcon_h1",),
    **dict.fromkeys(("mlp", "moe"), ("nemotron_h",)),
}
# of Mamba2: groups, size of a key, taps of the convolution, heads, and size of a value
_MAMBA = (
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_state", "ssm_state_size"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
)
# types whose own head for multi-token prediction is served
_PREDICTING = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "mellum", "glm4_moe")
# beside the decoder, what a class asks about every token
_ASKED = {"gemma3n": ("embed_vision", "embed_audio")}
_MAX_POSITIONS = 1 << 24  # beyond what any model was made for


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration's language model; of a larger model,
    the part of it that reads and writes text.

    Raises:
        InputError: transformers has none that makes text from the left to the right, or it has an
            encoder, too.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"a model with an encoder ({config.model_type}) is not served: only decoders are",
            "model",
        )
    if hasattr(config, "canvas_length"):
        raise InputError(
            f"a model that writes by diffusion ({config.model_type}) is not served: only those "
            "that write from left to right are",
            "model",
        )
    kind = type(config)
    alone = config.get_text_config() is config
    mappings = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] * (not alone) + [MODEL_FOR_CAUSAL_LM_MAPPING]
    for mapping in mappings:
        if kind in mapping:
            found: Any = mapping[kind]
            return found if alone else _text_part(found)
    raise InputError(
        f"transformers has no causal language model of the type {config.model_type}", "model"
    )


@cache
def _text_part(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def make(
        self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object
    ) -> None:
        try:
            whole.__init__(self, config, *args, **kwargs)
        except ImportError:  # towers of timm, of which nothing is kept
            with _without_towers(config.get_text_config()):
                whole.__init__(self, config, *args, **kwargs)
        needed = _ASKED.get(config.model_type, ())
        asked = {each for name, each in self.named_modules() if name.endswith(needed)}
        _keep_only(self, {self.get_decoder(), self.get_output_embeddings(), *asked})

    # some hold a whole language model, and not its decoder alone
    def get_output_embeddings(self: PreTrainedModel) -> nn.Module | None:
        return whole.get_output_embeddings(self) or whole.get_decoder(self).get_output_embeddings()

    def get_decoder(self: PreTrainedModel) -> nn.Module:
        found = whole.get_decoder(self)
        lm_head = found.get_output_embeddings()
        return found if lm_head is None else found.get_decoder()

    own = {
        **{"__init__": make, "__module__": whole.__module__},
        **{"get_decoder": get_decoder, "get_output_embeddings": get_output_embeddings},
    }
    # under its own name, by which transformers finds how the names of its weights have changed
    return type(whole.__name__, (whole,), own)


@contextmanager
def _without_towers(text: PreTrainedConfig) -> Iterator[None]:
    """While transformers makes nothing of configurations within a model's but of its text's."""
    make = AutoModel.from_config
    AutoModel.from_config = lambda config, **named: (
        make(config, **named) if config is text else nn.Identity()
    )
    try:
        yield
    finally:
        AutoModel.from_config = make


def _keep_only(module: nn.Module, wanted: Collection[object]) -> None:
    """Take away every module that is none of those wanted, nor holds one."""
    for name, child in list(module.named_children()):
        if child in wanted:
            continue
        if any(inner in wanted for inner in child.modules()):
            _keep_only(child, wanted)
        else:
            setattr(module, name, None)


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration on the meta device: shapes without weights, no memory."""
    with torch.device("meta"):
        return class_of(config)._from_config(deepcopy(config))


def is_moe(config: PreTrainedConfig) -> bool:
    """Whether a model is a mixture of experts, of which a pass reads only some."""
    text = config.get_text_config()
    return any(
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )


def has_mtp_head(config: PreTrainedConfig) -> bool:
    """Whether a model is of a kind whose own head for multi-token prediction is served."""
    return config.get_text_config().model_type in _PREDICTING


def refuse_routed(config: PreTrainedConfig, model: str) -> None:
    """Refuse a mixture of experts: no shape tells which weights a pass reads."""
    if is_moe(config):
        raise InputError(
            f"{model} reads only some of its experts in a pass; which, no shape can tell", "model"
        )


def refuse_unsupported(config: PreTrainedConfig, model: str) -> None:
    """Refuse what our attention and KV cache would compute wrongly,
    as far as a configuration says it.
    """
    moving = {
        str(rope["rope_type"])
        for rope in _ropes(config)
        if rope.get("rope_type") == "dynamic"
        or (rope.get("rope_type") == "longrope" and rope["short_factor"] != rope["long_factor"])
    }
    layers = {*(getattr(config, "layer_types", None) or ())} - {
        "full_attention",
        "sliding_attention",
    }
    layers -= {kind for kind, models in _RECURRENT.items() if config.model_type.startswith(models)}
    parts = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = {getattr(part, "num_attention_heads", None) for part in parts}
    reason = ""
    if (getattr(config, "max_position_embeddings", None) or 0) < 1 or None in heads:
        reason = f"the architecture {config.model_type}"
    elif layers:
        reason = f"layers of type {', '.join(sorted(layers))}"
    elif getattr(config, "kv_lora_rank", None):
        reason = "latent attention (kv_lora_rank), whose keys and values are of two sizes"
    elif len(heads) > 1:
        reason = "layers with different numbers of query heads"
    elif moving:
        reason = f"rotary embeddings of type {', '.join(moving)}"
    if reason:
        raise InputError(f"{model} has {reason}, which tswift cannot serve exactly yet", "model")


def freeze_longrope(config: PreTrainedConfig) -> None:
    """Let rotary embeddings of the type longrope turn alike at every length:
    by the factors of the longest text.

    They have one list of factors for texts up to the length that the model was first trained with,
    and another for longer ones. A text that grows past it would have keys of both.
    """
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            kept = rope["long_factor" if config.max_position_embeddings > first else "short_factor"]
            rope.update(short_factor=kept, long_factor=kept)


def _ropes(config: PreTrainedConfig) -> list[dict[str, object]]:
    """What a configuration says of rotary embeddings; some have one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def attention_layers(config: PreTrainedConfig) -> list[int]:
    """The layers of a configuration that have keys and values."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return [layer for layer, kind in enumerate(types) if kind not in _KEYLESS]


def kept_by_layer(config: PreTrainedConfig) -> list[LayerKV]:
    """What each layer of a configuration keeps of a token, as far as it says."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    heads = text.num_attention_heads
    differ = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if differ else [text] * count
    types = getattr(text, "layer_types", None) or [""] * count
    # the last ones read an earlier one's of their type
    own = count - (getattr(text, "num_kv_shared_layers", None) or 0)
    sources: dict[str, int] = {}
    kept = []
    for layer, (part, kind) in enumerate(zip(layers, types, strict=True)):
        if layer < own:
            sources[kind] = layer
        size = getattr(part, "head_dim", None) or part.hidden_size // heads
        kept.append(
            LayerKV(
                getattr(part, "num_key_value_heads", None) or heads, size, sources.get(kind, layer)
            )
        )
    return kept


def state_shape(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> StateShape | None:
    """Shape of the states of a model's recurrent layers; None if it has no such layers."""
    text = config.get_text_config()
    types = list(getattr(text, "layer_types", None) or ())
    kind = partial(
        StateShape, dtype=dtype, wide=torch.promote_types(dtype, torch.float32), device=device
    )
    if _CONVOLVED in types:
        return kind(types.count(_CONVOLVED), text.hidden_size, text.conv_L_cache, 0, 0, 0)
    count = types.count(_STEPPED) + types.count(_BOTH)
    if not count:
        return None
    if hasattr(text, "linear_num_value_heads"):
        heads = text.linear_num_value_heads
        keys = text.linear_key_head_dim
        values = text.linear_value_head_dim
        taps = text.linear_conv_kernel_dim
        groups = text.linear_num_key_heads
    else:
        groups, keys, taps, heads, values = (
            next(getattr(text, name) for name in names if hasattr(text, name)) for names in _MAMBA
        )
    return kind(count, heads * values + 2 * groups * keys, taps, heads, keys, values)


def by_layer(config: PreTrainedConfig) -> tuple[LayerKV, ...]:
    """What layers keep, as of :class:`~tswift.caches.KVShape`;
    empty where they are alike, as far as a configuration says.
    """
    text = config.get_text_config()
    differ = getattr(text, "is_heterogeneous", False) or getattr(text, "num_kv_shared_layers", None)
    return tuple(kept_by_layer(config)) if differ else ()


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether a model has recurrent layers."""
    return state_shape(config, torch.float32, torch.device("cpu")) is not None


def max_positions(config: PreTrainedConfig) -> int:
    """Maximum tokens, prompt included, that a model's position encoding was made for.

    It is ``max_position_embeddings``, except where rotary embeddings are scaled and that was left
    at what the model was trained with, as transformers asks for. A factor of x then serves x times
    as many positions:

    - ``linear``: of ``max_position_embeddings``, which is not to be raised to the new maximum;
    - ``yarn``: of ``original_max_position_embeddings``, where that gives more. Qwen2.5 says 32,768
      for both and a factor of 4, to serve 131,072; others name 131,072 in the first place;
    - ``llama3``: of the same, but only where the maximum was not raised. Llama 3.2's factor of 32
      would give 262,144, and it was made for the 131,072 that it says.

    Where each type of layer has its own rotary embeddings (Gemma 3), the maximum is that of the
    scaled ones already.
    """
    text = config.get_text_config()
    stated: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    factor = _number(rope, "factor", 1)
    original = _number(rope, "original_max_position_embeddings", stated)
    served: float = stated
    if kind == "linear":
        served = stated * factor
    elif kind == "yarn" or (kind == "llama3" and stated <= original):
        served = max(stated, original * factor)
    return int(min(served, _MAX_POSITIONS))


def with_yarn(config: PreTrainedConfig, factor: float) -> PreTrainedConfig:
    """A configuration for ``factor`` times the positions of another,
    by YaRN (Peng et al., 2023, arXiv 2309.00071).

    Raises:
        InputError: it has no rotary embeddings, or has scaled ones.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind != "default":
        scaled = (
            f"rotary embeddings of type {kind}"
            if kind
            else "no rotary embeddings that are one for all layers"
        )
        raise InputError(f"the model has {scaled}", "yarn")
    original = text.max_position_embeddings
    text.rope_parameters = rope | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    text.max_position_embeddings = int(original * factor)
    return config


def _number(rope: Mapping[str, object], name: str, default: float) -> float:
    value = rope.get(name)
    return value if isinstance(value, int | float) and value >= 1 else default


def own_quantization(config: PreTrainedConfig) -> str | None:
    """Name of the method by which a checkpoint's weights are quantised; None if they are not."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method))


def heads_of(config: PreTrainedConfig) -> tuple[int, int, int]:
    """KV heads, query heads per KV head, and head size by a model's configuration,
    where they differ the first layer's.

    Where it does not say: one each, and the usual size.
    """
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):  # by the first layer
        text = text.per_layer_config[0]
    heads, kv_heads, size, hidden = (
        value if type(value := getattr(text, name, None)) is int and value > 0 else 0
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    size = size or (hidden // heads if hidden >= heads > 0 else USUAL_HEAD_SIZE)
    return (
        (kv_heads, heads // kv_heads, size)
        if heads and kv_heads and heads % kv_heads == 0
        else (1, 1, size)
    )
