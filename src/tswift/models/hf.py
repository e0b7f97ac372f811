"""What tswift reads out of a transformers model: positions, masks, the way to logits, the state before the final norm.

Some configurations name a sliding window that the model never uses. What counts is the mask that transformers would
make. So a model is probed once, by a pass over one token in which it is given the rules of its masks instead of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tswift.attention.sdpa import AttentionSpec

_MAX_POSITIONS = 1 << 24  # beyond what any model was made for


def max_positions(config: Any) -> int:
    """Maximum tokens, prompt included, that a model's position encoding was made for.

    It is ``max_position_embeddings``, except where rotary embeddings are scaled and that was left at what the model was
    trained with, as transformers asks for. A factor of x then serves x times as many positions:

    - ``linear``: of ``max_position_embeddings``, which is not to be raised to the new maximum;
    - ``yarn``: of ``original_max_position_embeddings``, where that gives more. Qwen2.5 says 32,768 for both and a
      factor of 4, to serve 131,072; others name 131,072 in the first place;
    - ``llama3``: of the same, but only where the maximum was not raised. Llama 3.2's factor of 32 would give 262,144,
      and it was made for the 131,072 that it says.

    Where each type of layer has its own rotary embeddings (Gemma 3), the maximum is that of the scaled ones already.
    """
    text = config.get_text_config()
    stated: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), _number(rope, "factor", 1)
    original = _number(rope, "original_max_position_embeddings", stated)
    served: float = stated
    if kind == "linear":
        served = stated * factor
    elif kind == "yarn" or (kind == "llama3" and stated <= original):
        served = max(stated, original * factor)
    return int(min(served, _MAX_POSITIONS))


def _number(rope: Mapping[str, Any], name: str, default: float) -> float:
    value = rope.get(name)
    return value if isinstance(value, int | float) and value >= 1 else default


ATTENTION, _PROBE = "tswift", "tswift-probe"

# arguments that every attention function is given, and that make no difference here
_IGNORED = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "use_cache", "sliding_window", "softcap", "s_aux"}
)


class UnsupportedModel(ValueError):
    """A model whose layers need what the attention cannot do; the message completes "it has ..."."""


def _attention(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = tswift.layer(module.layer_idx, query[0], key[0], value[0], scaling)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


# No mask function has this name, so transformers builds no mask: ancestors take its place. It calls kernels of its own,
# which compilers must leave alone.
AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))


@dataclass(frozen=True)
class _Rule:
    """Takes the place of a mask: a function of batch, head, and the indices of query and key."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionProbe:
    """What the layers of a model need of their attention."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.heads = (
            0,
            0,
            0,
        )  # query heads, KV heads (of a split model, this rank's) and head size, in all layers
        self.dtype, self.device = torch.get_default_dtype(), device  # of its inputs, whatever the weights are stored in
        self.wants: list[AttentionSpec] = []  # by layer, what it needs besides plain causal softmax attention
        self._keys = torch.arange(positions, device=device)
        self._windows: dict[_Rule, int | None] = {}

    @property
    def special(self) -> str:
        """What the layers need, in words; empty for nothing."""
        windows = sorted({wants.window for wants in self.wants if wants.window is not None})
        words = [f"sliding windows of {', '.join(f'{window:,}' for window in windows)} tokens"] if windows else []
        words += ["soft-capped scores"] if any(wants.softcap is not None for wants in self.wants) else []
        words += ["attention sinks"] if any(wants.sinks is not None for wants in self.wants) else []
        return " and ".join(words)

    def note(self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: _Rule | None, more: Any) -> Tensor:
        """Record a layer's needs, from tensors ``[heads, 1, d]``; returns attention of the token to itself alone.

        ``mask`` is the rule of its mask, None for plain causality; ``more`` are other arguments of its attention.
        """
        for name, argument in more.items():
            if argument is not None and name not in _IGNORED:
                raise UnsupportedModel(f"attention with {name}")
        if index != len(self.wants):
            raise UnsupportedModel("layers that call their attention twice or out of order")
        heads = (len(query), len(key), key.shape[-1])
        if value.shape != key.shape or heads != (self.heads if index else heads):
            raise UnsupportedModel("heads of several sizes")
        if not isinstance(mask, _Rule | None):
            raise UnsupportedModel("masks of its own")
        if mask is not None and mask not in self._windows:
            self._windows[mask] = self._measure(mask)
        self.heads, self.dtype, self.device = heads, key.dtype, key.device
        window = None if mask is None else self._windows[mask]
        self.wants.append(AttentionSpec(window, more.get("softcap"), more.get("s_aux")))
        return value.repeat_interleave(len(query) // len(value), dim=0)

    def _measure(self, rule: _Rule) -> int | None:
        """The window of a rule; None if every token sees all before it."""
        keys, zero, last = self._keys, self._keys.new_zeros(()), len(self._keys) - 1
        rows = {
            at: rule.sees(zero, zero, keys[at], keys).expand_as(keys) for at in {last, max(0, last - 1), last // 2, 0}
        }
        window = int(rows[last].sum())
        if not all(torch.equal(row, (keys <= at) & (keys > at - window)) for at, row in rows.items()):
            raise UnsupportedModel("masks of its own")
        return None if window == len(keys) else window


def _note(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    if tswift is None:
        raise UnsupportedModel("layers that keep arguments from their attention")
    out = tswift.note(module.layer_idx, query[0], key[0], value[0], attention_mask, kwargs)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


AttentionInterface.register(_PROBE, _note)
AttentionMaskInterface.register(_PROBE, lambda *args, mask_function, **kwargs: _Rule(mask_function))


@torch.inference_mode()
def probe_attention(model: PreTrainedModel) -> AttentionProbe:
    """What the layers of a model need of their attention, which is replaced by ours.

    Raises:
        UnsupportedModel: it cannot be replaced, or not with what they need.
    """
    config = model.config.get_text_config()
    device = model.get_input_embeddings().weight.device
    probe = AttentionProbe(max_positions(config), device)
    model.set_attn_implementation(_PROBE)
    if config._attn_implementation != _PROBE:
        raise UnsupportedModel("attention that cannot be replaced")
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        model.get_decoder()(input_ids=zero, position_ids=zero, use_cache=False, tswift=probe)
    except (AttributeError, TypeError) as error:  # it did something with a mask, or is no decoder
        raise UnsupportedModel(f"parts that do not bear their attention being replaced ({error})") from None
    model.set_attn_implementation(ATTENTION)
    if not probe.wants:
        raise UnsupportedModel("attention that cannot be replaced")
    return probe


def output_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """A function from ``[..., H]`` last hidden states to ``[..., V]`` logits, in the model's dtype.

    Known rules beyond the LM head are ``logit_scale`` (Cohere), ``logits_scaling`` (Granite) and
    ``final_logit_softcapping`` (Gemma); any other shows when logits are compared at loading.
    """
    lm_head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale, divisor, cap = (
        getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
    )
    if cap:
        return lambda hidden: torch.tanh(lm_head(hidden) / cap) * cap
    if scale not in (None, 0, 1):
        return lambda hidden: lm_head(hidden) * scale
    if divisor not in (None, 0, 1):
        return lambda hidden: lm_head(hidden) / divisor
    return lm_head


def final_norm(decoder: Any) -> nn.Module:
    """What a decoder applies after its last layer.

    Raises:
        UnsupportedModel: it has no such module of a known name.
    """
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        norm = getattr(decoder, name, None)
        if norm is not None:
            return norm
    raise UnsupportedModel("no final norm that tswift knows of")


class Tap:
    """Catches what a module is called with, or else what it returns, in every pass."""

    def __init__(self, module: nn.Module, before: bool = False) -> None:
        self._caught: Any = None
        (module.register_forward_pre_hook if before else module.register_forward_hook)(self._catch)

    def _catch(self, module: nn.Module, inputs: tuple[Any, ...], out: Any = None) -> None:
        given = inputs if out is None else out
        self._caught = given[0] if isinstance(given, tuple) else given

    def take(self) -> Tensor:
        """``[n, H]`` of the last pass."""
        caught, self._caught = self._caught[0], None
        return caught


@contextmanager
def watched(modules: Mapping[str, nn.Module], see: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call a function with name, inputs and output of modules as they run."""

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, out: see(name, inputs, out)

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
