"""How often a small model draws what a large one draws: both under the same rule, with the same noise, after a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.decoding.sampling import Sampler, SamplingParams
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
) -> list[Agreement]:
    """Compare two models at places of a text, with all of the text before each place in the context of both.

    Args:
        target: the large model.
        draft: the small one, with the same vocabulary.
        text: token ids, ``window + 1`` of them from the last position on at least.
        positions: where to compare, rising, ``window`` apart at least.
        window: nodes compared from each position on.
        params: how tokens are drawn; the penalty sees the text.
        seed: of the noise.
    """
    caches = [FullKV(model.kv_shape, positions[-1] + window) for model in (target, draft)]
    sampler, found = Sampler(params, seed, target.vocab_size, target.device), []
    known = 0
    for position in positions:
        ids = torch.tensor(text[position : position + window + 1], device=target.device)
        rows = []
        for model, kv in zip((target, draft), caches, strict=True):
            model.prefill(text[kv.length : position], kv)
            parts = [part.hidden for part in model.chunks(text[position : position + window], kv)]
            rows.append(model.logits(torch.cat(parts)).float())
        sampler.extend(text[known:position])
        same = sum(
            _same(sampler, ids[at : at + _ROWS + 1], position + at, [each[at : at + _ROWS] for each in rows])
            for at in range(0, window, _ROWS)
        )
        known = position + window
        losses = [F.cross_entropy(each, ids[1:]).item() for each in rows]
        found.append(Agreement(losses[1], losses[0], same / window))
    return found


def _same(sampler: Sampler, ids: Tensor, start: int, rows: Sequence[Tensor]) -> int:
    """How often both draw the same after the nodes from ``start`` on, which then belong to the sampler's text."""
    nodes = len(rows[0])
    tokens = ids[:nodes]
    sampler.extend(tokens[:1].tolist())
    causal = torch.ones(nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
    seen = sampler.seen(tokens, torch.arange(start, start + nodes, device=tokens.device), causal)
    sampler.extend(tokens[1:].tolist())
    places = range(start + 1, start + 1 + nodes)
    ours, theirs = (sampler.scores(each, seen, places).argmax(-1) for each in rows)
    return int((ours == theirs).sum())
