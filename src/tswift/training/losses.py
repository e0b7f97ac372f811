"""Losses of heads and draft models, and their accuracy.

Head i, given the hidden state of token t, predicts token t + i + 2. The large model is frozen, so nothing of its passes
is kept. Logits are computed for a stretch of positions at a time: 8,192 positions over a vocabulary of 128K would take
4 GB for every head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from tswift.caches import FullKV
from tswift.forward.target import Target
from tswift.speculators.heads import Heads
from tswift.speculators.networks import BlockSpeculator
from tswift.training.config import DISTILL, TEXT

TOP = 3  # top-1 to top-3 accuracy
CAUSAL = "tswift_training_causal"  # an attention of transformers: plain causality, whatever the positions

_MAX_LOGITS = 1 << 26  # held at a time: 256 MB in float32, and a few times as much on the way to their gradient
_CHUNK = 512  # tokens of a row in one pass of the model


def _causal(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
    # transformers reads a jump in position_ids as the start of another packed text and masks across it
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(CAUSAL, _causal)


@dataclass(frozen=True)
class Metrics:
    """Losses and hits, summed over positions; a draft model counts as one head."""

    loss: Tensor  # [heads], in nats
    hits: Tensor  # [heads, 3] float64: how often the text's token was among the best 1, 2 and 3
    positions: int

    @property
    def mean_loss(self) -> list[float]:
        """Mean loss of each head, in nats."""
        return (self.loss / self.positions).tolist()

    def scores(self) -> dict[str, Any]:
        """Mean loss and top-1 to top-3 accuracy of each head."""
        return {"loss": self.mean_loss, "top": (self.hits / self.positions).tolist()}


def total(metrics: Sequence[Metrics]) -> Metrics:
    """Metrics of all the positions together."""
    loss, hits = (torch.stack([getattr(each, name) for each in metrics]).sum(0) for name in ("loss", "hits"))
    return Metrics(loss, hits, sum(each.positions for each in metrics))


class NetworkLoss(nn.Module):
    """A network that is trained, with its loss: one module for several processes to wrap.

    It is called with ``[B, T]`` int64 token ids and their positions, and gives metrics whose loss has a gradient.

    Args:
        network: what is trained.
        target: the frozen model.
        objective: ``text``: against the token that follows; ``distill``: against the model's own distribution there.
        max_logits: most logits held at a time; but never fewer than one position's. Where there are more, they are
            computed again for the backward pass.
    """

    def __init__(
        self, network: nn.Module, target: Target, objective: str = TEXT, max_logits: int = _MAX_LOGITS
    ) -> None:
        super().__init__()
        self.network: Any = network
        self._target, self._objective, self._max_logits = target, objective, max_logits

    def _piece(self, work: Callable[..., Any], *inputs: Any, logits: int) -> Any:
        if logits <= self._max_logits or not torch.is_grad_enabled():
            return work(*inputs)
        return checkpoint(work, *inputs, use_reentrant=False)

    @torch.no_grad()
    def _teacher(self, hidden: Tensor) -> Tensor | None:
        """The model's distributions ``[..., V]`` for its states ``[..., H]``, where these are the objective."""
        return _float32(self._target.open_logits(hidden)).softmax(-1) if self._objective == DISTILL else None

    def _summed(self, logits: Tensor, tokens: Tensor, teacher: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss of ``[n, V]`` logits, and ``[3]`` hits."""
        with torch.no_grad():
            hits = (logits.topk(TOP).indices == tokens.unsqueeze(-1)).cumsum(-1).sum(0).double()
        return F.cross_entropy(logits, tokens if teacher is None else teacher, reduction="sum"), hits


class HeadsLoss(NetworkLoss):
    """Loss of heads, over the positions for which every head has a token to predict: not the last ``heads + 1``."""

    network: Heads

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Metrics:
        """Metrics of each head."""
        heads, target, rows = self.network, self._target, ids.shape[0]
        used = ids.shape[1] - heads.count - 1
        hidden, dtype, embedded = read_states(target, ids, positions)[0], next(heads.parameters()).dtype, None
        if heads.conditioned:
            all_embedded = target.embed(ids).to(dtype, copy=True)  # a copy: inference tensors cannot be trained on
            embedded = torch.stack([all_embedded[:, 1 + i : 1 + i + used] for i in range(heads.count)])
        states = heads(hidden[:, :used].to(dtype), embedded)
        width = self._max_logits // (rows * target.vocab_size)
        width = max(1, width - (heads.count - 1 if self._objective == DISTILL else 0))
        slopes = torch.zeros_like(states)  # taken stretch by stretch: no logits are kept, or made again, for them
        losses = torch.zeros(heads.count, dtype=torch.float64, device=states.device)
        hits = torch.zeros(heads.count, TOP, dtype=torch.float64, device=states.device)
        for start in range(0, used, width):
            end = min(start + width, used)
            teacher = self._teacher(hidden[:, start + 1 : end + heads.count])
            for i in range(heads.count):
                goal = None if teacher is None else teacher[:, i : i + end - start].flatten(0, 1)
                part = states[i, :, start:end].detach().requires_grad_(torch.is_grad_enabled())
                logits = _float32(target.open_logits(part.to(target.dtype))).flatten(0, 1)
                loss, hit = self._summed(logits, ids[:, start + i + 2 : end + i + 2].flatten(), goal)
                if part.requires_grad:
                    slopes[i, :, start:end] = torch.autograd.grad(loss, part)[0]
                losses[i] += loss.detach()
                hits[i] += hit
        along = (states * slopes).sum((1, 2, 3))
        return Metrics(losses + (along - along.detach()), hits, rows * used)


class DraftLoss(NetworkLoss):
    """Loss of a draft model, whose attention must be ``CAUSAL``, over all positions but the last of each row."""

    def forward(self, ids: Tensor, positions: Tensor | None) -> Metrics:
        """Metrics of the model as one head."""
        rows, count = ids.shape[0], ids.shape[1] - 1
        hidden = self.network.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        teacher = read_states(self._target, ids, positions)[0] if self._objective == DISTILL else hidden
        per_place = rows * self._target.vocab_size
        width, parts = max(1, self._max_logits // per_place), []
        for start in range(0, count, width):
            part = slice(start, min(start + width, count))
            inputs = (hidden[:, part], ids[:, 1:][:, part].flatten(), teacher[:, part])
            parts.append(self._piece(self._stretch, *inputs, logits=count * per_place))
        losses, hits = zip(*parts, strict=True)
        return Metrics(torch.stack(losses).sum(0, keepdim=True), torch.stack(hits).sum(0, keepdim=True), rows * count)

    def _stretch(self, hidden: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        logits = _float32(self.network.get_output_embeddings()(hidden)).flatten(0, 1)
        return self._summed(logits, tokens, self._teacher(states.flatten(0, 1)))


class _RowKV:
    """Keys and values of one row that is trained on: they only grow."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for held, new in ((self.keys, keys), (self.values, values)):
            held[layer] = torch.cat([held[layer], new], 1) if layer in held else new


class BlockLoss(NetworkLoss):
    """Loss of a block drafter: blocks at many places of each row are filled, each from what lies before it."""

    network: BlockSpeculator

    def forward(self, ids: Tensor, positions: Tensor, roots: Tensor) -> Metrics:
        """Metrics of each slot; ``[B, A]`` roots are where blocks begin: above 0, at most ``T - 1 - slots``."""
        network, (rows, length) = self.network, ids.shape
        slots = torch.arange(network.spec.block, device=ids.device)
        hidden, taps = read_states(self._target, ids, positions)
        weight = network.fc.weight
        mask = torch.full_like(slots, network.spec.mask)
        blocks = []
        for row in range(rows):
            kv, at, unused = _RowKV(), roots[row], ids[row]
            network.remember(taps[row].to(weight.dtype), unused, positions[row], unused, kv)
            tokens = torch.where(slots == 0, ids[row, at, None], mask).flatten()
            places = (positions[row, at, None] + slots).flatten()
            before = torch.arange(length, device=ids.device) < at.repeat_interleave(len(slots))[:, None]
            own = torch.arange(len(places), device=ids.device) // len(slots)
            seen = torch.cat([before, own[:, None] == own], 1)
            embedded = self._target.embed(tokens).to(weight.dtype, copy=True)  # inference tensors cannot be trained on
            blocks.append(network.fill(embedded, places, places, kv, seen))
        states = torch.stack(blocks).unflatten(1, (-1, len(slots)))  # [B, A, slots, H]
        logits = states[:, :, 0].numel() // network.spec.hidden_size * self._target.vocab_size * len(slots)
        losses, hits, markov = [], [], None
        line = torch.arange(rows, device=ids.device)[:, None]
        for slot in range(len(slots)):
            told, goal, teacher = ids[line, roots + slot], ids[line, roots + slot + 1], hidden[line, roots + slot]
            given = (states[:, :, slot].flatten(0, 1), told.flatten(), goal.flatten(), teacher.flatten(0, 1), markov)
            loss, hit, markov = self._piece(self._slot, *given, logits=logits)
            losses.append(loss)
            hits.append(hit)
        return Metrics(torch.stack(losses), torch.stack(hits), roots.numel())

    def _slot(
        self, states: Tensor, told: Tensor, goal: Tensor, teacher: Tensor, markov: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        bias, markov = self.network.markov_head(told, states, markov)
        logits = _float32(self._target.open_logits(states.to(self._target.dtype))) + bias
        return *self._summed(logits, goal, self._teacher(teacher)), markov


def read_states(target: Target, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Last hidden states ``[B, T, H]`` of the model, and the taps ``[B, T, M * H]`` of one that has them.

    They come from the passes that decode: heads see the same when they draft.
    """
    rows, length = ids.shape
    hidden = torch.empty(rows, length, target.hidden_size, dtype=target.dtype, device=target.device)
    taps: list[Tensor] = []
    kv = FullKV(target.kv_shape, length)
    if positions is None:
        positions = torch.arange(length, device=target.device).expand(rows, -1)
    for row in range(rows):
        kv.length = 0
        for start in range(0, length, _CHUNK):
            part = slice(start, start + _CHUNK)
            with torch.autocast(target.device.type, enabled=False):
                forwarded = target.forward(ids[row, part], positions[row, part], kv, None)
            hidden[row, part] = forwarded.hidden
            if forwarded.layer_states is not None:
                taps.append(forwarded.layer_states.clone())
            kv.commit(range(len(ids[row, part])))
    return hidden, torch.cat(taps).unflatten(0, (rows, length)) if taps else hidden[:, :, :0]


def _float32(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
