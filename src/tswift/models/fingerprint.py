"""Hashes that tell one network, its weights or its configuration from another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

# fields about how and from where a model was loaded
_VOLATILE = {
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "distributed_config",
}


def fingerprint_of(network: nn.Module) -> str:
    """SHA-256 over the names, shapes and first 64 values of all weights.

    The same however the network is split over ranks, all of which have to ask together then.
    """
    digest = sha256()
    for name, weight in weights_of(network):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_hash(network: nn.Module) -> str:
    """SHA-256 over names, shapes, types, and all bits of all weights: as sums, which a device takes where they are.

    Every single changed bit shows. It depends on the type that the weights were loaded in; and not on how the network
    is split over ranks, all of which have to ask together then.
    """
    digest = sha256(fingerprint_of(network).encode())
    for name, weight in weights_of(network):
        digest.update(f"{name}{weight.dtype}{_sum_of_bits(weight)}".encode())
    return digest.hexdigest()


def fingerprint_in_any_dtype(network: nn.Module) -> str:
    """SHA-256 over the shapes of all weights and the signs of the first 1,024 values of each.

    Rounding changes no sign, so it is the same in whatever dtype a model is loaded; training does change some.
    """
    digest = sha256()
    for weight in network.parameters():
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().flatten()[:1024].signbit().cpu().numpy().tobytes())
    return digest.hexdigest()


def config_hash(model: PreTrainedModel) -> str:
    """SHA-256 over what a model's configuration says of its architecture, as it was read and completed."""
    config = model.config.to_diff_dict()
    said = {name: value for name, value in config.items() if name not in _VOLATILE}
    return sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _sum_of_bits(weight: Tensor) -> int:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.contiguous().view(whole).sum(dtype=torch.int64))


def weights_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights by name as plain tensors: split ones gathered, quantised ones as they are stored.

    Buffers in the checkpoint count: some quantised layers keep their weights there.
    """
    weights = dict(network.named_parameters())
    every = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    weights.update((name, kept) for name, kept in network.state_dict().items() if name not in every)
    for name, weight in weights.items():
        if isinstance(weight, Tensor):  # not a module's extra state
            yield from _plain(name, weight.detach())


def _plain(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, DTensor):
        yield from _plain(name, weight.full_tensor())
    elif hasattr(weight, "__tensor_flatten__"):
        inner, _ = weight.__tensor_flatten__()
        for part in inner:
            yield from _plain(f"{name}.{part}", getattr(weight, part))
    else:
        yield name, weight
