"""Random weights in a published shape: they write nothing worth reading, and cost what the real ones cost."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from tswift.errors import InputError
from tswift.models.base_heads import Heads
from tswift.models.dtypes import dtype_name
from tswift.models.kinds import KINDS
from tswift.models.memory import available_bytes, gigabytes
from tswift.models.shapes import skeleton

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
