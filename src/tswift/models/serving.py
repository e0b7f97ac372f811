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


def heads_of(config: Any) -> tuple[int, int]:
    """A model's KV heads and query heads per KV head, as its configuration tells them; one each where it does not."""
    text = config.get_text_config()
    heads, kv_heads = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if type(heads) is int and type(kv_heads) is int and heads >= kv_heads > 0 == heads % kv_heads:
        return kv_heads, heads // kv_heads
    return 1, 1


def backend_for(attention: str, dtype: torch.dtype, place: torch.device, config: Any) -> tuple[str, str]:
    """The attention backend that a name stands for, and what is to be said if it is not the one that should serve here.

    It serves if what it computes of random rows is what sdpa computes.

    Args:
        attention: the name.
        dtype: of the model.
        place: where it will be.
        config: the model's.

    Raises:
        InputError: there is no such backend, or the one that is named cannot serve.
    """
    width = head_size(config)
    backend = choose(attention, dtype, place, width)
    tried = backend != "sdpa" and (backend == "native" or place.type == "cuda")
    reason = fails(backend, dtype, place, width, heads_of(config)) if tried else None
    if reason is None:
        return backend, ""
    if attention != "auto":
        raise InputError(reason, "--attention")
    return "sdpa", reason


def compiled(target: Target, note: str) -> str:
    """Compile the layers where that helps, and say what came of it, as far as passes do not show it later.

    Fusing pays where passes are replayed, on CUDA. On the CPU compiled layers were slower than eager ones: 5.0 ms
    instead of 4.4 for a pass of the bundled model over 8 nodes.
    """
    if target.split:
        return f"{EAGER}, as ranks hold them together"
    if not (target.replays and target.device.type == "cuda"):
        note = note or target.special_fault or ""
        if not note and target.special and target.device.type == "cuda":
            note = f"they have {target.special}"
        return f"{EAGER}, as {note}" if note else EAGER
    reason = target.compile()
    target.prepare(FullKV(target.kv_shape, 1), 1)  # shows whether graphs can be captured
    return "compiled" if reason is None else f"{EAGER}, as they could not be compiled: {reason}"


def running(target: Target, words: str) -> str:
    """How layers run, for records: the result of :func:`compiled`, and what went wrong since then."""
    if target.uncompiled is not None:
        words = f"{words} in part, as the compiler stopped: {target.uncompiled}"
    if target.graphs is not None:
        words = f"{words}; no CUDA graphs: {target.graphs}"
    return words if target.sampler_fault is None else f"{words}; sampler by PyTorch: {target.sampler_fault}"
