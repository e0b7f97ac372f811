"""Losses of heads, and their accuracy.

Head i, given the hidden state of token t, predicts token t + i + 2. The large model is frozen.
Logits are computed for a stretch of positions at a time: 8,192 positions over a vocabulary of 128K
would take 4 GB for every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from tswift.errors import Object
from tswift.forward.target import Target
from tswift.speculators.heads import Heads
from tswift.training.config import TEXT
from tswift.training.teacher import draft_logits

TOP = 3  # top-1 to top-3 accuracy

# held at a time: 256 MB in float32, and a few times as much on the way to their gradient
_MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class Metrics:
    """Losses and hits, summed over positions."""

    loss: Tensor  # [heads], in nats
    hits: Tensor  # [heads, 3] float64: how often the text's token was among the best 1, 2 and 3
    positions: int

    @property
    def mean_loss(self) -> list[float]:
        """Mean loss of each head, in nats."""
        return (self.loss / self.positions).tolist()

    def scores(self) -> Object:
        """Mean loss and top-1 to top-3 accuracy of each head."""
        return {"loss": self.mean_loss, "top": (self.hits / self.positions).tolist()}


def total(metrics: Sequence[Metrics]) -> Metrics:
    """Metrics of all the positions together."""
    loss, hits = (
        torch.stack([getattr(each, name) for each in metrics]).sum(0) for name in ("loss", "hits")
    )
    return Metrics(loss, hits, sum(each.positions for each in metrics))


class HeadsLoss(nn.Module):
    """Loss of heads over their draft vocabulary,
    over the positions for which every head has a token to predict.

    These are not the last ``heads + 1``. Where a token that follows is not in the draft vocabulary,
    or its probability is not among those learnt, nothing is learnt of it.

    Args:
        network: the heads.
        target: the frozen model.
        objective: ``text``: against the token that follows; ``distill``: against the model's own
            distribution there.
        max_logits: most logits held at a time; but never fewer than one position's.
    """

    def __init__(
        self, network: Heads, target: Target, objective: str = TEXT, max_logits: int = _MAX_LOGITS
    ) -> None:
        super().__init__()
        self.network = network
        self._target = target
        self._objective = objective
        self._max_logits = max_logits
        drafted = self.network.draft_ids
        self._logits = draft_logits(target, drafted)
        self._size = target.vocab_size if drafted is None else len(drafted)
        ids = torch.arange(self._size, device=target.device)
        # in the draft vocabulary, of tokens
        self._places = torch.full((target.vocab_size,), -1, device=target.device)
        self._places[ids if drafted is None else drafted.long()] = ids

    def forward(self, ids: Tensor, hidden: Tensor, likeliest: Tensor, shares: Tensor) -> Metrics:
        """Metrics of each head, of rows as :class:`~tswift.training.teacher.Taught` has them."""
        heads = self.network
        target = self._target
        rows = ids.shape[0]
        used = ids.shape[1] - heads.count - 1
        dtype = next(heads.parameters()).dtype
        embedded = None
        if heads.conditioned:
            several, places = ids.unique(return_inverse=True)
            # inference tensors cannot be trained on
            all_embedded = target.embed(several).to(dtype, copy=True)[places]
            embedded = torch.stack(
                [all_embedded[:, 1 + i : 1 + i + used] for i in range(heads.count)]
            )
        states = heads(hidden[:, :used].to(dtype), embedded)
        if self._objective == TEXT:
            likeliest = self._places[ids].unsqueeze(-1)
            shares = torch.ones_like(ids.unsqueeze(-1), dtype=dtype)
            shares = shares * (likeliest >= 0)
        width = max(1, self._max_logits // (rows * self._size))
        # taken stretch by stretch: no logits are kept, or made again, for them
        slopes = torch.zeros_like(states)
        losses = torch.zeros(heads.count, dtype=torch.float64, device=states.device)
        hits = torch.zeros(heads.count, TOP, dtype=torch.float64, device=states.device)
        # text goes by the token itself, a model by its state one token before
        after = 1 + (self._objective == TEXT)
        for start, i in product(range(0, used, width), range(heads.count)):
            end = min(start + width, used)
            part = states[i, :, start:end].detach().requires_grad_(torch.is_grad_enabled())
            logits = self._logits(part).flatten(0, 1)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            goal = slice(start + i + after, end + i + after)
            loss = _cross_entropy(
                logits, likeliest[:, goal].flatten(0, 1), shares[:, goal].flatten(0, 1)
            )
            if part.requires_grad:
                slopes[i, :, start:end] = torch.autograd.grad(loss, part)[0]
            losses[i] += loss.detach()
            hits[i] += _hits(
                logits.detach(), self._places[ids[:, start + i + 2 : end + i + 2]].flatten()
            )
        along = (states * slopes).sum((1, 2, 3))
        return Metrics(losses + (along - along.detach()), hits, rows * used)


def _cross_entropy(logits: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Of ``[n, V]`` logits from a few probabilities ``[n, K]`` at places; the others are 0."""
    known = (shares * logits.gather(1, places.clamp(min=0))).sum()
    return (shares.sum(1) * logits.logsumexp(1)).sum() - known


def _hits(logits: Tensor, tokens: Tensor) -> Tensor:
    """``[3]``: how often tokens ``[n]`` were among the best 1, 2 and 3."""
    return (logits.topk(TOP).indices == tokens.unsqueeze(-1)).cumsum(-1).sum(0).double()
