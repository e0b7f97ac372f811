"""One step of training a small model to draft for a large one: on the text itself, or on what the large one says of it.

Logits are never there for more than a stretch of positions, and are computed again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tswift.models.target import Target
from tswift.training.loss import DISTILL, RANKS, TEXT, Tally, hidden_states
from tswift.training.trainer import Trainer

_ROOM = 1 << 26  # logits held at a time
_OTHERS = 0.15  # of the matrices' rate: what embeddings and norms learn at


class Imitator(nn.Module):
    """A small model and its loss, in one module: that is what PyTorch wraps for several processes.

    Args:
        network: the small model; its attention is to be plainly causal, whatever the positions.
        target: the large one, frozen.
        objective: ``text``: cross-entropy against the token that follows; ``distill``: against the large model's own
            distribution there.
        room: most logits held at a time; but never fewer than one position's.
    """

    def __init__(self, network: PreTrainedModel, target: Target, objective: str = TEXT, room: int = _ROOM) -> None:
        super().__init__()
        self.network = network
        self._target, self._objective, self._room = target, objective, room

    def forward(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss, summed over all positions but the last of each row, and the hits ``[3]`` of :class:`Tally`."""
        rows, length = ids.shape
        hidden = self.network.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        said = hidden_states(self._target, ids, positions) if self._objective == DISTILL else None
        width = max(1, self._room // (rows * self._target.vocab_size))
        parts = []
        for start in range(0, length - 1, width):
            part = slice(start, min(start + width, length - 1))
            given = (hidden[:, part], ids[:, 1:][:, part], None if said is None else said[:, part])
            if width >= length - 1 or not torch.is_grad_enabled():
                parts.append(self._stretch(*given))
            else:
                parts.append(checkpoint(self._stretch, *given, use_reentrant=False))
        losses, hits = zip(*parts, strict=True)
        return torch.stack(losses).sum(), torch.stack(hits).sum(0)

    def _stretch(self, hidden: Tensor, tokens: Tensor, said: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.network.get_output_embeddings()(hidden).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        goal = tokens.flatten()
        with torch.no_grad():
            best = logits.topk(min(RANKS, logits.shape[-1])).indices
            right = (best == goal.unsqueeze(-1)).cumsum(-1).sum(0)
            if said is not None:
                goal = self._target.open_logits(said).to(logits.dtype).softmax(-1).flatten(0, 1)
        return F.cross_entropy(logits, goal, reduction="sum"), right.double()


class DraftTrainer(Trainer):
    """A small model in training.

    Args:
        imitator: the small model with its loss.
        optimizers: over its weights; their rates are the highest ones.
        coarse: compute in bfloat16 where that is safe.
        wrapped: the imitator wrapped by PyTorch, where several processes train it together.
    """

    def __init__(
        self,
        imitator: Imitator,
        optimizers: Sequence[torch.optim.Optimizer],
        coarse: bool = False,
        wrapped: DistributedDataParallel | None = None,
    ) -> None:
        super().__init__(imitator, optimizers, "draft", wrapped)
        self.imitator, self._coarse = imitator, coarse

    def _backward(self, ids: Tensor, positions: Tensor | None, share: float) -> Tally:
        device = self.imitator.network.device
        ids, positions = ids.to(device), None if positions is None else positions.to(device)
        count = ids.shape[0] * (ids.shape[1] - 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._coarse):
            loss, hits = (self._wrapped or self.imitator)(ids, positions)
        cast(Tensor, loss * (share / count)).backward()
        return Tally(loss.detach().double().unsqueeze(0), hits.unsqueeze(0), count)


def optimizers_of(network: PreTrainedModel, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for all else: what the bundled models are trained with.

    Args:
        network: what is trained.
        rate: Muon's; AdamW has 0.15 of it.
        decay: of the matrices' weights.
    """
    ends = {id(network.get_input_embeddings().weight), id(network.get_output_embeddings().weight)}
    matrices = [weight for weight in network.parameters() if weight.ndim == 2 and id(weight) not in ends]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in network.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=rate, momentum=0.95, weight_decay=decay, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=_OTHERS * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
