"""What the metadata of a GGUF file say of a model: transformers' configuration of it.

Keys begin with the name of the file's architecture. Each of them is read, or has to have the one
value that is served, or is known to change nothing. What llama.cpp reads of other architectures
alone is told of, and any other key is refused by its name: it could make another model. What keys
mean, and what holds where one is missing or 0, is llama.cpp's.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import log
from typing import Any

import torch
from gguf import Keys
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tswift.errors import InputError
from tswift.models.gguf import FACTORS, Architecture, GGUFFile

_FIELDS = {  # of the configuration: the name in the metadata, after the architecture's
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
# a file need not say these: they follow from others, or transformers' value is right
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "attention_multiplier", "embedding_multiplier"),
    *("residual_multiplier", "attn_logit_softcapping", "final_logit_softcapping"),
    *("full_attention_interval", "sliding_window"),
)
_BIASES = {"attention_bias": ".attn_", "mlp_bias": ".ffn_"}  # by what tensors of biases are called
# keys of which one value is served, beside those of an architecture
_ONLY = {"attention.causal": True, "nextn_predict_layers": 0}
_ONLY |= {"expert_count": 0, "expert_used_count": 0}
_SAME = ("value_length", "head_dim", "key_length_swa", "value_length_swa")  # as a head's size
_OTHER_NAMES = {  # the first one is llama.cpp's old one, the others are Ollama's
    "rope.scale_linear": "rope.scaling.factor",
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
}
# keys that change nothing here, by why
_SILENT = {
    "tensors say it": "vocab_size tensor_data_layout",
    "norms here subtract no mean": "attention.layer_norm_epsilon",
    "how it was trained": "rope.scaling.finetuned",
    "a position in a text is one number": "rope.dimension_sections rope.mrope_section "
    "rope.mrope_interleaved mrope_sections",
    "there are no states": "ssm.*",
    "images are not read": "vision.* mm.* deepstack_mapping n_deepstack_layers",
    "there are no experts": "expert_* leading_dense_block_count interleave_moe_layer_step "
    "moe_every_n_layers norm_top_k_prob",
    "of a text as a vector": "pooling_type embedding_length_out classifier.output_labels",
}
# what llama.cpp computes with, whatever a file says
_USUAL = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_ext_factor": 1.0}
_KNOWN = {  # what it knows of some architecture
    key.removeprefix("{arch}.")
    for part in vars(Keys).values()
    if isinstance(part, type)
    for key in vars(part).values()
    if isinstance(key, str)
}
_WINDOW = "attention.sliding_window"
_BASE = 10_000.0  # of rotary embeddings, where a file does not say
# types of scaled rotary embeddings; the last one is linear, but that it has factors by length
_KINDS = ("none", "linear", "yarn", "longrope")


class _Keys(dict[str, Any]):
    """The values under the name of a file's architecture that nobody has asked for yet."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata['general.architecture']}."
        said: dict[str, Any] = {**file.metadata, **file.arrays}
        for key, value in sorted(said.items()):
            if key.startswith(self.prefix):
                name = key.removeprefix(self.prefix)
                alike = isinstance(value, list) and {*value} == {*value[:1]}  # of each layer
                self[_OTHER_NAMES.get(name, name)] = value[0] if alike else value

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default if that is 0, or there is none."""
        value = self.pop(key, None)
        if isinstance(value, list | str):
            raise self.odd(key, value)
        return value or default

    def demand(self, key: str, served: object) -> None:
        """Refuse another value of a key than the one that is served."""
        value = self.pop(key, served)
        if value != served:
            raise self.odd(key, value)

    def odd(self, key: str, value: object) -> InputError:
        """An error about a key."""
        return self.file.refusal(
            f"has {self.prefix}{key} {value!r:.60}, which tswift does not serve"
        )

    def tell(self, key: str, how: str) -> None:
        """Say in a line how a key is served."""
        self.file.told[key] = f"{self.file.path.name}: {self.prefix}{key} is {how}"

    def finish(self) -> None:
        """Refuse keys that are left; tell of those that llama.cpp knows of other architectures."""
        silent = " ".join(_SILENT.values()).split()
        for key, value in self.items():
            if any(fnmatchcase(key, each) for each in silent):
                continue
            if key not in _KNOWN:
                raise self.odd(key, value)
            if _USUAL.get(key.rpartition(".")[2]) != value:
                self.tell(key, "not used, as llama.cpp does not use it here")


def configuration(file: GGUFFile) -> dict[str, Any]:
    """What transformers' configuration of a file's model is to say, by its names.
    ``file.told`` has where something else is served than the file seems to say, in a line each.

    Raises:
        InputError: the file lacks a value, or has one that is not served, or a key that nobody
            knows.
    """
    keys, own = _Keys(file), file.architecture
    values: dict[str, Any] = {"model_type": own.model_type}
    for name, key in {**_FIELDS, **own.fields}.items():
        value = keys.take(key)
        if value is not None:
            values[name] = value
        elif name not in _OPTIONAL:
            raise file.refusal(f"lacks {keys.prefix}{key} in its metadata")
    heads = values["num_attention_heads"]
    share = values["hidden_size"] // heads
    values.setdefault("num_key_value_heads", heads)
    size = values.setdefault("head_dim", share)
    if "attention_multiplier" in own.fields:
        values.setdefault("attention_multiplier", size**-0.5)
    if own.delta:
        values["num_hidden_layers"] -= keys.take("nextn_predict_layers", 0)
        values["linear_value_head_dim"] = values.pop("inner") // values["linear_num_value_heads"]
    if own.halved:  # Gemma's largest models are known by the number of their layers
        large = values["num_hidden_layers"] == own.halved
        values["query_pre_attn_scalar"] = share if large else size
    for name, part in _BIASES.items():
        if any(part in each and each.endswith(".bias") for each in file.tensors):
            values[name] = True
    same = {f"attention.{each}": size for each in _SAME}
    for key, served in {**same, **_ONLY, **own.only}.items():
        keys.demand(key, served)
    if own.by_length and "sliding_window" in values:
        keys.tell(_WINDOW, "used, as transformers does; llama.cpp does not use it")
    if own.period:
        _add_windows(own, keys, values)
    _add_rotary(own, keys, values)
    keys.finish()
    return {**values, **file.own_values()}


def _add_windows(own: Architecture, keys: _Keys, values: dict[str, Any]) -> None:
    """Which layers see how many tokens."""
    if own.window and keys.get(_WINDOW) == 0:  # which llama.cpp takes for no attention at all
        raise keys.odd(_WINDOW, 0)
    window = keys.take(_WINDOW, own.window)
    if own.windowed and not window:
        return
    values["model_type"] = own.windowed or own.model_type
    values["sliding_window"] = window or values["max_position_embeddings"]
    key = "attention.sliding_window_pattern"
    near = keys.pop(key, own.period) if window else 1
    layers = range(values["num_hidden_layers"])
    if isinstance(near, int | float):
        near = [not near or layer % near < near - 1 for layer in layers]
    if len(near) != len(layers) or {*near} - {0, 1}:
        raise keys.odd(key, near)
    kinds = ("full_attention", "sliding_attention")
    values["layer_types"] = [kinds[each] for each in near]


def _add_rotary(own: Architecture, keys: _Keys, values: dict[str, Any]) -> None:
    """How heads turn."""
    size, context = values["head_dim"], values["max_position_embeddings"]
    kind = keys.pop("rope.scaling.type", "linear")
    if kind not in _KINDS:
        raise keys.odd("rope.scaling.type", kind)
    if not own.partial:
        keys.demand("rope.dimension_count", size)
    turned = keys.take("rope.dimension_count", size)
    keys.demand("rope.dimension_count_swa", turned)
    original = keys.take("rope.scaling.original_context_length", context)
    factor = keys.take("rope.scaling.factor", 1.0)
    base = keys.take("rope.freq_base", _BASE)
    given = keys.take("rope.scaling.attn_factor", 1.0)
    # what YaRN multiplies cosines and sines by itself
    usual = 1 + 0.1 * log(factor) if kind == "yarn" else 1.0
    if usual != 1 != given:
        how = f"multiplied by YaRN's own factor of {usual:g}, as llama.cpp does"
        keys.tell("rope.scaling.attn_factor", how)
    if own.window:  # as far as transformers' class can
        keys.demand("rope.freq_base_swa", base)
        if kind == "none" and factor != 1:
            raise keys.odd("rope.scaling.factor", factor)
    divisor = _divisor(own, keys.file, kind == "longrope", original < context)

    def turn(rope: dict[str, Any], scale: float, divisor: Tensor | None = None) -> dict[str, Any]:
        """The same as longrope, with one list of factors for short and long texts,
        where no other type can say it.
        """
        named = divisor is None and (scale == 1 or "attention_factor" in rope)
        if named and not (own.by_length and "factor" in rope):
            return rope
        theta = rope["rope_theta"]
        rates = LlamaRotaryEmbedding(LlamaConfig(head_dim=turned, rope_parameters=rope)).inv_freq
        factors = theta ** (-torch.arange(0, turned, 2) / turned) / rates
        if divisor is not None:
            factors = factors * divisor
        return {
            **{"rope_type": "longrope", "rope_theta": theta, "attention_factor": scale},
            **dict.fromkeys(("short_factor", "long_factor"), factors.tolist()),
        }

    scale = given * max(usual, 1.0)
    rope = {"rope_type": "default", "rope_theta": base}
    if kind == "yarn":
        rope |= {"rope_type": kind, "factor": factor, "attention_factor": scale}
        rope |= {"original_max_position_embeddings": original}
    elif kind != "none" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    rope = turn(rope, scale, divisor)
    if own.partial:
        rope["partial_rotary_factor"] = turned / size
    if own.two_rotaries and "layer_types" in values:
        near = {"rope_type": "default", "rope_theta": base}
        if not own.windowed:
            near["rope_theta"] = keys.take("rope.freq_base_swa", _BASE)
            near = turn(near, scale / usual)
        rope = {"full_attention": rope, "sliding_attention": near}
    values["rope_parameters"] = rope


def _divisor(own: Architecture, file: GGUFFile, longrope: bool, longer: bool) -> Tensor | None:
    """What frequencies are divided by; None for nothing."""
    by_length = own.by_length or (own.divided and longrope)
    read = FACTORS[1:] if by_length else FACTORS[: own.divided]
    there = [each for each in FACTORS if each in file.tensors]
    for each in there:
        if each not in read:
            raise file.refusal(f"has {each}, by which no {own.model_type} turns")
    chosen = FACTORS[by_length * (1 if longer else 2)]
    if there[1:] and longer:
        how = "used for texts of any length; llama.cpp takes the other one with a short context"
        file.told[chosen] = f"{file.path.name}: {chosen} is {how}"
    return file.numbers(file.tensors[chosen]) if chosen in there else None
