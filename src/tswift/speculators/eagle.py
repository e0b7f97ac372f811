"""EAGLE-3: guesses token by token, fed with its own states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tswift.caches import KVBuffer, WindowKV
from tswift.forward.target import Target
from tswift.speculators.draft_network import DrafterRound, DraftNetwork, to_full_vocabulary
from tswift.speculators.drafter_layers import DrafterLayer
from tswift.speculators.spec import SpeculatorSpec


class EagleSpeculator(DraftNetwork):
    """EAGLE-3, of one layer, with an LM head and perhaps a smaller vocabulary of its own.

    Row p has a state of token p and the embedding of token p + 1, and guesses the one after that.
    """

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__(spec, target)
        hidden = spec.hidden_size
        self.fc = nn.Linear(spec.tap_count * spec.tap_size, hidden, bias=False)
        self.midlayer = DrafterLayer(spec)
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
