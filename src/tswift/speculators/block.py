"""Block drafters (DSpark, DFlash, DFlash2): a whole block guessed in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tswift.caches import KVBuffer, WindowKV
from tswift.forward.target import Target
from tswift.speculators.draft_network import (
    EXCLUDED,
    DrafterRound,
    DraftNetwork,
    behind,
    to_full_vocabulary,
)
from tswift.speculators.drafter_layers import DrafterLayer, mixed_slots
from tswift.speculators.spec import DFLASH2, SpeculatorSpec


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
        full = logits.new_full((len(tokens), logits.shape[1]), EXCLUDED)
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


class BlockSpeculator(DraftNetwork):
    """DSpark, DFlash and DFlash2: a block of masks after the root is filled in one pass,
    all of it seeing all of it.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        self.fc = nn.Linear(spec.tap_count * spec.tap_size, spec.hidden_size, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(spec.hidden_size, spec.eps) for _ in range(2))
        self.layers: Any = nn.ModuleList(DrafterLayer(spec) for _ in range(spec.layers))
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
            normed, finish = mixed_slots(layer.input_layernorm(rows), layer, "attention_conv")
            layer.self_attn.remember(index, normed, angles, slots, kv)
            sees = windowed if index in self.spec.sliding else whole[None]
            rows = rows + finish(layer.self_attn(index, normed, angles, kv, sees))
            normed, finish = mixed_slots(layer.post_attention_layernorm(rows), layer, "mlp_conv")
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
