"""The attention function that transformers calls, and what a model's layers are seen to ask of it.

A configuration cannot be trusted to say what a layer attends to, nor can the arguments that its attention is given:
some models name a sliding window and never use it. What counts is the mask that transformers would have made. So a
model is surveyed once, by a pass over one token in which it is given the rules of its masks instead of masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tswift.attention.special import Wants
from tswift.models.positions import max_positions

ATTENTION, _SURVEY = "tswift", "tswift-survey"

# Said to every attention function, and of no consequence here.
_IDLE = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "use_cache", "sliding_window", "softcap", "s_aux"}
)


class Unserved(ValueError):
    """A model whose layers want what the attention cannot do; the message says what it is, as in "it has ..."."""


def _attention(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = tswift.layer(module.layer_idx, query[0], key[0], value[0], scaling)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


# No mask function goes by this name, so transformers builds no mask: the ancestors say all there is to say. Compilers
# leave it alone: it calls kernels of its own.
AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))


@dataclass(frozen=True)
class _Rule:
    """Stands in for a mask: a function of batch, head, and the indices of query and key."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Survey:
    """What the layers of a model ask of their attention.

    Attributes:
        heads: ``(query heads, KV heads, head size)``, which all layers share; this rank's own of a model that is split.
        dtype, device: of what the attention is given, whatever the weights are stored in.
        wants: by layer, what it wants besides softmax over scaled products with all that came before.
    """

    def __init__(self, positions: int, device: torch.device) -> None:
        self.heads = (0, 0, 0)
        self.dtype, self.device = torch.get_default_dtype(), device
        self.wants: list[Wants] = []
        self._keys = torch.arange(positions, device=device)
        self._windows: dict[int, tuple[_Rule, int | None]] = {}  # by the rule's identity

    @property
    def special(self) -> str:
        """What the layers want, in words; empty for nothing."""
        windows = sorted({wants.window for wants in self.wants if wants.window is not None})
        words = [f"sliding windows of {', '.join(f'{window:,}' for window in windows)} tokens"] if windows else []
        words += ["soft-capped scores"] if any(wants.softcap is not None for wants in self.wants) else []
        words += ["attention sinks"] if any(wants.sinks is not None for wants in self.wants) else []
        return " and ".join(words)

    def note(self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: _Rule | None, asked: Any) -> Tensor:
        """Take notice of a layer; the token attends to itself alone.

        Args:
            index: of the layer.
            query: ``[query heads, 1, d]``.
            key, value: ``[kv heads, 1, d]``.
            mask: the rule of its mask; None for plain causality.
            asked: the other arguments of its attention.

        Returns:
            ``[query heads, 1, d]``.
        """
        for name, argument in asked.items():
            if argument is not None and name not in _IDLE:
                raise Unserved(f"attention with {name}")
        if index != len(self.wants):
            raise Unserved("layers that call their attention twice or out of order")
        heads = (len(query), len(key), key.shape[-1])
        if value.shape != key.shape or heads != (self.heads if index else heads):
            raise Unserved("heads of several sizes")
        self.heads, self.dtype, self.device = heads, key.dtype, key.device
        self.wants.append(Wants(self._window(mask), asked.get("softcap"), asked.get("s_aux")))
        return value.repeat_interleave(len(query) // len(value), dim=0)

    def _window(self, mask: _Rule | None) -> int | None:
        if mask is None:
            return None
        if not isinstance(mask, _Rule):
            raise Unserved("masks of its own")
        if id(mask) not in self._windows:
            self._windows[id(mask)] = (mask, self._measured(mask))
        return self._windows[id(mask)][1]

    def _measured(self, rule: _Rule) -> int | None:
        """The window of a rule; None if every token sees all before it."""
        keys, zero = self._keys, self._keys.new_zeros(())
        last = len(keys) - 1
        rows = {
            at: rule.sees(zero, zero, keys[at], keys).expand_as(keys) for at in {last, max(0, last - 1), last // 2, 0}
        }
        window = int(rows[last].sum())
        for at, row in rows.items():
            if not torch.equal(row, (keys <= at) & (keys > at - window)):
                raise Unserved("masks of its own")
        return None if window == len(keys) else window


def _note(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    if tswift is None:
        raise Unserved("layers that keep arguments from their attention")
    out = tswift.note(module.layer_idx, query[0], key[0], value[0], attention_mask, kwargs)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


def _rule(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> _Rule:
    return _Rule(mask_function)


AttentionInterface.register(_SURVEY, _note)
AttentionMaskInterface.register(_SURVEY, _rule)


@torch.inference_mode()
def survey(model: PreTrainedModel) -> Survey:
    """What the layers of a model ask of their attention, which is replaced by ours.

    Raises:
        Unserved: something that cannot be done.
    """
    config = model.config.get_text_config()
    device = model.get_input_embeddings().weight.device
    seen = Survey(max_positions(config), device)
    model.set_attn_implementation(_SURVEY)
    if config._attn_implementation != _SURVEY:
        raise Unserved("attention that cannot be replaced")
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        model.get_decoder()(input_ids=zero, position_ids=zero, use_cache=False, tswift=seen)
    except (AttributeError, TypeError) as error:  # it did something with a mask, or is no decoder
        raise Unserved(f"parts that do not bear their attention being replaced ({error})") from None
    model.set_attn_implementation(ATTENTION)
    if not seen.wants:
        raise Unserved("attention that cannot be replaced")
    return seen
