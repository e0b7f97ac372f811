"""Logits that are no numbers: nothing can be drawn from them. Where they come from is found by a second pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tswift.decoding.params import SamplingParams
from tswift.errors import Fault
from tswift.kv.buffer import KVBuffer
from tswift.models.target import Target

_TOKENS = 512  # looked at together


class NotFinite(Fault):
    """There is nothing to draw: logits are NaN or infinite, or the sampling parameters leave no token."""


def broken(logits: Tensor) -> Tensor:
    """Of rows ``[n, V]``, which have NaN or infinity: ``[n]`` bool. A token may be impossible, at ``-inf``."""
    return ~(logits.amax(-1) < torch.inf)


@torch.inference_mode()
def not_finite(target: Target, kv: KVBuffer, text: Sequence[int], logits: Tensor, params: SamplingParams) -> NotFinite:
    """What to say where nothing can be drawn after the token that follows those in the cache. It costs a pass.

    Args:
        target: the model.
        kv: the cache; it keeps its length, and tokens in it may be forwarded again.
        text: the tokens that it holds, and the one that follows.
        logits: ``[V]``, given by that one.
        params: the sampling parameters.
    """
    held = kv.length
    if not broken(logits[None]).item():
        asked = f"temperature {params.temperature}, penalty {params.penalty} and {len(params.banned):,} banned ids"
        return NotFinite(
            f"there is nothing to draw at position {held + 1:,}: the logits are finite; {asked} leave none of them so"
        )
    what = f"the logits for position {held + 1:,} are {'NaN' if logits.isnan().any() else 'infinite'}"
    start = _first_broken(kv)
    try:
        kv.length = held if start is None else start
        first = kv.length
        found = target.first_broken(text[first : min(first + _TOKENS, held + 1)], kv)
    finally:
        kv.length = held
    if found is None:
        what += "" if start is None else f", and keys or values of position {start:,} are not finite"
        return NotFinite(f"{what}; a second pass gave finite ones: the memory or the device may be faulty")
    name, node = found
    kind = str(target.dtype).removeprefix("torch.")
    return NotFinite(
        f"{what}; the first output that is not finite is that of {name} at position {first + node:,}: "
        f"its weights are broken, or {kind} is too narrow for the model"
    )


def _first_broken(kv: KVBuffer) -> int | None:
    """The first token in the cache whose keys or values are not finite in some layer."""
    for start in range(0, kv.length, _TOKENS):
        fine = torch.ones(min(_TOKENS, kv.length - start), dtype=torch.bool, device=kv.keys.device)
        for buffer in (kv.keys, kv.values):
            fine &= buffer[:, :, start : start + len(fine)].isfinite().all(-1).all(0).all(0)
        if not fine.all():
            return start + int((~fine).nonzero()[0])
    return None
