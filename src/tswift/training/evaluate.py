"""Evaluation on held-out texts: loss, accuracy and alpha of heads; how often a draft model draws the target's token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.decoding.stats import DecodeStats
from tswift.engine import begin
from tswift.errors import InputError, renamed
from tswift.kv.full import FullKV
from tswift.models.heads import Heads
from tswift.models.load import LoadedModel
from tswift.models.target import Target
from tswift.training.config import HeadsConfig
from tswift.training.losses import heads_loss, total

_PROMPT = 1024  # most tokens of a text that decoding continues
_ROWS = 256  # of scores in float64 at a time, for each model


@dataclass(frozen=True)
class HeadsScores:
    """Loss in nats and top-1 to top-3 accuracy of each head; alpha and tokens per step if they were measured."""

    loss: list[float]
    top: list[list[float]]
    alpha: float | None = None
    tokens_per_step: float | None = None


def evaluate_heads(
    model: LoadedModel,
    heads: Heads,
    rows: Sequence[np.ndarray],
    config: HeadsConfig,
    alpha_tokens: int,
    on_progress: Callable[[int, int], None],
) -> HeadsScores:
    """Loss and accuracy of heads, and what decoding by ``tokenswift`` with its defaults accepts of their drafts.

    Args:
        model: the model; heads of its own are not used.
        heads: in any dtype; a copy in the model's is evaluated.
        rows: the held-out texts, ``[T]`` int64 token ids each.
        config: of the training.
        alpha_tokens: tokens decoded after each text; 0 for none.
        on_progress: called with the number of tokens decoded so far, and of all.

    Raises:
        InputError: no memory to decode.
    """
    target = model.target
    heads = deepcopy(heads).to(target.device, target.dtype).eval().requires_grad_(False)
    metrics = total([heads_loss(target, heads, torch.from_numpy(row[None]), config.objective) for row in rows])
    scores = HeadsScores(metrics.mean_loss, metrics.accuracy)
    if not alpha_tokens:
        return scores
    stats, longest = DecodeStats(1), min(config.seq_len, _PROMPT, target.max_positions - alpha_tokens)
    for row in rows:
        try:
            generation = begin(replace(model, heads=heads), row[:longest].tolist(), alpha_tokens, seed=config.seed)
        except InputError as error:
            raise renamed(error, {"--len": "--alpha-tokens"}) from None
        stats.depth = generation.depth
        for step in generation.steps():
            stats.add(step)
            on_progress(stats.tokens, alpha_tokens * len(rows))
    return replace(scores, alpha=stats.alpha, tokens_per_step=stats.tokens_per_step)


@dataclass(frozen=True)
class Agreement:
    """Losses of a draft model and its target on a text, in nats per token, and how often both draw the same token."""

    loss: float
    target_loss: float
    agreement: float

    @classmethod
    def mean(cls, several: Sequence[Agreement]) -> Agreement:
        """The mean of several."""
        names = ("loss", "target_loss", "agreement")
        return cls(*(sum(getattr(each, name) for each in several) / len(several) for name in names))


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
    """Compare a draft model with its target, under the same sampling rule and noise, at positions of a text.

    Args:
        target: the target; it reads the whole text.
        draft: the draft model, with the same vocabulary.
        text: token ids, at least ``window + 1`` of them from the last position on.
        positions: where to compare, rising, at least ``window`` apart.
        window: number of tokens compared from each position on.
        params: of sampling; the penalty sees the text.
        seed: of the noise.
        recents: contexts of the draft model, each compared separately: only so many tokens before those compared (up to
            256 more), or None for the whole text.

    Returns:
        For each of ``recents``, an agreement at each position.
    """
    caches = [FullKV(model.kv_shape, positions[-1] + window) for model in (target, draft)]
    sampler, known = Sampler(params, seed, target.vocab_size, target.device), 0
    result: list[list[Agreement]] = [[] for _ in recents]
    for position in positions:
        ids = torch.tensor(text[position : position + window + 1], device=target.device)
        logits = [_logits(target, text, position, window, caches[0])]
        for recent in recents:
            if recent is None:
                logits.append(_logits(draft, text, position, window, caches[1]))
            else:
                logits.append(_recent_logits(draft, text, position, window, recent))
        sampler.extend(text[known:position])
        known, same = position + window, torch.zeros(len(recents))
        for at in range(0, window, _ROWS):
            parts = [each[at : at + _ROWS] for each in logits]
            same += _same_draws(sampler, ids[at : at + _ROWS + 1], position + at, parts)
        losses = [F.cross_entropy(each, ids[1:]).item() for each in logits]
        for agreed, loss, hits in zip(result, losses[1:], same.tolist(), strict=True):
            agreed.append(Agreement(loss, losses[0], hits / window))
    return result


def _logits(model: Target, text: Sequence[int], position: int, window: int, kv: FullKV) -> Tensor:
    """``[window, V]`` logits from a position on, with all of the text before it in the cache."""
    model.prefill(text[kv.length : position], kv)
    parts = [part.hidden for part in model.chunks(text[position : position + window], kv)]
    return model.logits(torch.cat(parts)).float()


def _recent_logits(model: Target, text: Sequence[int], position: int, window: int, recent: int) -> Tensor:
    """The same with only the last ``recent`` tokens in the cache, at their own positions."""
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


def _same_draws(sampler: Sampler, ids: Tensor, start: int, logits: Sequence[Tensor]) -> Tensor:
    """For each draft model, count the positions where it draws the target's token.

    The sampler's text ends before position ``start``. ``ids`` are the ``[n + 1]`` tokens from there on, which extend
    it; ``logits`` are ``[n, V]`` of the target, then of each draft model.
    """
    nodes = len(logits[0])
    tokens = ids[:nodes]
    sampler.extend(tokens[:1].tolist())
    causal = torch.ones(nodes, nodes, dtype=torch.bool, device=tokens.device).tril()
    seen = sampler.seen(tokens, torch.arange(start, start + nodes, device=tokens.device), causal)
    sampler.extend(tokens[1:].tolist())
    places = range(start + 1, start + 1 + nodes)
    drawn, *drafted = (sampler.scores(each, seen, places).argmax(-1) for each in logits)
    return torch.tensor([int((each == drawn).sum()) for each in drafted])
