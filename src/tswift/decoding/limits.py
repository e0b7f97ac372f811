"""What a decode needs of positions and memory, and whether the model and the machine have it."""

from __future__ import annotations

from dataclasses import dataclass

from tswift.drafting.methods import DraftOptions, find_method
from tswift.errors import InputError
from tswift.models.memory import available_bytes, gigabytes
from tswift.models.target import Target


@dataclass(frozen=True)
class Need:
    """What a decode needs.

    Attributes:
        positions: tokens of prompt and text together.
        full_bytes: bytes of the full KV cache, slots for the draft tree included.
        partial_bytes: bytes of the partial KV cache that drafting reads; 0 if there is none.
    """

    positions: int
    full_bytes: int
    partial_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of both caches."""
        return self.full_bytes + self.partial_bytes


def check(
    target: Target, prompt: int, length: int, method: str, options: DraftOptions, option: str | None = "--len"
) -> Need:
    """What a decode of ``length`` tokens after ``prompt`` tokens needs.

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
    slots = prompt + length + (options.nodes or 1)
    partial = options.budget + 1 if "budget" in find_method(method).uses else 0
    token_bytes = target.kv_shape.bytes_per_token
    need = Need(prompt + length, slots * token_bytes, partial * token_bytes)
    if need.positions > target.max_positions:
        raise InputError(
            f"{prompt:,} prompt tokens and {length:,} new ones need {need.positions:,} positions, "
            f"the model has {target.max_positions:,}",
            option,
        )
    free = available_bytes(target.device)
    if free is not None and need.kv_bytes > free:
        raise InputError(
            f"the KV cache of {need.positions:,} tokens needs {gigabytes(need.kv_bytes)}, "
            f"{target.device.type} has {gigabytes(free)} free",
            option,
        )
    return need
