"""A drafter's window of the text, as transformers' layers see it."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from tswift.caches import WindowKV
from tswift.speculators.drafter_layers import attend

SLIDING = "sliding_attention"


def _attend_seen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention of layers that are transformers', over slots that are seen."""
    out = attend(query[0], key[0], value[0], attention_mask, scaling)
    return out.transpose(0, 1)[None], None


ATTENDS_SEEN = "tswift_drafter"
AttentionInterface.register(ATTENDS_SEEN, _attend_seen)


class SlotCache:
    """A layer's cache, as transformers asks it: its keys and values go into slots."""

    def __init__(self, kv: WindowKV, slots: Tensor) -> None:
        self._kv = kv
        self._slots = slots

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Put keys and values ``[1, heads, n, d]`` there, and return all that are held."""
        self._kv.put(layer, self._slots, keys[0], values[0])
        return self._kv.keys[layer][None], self._kv.values[layer][None]
