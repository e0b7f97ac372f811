"""What tells one training of a network from another."""

from __future__ import annotations

from hashlib import sha256

from torch import nn


def fingerprint_of(network: nn.Module) -> str:
    """SHA-256 over the names, shapes and first 64 values of all weights."""
    digest = sha256()
    for name, weight in network.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:64].double().cpu().numpy().tobytes())
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
