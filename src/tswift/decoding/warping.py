"""What is done to logits before one is drawn: filters and the contextual penalty, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tswift.decoding.params import SamplingParams


def warp(logits: Tensor, seen: Tensor | None, params: SamplingParams, banned: Tensor | None = None) -> Tensor:
    """Apply the filters and the penalty to rows of logits.

    Order, as in the reference: banned ids, temperature, contextual penalty, min-p, eta, top-k, top-p. At temperature 0
    only what can change the most likely token is applied.

    Args:
        logits: ``[n, V]`` float64; changed in place.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        params: the sampling parameters.
        banned: ``params.banned`` as int64 on the logits' device; where it is not given, it is copied there.

    Returns:
        ``[n, V]`` float64, unnormalised log-probabilities, ``-inf`` where a token is dropped.
    """
    if params.banned:
        if banned is None:
            banned = torch.tensor(params.banned).to(logits.device, non_blocking=True)
        logits.index_fill_(-1, banned, -math.inf)
    # divisors are tensors: by a number CUDA does not divide, but multiplies by its reciprocal, which rounds otherwise
    if params.temperature not in (0, 1):
        logits /= logits.new_full((), params.temperature)
    if seen is not None:
        lower = torch.where(logits > 0, logits / logits.new_full((), params.penalty), logits * params.penalty)
        logits = torch.where(seen, lower, logits)
    if params.temperature == 0:
        return logits
    if params.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf)
    if params.eta > 0:
        logits = _keep_eta(logits, params.eta)
    if 0 < params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -math.inf)
    if params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    return logits


def _keep_eta(logits: Tensor, epsilon: float) -> Tensor:
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(-1, keepdim=True)
    least = (math.sqrt(epsilon) * torch.exp(-entropy)).clamp(max=epsilon)
    drop = (probs < least) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -math.inf)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    probs = logits.softmax(-1)
    # on the CPU only as many are sorted as it takes; elsewhere to find that out would be a wait for the device
    best = _enough(probs, top_p) if probs.device.type == "cpu" else _sorted(probs)
    return logits.masked_fill(_too_much(probs, top_p, best), -math.inf)


def _too_much(probs: Tensor, top_p: float, best: Tensor) -> Tensor:
    """Which tokens go: those whose more likely ones (``best``, in order) together reach ``top_p`` without them."""
    kept = (best.cumsum(-1) - best < top_p).sum(-1, keepdim=True).clamp_(min=1)  # of a row with NaN none reaches it
    return probs < best.gather(-1, kept - 1)


def _sorted(probs: Tensor) -> Tensor:
    return probs.sort(-1, descending=True).values


def _enough(probs: Tensor, top_p: float) -> Tensor:
    """The largest probabilities of each row in order, as many as it takes for ``top_p`` in all of them."""
    vocab = probs.shape[-1]
    count = min(128, vocab)
    while True:
        best = probs.topk(count).values
        if count == vocab or bool((best.cumsum(-1)[:, -1] >= top_p).all()):
            return best
        count = min(8 * count, vocab)
