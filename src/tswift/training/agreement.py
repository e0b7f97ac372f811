"""How often a small model draws what a large one draws: both under the same rule, with the same noise, after a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.kv.full import FullKV
from tswift.models.target import Target

_ROWS = 256  # of scores in float64 at a time, for each model


@dataclass(frozen=True)
class Agreement:
    """Two models on the same text.

    Attributes:
        loss: the small one's, in nats per token of the text.
        target_loss: the large one's.
        agreement: share of the positions where both draw the same token.
    """

    loss: float
    target_loss: float
    agreement: float


@torch.inference_mode()
def agreements(
    target: Target,
    draft: Target,
    text: Sequence[int],
    positions: Sequence[int],
    window: int,
    params: SamplingParams,
    seed: int = 0,
    recents: Sequence[int | None] = (None,),
) -> list[list[Agreement]]:
    """Compare two models at places of a text, all of which is in the context of the large one.

    Args:
        target: the large model.
        draft: the small one, with the same vocabulary.
        text: token ids, ``window + 1`` of them from the last position on at least.
        positions: where to compare, rising, ``window`` apart at least.
        window: nodes compared from each position on.
        params: how tokens are drawn; the penalty sees the text.
        seed: of the noise.
        recents: what the small one reads, each compared apart: so many tokens before those compared, 256 more at most;
            None for the whole text.

    Returns:
        For each of the ``recents``, an agreement at each position.
    """
    caches = [FullKV(model.kv_shape, positions[-1] + window) for model in (target, draft)]
    sampler, known = Sampler(params, seed, target.vocab_size, target.device), 0
    found: list[list[Agreement]] = [[] for _ in recents]
    for position in positions:
        ids = torch.tensor(text[position : position + window + 1], device=target.device)
        wanted = _whole(target, text, position, window, caches[0])
        drafted = [
            _whole(draft, text, position, window, caches[1])
            if recent is None
            else _recent(draft, text, position, window, recent)
            for recent in recents
        ]
        sampler.extend(text[known:position])
        known, same = position + window, torch.zeros(len(recents))
        for at in range(0, window, _ROWS):
            part = [each[at : at + _ROWS] for each in (wanted, *drafted)]
            same += _same(sampler, ids[at : at + _ROWS + 1], position + at, part)
        losses = [F.cross_entropy(each, ids[1:]).item() for each in (wanted, *drafted)]
        for each, loss, hits in zip(found, losses[1:], same.tolist(), strict=True):
            each.append(Agreement(loss, losses[0], hits / window))
    return found


def _whole(model: Target, text: Sequence[int], position: int, window: int, kv: FullKV) -> Tensor:
    """``[window, V]`` logits from a position on, with all of the text before it in the cache."""
    model.prefill(text[kv.length : position], kv)
    parts = [part.hidden for part in model.chunks(text[position : position + window], kv)]
    return model.logits(torch.cat(parts)).float()


def _recent(model: Target, text: Sequence[int], position: int, window: int, recent: int) -> Tensor:
    """The same with only some of the text before it in the cache, at the positions that it has."""
    rows = []
    for start in range(position, position + window, _ROWS):
        first, end = max(0, start - recent), min(start + _ROWS, position + window)
        kv, hidden = FullKV(model.kv_shape, end - first), []
        for at in range(first, end, _ROWS):
            places = torch.arange(at, min(at + _ROWS, end), device=model.device)
            tokens = torch.tensor(text[at : at + len(places)], device=model.device)
            hidden.append(model.forward(tokens, places, kv, None).hidden)
            kv.commit(range(len(places)))
        rows.append(torch.cat(hidden)[start - first :])
    return model.logits(torch.cat(rows)).float()


def _same(sampler: Sampler, ids: Tensor, start: int, rows: Sequence[Tensor]) -> Tensor:
    """How often each but the first draws what that draws after the nodes from ``start`` on: the sampler's text then."""
    nodes = len(rows[0])
    tokens = ids[:nodes]
    sampler.extend(tokens[:1].tolist())
    causal = torch.ones(nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
    seen = sampler.seen(tokens, torch.arange(start, start + nodes, device=tokens.device), causal)
    sampler.extend(tokens[1:].tolist())
    places = range(start + 1, start + 1 + nodes)
    wanted, *drafted = (sampler.scores(each, seen, places).argmax(-1) for each in rows)
    return torch.tensor([int((each == wanted).sum()) for each in drafted])
