"""Published models' shapes by name: what a pass reads and computes, and random weights to time it with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.initialization import no_init_weights

from tswift.errors import InputError, did_you_mean
from tswift.models.codes import holds_packed, read_bytes
from tswift.models.config import SHAPE_PREFIX
from tswift.models.devices import available_bytes, dtype_name, gigabytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PREFIX = SHAPE_PREFIX


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# Qwen2.5's base models are published with 128K positions and no scaling of the rotary embeddings.
_QWEN = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
_COLUMNS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "bos_token_id", "eos_token_id"),
    *("rms_norm_eps", "tie_word_embeddings", "rope_parameters"),
)
_TABLE: dict[str, tuple[object, ...]] = {
    "llama3.1-8b": (128_256, 4096, 14_336, 32, 32, 8, 128_000, 128_001, 1e-5, False, _LLAMA3),
    "yarn-llama2-7b-128k": (32_000, 4096, 11_008, 32, 32, 32, 1, 2, 1e-5, False, _YARN),
    "qwen2.5-1.5b": (151_936, 1536, 8960, 28, 12, 2, 151_643, 151_643, 1e-6, True, _QWEN),
    "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, 151_643, 151_643, 1e-6, False, _QWEN),
    "qwen2.5-14b": (152_064, 5120, 13_824, 48, 40, 8, 151_643, 151_643, 1e-5, False, _QWEN),
    "qwen3-4b": (151_936, 2560, 9728, 36, 32, 8, 151_643, 151_645, 1e-6, True, _QWEN3),
    "qwen3-8b": (151_936, 4096, 12_288, 36, 32, 8, 151_643, 151_645, 1e-6, False, _QWEN3),
    "qwen3-14b": (151_936, 5120, 17_408, 40, 40, 8, 151_643, 151_645, 1e-6, False, _QWEN3),
}


def _config(name: str) -> PreTrainedConfig:
    """A configuration of transformers; every shape has 131,072 positions and bfloat16 weights."""
    make = {"qwen3": Qwen3Config, "qwen2": Qwen2Config}.get(name[:5], LlamaConfig)
    return make(
        **dict(zip(_COLUMNS, deepcopy(_TABLE[name]), strict=True)), max_position_embeddings=131_072, dtype="bfloat16"
    )


# The models of the paper's tables 3 and 4, as their authors published them; and those with published drafters.
SHAPES: dict[str, PreTrainedConfig] = {name: _config(name) for name in _TABLE}


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the cost of a pass over a model."""

    parameters: int  # number of all weights
    read: int  # weights that a pass reads: all but the input embeddings, unless the LM head is tied to them
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of a weight
    lm_head: int = 0  # weights of the LM head, which are among those read
    kv_itemsize: int | None = None  # bytes of an element of the KV cache; None for those of a weight
    coded_bytes: int | None = None  # of the weights that a pass reads, where they are codes; None where they are not

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads, however many nodes it has."""
        return self.read * self.itemsize if self.coded_bytes is None else self.coded_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * (self.kv_itemsize or self.itemsize)

    @property
    def narrowest_bits(self) -> int:
        """Bits of the narrowest numbers that a pass multiplies: codes of weights, cached keys and values, or floats."""
        narrowest = min(self.itemsize, self.kv_itemsize or self.itemsize)
        return 8 if self.coded_bytes is not None else 8 * narrowest

    def spared_bytes(self, bits: int) -> int:
        """Bytes saved per pass if all weights but the LM head's take ``bits`` bits; scales are not counted."""
        return (self.read - self.lm_head) * (8 * self.itemsize - bits) // 8

    def flops(self, context: Any) -> Any:
        """Operations of one node that attends to ``context`` tokens (a number or an array).

        Two per weight; four per element of a query head and token: multiply and add, with key and with value.
        """
        return 2 * self.read + 4 * context * self.query_heads * self.head_dim * self.layers


def shape_config(model: str) -> PreTrainedConfig:
    """The configuration of ``shape:NAME``, a copy that may be changed."""
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise InputError(f"no shape {name!r}; there are {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}", "model")
    return deepcopy(SHAPES[name])


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration on the meta device: shapes without weights, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)


def is_moe(config: PreTrainedConfig) -> bool:
    """Whether a model is a mixture of experts, of which a pass reads only some."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def refuse_routed(config: PreTrainedConfig, model: str) -> None:
    """Refuse a mixture of experts: no shape tells which weights a pass reads."""
    if is_moe(config):
        raise InputError(f"{model} reads only some of its experts in a pass; which, no shape can tell", "model")


def shape_of(network: PreTrainedModel, itemsize: int, kv_itemsize: int | None = None) -> Shape:
    """The shape of a model, which may be on the meta device."""
    config = network.config.get_text_config()
    if holds_packed(network):
        return replace(shape_of(skeleton(config), itemsize, kv_itemsize), coded_bytes=read_bytes(network))
    embeddings, lm_head = network.get_input_embeddings().weight, network.get_output_embeddings().weight
    parameters = sum(weight.numel() for weight in network.parameters())
    heads = config.num_attention_heads
    return Shape(
        parameters=parameters,
        read=parameters if lm_head is embeddings else parameters - embeddings.numel(),
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        itemsize=itemsize,
        lm_head=lm_head.numel(),
        kv_itemsize=kv_itemsize,
    )


HEADS = 3  # as many as the paper trains
_SEED = 20_250_218
_STD = 0.02
_NOISE = 4_194_301  # values drawn; a prime, so that no two rows of a matrix are the same


class StandInTokenizer:
    """Bytes as token ids, to fill a prompt for random weights; what those draw is not decoded."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids, below 256, under ``input_ids``."""
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int]) -> str:
        """How many ids there were."""
        return f"[{len(ids):,} tokens of random weights]"


def random_weights(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, model: str) -> PreTrainedModel:
    """A model with random weights: the same ones everywhere, made on the device in the dtype, without a copy."""
    weights = sum(weight.numel() for weight in skeleton(config).parameters())
    needed, free = (weights + HEADS * config.hidden_size**2) * dtype.itemsize, available_bytes(device)
    if free is not None and needed > free:
        reason = f"needs {gigabytes(needed)}, {device.type} has {gigabytes(free)} free"
        raise InputError(f"{model} in {dtype_name(dtype)} {reason}", "model")
    with torch.device(device), no_init_weights():
        network = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, trust_remote_code=False)
    network.tie_weights()  # left out with the initialisation
    fill_randomly(network)
    return network


@torch.no_grad()
def fill_randomly(network: nn.Module) -> None:
    """Ones for norms, noise for all else."""
    first = next(network.parameters())
    noise = Noise(first.device, first.dtype)
    for name, weight in network.named_parameters():
        noise.fill(name, weight)


class Noise:
    """Values for the weights of a network, which are to be filled one after the other.

    The noise is drawn once, on the CPU, and repeated: billions of draws would take minutes there, and other devices
    would draw other numbers.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        drawn = torch.randn(_NOISE, generator=torch.Generator().manual_seed(_SEED))
        self._noise = drawn.mul_(_STD).to(device, dtype)

    def fill(self, name: str, weight: Tensor) -> None:
        """Ones for a norm, noise for all else."""
        if weight.ndim == 1 and name.endswith("weight"):
            weight.fill_(1)
            return
        for piece in weight.view(-1).split(_NOISE):
            piece.copy_(self._noise[: len(piece)])
        self._noise = self._noise.roll(997)  # the next weight begins elsewhere
