"""How passes are computed: by which attention, and whether by compiled layers; and why not as they should be."""

from __future__ import annotations

from typing import Any

import torch

from tswift.attention.backends import USUAL, choose, fails
from tswift.errors import InputError
from tswift.kv.full import FullKV
from tswift.models.target import Target

EAGER = "eager"


def head_size(config: Any) -> int:
    """Of a model's keys and values, as its configuration tells it; the usual one where it does not."""
    text = config.get_text_config()
    size, hidden, heads = (getattr(text, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if type(size) is int and size > 0:
        return size
    if type(hidden) is int and type(heads) is int and hidden >= heads > 0:
        return hidden // heads
    return USUAL


def backend_for(attention: str, dtype: torch.dtype, place: torch.device, width: int) -> tuple[str, str]:
    """The attention backend that a name stands for, and what is to be said if it is not the one that should serve here.

    Args:
        attention: the name.
        dtype: of the model.
        place: where it will be.
        width: its head size.

    Raises:
        InputError: there is no such backend, or the one that is named cannot serve.
    """
    backend = choose(attention, dtype, place, width)
    reason = None
    if backend == "native":
        reason = fails(backend, dtype, place, width)
    elif place.type == "cuda" and backend != "sdpa":
        reason = fails(backend, dtype, place)
    if reason is None:
        return backend, ""
    if attention != "auto":
        raise InputError(reason, "--attention")
    return "sdpa", reason


def compiled(target: Target, note: str) -> str:
    """Compile the layers where that helps, and say what came of it.

    Fusing pays where passes are replayed, on CUDA. On the CPU compiled layers were slower than eager ones: 5.0 ms
    instead of 4.4 for a pass of the bundled model over 8 nodes.
    """
    if target.split:
        return f"{EAGER}, as ranks hold them together"
    if not (target.replays and target.device.type == "cuda"):
        note = note or (f"they have {target.special}" if target.special and target.device.type == "cuda" else "")
        return f"{EAGER}, as {note}" if note else EAGER
    reason = target.compile()
    target.prepare(FullKV(target.kv_shape, 1), 1)  # shows whether graphs can be captured
    words = "compiled" if reason is None else f"{EAGER}, as they could not be compiled: {reason}"
    return words if target.graphs is None else f"{words}; no CUDA graphs: {target.graphs}"
