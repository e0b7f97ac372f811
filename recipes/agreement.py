"""How often a draft model draws the token of its target, and how well both know a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.caches import FullKV
from tswift.errors import Object
from tswift.forward.target import Target
from tswift.forward.text import chunks, prefill
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

_ROWS = 256  # of scores in float64 at a time, for each model
Scores = Object  # of the held-out texts, as metrics.jsonl and train.json have them


@torch.inference_mode()
def measure_agreement(
    target: Target, draft: Target, text: Sequence[int], params: SamplingParams
) -> Scores:
    """Compare a draft model with its target, under the same sampling rule and noise,
    at every token of a text.
    """
    count = len(text) - 1
    logits = (
        read_logits(model, text, 0, count, FullKV(model.kv_shape, count))
        for model in (target, draft)
    )
    return compare(params, text, 0, *logits)


def read_logits(
    model: Target, text: Sequence[int], position: int, window: int, kv: FullKV
) -> Tensor:
    """``[window, V]`` logits from a position on, with all of the text before it in the cache."""
    prefill(model, text[kv.length : position], kv)
    parts = [part.hidden for part in chunks(model, text[position : position + window], kv)]
    return model.logits(torch.cat(parts)).float()


def compare(
    params: SamplingParams, text: Sequence[int], position: int, target: Tensor, draft: Tensor
) -> Scores:
    """Compare a draft model with its target, by their logits ``[n, V]`` from a position of a text
    on.

    Returns:
        ``loss`` and ``target_loss``, in nats per token, and ``agreement``: how often both draw the
        same token.
    """
    device = target.device
    count = len(target)
    same = 0
    ids = torch.tensor(text[position : position + count + 1], device=device)
    sampler = Sampler(params, 0, target.shape[1], device)
    sampler.extend(text[:position])
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        tokens = text[position + rows.start : position + rows.stop]
        sampler.extend(tokens[:1])
        _, seen = sampler.along(target[rows], tokens)
        following = range(position + rows.start + 1, position + rows.stop + 1)
        ours, theirs = (
            sampler.scores(logits[rows], seen, following).argmax(-1) for logits in (draft, target)
        )
        same += int((ours == theirs).sum())
    loss, target_loss = (F.cross_entropy(logits, ids[1:]).item() for logits in (draft, target))
    return {"loss": loss, "target_loss": target_loss, "agreement": same / count}


def mean(scores: Sequence[Scores]) -> Scores:
    """The mean of several comparisons."""
    return {name: sum(each[name] for each in scores) / len(scores) for name in scores[0]}
