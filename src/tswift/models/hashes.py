"""Hashes of a model's weights and configuration: what says that two models are one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.models.codes import is_packed_floats

# fields about how and from where a model was loaded
_VOLATILE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype"),
    "_attn_implementation",
}


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def fingerprint_of(network: nn.Module) -> str:
    """SHA-256 over the names, shapes and first 64 values of all weights."""
    digest = sha256()
    for name, weight in _weights_of(network):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_hash(network: nn.Module) -> str:
    """SHA-256 over names, shapes, types, and all bits of all weights: as sums,
    which a device takes where they are.

    Every single changed bit shows. It depends on the type that the weights were loaded in.
    """
    digest = sha256(fingerprint_of(network).encode())
    for name, weight in _weights_of(network):
        bits = weight.contiguous().view(_INTEGERS[weight.element_size()])
        if bits.is_cpu:
            total = int(
                bits.numpy().sum(dtype=np.int64)
            )  # many times as quick as PyTorch for bytes
        else:
            total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name}{weight.dtype}{total}".encode())
    return digest.hexdigest()


def fingerprint_in_any_dtype(network: nn.Module) -> str:
    """SHA-256 over the shapes of all weights and the signs of the first 1,024 values of each.

    Rounding changes no sign, so it is the same in whatever dtype a model is loaded; training does
    change some.
    """
    digest = sha256()
    for _, weight in named_weights(network):
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().flatten()[:1024].signbit().cpu().numpy().tobytes())
    return digest.hexdigest()


def config_hash(model: PreTrainedModel) -> str:
    """SHA-256 over what a model's configuration says of its architecture,
    as it was read and completed.
    """
    config = model.config.to_diff_dict()
    lasting = {name: value for name, value in config.items() if name not in _VOLATILE}
    return sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()


def _weights_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights by name as plain tensors, quantised ones as they are stored.

    Buffers in the checkpoint count: some quantised layers keep their weights there.
    """
    every = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    modules = network.named_modules(remove_duplicate=False)
    every |= {f"{name}.bytes" for name, module in modules if is_packed_floats(module)}
    buffers = ((name, kept) for name, kept in network.state_dict().items() if name not in every)
    for name, weight in chain(named_weights(network), buffers):
        # one by one: what is packed is unpacked for it
        if isinstance(weight, Tensor):  # not a module's extra state
            yield from _plain(name, weight.detach())


def named_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, and matrices of packed floats as the float32 parameters that they
    were; each once.
    """
    seen = set()
    for path, module in network.named_modules():
        packed = getattr(module, "packed", None)
        own = [(f"{path}.weight", packed)] if is_packed_floats(packed) else []
        for name, weight in [*own, *module.named_parameters(path, recurse=False)]:
            if id(weight) not in seen:
                seen.add(id(weight))
                yield name, weight if isinstance(weight, Tensor) else weight.whole()


def _plain(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if hasattr(weight, "__tensor_flatten__"):
        inner, _ = weight.__tensor_flatten__()
        for part in inner:
            yield from _plain(f"{name}.{part}", getattr(weight, part))
    else:
        yield name, weight
