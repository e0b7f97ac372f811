"""A model's shape: what a pass reads and computes, and random weights to time it with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from tswift.caches import StateShape
from tswift.errors import InputError
from tswift.machine import available_bytes, gigabytes
from tswift.models.architecture import (
    attention_layers,
    class_of,
    kept_by_layer,
    skeleton,
    state_shape,
)
from tswift.models.codes import holds_packed, read_bytes
from tswift.models.devices import dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the cost of a pass over a model."""

    parameters: int  # number of all weights
    # weights that a pass reads: all but the input embeddings, unless the LM head is tied to them
    read: int
    hidden_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of a weight
    # bytes of an element of the KV cache; None for those of a weight
    kv_itemsize: int | None = None
    # numbers of a token's keys, and of its queries, over all layers; None where these are alike
    key_numbers: int | None = None
    query_numbers: int | None = None
    key_rows: int | None = None  # heads of a token's keys, over all layers; None as above
    states: StateShape | None = None  # of recurrent layers, which are none of ``layers``
    # of the weights that a pass reads, where they are codes; None where they are not
    coded_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass reads, however many nodes it has."""
        return self.read * self.itemsize if self.coded_bytes is None else self.coded_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent layers' states that a pass reads and writes,
        however many nodes it has.
        """
        return 0 if self.states is None else 2 * self.states.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values, with the steps of those of 8 bits."""
        rows = self.key_rows or self.layers * self.kv_heads
        numbers = self.key_numbers or rows * self.head_dim
        size = self.kv_itemsize or self.itemsize
        return 2 * (numbers * size + (rows * torch.float32.itemsize if size == 1 else 0))

    @property
    def narrowest_bits(self) -> int:
        """Bits of the narrowest numbers that a pass multiplies: codes of weights,
        cached keys and values, or floats.
        """
        narrowest = min(self.itemsize, self.kv_itemsize or self.itemsize)
        return 8 if self.coded_bytes is not None else 8 * narrowest

    def flops(self, context: Number) -> Number:
        """Operations of one node that attends to ``context`` tokens (a number or an array).

        Two per weight; four per element of a query head and token: multiply and add, with key and
        with value. Seven per element of a state: it decays, is read by the key, added to, and read
        by the query.
        """
        states = self.states
        queries = self.query_numbers or self.query_heads * self.head_dim * self.layers
        own = (
            0 if states is None else 7 * states.layers * states.heads * states.keys * states.values
        )
        return 2 * self.read + own + 4 * context * queries


def shape_of(network: PreTrainedModel, itemsize: int, kv_itemsize: int | None = None) -> Shape:
    """The shape of a model, which may be on the meta device."""
    config = network.config.get_text_config()
    if holds_packed(network):
        return replace(
            shape_of(skeleton(config), itemsize, kv_itemsize), coded_bytes=read_bytes(network)
        )
    lm_head = network.get_output_embeddings().weight
    parameters = sum(weight.numel() for weight in network.parameters())
    heads = config.num_attention_heads
    every = kept_by_layer(config)
    kept = {layer: every[layer] for layer in attention_layers(config)}
    # a row of each table is read, unless it is the LM head's
    tables = {module.weight for module in network.modules() if isinstance(module, nn.Embedding)} - {
        lm_head
    }
    states = state_shape(config, network.dtype, network.device)
    first = next(iter(kept.values()))
    return Shape(
        parameters=parameters,
        read=parameters - sum(table.numel() for table in tables),
        hidden_size=config.hidden_size,
        layers=len(kept),
        query_heads=heads,
        kv_heads=first.heads,
        head_dim=first.head_dim,
        key_numbers=sum(
            each.heads * each.head_dim for layer, each in kept.items() if each.source == layer
        ),
        query_numbers=sum(heads * each.head_dim for each in kept.values()),
        key_rows=sum(each.heads for layer, each in kept.items() if each.source == layer),
        itemsize=itemsize,
        kv_itemsize=kv_itemsize,
        states=states,
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


def random_weights(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, model: str
) -> PreTrainedModel:
    """A model with random weights: the same ones everywhere, made on the device in the dtype,
    without a copy.
    """
    weights = sum(weight.numel() for weight in skeleton(config).parameters())
    needed = (weights + HEADS * config.hidden_size**2) * dtype.itemsize
    free = available_bytes(device)
    if free is not None and needed > free:
        reason = f"needs {gigabytes(needed)}, {device.type} has {gigabytes(free)} free"
        raise InputError(f"{model} in {dtype_name(dtype)} {reason}", "model")
    with torch.device(device), no_init_weights():
        network = class_of(config)._from_config(deepcopy(config), dtype=dtype)
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

    The noise is drawn once, on the CPU, and repeated: billions of draws would take minutes there,
    and other devices would draw other numbers.
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
