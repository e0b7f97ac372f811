"""Published models' shapes by name: what a pass reads and computes, and random weights to time it with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.initialization import no_init_weights

from tswift.errors import InputError
from tswift.models.devices import available_bytes, dtype_name, gigabytes
from tswift.models.heads import KINDS, Heads

PREFIX = "shape:"  # before a name, where a model is asked for
_POSITIONS = 131_072

# What the three models of Qwen2.5 have in common. Their base models are published with 128K positions and no scaling of
# the rotary embeddings, and that is what the paper's 100K tokens need.
_QWEN: dict[str, Any] = {
    "max_position_embeddings": _POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
    "dtype": "bfloat16",
}

# The models of the paper's tables 3 and 4, as their authors published them.
SHAPES: dict[str, Any] = {
    "llama3.1-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        bos_token_id=128_000,
        eos_token_id=128_001,
        dtype="bfloat16",
    ),
    "yarn-llama2-7b-128k": LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=_POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        **_QWEN,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        **_QWEN,
    ),
    "qwen2.5-14b": Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **_QWEN,
    ),
}


@dataclass(frozen=True)
class Shape:
    """What decides the cost of a pass over a model.

    Attributes:
        parameters: all of them.
        read: those that a pass reads: all but the input embeddings, of which it looks up a few rows. Where the LM head
            is tied to them, they are read as the LM head.
        hidden_size: width of the hidden states.
        layers, query_heads, kv_heads, head_dim: of the attention.
        itemsize: bytes of a weight, and of an element of the KV cache.
        lm_head: parameters of the LM head, which are among those read.
    """

    parameters: int
    read: int
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    lm_head: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads, however many nodes it has."""
        return self.read * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def spared_bytes(self, bits: int) -> int:
        """How many fewer a pass reads if weights take so many bits, all but the LM head's; no scales are counted."""
        return (self.read - self.lm_head) * (8 * self.itemsize - bits) // 8

    def flops(self, context: Any) -> Any:
        """Operations of one node that attends to ``context`` tokens, or to each of an array of them.

        Two for each weight, and four for each element of a query head and each token: a product and a sum, once with
        the key and once with the value.
        """
        return 2 * self.read + 4 * context * self.query_heads * self.head_dim * self.layers


def shape_config(model: str) -> Any:
    """The configuration of ``shape:NAME``, to be had and to be changed.

    Raises:
        InputError: there is no such shape.
    """
    name = model.removeprefix(PREFIX)
    if name not in SHAPES:
        raise InputError(f"no shape {name!r}; there are {', '.join(SHAPES)}", "--model")
    return deepcopy(SHAPES[name])


def refuse_shape(model: str) -> None:
    """Refuse ``shape:NAME`` where a text is wanted.

    Raises:
        InputError: it is one.
    """
    if model.startswith(PREFIX):
        reason = "has random weights: its text says nothing; tswift bench times it, tswift roofline counts it"
        raise InputError(f"{model} {reason}", "--model")


def skeleton(config: Any) -> PreTrainedModel:
    """The model of a configuration with shapes alone: no memory is taken, and no weight is there."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)


def routed(config: Any) -> bool:
    """Whether a pass reads some of the weights only: experts, chosen for each token."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def refuse_routed(config: Any, model: str) -> None:
    """Refuse a model whose passes choose what they read.

    Raises:
        InputError: it is one.
    """
    if routed(config):
        raise InputError(f"{model} reads only some of its experts in a pass; which, no shape can tell", "--model")


def shape_of(network: PreTrainedModel, itemsize: int) -> Shape:
    """The shape of a model, with weights or without.

    Args:
        network: not :func:`routed`.
        itemsize: bytes of a weight.
    """
    config = network.config.get_text_config()
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
    )


HEADS = 3  # as many as the paper trains
_SEED = 20_250_218
_STD = 0.02
_NOISE = 4_194_301  # values drawn; a prime, so that the rows of a matrix begin at different ones


class StandInTokenizer:
    """A text's bytes as token ids: enough to fill a prompt. What random weights draw is not worth decoding."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        """The ids, below 256, under ``input_ids``."""
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int]) -> str:
        """How many ids there were."""
        return f"[{len(ids):,} tokens of random weights]"


def random_network(config: Any, dtype: torch.dtype, place: torch.device, model: str) -> PreTrainedModel:
    """A network of random weights, made where it will run. The same configuration gives the same weights everywhere.

    Args:
        config: the model's configuration.
        dtype: of the weights.
        place: where they go; no copy is made elsewhere.
        model: as the user named it.

    Raises:
        InputError: the device has too little memory for the weights and the heads.
    """
    weights = sum(weight.numel() for weight in skeleton(config).parameters())
    needed = (weights + HEADS * config.hidden_size**2) * dtype.itemsize
    free = available_bytes(place)
    if free is not None and needed > free:
        kind = dtype_name(dtype)
        raise InputError(
            f"{model} in {kind} needs {gigabytes(needed)}, {place.type} has {gigabytes(free)} free", "--model"
        )
    with torch.device(place), no_init_weights():
        network = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, trust_remote_code=False)
    network.tie_weights()  # left out with the initialisation
    _fill(network)
    return network


def random_heads(kind: str, config: Any, dtype: torch.dtype, place: torch.device) -> Heads:
    """Heads of random weights.

    Args:
        kind: one of ``KINDS``.
        config: of the model that they draft for.
        dtype: of the weights.
        place: where they go.
    """
    with torch.device(place):
        heads = KINDS[kind](config.hidden_size, HEADS, config.rms_norm_eps)
    heads.to(dtype)
    _fill(heads)
    return heads.eval().requires_grad_(False)


@torch.no_grad()
def _fill(network: nn.Module) -> None:
    """Ones for norms, noise for all else.

    The noise is drawn once, on the CPU, and copied over and over: billions of draws would take minutes there, and other
    devices would draw other numbers.
    """
    weights = dict(network.named_parameters())
    first = next(iter(weights.values()))
    noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(_SEED)).mul_(_STD).to(first.device, first.dtype)
    for name, weight in weights.items():
        if weight.ndim == 1 and name.endswith("weight"):
            weight.fill_(1)
            continue
        for piece in weight.view(-1).split(_NOISE):
            piece.copy_(noise[: len(piece)])
        noise = noise.roll(997)  # the next weight begins elsewhere
