"""What a decode needs of positions and memory, and whether the model and the machine have it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tswift.drafting.methods import DraftOptions, partial_slots, resolve_for
from tswift.errors import InputError
from tswift.models.memory import available_bytes, gigabytes
from tswift.models.prospect import foresee
from tswift.models.target import Target

_ROWS = 3  # of scores in float64, for each node of a pass: those, what a filter makes of them, and the noise


@dataclass(frozen=True)
class Need:
    """What a decode needs.

    Attributes:
        positions: tokens of prompt and text together.
        full_bytes: bytes of the full KV cache, slots for the draft tree included.
        partial_bytes: bytes of the partial KV cache that drafting reads; 0 if there is none.
        logits_bytes: bytes of one pass's scores.
        weight_bytes, heads_bytes: bytes of what is to be loaded first; 0 for what is there already.
    """

    positions: int
    full_bytes: int
    partial_bytes: int
    logits_bytes: int = 0
    weight_bytes: int = 0
    heads_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of both caches."""
        return self.full_bytes + self.partial_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.weight_bytes + self.heads_bytes + self.kv_bytes + self.logits_bytes

    def __str__(self) -> str:
        parts = {
            "weights": self.weight_bytes,
            "heads": self.heads_bytes,
            "KV": self.full_bytes,
            "drafting KV": self.partial_bytes,
            "logits": self.logits_bytes,
        }
        return " + ".join(f"{name} {gigabytes(count)}" for name, count in parts.items() if count)


def check(
    target: Target, prompt: int, length: int, method: str, options: DraftOptions, option: str | None = "--len"
) -> Need:
    """What a decode of ``length`` tokens after ``prompt`` tokens needs, now that the model is loaded.

    Args:
        target: the model.
        prompt: tokens.
        length: tokens.
        method: one of ``METHODS``.
        options: resolved ones.
        option: what the user gave the length with, for the error.

    Raises:
        InputError: more than the model's positions, or than the free memory of its device.
    """
    need = _need(prompt, length, method, options, target.kv_shape.bytes_per_token, target.vocab_size)
    _refuse_positions(f"{prompt:,} prompt tokens", length, need, target.max_positions, option)
    _refuse_memory(need, target.device, option)
    return need


def check_ahead(
    model: str,
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    heads: str | os.PathLike[str] | None = None,
    option: str = "--len",
) -> Need:
    """What a decode needs at least, weights included: before the model is loaded. See :func:`tswift.load` for that.

    It reads the model's configuration and the header of its heads. What it lets through may still be refused by
    :func:`check`; what it refuses cannot be done.

    Args:
        model: as for :func:`tswift.load`.
        prompt: tokens it will have at least.
        length: tokens.
        method: one of ``METHODS``.
        options: as asked for.
        device, dtype, attention, heads: as for :func:`tswift.load`.
        option: what the user gave the length with, for the error.

    Raises:
        InputError: more positions or memory than there are, no such model, heads that are none, that were made for
            another model or that the method lacks, or options that do not fit.
    """
    seen = foresee(model, device=device, dtype=dtype, attention=attention, heads=heads)
    if seen.heads is not None:
        options = resolve_for(method, seen.device, seen.most_nodes, seen.heads, options)
    loads = seen.weight_bytes, seen.heads_bytes
    need = _need(prompt, length, method, options, seen.token_bytes, seen.vocab_size, *loads)
    _refuse_positions(f"at least {prompt:,} prompt tokens", length, need, seen.positions, option)
    _refuse_memory(need, seen.device, option)
    return need


def _need(
    prompt: int,
    length: int,
    method: str,
    options: DraftOptions,
    token_bytes: int,
    vocab_size: int,
    weight_bytes: int = 0,
    heads_bytes: int = 0,
) -> Need:
    nodes = options.nodes or (options.gamma or 0) + 1
    partial = partial_slots(method, options)
    slots, scores = prompt + length + nodes, _ROWS * nodes * vocab_size
    logits_bytes = scores * torch.float64.itemsize
    return Need(prompt + length, slots * token_bytes, partial * token_bytes, logits_bytes, weight_bytes, heads_bytes)


def _refuse_positions(prompt: str, length: int, need: Need, positions: int, option: str | None) -> None:
    if need.positions > positions:
        message = f"{prompt} and {length:,} new ones need {need.positions:,} positions, the model has {positions:,}"
        raise InputError(message, option)


def _refuse_memory(need: Need, device: torch.device, option: str | None) -> None:
    free = available_bytes(device)
    if free is None or need.total_bytes <= free:
        return
    loaded = need.weight_bytes + need.heads_bytes
    # a shorter text would not help
    option = "--model" if loaded > free else option
    raise InputError(f"{need} = {gigabytes(need.total_bytes)}, {device.type} has {gigabytes(free)} free", option)
