"""Train heads for a loaded model, from a plan to a heads file and what it brings; the work behind ``tswift train``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tswift.models.base_heads import Heads
from tswift.models.fingerprint import fingerprint_in_any_dtype
from tswift.models.heads import load_heads
from tswift.models.kinds import KINDS
from tswift.models.loaded import LoadedModel
from tswift.training.course import BEFORE, SILENCE, Course, Outcome
from tswift.training.documents import Documents
from tswift.training.folder import HEADS, TrainFolder
from tswift.training.held_out import HeldOut, Judged
from tswift.training.loop import Show
from tswift.training.plan import TrainPlan
from tswift.training.ranks import Ranks
from tswift.training.session import begin, go_on
from tswift.training.trainer import HeadTrainer, adamw


class HeadsPupil:
    """Heads that learn to foresee what a frozen model will say.

    Args:
        plan: what is asked.
        model: the model; heads of its own are not looked at.
        documents: what is trained on, and held out.
        ranks: the processes.
        show: who is told of the progress.
    """

    def __init__(self, plan: TrainPlan, model: LoadedModel, documents: Documents, ranks: Ranks, show: Show) -> None:
        target = self._target = model.target
        rows = [documents.beginning(document, plan.seq_len) for document in documents.held_out]
        self._held_out = HeldOut(model, rows, plan, show.update)
        # where the model is in bf16, small updates would be lost on weights in bf16
        self._fresh = untrained(plan, target.hidden_size).to(torch.promote_types(target.dtype, torch.float32))
        heads = deepcopy(self._fresh).to(target.device)
        optimizers = adamw(heads, plan.lr, plan.weight_decay)
        self.trainer = HeadTrainer(target, heads, optimizers, plan.objective, ranks.wrap(heads))

    def score(self) -> Mapping[str, Any]:
        """Each head's loss and accuracy on the held-out texts."""
        found = self._held_out.score(self.trainer.heads)
        return {"loss": found.loss, "top": found.top}

    def judge(self, when: str, folder: TrainFolder) -> Judged:
        """The same, and alpha: of the heads before the training, or of those in the folder."""
        if when == BEFORE:
            heads = self._fresh
        else:  # what was written is what is judged: weights rounded to bf16
            path, hidden, dtype = folder.path / HEADS, self._target.hidden_size, self._target.dtype
            heads = load_heads(path, hidden, dtype, self._target.device)
        return self._held_out.judge(heads.to(self._target.device), when)

    def write(self, folder: TrainFolder) -> None:
        """Write the heads file."""
        base = fingerprint_in_any_dtype(self._target.model)
        folder.write(HEADS, partial(self.trainer.heads.save, base=base))


_COURSE = Course("train", TrainPlan, Judged, HeadsPupil)


def train(plan: TrainPlan, out: Path | None = None, show: Show = SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Train heads from the beginning; see :func:`tswift.training.session.begin`."""
    return begin(_COURSE, plan, out, show, command)


def resume(path: Path, given: Mapping[str, Any], show: Show = SILENCE, command: Sequence[str] = ()) -> Outcome:
    """Go on with a training of heads; see :func:`tswift.training.session.go_on`."""
    return go_on(_COURSE, path, given, show, command)


def untrained(plan: TrainPlan, hidden_size: int) -> Heads:
    """The heads that a training begins with, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return KINDS[plan.kind](hidden_size, plan.heads_count)
