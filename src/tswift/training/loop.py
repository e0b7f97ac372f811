"""The loop of a training: steps, their figures, checkpoints, and the end of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tswift.errors import Fault
from tswift.jobs.signals import Signals
from tswift.training.documents import Documents
from tswift.training.folder import TrainFolder
from tswift.training.loss import RANKS, Tally
from tswift.training.plan import Schedule
from tswift.training.ranks import Ranks
from tswift.training.trainer import Trainer, rate


class Show(Protocol):
    """Who is told of the progress."""

    def say(self, message: str) -> None:
        """A line for people."""

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """How far a task has come."""


class Loop:
    """A training under way. All of several processes run it; the first one writes, shows and evaluates.

    Args:
        plan: what is asked.
        trainer: what is trained.
        documents: what it is trained on.
        score: says now and then how well it does on other texts.
        folder: where checkpoints and figures go.
        ranks: the processes.
        show: who is told of the progress.

    Attributes:
        step: how many are done.
        seconds: of training so far, evaluations and checkpoints apart.
    """

    def __init__(
        self,
        plan: Schedule,
        trainer: Trainer,
        documents: Documents,
        score: Callable[[], Mapping[str, Any]],
        folder: TrainFolder,
        ranks: Ranks,
        show: Show,
    ) -> None:
        self.step, self.seconds = 0, 0.0
        self._plan, self._trainer, self._documents, self._score = plan, trainer, documents, score
        self._folder, self._ranks, self._show = folder, ranks, show
        self._saved = time.monotonic()

    def run(self, signals: Signals) -> int | None:
        """Step until all is done or a signal comes, then keep it.

        Returns:
            The signal; None if all is done.

        Raises:
            Fault: a loss is no number, or nothing can be written.
        """
        while True:
            started = time.monotonic()
            stop, share = self._ranks.highest(signals.number, self._share())
            tally = None if stop or share >= 1 else self._batches(signals)
            if tally is None:
                self._keep()
                return int(self._ranks.highest(signals.number)[0]) or None
            factor = rate(self.step, share, self._plan.warmup)
            self._trainer.update(factor)
            self.step += 1
            self.seconds += time.monotonic() - started
            self._tell(tally, factor)
            self._now_and_then()

    def _share(self) -> float:
        """Of the training that is done."""
        if self._plan.minutes is not None:
            return self.seconds / (60 * self._plan.minutes)
        return self.step / self._plan.last

    def _batches(self, signals: Signals) -> Tally | None:
        """Add up the gradients of a step; None if a signal came meanwhile."""
        plan, ranks, tallies = self._plan, self._ranks, []
        for number in range(plan.accumulate):
            if number and ranks.highest(signals.number)[0]:
                return None
            key = (plan.seed, self.step, number * ranks.count + ranks.index)
            ids = torch.from_numpy(self._documents.batch(plan.batch, plan.seq_len, key))
            where = plan.positions(key)
            positions = None if where is None else torch.from_numpy(where)
            last = number == plan.accumulate - 1
            tallies.append(self._trainer.learn(ids, positions, of=plan.accumulate, last=last))
        whole = sum(tallies[1:], start=tallies[0])
        ranks.total(whole.loss, whole.hits)
        if not whole.loss.isfinite().all():
            advice = f"a lower --lr may help; checkpoints are in {self._folder.path}"
            raise Fault(f"the loss of step {self.step + 1:,} is no number; {advice}")
        return Tally(whole.loss, whole.hits, whole.positions * ranks.count)

    def _tell(self, tally: Tally, factor: float) -> None:
        plan, tokens = self._plan, self.step * self._plan.step_tokens * self._ranks.count
        if self._ranks.first:
            self._folder.log(
                {
                    "step": self.step,
                    "seconds": round(self.seconds, 3),
                    "tokens": tokens,
                    "lr": plan.lr * factor,
                    "loss": tally.losses,
                    "top": tally.accuracy,
                }
            )
        figures = _figures(tally.losses, tally.accuracy)
        if plan.minutes is None:
            self._show.update("train", self.step, plan.last, figures)
        else:
            self._show.update("train, s", int(self.seconds), int(60 * plan.minutes), f"{figures}, step {self.step:,}")

    def _now_and_then(self) -> None:
        plan, ranks = self._plan, self._ranks
        if plan.eval_every and self.step % plan.eval_every == 0 and self._share() < 1 and ranks.first:
            self._folder.log({"step": self.step, "held_out": self._score()})
        by_steps = plan.save_every is not None and self.step % plan.save_every == 0
        if by_steps or time.monotonic() - self._saved >= 60 * plan.save_minutes:
            self._keep()

    def _keep(self) -> None:
        if self._ranks.first:
            self._folder.keep(self._trainer.tensors(), self.step, self.seconds)
        self._saved = time.monotonic()


def _figures(losses: Sequence[float], accuracy: Sequence[Sequence[float]]) -> str:
    """What matters most comes first: a terminal may have no room for the rest."""
    tops = [f"top-{k} {' '.join(f'{100 * head[k - 1]:.0f}' for head in accuracy)}%" for k in range(1, RANKS + 1)]
    return ", ".join([f"loss {' '.join(f'{loss:.2f}' for loss in losses)}", *tops])
