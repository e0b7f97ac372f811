"""A kind of training: what is trained and how it is judged, who is told of the progress, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tswift.models.loaded import LoadedModel
from tswift.training.documents import Documents
from tswift.training.folder import TrainFolder
from tswift.training.loop import Show
from tswift.training.plan import Schedule
from tswift.training.ranks import Ranks
from tswift.training.trainer import Trainer

BEFORE, AFTER = "before", "after"


class Pupil(Protocol):
    """What is trained, and how it is judged."""

    @property
    def trainer(self) -> Trainer:
        """Its weights and their optimizers."""

    def score(self) -> Mapping[str, Any]:
        """How well it does on the held-out texts, for the log."""

    def judge(self, when: str, folder: TrainFolder) -> Any:
        """All that is measured of it: untrained (``before``), or as it was written (``after``).

        Raises:
            InputError: no memory to do so.
        """

    def write(self, folder: TrainFolder) -> None:
        """Write what has been learnt.

        Raises:
            Fault: it cannot be written.
        """


@dataclass(frozen=True)
class Course:
    """A kind of training.

    Attributes:
        kind: what its records are called.
        plan: what it is told by.
        judged: the dataclass of what its pupils are judged by.
        pupil: what is trained, from a plan, the model that it is trained for, the documents, the processes, and who is
            told of the progress.
    """

    kind: str
    plan: type[Schedule]
    judged: type
    pupil: Callable[[Any, LoadedModel, Documents, Ranks, Show], Pupil]


@dataclass(frozen=True)
class Outcome:
    """What came of a training.

    Attributes:
        folder: where it is.
        plan: what was asked.
        steps: how many are done.
        before: what was measured before it, by its course's dataclass; None if it was stopped before that was known, or
            in a process that does not write.
        after: the same of its result; None if that is not there yet, or in a process that does not write.
        signum: the signal that stopped it; None if it ran to its end.
    """

    folder: Path
    plan: Schedule
    steps: int
    before: Any
    after: Any
    signum: int | None = None


class Silence:
    """A :class:`~tswift.training.loop.Show` that nobody sees."""

    def say(self, message: str) -> None:
        """Nothing."""

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Nothing."""


SILENCE = Silence()
