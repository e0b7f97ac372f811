"""From hidden states to logits, as models do it: an LM head, and with some a scale or a soft cap after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def output_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """What turns ``[..., H]`` last hidden states into ``[..., V]`` logits, in the model's dtype.

    What a configuration says is known of: ``logit_scale`` (Cohere), ``logits_scaling`` (Granite) and
    ``final_logit_softcapping`` (Gemma). Whoever loads a model compares its logits, so no other rule goes unnoticed.
    """
    lm_head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    rule = _rule(model.config.get_text_config())
    return lm_head if rule is None else lambda hidden: rule(lm_head(hidden))


def _rule(config: Any) -> Callable[[Tensor], Tensor] | None:
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits / cap) * cap
    if scale != 1:
        return lambda logits: logits * scale
    if divisor != 1:
        return lambda logits: logits / divisor
    return None
