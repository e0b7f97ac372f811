"""What heads are trained for: head i, looking from token t, foresees token t + i + 2.

The model is frozen, so nothing has to be kept of its passes. And logits are never there for more than a stretch of
positions: of 8,192 positions over a vocabulary of 128K they would take 4 GB for every head. Each stretch's gradient
goes to the heads' states at once, and one backward pass through the heads ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tswift.kv.full import FullKV
from tswift.models.base_heads import Heads
from tswift.models.target import Target

TEXT, DISTILL = "text", "distill"
OBJECTIVES = (TEXT, DISTILL)
RANKS = 3  # top-1 to top-3 accuracy

_ROOM = 1 << 26  # logits held at a time: 256 MB in float32, and a few times as much on the way to their gradient
_CHUNK = 512  # tokens of a row that the model forwards at a time

Run = Callable[[Tensor, Tensor | None], Tensor]  # the heads, perhaps wrapped: states from hidden states and embeddings


@dataclass(frozen=True)
class Tally:
    """How heads did, summed over positions.

    Attributes:
        loss: ``[count]`` float64, in nats.
        hits: ``[count, 3]`` float64: how often the text's token was among a head's best 1, 2 and 3.
        positions: how many.
    """

    loss: Tensor
    hits: Tensor
    positions: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.loss + other.loss, self.hits + other.hits, self.positions + other.positions)

    @property
    def losses(self) -> list[float]:
        """Each head's mean loss."""
        return (self.loss / self.positions).tolist()

    @property
    def accuracy(self) -> list[list[float]]:
        """Each head's top-1 to top-3 accuracy."""
        return (self.hits / self.positions).tolist()


def foresee(
    target: Target,
    heads: Heads,
    ids: Tensor,
    objective: str = TEXT,
    *,
    positions: Tensor | None = None,
    share: float | None = None,
    run: Run | None = None,
    room: int = _ROOM,
) -> Tally:
    """Score heads on rows of text, and add to their gradients.

    Every position counts from which all heads look at a token of the row: all but the last ``heads.count + 1``.

    Args:
        target: the frozen model.
        heads: what is scored.
        ids: ``[B, T]`` int64 token ids.
        objective: ``text``: cross-entropy against the token that follows; ``distill``: against the model's own
            distribution there, which is less noisy.
        positions: ``[B, T]`` int64; None for 0, 1, ...
        share: what the mean loss, summed over heads, is multiplied with before its gradient is added to the heads';
            None for no gradient.
        run: the heads as they are to be called; None for ``heads`` itself.
        room: most logits held at a time.
    """
    ids = ids.to(target.device)
    used = ids.shape[1] - heads.count - 1
    hidden = hidden_states(target, ids, positions)
    weight = next(heads.parameters())
    before = None
    if heads.conditioned:
        embedded = target.embed(ids).to(weight.dtype, copy=True)  # a copy: inference tensors cannot be trained on
        before = torch.stack([embedded[:, 1 + i : 1 + i + used] for i in range(heads.count)])
    coarse = target.dtype == torch.bfloat16 and weight.dtype == torch.float32
    with (
        torch.set_grad_enabled(share is not None),
        torch.autocast(target.device.type, torch.bfloat16, enabled=coarse),
    ):
        states = (run or heads)(hidden[:, :used].to(weight.dtype), before)
    tally, gradient = in_stretches(target.open_logits, states, hidden, ids, objective, target.dtype, share, room)
    if gradient is not None:
        states.backward(gradient)
    return tally


def hidden_states(target: Target, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """The model's last hidden states ``[B, T, H]``, by the passes that decode, so that heads see what they will see."""
    rows, length = ids.shape
    hidden = torch.empty(rows, length, target.hidden_size, dtype=target.dtype, device=target.device)
    kv = FullKV(target.kv_shape, length)
    places = torch.arange(length, device=target.device).expand(rows, -1) if positions is None else positions
    for row in range(rows):
        kv.length = 0
        for start in range(0, length, _CHUNK):
            part = slice(start, start + _CHUNK)
            hidden[row, part] = target.forward(ids[row, part], places[row, part], kv, None).hidden
            kv.commit(range(len(ids[row, part])))
    return hidden


def in_stretches(
    logits: Callable[[Tensor], Tensor],
    states: Tensor,
    hidden: Tensor,
    ids: Tensor,
    objective: str,
    dtype: torch.dtype,
    share: float | None,
    room: int,
) -> tuple[Tally, Tensor | None]:
    """Losses of heads over a stretch of positions at a time.

    Args:
        logits: ``[..., V]`` of hidden states ``[..., H]``.
        states: ``[count, B, P, H]`` of the heads, to feed to ``logits``.
        hidden: ``[B, T, H]`` of the model, with T = P + count + 1.
        ids: ``[B, T]`` int64.
        objective: ``text`` or ``distill``.
        dtype: in which ``logits`` takes its states.
        share: see :func:`foresee`.
        room: most logits held at a time; but never fewer than one position's.

    Returns:
        The tally, and the gradient of the states if there is a share.
    """
    count, rows, used, _ = states.shape
    vocabulary = logits(hidden[:1, :1]).shape[-1]
    width = max(1, room // (rows * vocabulary) - (count - 1 if objective == DISTILL else 0))
    gradient = None if share is None else torch.zeros_like(states)
    loss = torch.zeros(count, dtype=torch.float64, device=states.device)
    hits = torch.zeros(count, RANKS, dtype=torch.float64, device=states.device)
    for start in range(0, used, width):
        end = min(start + width, used)
        said = None
        if objective == DISTILL:
            with torch.no_grad():
                said = _wide(logits(hidden[:, start + 1 : end + count])).softmax(-1)
        for i in range(count):
            part = states[i, :, start:end].detach().requires_grad_(share is not None)
            token = ids[:, start + i + 2 : end + i + 2]
            with torch.set_grad_enabled(share is not None):
                found = _wide(logits(part.to(dtype))).flatten(0, 1)
                goal = token.flatten() if said is None else said[:, i : i + end - start].flatten(0, 1)
                summed = F.cross_entropy(found, goal, reduction="sum")
            if gradient is not None and share is not None:
                gradient[i, :, start:end] = torch.autograd.grad(summed, part)[0] * (share / (rows * used))
            loss[i] += summed.detach()
            best = found.detach().topk(min(RANKS, vocabulary)).indices
            right = (best == token.flatten().unsqueeze(-1)).cumsum(-1).sum(0)
            hits[i, : len(right)] += right
            hits[i, len(right) :] += right[-1]
    return Tally(loss, hits, rows * used), gradient


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
