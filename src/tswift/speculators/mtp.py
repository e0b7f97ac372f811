"""A model's own MTP head."""

from __future__ import annotations

from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_MAPPING

from tswift.caches import KVBuffer, WindowKV
from tswift.forward.target import Target
from tswift.models.architecture import is_moe
from tswift.speculators.draft_network import EXCLUDED, DrafterRound, DraftNetwork, near
from tswift.speculators.spec import SpeculatorSpec
from tswift.speculators.window_layers import ATTENDS_SEEN, SlotCache


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
        model: Any = kind._from_config(copy(spec.text), attn_implementation=ATTENDS_SEEN)
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
            **{self._cache: SlotCache(kv, slots)},
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
        weight = head._parameters.get("weight")  # codes would make all their weights to say it
        whole = spec.draft_vocab == spec.vocab_size
        if whole or type(weight) is not nn.Parameter or head.bias is not None:
            return self.target.open_logits(states)
        full = states.new_full((len(states), spec.vocab_size), EXCLUDED)
        full[:, : spec.draft_vocab] = F.linear(states, weight[: spec.draft_vocab])
        return full
