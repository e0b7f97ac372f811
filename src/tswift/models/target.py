"""A transformers causal language model, adapted: passes over draft trees that read and write our KV caches.

All modeling code stays in transformers. Two of its extension points are used: an attention function of our own under
the name ``tswift``, and extra keyword arguments, which reach that function from the model's call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from tswift.attention.layout import Attention, Layout
from tswift.attention.reference import ReferenceAttention
from tswift.attention.sdpa import TreeAttention
from tswift.kv.buffer import KVBuffer, KVShape
from tswift.kv.full import FullKV

ATTENTION = "tswift"
_CHUNK = 512  # prompt tokens forwarded at a time


@dataclass
class _Pass:
    kv: KVBuffer
    attend: Attention
    queries: list[Tensor] = field(default_factory=list)


def _attention(module, query, key, value, attention_mask, scaling=None, tswift=None, **kwargs):  # type: ignore[no-untyped-def]
    layer = module.layer_idx
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    keys, values = tswift.kv.write(layer, key[0], value[0])
    tswift.queries.append(query[0])
    out = tswift.attend(query[0], keys, values, scaling)
    return out.transpose(0, 1).unsqueeze(0), None


# No mask function goes by this name, so transformers builds no mask: the ancestors say all there is to say.
AttentionInterface.register(ATTENTION, _attention)


@dataclass(frozen=True)
class Forwarded:
    """What a pass yields.

    Attributes:
        hidden: ``[n, H]`` last hidden states, after the final norm.
        queries: per layer ``[query heads, n, head_dim]``, rotated.
    """

    hidden: Tensor
    queries: list[Tensor]

    def queries_at(self, node: int) -> Tensor:
        """``[layers, query heads, head_dim]`` of one node."""
        return torch.stack([query[:, node] for query in self.queries])


class Target:
    """The model whose tokens are wanted.

    Args:
        model: a causal language model of transformers; its attention is replaced by ours.

    Attributes:
        vocab_size: number of logits.
        max_positions: most tokens, prompt included, that the model's position encoding was made for.
        kv_shape: what one token's keys and values take.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval().requires_grad_(False)
        self._attention: type[Attention] = TreeAttention
        self._decoder, self._lm_head = model.get_decoder(), model.get_output_embeddings()
        self._embeddings = model.get_input_embeddings()
        config = model.config.get_text_config()
        self.vocab_size: int = self._lm_head.weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = config.max_position_embeddings
        self.device, self.dtype = self._lm_head.weight.device, self._lm_head.weight.dtype
        heads = config.num_attention_heads
        self.kv_shape = KVShape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=self.dtype,
            device=self.device,
        )
        self._layout = Layout(self.kv_shape.heads, heads // self.kv_shape.heads, self.dtype, self.device)

    def reference(self) -> Target:
        """The same model with the slow attention of reference implementations, to be measured beside ours."""
        twin = copy(self)
        twin._attention = ReferenceAttention
        return twin

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, kv: KVBuffer, ancestors: Tensor | None) -> Forwarded:
        """One pass over the nodes of a tree; their keys and values go to the cache's scratch slots.

        Args:
            tokens: ``[n]`` int64.
            positions: ``[n]`` int64.
            kv: what the nodes attend to; nothing is committed.
            ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row itself; None where
                every node descends from all before it.
        """
        run = _Pass(kv, self._attention(self._layout, kv.length, len(tokens), ancestors))
        out = self._decoder(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, tswift=run
        )
        return Forwarded(out.last_hidden_state[0], run.queries)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits of hidden states ``[..., H]``, in the model's dtype."""
        return self._lm_head(hidden)

    @torch.inference_mode()
    def embed(self, token: int) -> Tensor:
        """``[H]`` input embedding of a token."""
        return self._embeddings(torch.tensor(token, device=self.device))

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock read now tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def chunks(self, tokens: Sequence[int], kv: FullKV) -> Iterator[Forwarded]:
        """Forward a text in chunks, commit each, and yield its pass."""
        for start in range(0, len(tokens), _CHUNK):
            chunk = torch.tensor(tokens[start : start + _CHUNK], device=self.device)
            positions = torch.arange(kv.length, kv.length + len(chunk), device=self.device)
            forwarded = self.forward(chunk, positions, kv, None)
            kv.commit(range(len(chunk)))
            yield forwarded

    def prefill(self, tokens: Sequence[int], kv: FullKV) -> Forwarded | None:
        """Forward a text and commit it.

        Returns:
            The last chunk's pass; None if there was nothing to forward.
        """
        return deque(self.chunks(tokens, kv), maxlen=1).pop() if tokens else None
