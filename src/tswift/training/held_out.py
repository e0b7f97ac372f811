"""Heads judged on texts that they are not trained on: what they foresee, and how much of it decoding accepts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tswift.decoding.stats import DecodeStats
from tswift.engine import begin
from tswift.errors import InputError, renamed
from tswift.models.base_heads import Heads
from tswift.models.loaded import LoadedModel
from tswift.training.loss import Tally, foresee
from tswift.training.plan import TrainPlan

_PROMPT = 1024  # most tokens of a text that decoding continues


class Update(Protocol):
    """Takes how far a task has come."""

    def __call__(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Called now and then."""


@dataclass(frozen=True)
class Judged:
    """Heads on the held-out texts.

    Attributes:
        loss: each head's, in nats.
        top: each head's top-1 to top-3 accuracy.
        alpha: of decoding by ``tokenswift``; None if it was not measured.
        tokens_per_step: likewise.
    """

    loss: list[float]
    top: list[list[float]]
    alpha: float | None = None
    tokens_per_step: float | None = None


class HeldOut:
    """Texts that heads are judged on.

    Args:
        model: the model; heads of its own are not looked at.
        rows: token ids of each text, ``[plan.seq_len]`` int64.
        plan: of the training.
        update: takes the progress.

    Raises:
        InputError: decoding after them would need more positions than the model has.
    """

    def __init__(self, model: LoadedModel, rows: Sequence[np.ndarray], plan: TrainPlan, update: Update) -> None:
        self._model, self._rows, self._plan, self._update = model, rows, plan, update
        most = model.target.max_positions
        if plan.alpha_tokens >= most:
            raise InputError(f"must be below the model's {most:,} positions", "--alpha-tokens")
        self._prompt = min(plan.seq_len, _PROMPT, most - plan.alpha_tokens)

    def score(self, heads: Heads, when: str | None = None) -> Judged:
        """How well heads foresee the texts.

        Args:
            heads: what is judged.
            when: a word for the progress; None to show none.
        """
        tallies: list[Tally] = []
        for row in self._rows:
            if when:
                self._update(f"held out, {when}", len(tallies), len(self._rows))
            ids = torch.from_numpy(row).unsqueeze(0)
            tallies.append(foresee(self._model.target, heads, ids, self._plan.objective))
        whole = sum(tallies[1:], start=tallies[0])
        return Judged(whole.losses, whole.accuracy)

    def judge(self, heads: Heads, when: str) -> Judged:
        """The same, and what decoding by ``tokenswift`` with its defaults accepts of their drafts.

        Args:
            heads: what is judged, in any dtype: it is taken to the model's.
            when: a word for the progress.

        Raises:
            InputError: no memory to decode.
        """
        ours = deepcopy(heads).to(self._model.target.dtype).eval().requires_grad_(False)
        found = self.score(ours, when)
        if not self._plan.alpha_tokens:
            return found
        stats, tokens = DecodeStats(1), self._plan.alpha_tokens
        for row in self._rows:
            prompt = row[: self._prompt].tolist()
            try:
                generation = begin(replace(self._model, heads=ours), prompt, tokens, seed=self._plan.seed)
            except InputError as error:
                raise renamed(error, {"--len": "--alpha-tokens"}) from None
            stats.depth = generation.depth
            for step in generation.steps():
                stats.add(step)
                self._update(f"alpha, {when}", stats.tokens, tokens * len(self._rows))
        return replace(found, alpha=stats.alpha, tokens_per_step=stats.tokens_per_step)
