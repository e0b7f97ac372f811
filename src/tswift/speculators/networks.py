"""Published drafters as modules: block drafters (DSpark, DFlash),
EAGLE-3, a model's own MTP head and Gemma 4's assistants, over a window.

They read the target's states after some of its layers (taps), MTP heads and assistants those after
its final norm, and assistants its keys and values. A block drafter guesses a whole block in one
pass; the others guess token by token, fed with their own. Either way a round is a few
passes of known sizes: nothing in it waits for the device, so that one CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING, AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from tswift.caches import KVBuffer, KVShape, LayerKV, WindowKV
from tswift.forward.target import Target
from tswift.models.architecture import is_moe

DSPARK, DFLASH, DFLASH2, EAGLE3 = "dspark", "dflash", "dflash2", "eagle3"
MTP, ASSISTANT = "mtp", "assistant"
_SLIDING = "sliding_attention"
_EAGLE_LEVELS = 6  # as many as a pass each is worth
# logit of a token outside a draft vocabulary: never among the best, and finite in every dtype
_EXCLUDED = -1e4


@dataclass(frozen=True, kw_only=True)
class SpeculatorSpec:
    """Sizes and switches of a drafter, as its configuration and its tensors' shapes tell them."""

    kind: str  # ``dspark``, ``dflash``, ``dflash2``, ``eagle3``, ``mtp`` or ``assistant``
    hidden_size: int  # this and the next seven as in transformers' configurations
    inner_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # 0 for the target's
    eps: float
    rope: Mapping[str, object]  # transformers' ``rope_parameters``
    tap_size: int  # hidden size of the target
    tap_count: int  # how many of its states are read
    # after which of its layers, from 0; None for EAGLE-3's usual three
    taps: tuple[int, ...] | None = None
    target_layers: int | None = None  # how many layers the target has; None where that is not said
    qk_norm: bool = True  # whether queries and keys are normalised
    block: int = 0  # tokens of a block; EAGLE-3 has none
    mask: int = 0  # token id of the positions to be guessed
    # a slot guesses the token at its own position (DFlash), not the next one
    in_place: bool = False
    rank: int = 0  # of the bias that the token before gives to a slot; 0 for none
    conv: tuple[int, int] = (
        0,
        0,
    )  # taps of DFlash2's convolutions, and channels that share weights
    chosen: int = 0  # candidates of a slot that DFlash2's selector scores
    draft_vocab: int = 0  # tokens that it can guess; 0 for all, by the target's LM head
    embeds: bool = False  # whether EAGLE-3 has embeddings of its own
    # this and the next three: which of its norms EAGLE-3 applies where
    norm_before_residual: bool = False
    norm_output: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    # layers of a block drafter that see a window, and not all of the text
    sliding: tuple[int, ...] = ()
    window: int = 0  # tokens of the text that those see before the block
    moving: bool = False  # whether each slot's window ends at the slot, and not at the root
    causal: bool = False  # whether a slot of the block sees none after it there
    # a factor of the target's embeddings as they are stored; None for those that its layers read
    embed_scale: float | None = None
    # factor and cap (0 for none) of what the target's LM head gives; None for the target's own
    output: tuple[float, float] | None = None
    # of the layers of an assistant or an MTP head, which are transformers'
    text: PreTrainedConfig | None = None
    # this and the next one: of an assistant
    # what a token's keys and values are in the model's last layer of each kind
    kept: tuple[LayerKV, ...] = ()
    clusters: tuple[int, int] = (0, 0)  # of its vocabulary, and how many it looks through; or none

    @property
    def method(self) -> str:
        """The method that drafts with it."""
        return "block" if self.block else "mtp" if self.kind == MTP else "eagle"

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the target's states after its final norm, which every pass gives."""
        return self.kind in (MTP, ASSISTANT)

    @property
    def kinds(self) -> list[str]:
        """Of an assistant's layers."""
        return [] if self.text is None else sorted({*self.text.layer_types})

    def tapped(self, layers: int) -> tuple[int, ...]:
        """After which layers of a target with so many the states are read (the three are
        SafeAILab's).
        """
        return (1, layers // 2 - 1, layers - 4) if self.taps is None else self.taps

    @property
    def count(self) -> int:
        """Most tokens that it drafts along a path; a pass each, where it has no blocks."""
        return self.block - self.in_place if self.block else _EAGLE_LEVELS

    def slots(self, levels: int, beam: int) -> int:
        """Scratch slots of a round: the whole block, even to use less of it;
        or the tokens that are fed back.
        """
        return self.block or (levels - 1) * beam

    def weights(self) -> dict[str, int]:
        """Number of weights by parameter."""
        with torch.device("meta"):
            return {name: weight.numel() for name, weight in build(self).named_parameters()}

    def read_bytes(self, itemsize: int, budget: int, levels: int, lm_head: int) -> int:
        """Bytes that a round reads at least: weights, and the window.

        Args:
            itemsize: bytes of a number.
            budget: tokens of the window.
            levels: tokens drafted along a path.
            lm_head: weights of the target's LM head, which all but EAGLE-3 share.
        """
        sizes = self.weights()
        read = sum(
            size
            for name, size in sizes.items()
            if not any(table in name for table in ("embed_tokens", "markov_w1", "codebook"))
        )
        window = 2 * budget * sum(kept.heads * kept.head_dim for kept in self.kept)
        if self.kind == ASSISTANT:
            parts, chosen = self.clusters
            head = sizes["model.embed_tokens.weight"] * (chosen / parts if parts else 1)
            return itemsize * levels * (read + window + int(head))
        window = 2 * self.layers * self.kv_heads * self.head_dim * budget
        again = levels - 1
        if self.kind == MTP:
            return (
                itemsize * levels * (read + window + lm_head * self.draft_vocab // self.vocab_size)
            )
        if self.kind == EAGLE3:  # all but what the taps go through is read for every level
            return itemsize * (read + window + again * (read - sizes["fc.weight"] + window))
        lm_head = 0 if "lm_head.weight" in sizes else lm_head
        biased = self.chosen or self.draft_vocab or self.vocab_size
        return itemsize * (read + window + lm_head + again * self.rank * biased)

    def kv_shape(self, dtype: torch.dtype, device: torch.device) -> KVShape:
        """Of the drafter's own cache."""
        layers = len(self.kept) or self.layers
        return KVShape(layers, self.kv_heads, self.head_dim, dtype, device, by_layer=self.kept)

    def llama(self) -> LlamaConfig:
        """What transformers' modules are made of: the MLP's sizes and the rotary embeddings of a
        head.
        """
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            num_attention_heads=1,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope),
        )


Angles = tuple[Tensor, Tensor]  # ``[n, d / 2]`` cosines and sines of positions


class Rotary(nn.Module):
    """Rotary embeddings; cosines and sines are taken in float32, at any position."""

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        with torch.device("cpu"):
            made = LlamaRotaryEmbedding(spec.llama())
        self.rates = made.inv_freq.float()
        self.scale = float(made.attention_scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Cosines and sines of positions ``[n]``, once for all layers."""
        self.rates = self.rates.to(positions.device)
        angles = positions[:, None].float() * self.rates
        cos, sin = ((turn * self.scale).to(dtype) for turn in (angles.cos(), angles.sin()))
        return cos, sin


def _rotated(rows: Tensor, angles: Angles) -> Tensor:
    """``[heads, n, d]``, rotated."""
    cos, sin = angles
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float | None = None
) -> Tensor:
    """``[heads, n, d]``: queries attend to slots ``[kv heads, slots, d]`` that are ``seen`` ``[n or
    1, slots]``.
    """
    # the query heads of a KV head are its rows: keys and values are not repeated
    packed = queries.unflatten(0, (len(keys), -1)).flatten(1, 2)
    mask = seen if len(seen) == 1 else seen.repeat(len(queries) // len(keys), 1)
    out = F.scaled_dot_product_attention(packed[None], keys[None], values[None], mask, scale=scale)[
        0
    ]
    return out.unflatten(1, (-1, queries.shape[1])).flatten(0, 1)


class DrafterAttention(nn.Module):
    """Attention of a drafter's layer, ``width`` its input's."""

    def __init__(self, spec: SpeculatorSpec, width: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads
        size = spec.head_dim
        self.q_proj = nn.Linear(width, spec.heads * size, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(width, spec.kv_heads * size, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(spec.heads * size, spec.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(size, spec.eps) if spec.qk_norm else nn.Identity() for _ in range(2)
        )

    def remember(
        self, index: int, rows: Tensor, angles: Angles, slots: Tensor, kv: WindowKV
    ) -> None:
        """Put the keys and values of rows ``[n, width]`` into slots ``[n]`` of layer ``index``."""
        keys, values = (
            proj(rows).unflatten(-1, (self.kv_heads, -1)).transpose(0, 1)
            for proj in (self.k_proj, self.v_proj)
        )
        kv.put(index, slots, _rotated(self.k_norm(keys), angles), values)

    def forward(
        self, index: int, rows: Tensor, angles: Angles, kv: WindowKV, seen: Tensor
    ) -> Tensor:
        """``[n, H]``: rows ``[n, width]`` attend to layer ``index``'s slots that are ``seen`` ``[n
        or 1, slots]``.
        """
        queries = self.q_proj(rows).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        queries = _rotated(self.q_norm(queries), angles)
        mixed = attend(queries, kv.keys[index], kv.values[index], seen).transpose(0, 1)
        return self.o_proj(mixed.flatten(1))


class _Layer(nn.Module):
    """A layer as Qwen3's; the attention of EAGLE-3's only one reads a token's embedding beside its
    state.
    """

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        eagle = spec.kind == EAGLE3
        hidden = spec.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, spec.eps) for _ in range(2)
        )
        if eagle:
            self.hidden_norm = nn.RMSNorm(hidden, spec.eps)
        self.self_attn = DrafterAttention(spec, (1 + eagle) * hidden)
        self.mlp = LlamaMLP(spec.llama())
        if spec.kind == DFLASH2:
            self.attention_conv, self.mlp_conv = (_Convolution(spec) for _ in range(2))


class _Convolution(nn.Module):
    """DFlash2's mixing of a slot with those before it in the block,
    before and after a part of a layer, by weights computed from the slot itself.
    """

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        taps, group = spec.conv
        hidden = spec.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group), bias=False)

    def kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, taps, H]`` weights before and after, computed from rows ``[n, H]`` of a block."""
        _, taps, hidden = self.base_kernel.shape
        groups = self.kernel_projection(rows).view(len(rows), 2, taps, -1)
        own = groups.repeat_interleave(hidden // groups.shape[-1], -1)
        before, after = (self.base_kernel + own).unbind(1)
        return before, after


def convolved(rows: Tensor, kernel: Tensor) -> Tensor:
    """``[n, H]``: rows of a block, each by its kernel ``[taps, H]`` with those before it."""
    taps = kernel.shape[1]
    padded = F.pad(rows, (0, 0, taps - 1, 0))
    windows = torch.stack([padded[taps - 1 - tap :][: len(rows)] for tap in range(taps)], 1)
    return (windows * kernel).sum(1)


class _Selector(nn.Module):
    """DFlash2's scores of a slot's likeliest tokens, by the token before and the slot's state."""

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        self.chosen = spec.chosen
        sizes = spec.vocab_size, spec.rank
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.empty(sizes)) for _ in range(2)
        )
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.rank, bias=False)

    def forward(self, logits: Tensor, state: Tensor, tokens: Tensor) -> Tensor:
        """``[n, V]`` after tokens ``[n]``, from the slot's own logits ``[1, V]`` and state."""
        best = logits[0].topk(self.chosen).indices
        asked = self.predecessor_codebook[tokens] * self.hidden_projection(state)
        scores = logits[:, best] + asked @ self.successor_codebook[best].T
        full = logits.new_full((len(tokens), logits.shape[1]), _EXCLUDED)
        return full.index_copy_(1, best, scores)


class _Markov(nn.Module):
    """The bias that the token before gives to a slot's logits (DSpark)."""

    def __init__(self, spec: SpeculatorSpec) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, spec.rank)
        self.markov_w2 = nn.Linear(spec.rank, spec.draft_vocab or spec.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[n, V]`` for slots after tokens ``[n]``."""
        return self.markov_w2(self.markov_w1(tokens))


# A round under way: ``[n or 1, V]`` logits after drafted tokens ``[n]`` (int64) at a level, one
# level after another. Given are how many tokens were drafted before, each one's parent among those
# of the level before (``[n]``; None at the root), and the tokens.
DrafterRound = Callable[[int, "Tensor | None", Tensor], Tensor]


class DraftNetwork(nn.Module):
    """What all drafters have: the target, and what is remembered of its text.

    Args:
        spec: sizes.
        target: whose embeddings and LM head are shared; its passes give the taps.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__()
        self.spec = spec
        self._targets = (target,)  # no submodule
        if spec.rope:
            self.rotary = Rotary(spec)

    @property
    def target(self) -> Target:
        """The model that it drafts for."""
        (target,) = self._targets
        assert target is not None
        return target

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """Put committed tokens into the cache: nothing is waited for.

        Args:
            taps: ``[n, M * H]`` of the passes that forwarded them.
            following: ``[n]``, the token after each.
            places: ``[n]``, where in the text they are.
            slots: ``[n]``, where their keys and values go; the cache holds them already.
            kv: the cache.
            text: the target's own, of the whole text.

        Returns:
            ``[n, ...]``: what :meth:`begin` wants of the last one.
        """
        raise NotImplementedError

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """Begin a round.

        Args:
            state: ``[1, ...]``, what :meth:`remember` returned for the token before the root.
            root: ``[1]``, the text's last token.
            position: ``[1]``, its position.
            kv: the cache; scratch slots are written.
            seen: ``[slots]`` bool, those of committed tokens.
        """
        raise NotImplementedError


def behind(position: Tensor, window: int, kv: WindowKV) -> Tensor:
    """``[slots]`` int64: how far before a position the token of each is, from 1; more than a
    window has where it is none of that.
    """
    far = 1 + torch.arange(min(window, kv.budget), device=position.device)
    places = position - far
    around = kv.sinks + (places - kv.sinks) % (kv.budget - kv.sinks)
    slots = torch.where(places < kv.budget, places, around).clamp(min=0)
    found = torch.full((kv.capacity,), window + 1, device=position.device)
    return found.scatter_reduce(0, slots, torch.where(places < 0, window + 1, far), "amin")


def near(position: Tensor, window: int, kv: WindowKV) -> Tensor:
    """``[slots]`` bool: where the newest tokens before a position are, as many as a window has."""
    return behind(position, window, kv) <= window


def _mixed(rows: Tensor, layer: _Layer, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows as a part of a layer reads them, and a function for what the part gives: both mix
    neighbouring slots where the part has a convolution (DFlash2), and change nothing elsewhere.
    """
    own = getattr(layer, name, None)
    if own is None:
        return rows, lambda given: given
    before, after = own.kernels(rows)
    return convolved(rows, before), lambda given: convolved(given, after)


class BlockSpeculator(DraftNetwork):
    """DSpark, DFlash and DFlash2: a block of masks after the root is filled in one pass,
    all of it seeing all of it.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        self.fc = nn.Linear(spec.tap_count * spec.tap_size, spec.hidden_size, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(spec.hidden_size, spec.eps) for _ in range(2))
        self.layers: Any = nn.ModuleList(_Layer(spec) for _ in range(spec.layers))
        if spec.kind == DFLASH2:
            self.candidate_selector = _Selector(spec)
        elif spec.rank:
            self.markov_head = _Markov(spec)
        if spec.draft_vocab:
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab, bias=False)
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """As :meth:`DraftNetwork.remember`."""
        rows = self.hidden_norm(self.fc(taps))
        angles = self.rotary(places, rows.dtype)
        for index, layer in enumerate(self.layers):
            layer.self_attn.remember(index, rows, angles, slots, kv)
        return rows

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """As :meth:`DraftNetwork.begin`."""
        block = torch.arange(self.spec.block, device=root.device)
        tokens = torch.where(block == 0, root, self.spec.mask)
        slots = kv.scratch + block
        places = position + block
        whole = seen.clone()
        windowed = whole[None]
        whole[kv.scratch : kv.scratch + self.spec.block] = True
        if self.spec.sliding:
            far = behind(position, self.spec.window, kv) + block[:, None] * self.spec.moving
            windowed = seen & (far <= self.spec.window)
            after = (
                block[:, None] < block
                if self.spec.causal
                else torch.zeros_like(block[:, None] < block)
            )
            windowed[:, kv.scratch : kv.scratch + self.spec.block] = ~after
        rows = self.target.embed(tokens, self.spec.embed_scale)
        angles = self.rotary(places, rows.dtype)
        for index, layer in enumerate(self.layers):
            normed, finish = _mixed(layer.input_layernorm(rows), layer, "attention_conv")
            layer.self_attn.remember(index, normed, angles, slots, kv)
            sees = windowed if index in self.spec.sliding else whole[None]
            rows = rows + finish(layer.self_attn(index, normed, angles, kv, sees))
            normed, finish = _mixed(layer.post_attention_layernorm(rows), layer, "mlp_conv")
            rows = rows + finish(layer.mlp(normed))
        hidden = self.norm(rows)[int(self.spec.in_place) :]
        own = (
            self.lm_head(hidden)
            if self.spec.draft_vocab
            else self.target.open_logits(hidden, self.spec.output)
        )

        def logits(level: int, rows: Tensor | None, tokens: Tensor) -> Tensor:
            slot = own[level : level + 1]
            if self.spec.kind == DFLASH2:
                return self.candidate_selector(slot, hidden[level : level + 1], tokens)
            return to_full_vocabulary(
                slot + self.markov_head(tokens) if self.spec.rank else slot, self
            )

        return logits


class EagleSpeculator(DraftNetwork):
    """EAGLE-3, of one layer, with an LM head and perhaps a smaller vocabulary of its own.

    Row p has a state of token p and the embedding of token p + 1, and guesses the one after that.
    """

    d2t: Tensor  # from an id of the draft vocabulary to what is to be added to it

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        hidden = spec.hidden_size
        self.fc = nn.Linear(spec.tap_count * spec.tap_size, hidden, bias=False)
        self.midlayer = _Layer(spec)
        self.norm = nn.RMSNorm(hidden, spec.eps)
        self.lm_head = nn.Linear(hidden, spec.draft_vocab, bias=False)
        if spec.input_norm:
            self.input_norm = nn.RMSNorm(spec.tap_count * spec.tap_size, spec.eps)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(spec.tap_size, spec.eps) for _ in range(spec.tap_count)
            )
        if spec.embeds:
            self.embed_tokens = nn.Embedding(spec.vocab_size, hidden)
        if spec.draft_vocab < spec.vocab_size:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """As :meth:`DraftNetwork.remember`: all of a token's taps make one state."""
        if self.spec.input_norm:
            taps = self.input_norm(taps)
        if self.spec.fc_norm:
            parts = taps.chunk(self.spec.tap_count, -1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        states = self.fc(taps)
        rows = self._inputs(states, following)[0]
        self.midlayer.self_attn.remember(0, rows, self.rotary(places, rows.dtype), slots, kv)
        return states

    def _inputs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads ``[n, 2 H]`` of states and the tokens after them, and what its
        output is added to.
        """
        embeddings = self.embed_tokens(tokens) if self.spec.embeds else self.target.embed(tokens)
        normed = self.midlayer.hidden_norm(states)
        rows = torch.cat([self.midlayer.input_layernorm(embeddings), normed], -1)
        return rows, normed if self.spec.norm_before_residual else states

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """As :meth:`DraftNetwork.begin`: a level is a pass over the tokens drafted last."""
        states = state
        lines = seen[None]
        used = kv.scratch

        def logits(level: int, rows: Tensor | None, tokens: Tensor) -> Tensor:
            nonlocal states, lines, used
            places = (position - 1 + level).expand(len(tokens))
            if rows is not None:
                states = states.index_select(0, rows)
            read, out = self._inputs(states, tokens)
            angles = self.rotary(places, read.dtype)
            if rows is not None:  # the root's row is among those remembered
                slots = torch.arange(used, used + len(tokens), device=tokens.device)
                used += len(tokens)
                lines = lines.index_select(0, rows).scatter_(1, slots[:, None], True)
                self.midlayer.self_attn.remember(0, read, angles, slots, kv)
            out = out + self.midlayer.self_attn(0, read, angles, kv, lines)
            out = out + self.midlayer.mlp(self.midlayer.post_attention_layernorm(out))
            normed = self.norm(out)
            states = normed if self.spec.norm_output else out
            return to_full_vocabulary(self.lm_head(normed), self)

        return logits


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


_SEEN = "tswift_drafter"
AttentionInterface.register(_SEEN, _attend_seen)


class _Slots:
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


class MtpSpeculator(DraftNetwork):
    """The head for multi-token prediction that a model's own checkpoint has: a layer of the model's
    kind, by transformers' modules.

    Row p has the state of token p and the embedding of token p + 1, and guesses the one after that.
    It reads the model's states after the final norm, and its own after its own norm. A round's
    first row is the last of those remembered, so that the layer is read once for both.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        hidden = spec.hidden_size
        assert spec.text is not None
        kind = MODEL_MAPPING[type(spec.text)]
        model: Any = kind._from_config(copy(spec.text), attn_implementation=_SEEN)
        if target is not None and target.dtype == torch.float64 and is_moe(spec.text):
            model.set_experts_implementation("eager")  # the others multiply no float64
        self.enorm, self.hnorm, self.norm = (
            type(model.norm)(hidden, eps=spec.eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = model.layers[0]
        # transformers 5.24 calls a layer's cache otherwise than those before
        known = signature(self.layer.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"
        # where layers of several kinds turn differently: which of these it is
        kinds = getattr(spec.text, "layer_types", None) or ("",)
        self._kind = [kind for kind in kinds if kind in spec.text.rope_parameters]

    def _rows(
        self,
        states: Tensor,
        tokens: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        seen: Tensor,
    ) -> Tensor:
        """``[n, H]`` of states and the tokens after them, which see slots ``[n or 1, slots]``."""
        parts = self.enorm(self.target.embed(tokens)), self.hnorm(states)
        rows = self.eh_proj(torch.cat(parts, -1))[None]
        decoder: Any = self.target.model.get_decoder()
        rotary = decoder.rotary_emb
        # Qwen3.5 asks for positions in time and in an image's two directions, which are one in text
        asked = places.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else places[None]
        angles = rotary(rows, asked, *self._kind)
        out = self.layer(
            rows,
            position_embeddings=angles,
            position_ids=places[None],
            attention_mask=seen,
            **{self._cache: _Slots(kv, slots)},
        )
        return self.norm(out[0])

    def _near(self, seen: Tensor, position: Tensor, kv: WindowKV) -> Tensor:
        """Of the slots that are seen those that a layer with a window sees before a position."""
        window = self.spec.window
        return (seen & near(position, window, kv) if window else seen)[None]

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """As :meth:`DraftNetwork.remember`; only the last row sees what it should."""
        seen = self._near(kv.held, places.amax()[None] + 1, kv)
        return self._rows(taps, following, places, slots, kv, seen)

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """As :meth:`DraftNetwork.begin`: a level is a pass over the tokens drafted last."""
        states = state
        lines = self._near(seen, position, kv)
        used = kv.scratch

        def logits(level: int, rows: Tensor | None, tokens: Tensor) -> Tensor:
            nonlocal states, lines, used
            if rows is not None:
                places = (position - 1 + level).expand(len(tokens))
                slots = torch.arange(used, used + len(tokens), device=tokens.device)
                used += len(tokens)
                lines = lines.index_select(0, rows).scatter_(1, slots[:, None], True)
                states = self._rows(states.index_select(0, rows), tokens, places, slots, kv, lines)
            return self._scores(states)

        return logits

    def _scores(self, states: Tensor) -> Tensor:
        """``[n, V]`` logits of what follows, by the first rows of the model's LM head, if they are
        plain numbers.

        They are the commonest tokens: a tokenizer numbers them as it found them. With all rows the
        LM head would be four fifths of what a level reads, and by shared noise a token that is
        missing costs no more than its own guess.
        """
        spec = self.spec
        head = self.target.model.get_output_embeddings()
        if (
            spec.draft_vocab == spec.vocab_size
            or type(head.weight) is not nn.Parameter
            or head.bias is not None
        ):
            return self.target.open_logits(states)
        full = states.new_full((len(states), spec.vocab_size), _EXCLUDED)
        full[:, : spec.draft_vocab] = F.linear(states, head.weight[: spec.draft_vocab])
        return full


class _AllShared:
    """Of a configuration: no layer has keys and values of its own."""

    @property
    def kv_sharing_modes(self) -> list[str]:
        """What each layer does with those of others."""
        return ["reuse"] * self.num_hidden_layers  # type: ignore[attr-defined]


class AssistantSpeculator(DraftNetwork):
    """Gemma 4's assistant: layers without keys and values of their own.

    They read those of the model's last layer of each kind, here a window of them, and stay at the
    root's position. Each level is fed with the token drafted last and the state after it.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        hidden = spec.hidden_size
        assert spec.text is not None
        kind = MODEL_MAPPING[type(spec.text)]
        text = copy(spec.text)
        # transformers 5.23 makes no model that shares the keys and values of all its layers
        text.__class__ = type("AssistantText", (_AllShared, type(text)), {})
        self.model: Any = kind._from_config(text, attn_implementation=_SEEN)
        with torch.device("cpu"):  # its rates are in no file
            self.model.rotary_emb = type(self.model.rotary_emb)(spec.text)
        self.pre_projection = nn.Linear(2 * spec.tap_size, hidden, bias=False)
        self.post_projection = nn.Linear(hidden, spec.tap_size, bias=False)
        parts, _ = spec.clusters
        if parts:
            self.masked_embedding: Any = nn.Module()
            self.masked_embedding.centroids = nn.Linear(hidden, parts, bias=False)
            order = torch.zeros(spec.vocab_size, dtype=torch.int64)
            self.masked_embedding.register_buffer("token_ordering", order)

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """As :meth:`DraftNetwork.remember`: what the model keeps of them is copied."""
        kinds = self.target.model.config.get_text_config().layer_types
        for index, kind in enumerate(self.spec.kinds):
            layer = max(at for at, each in enumerate(kinds) if each == kind)
            keys, values = (
                text.shape.widened(held[layer].index_select(1, places), part, layer)
                for part, held in enumerate((text.keys, text.values))
            )
            kv.put(index, slots, keys, values)
        return taps

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """As :meth:`DraftNetwork.begin`: nothing is written."""
        states = state
        kinds = self.spec.kinds
        sees = dict.fromkeys(kinds, seen[None])
        if _SLIDING in sees:
            sees[_SLIDING] = (seen & near(position, self.spec.window, kv))[None]
        held = {
            kind: (kv.keys[index][None], kv.values[index][None]) for index, kind in enumerate(kinds)
        }
        self.model.rotary_emb.to(position.device)

        def logits(level: int, rows: Tensor | None, tokens: Tensor) -> Tensor:
            nonlocal states
            if rows is not None:
                states = states.index_select(0, rows)
            given = torch.cat([self.target.embed(tokens), states], -1)
            out = self.pre_projection(given)[None]
            places = position.expand(1, len(tokens))
            for layer, kind in zip(self.model.layers, self.model.config.layer_types, strict=True):
                angles = self.model.rotary_emb(out, places, kind)
                out = layer(
                    out,
                    shared_kv_states=held,
                    position_embeddings=angles,
                    attention_mask=sees[kind],
                )
            out = self.model.norm(out)[0]
            states = self.post_projection(out)
            return self._scores(out)

        return logits

    def _scores(self, rows: Tensor) -> Tensor:
        """``[n, V]`` logits after rows ``[n, H]``, of the clusters that promise most."""
        weight = self.model.embed_tokens.weight
        parts, chosen = self.spec.clusters
        if not parts:
            return F.linear(rows, weight)
        best = self.masked_embedding.centroids(rows).topk(chosen).indices
        ids = self.masked_embedding.token_ordering.view(parts, -1)[best].flatten(1)
        found = (weight[ids] @ rows[:, :, None]).squeeze(-1)
        full = rows.new_full((len(rows), self.spec.vocab_size), _EXCLUDED)
        return full.scatter_(1, ids, found)


def to_full_vocabulary(logits: Tensor, network: DraftNetwork) -> Tensor:
    """``[n, V]`` logits of those of a drafter's own vocabulary,
    where that is smaller than the target's.
    """
    count = network.spec.vocab_size
    own = logits.shape[1]
    if own in (count, network.target.vocab_size):
        return logits
    offsets: Any = network.d2t
    full = logits.new_full((len(logits), count), _EXCLUDED)
    return full.index_copy_(1, offsets + torch.arange(own, device=logits.device), logits)


def build(spec: SpeculatorSpec, target: Target | None = None) -> DraftNetwork:
    """A drafter with uninitialised weights."""
    kinds: dict[str, type[DraftNetwork]] = {
        EAGLE3: EagleSpeculator,
        MTP: MtpSpeculator,
        ASSISTANT: AssistantSpeculator,
    }
    return kinds.get(spec.kind, BlockSpeculator)(spec, target)
