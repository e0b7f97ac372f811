"""What tswift reads out of a transformers model: positions, masks, the way to logits,
the state before the final norm.

Some configurations name a sliding window that the model never uses. What counts is the mask that
transformers would make. So a model is probed once, by a pass over one token in which it is given
the rules of its masks instead of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tswift.attention.sdpa import AttentionSpec, Layout
from tswift.caches import KVShape, LayerKV, StateShape
from tswift.models.architecture import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ATTENTION = "tswift"
_PROBE = "tswift-probe"

# arguments that every attention function is given, and that make no difference here
_IGNORED = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "position_ids",
        "use_cache",
        "sliding_window",
        "softcap",
        "s_aux",
    }
)


class UnsupportedModel(ValueError):
    """A model whose layers need what the attention cannot do;
    the message completes "it has ...".
    """


def _attention(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    # not the module's own index: recurrent layers between have none in the cache
    out = tswift.layer(len(tswift.queries), query[0], key[0], value[0], scaling)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


# No mask function has this name, so transformers builds no mask: ancestors take its place.
AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True)
class _Rule:
    """Takes the place of a mask: a function of batch, head, and the indices of query and key."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AttentionProbe:
    """What the layers of a model need of their attention."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.kept: list[LayerKV] = []
        self.layouts: dict[tuple[int, int], Layout] = {}  # by the number and size of KV heads
        # of its inputs, whatever the weights are stored in
        self.dtype = torch.get_default_dtype()
        self.device = device
        # by layer, what it needs besides plain causal softmax attention
        self.layer_specs: list[AttentionSpec] = []
        self._keys = torch.arange(positions, device=device)
        self._windows: dict[_Rule, int | None] = {}
        self._last = -1  # layer that called its attention
        # by layer, the keys; kept, so that no two have one place in memory
        self._given: list[Tensor] = []

    def kv_shape(self, states: StateShape | None) -> KVShape:
        """What a token's keys and values take, beside the states of recurrent layers."""
        first = self.kept[0]
        alike = [LayerKV(first.heads, first.head_dim, layer) for layer in range(len(self.kept))]
        return KVShape(
            len(alike),
            first.heads,
            first.head_dim,
            self.dtype,
            self.device,
            any(spec.window for spec in self.layer_specs),
            states=states,
            by_layer=() if self.kept == alike else tuple(self.kept),
        )

    @property
    def attention_features(self) -> str:
        """What the layers need, in words; empty for nothing."""
        windows = sorted({spec.window for spec in self.layer_specs if spec.window is not None})
        words = []
        if windows:
            words.append(f"sliding windows of {', '.join(f'{each:,}' for each in windows)} tokens")
        if any(spec.softcap is not None for spec in self.layer_specs):
            words.append("soft-capped scores")
        if any(spec.sinks is not None for spec in self.layer_specs):
            words.append("attention sinks")
        return " and ".join(words)

    def note(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: _Rule | None,
        more: Mapping[str, Any],
    ) -> Tensor:
        """Record a layer's needs, from tensors ``[heads, 1, d]``;
        returns attention of the token to itself alone.

        ``mask`` is the rule of its mask, None for plain causality; ``more`` are other arguments of
        its attention.
        """
        for name, argument in more.items():
            if argument is not None and name not in _IGNORED:
                raise UnsupportedModel(f"attention with {name}")
        if index <= self._last:
            raise UnsupportedModel("layers that call their attention twice or out of order")
        self._last = index
        if value.shape != key.shape:
            raise UnsupportedModel("keys and values of different sizes")
        layout = Layout(len(key), len(query) // len(key), key.dtype, key.device, key.shape[-1])
        if layout != self.layouts.setdefault((len(key), key.shape[-1]), layout):
            raise UnsupportedModel("layers with different numbers of query heads")
        if not isinstance(mask, _Rule | None):
            raise UnsupportedModel("masks of its own")
        if mask is not None and mask not in self._windows:
            self._windows[mask] = self._measure(mask)
        self.dtype = key.dtype
        self.device = key.device
        self.kept.append(LayerKV(len(key), key.shape[-1], self._source(key)))
        window = None if mask is None else self._windows[mask]
        self.layer_specs.append(AttentionSpec(window, more.get("softcap"), more.get("s_aux")))
        return value.repeat_interleave(len(query) // len(value), dim=0)

    def _source(self, key: Tensor) -> int:
        """The layer whose keys these are: where one reads another's,
        transformers gives it the same tensor.
        """
        self._given.append(key)
        return next(layer for layer, given in enumerate(self._given) if _same(given, key))

    def _measure(self, rule: _Rule) -> int | None:
        """The window of a rule; None if every token sees all before it."""
        keys = self._keys
        zero = self._keys.new_zeros(())
        last = len(self._keys) - 1
        rows = {
            at: rule.sees(zero, zero, keys[at], keys).expand_as(keys)
            for at in {last, max(0, last - 1), last // 2, 0}
        }
        window = int(rows[last].sum())
        if not all(
            torch.equal(row, (keys <= at) & (keys > at - window)) for at, row in rows.items()
        ):
            raise UnsupportedModel("masks of its own")
        return None if window == len(keys) else window


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same part of memory; a simulated device's, all at 0,
    are where they are one.
    """
    return one is other or (one.shape == other.shape and 0 != one.data_ptr() == other.data_ptr())


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
    device = model.device
    probe = AttentionProbe(max_positions(config), device)
    model.set_attn_implementation(_PROBE)
    if config._attn_implementation != _PROBE:
        raise UnsupportedModel("attention that cannot be replaced")
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        out = model.get_decoder()(input_ids=zero, position_ids=zero, use_cache=False, tswift=probe)
        out.last_hidden_state  # noqa: B018
    except (AttributeError, TypeError):  # it did something with a mask, or is no decoder
        raise UnsupportedModel("parts that do not bear their attention being replaced") from None
    model.set_attn_implementation(ATTENTION)
    if not probe.layer_specs:
        raise UnsupportedModel("attention that cannot be replaced")
    return probe


_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # of the LM head's output

_UNSCALED = ("aya_vision", "cohere2_vision")  # around Cohere's decoders, without their factor


def output_rule(config: PreTrainedConfig) -> tuple[float, float]:
    """A factor of the LM head's output, and a cap to which that is then squeezed by a tangent;
    0 for none.

    Known rules are ``logit_scale`` (Cohere), ``output_multiplier`` (Muse), ``lm_head_multiplier``
    (Falcon-H1), ``logits_scaling`` (Granite, a divisor) and ``final_logit_softcapping`` (Gemma);
    any other shows when logits are compared at loading.
    """
    text = config.get_text_config()
    if config.model_type in _UNSCALED:
        return 0.0, 0.0
    scales = [getattr(text, name, None) for name in _SCALES]
    divisor = getattr(text, "logits_scaling", None)
    scale = next((scale for scale in scales if scale), 1) / (divisor or 1)
    return 0.0 if scale == 1 else float(scale), float(
        getattr(text, "final_logit_softcapping", None) or 0
    )


def output_of(
    model: PreTrainedModel,
    layer: nn.Module | None = None,
    rule: tuple[float, float] | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function from ``[..., H]`` last hidden states to ``[..., V]`` logits, in the model's dtype.

    ``layer`` takes the place of the LM head: it has some of its rows; ``rule`` that of
    :func:`output_rule`.
    """
    lm_head: Callable[[Tensor], Tensor] = layer or model.get_output_embeddings()
    scale, cap = rule or output_rule(model.config)
    if cap:
        return lambda hidden: torch.tanh(lm_head(hidden) * (scale or 1) / cap) * cap
    return lm_head if not scale else lambda hidden: lm_head(hidden) * scale


def final_norm(decoder: nn.Module) -> nn.Module:
    """What a decoder applies after its last layer.

    Raises:
        UnsupportedModel: it has no such module of a known name.
    """
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm"):
        norm = getattr(decoder, name, None)
        if norm is not None:
            return norm
    raise UnsupportedModel("no final norm that tswift knows of")


class Tap:
    """Catches what a module is called with, or else what it returns, in every pass."""

    def __init__(self, module: nn.Module, before: bool = False) -> None:
        self._caught: Any = None
        (module.register_forward_pre_hook if before else module.register_forward_hook)(self._catch)

    def _catch(self, module: nn.Module, inputs: tuple[object, ...], out: object = None) -> None:
        given = inputs if out is None else out
        self._caught = given[0] if isinstance(given, tuple) else given

    def take(self) -> Tensor:
        """``[n, H]`` of the last pass."""
        caught, self._caught = self._caught[0], None
        return caught


@contextmanager
def watched(modules: Mapping[str, nn.Module], see: Callable[..., None]) -> Iterator[None]:
    """Call a function with name, inputs and output of modules as they run."""

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        return lambda module, inputs, out: see(name, inputs, out)

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
