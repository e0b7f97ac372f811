"""Gemma 4's assistants, which read the target's keys and values."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING

from tswift.caches import KVBuffer, WindowKV
from tswift.forward.target import Target
from tswift.speculators.draft_network import EXCLUDED, DrafterRound, DraftNetwork, near
from tswift.speculators.spec import SpeculatorSpec
from tswift.speculators.window_layers import ATTENDS_SEEN, SLIDING


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
        self.model: Any = kind._from_config(text, attn_implementation=ATTENDS_SEEN)
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
            keys, values = (text.numbers(part, layer, places) for part in (0, 1))
            kv.put(index, slots, keys, values)
        return taps

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """As :meth:`DraftNetwork.begin`: nothing is written."""
        states = state
        kinds = self.spec.kinds
        sees = dict.fromkeys(kinds, seen[None])
        if SLIDING in sees:
            sees[SLIDING] = (seen & near(position, self.spec.window, kv))[None]
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
        full = rows.new_full((len(rows), self.spec.vocab_size), EXCLUDED)
        return full.scatter_(1, ids, found)
