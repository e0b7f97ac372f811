"""The device that a model goes to, by name."""

from __future__ import annotations

import torch

from tswift.errors import InputError
from tswift.models.ranks import Ranks


def find_device(device: str) -> torch.device:
    """The device of a name; ``auto`` is CUDA where there is one.

    Raises:
        InputError: there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, ValueError):
        place = None
    if place is None or place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise InputError(f"no device {device!r}; there are auto, cpu, cuda, cuda:0, ...", "--device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(f"PyTorch finds {torch.cuda.device_count()} CUDA devices here, wanted {device}", "--device")
    return place


def place_for(device: str, ranks: Ranks) -> torch.device:
    """Where the weights go; a rank has its place already.

    Raises:
        InputError: there is no such device, or the ranks are on devices of another type.
    """
    if ranks.device is None:
        return find_device(device)
    if device.partition(":")[0] not in ("auto", ranks.device.type):
        raise InputError(f"the ranks are on {ranks.device.type}, got {device}", "--device")
    return ranks.device
