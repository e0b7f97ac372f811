"""The file format of heads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tswift.errors import InputError
from tswift.models.kinds import FORMAT, KINDS, ChainedHeads, ConditionedHeads, Heads, MedusaHeads, build

PICKLES = (".pt", ".pth", ".bin")

__all__ = ["FORMAT", "KINDS", "ChainedHeads", "ConditionedHeads", "Heads", "load_heads"]


def is_ours(path: Path) -> bool:
    """Whether a file has our metadata, or cannot be opened, so that :func:`load_heads` is to say why."""
    try:
        with safe_open(path, framework="pt") as file:
            return "tswift" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return path.is_file() and path.suffix not in PICKLES


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read a heads file written by :meth:`Heads.save`.

    Raises:
        InputError: the file is no such file, or its heads were made for another hidden size.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["tswift"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["format"] != FORMAT or about["kind"] not in (*KINDS, MedusaHeads.kind):
            raise InputError(f"{path} holds heads of format {about['format']}, kind {about['kind']}", "--heads")
        heads = build(about)
        heads.load_state_dict(tensors)
        heads.base = about.get("base")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "--heads") from None
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise InputError(f"{path} is not a tswift heads file ({str(error).splitlines()[0]})", "--heads") from None
    if heads.hidden_size != hidden_size:
        raise InputError(f"{path} was made for hidden size {heads.hidden_size}, the model has {hidden_size}", "--heads")
    return heads.to(dtype=dtype, device=device).eval().requires_grad_(False)
