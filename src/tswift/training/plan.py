"""What is asked of a training; the defaults are the paper's (table 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tswift.errors import InputError
from tswift.models.kinds import KINDS
from tswift.models.shapes import refuse_shape
from tswift.models.source import DEMO
from tswift.training.loss import OBJECTIVES, TEXT

if TYPE_CHECKING:
    import numpy as np

STEPS = 200  # of table 9, where nothing else is said
_MOST_HEADS = 64
_MOST_ROWS = 1 << 20
_DTYPES = ("auto", "float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Schedule:
    """What any training is told: on which text, for how long, how fast, and what is kept of it.

    Attributes:
        corpus: folder of ``.parquet`` or ``.txt`` files, one such file, or a hub id.
        model: ``demo``, a folder or a hub id.
        seq_len: tokens of a row.
        steps: optimizer steps; None for 200, or for as many as the minutes allow.
        minutes: training time instead, evaluations apart. Which step is the last one then depends on the machine.
        batch: rows forwarded together.
        accumulate: batches of a step, for each process.
        lr: highest learning rate.
        warmup: steps in which it rises; a quarter of the training at most. Then it falls along a cosine.
        weight_decay: the optimizers'.
        documents: most documents of the corpus to look at, spread evenly over it; None for all.
        held_out: documents held out; None for four, or a tenth if that is less.
        eval_every: steps between two scorings of the held-out texts; 0 for none between the first and the last.
        save_every: steps between two checkpoints; None for none but those by time.
        save_minutes: most minutes between two checkpoints.
        seed: of the first weights and of the rows.
        device, dtype, attention: as for :func:`tswift.models.loading.load`, but that on CUDA ``auto`` is bfloat16.

    Raises:
        InputError: a value outside its range.
    """

    corpus: str
    model: str = DEMO
    seq_len: int = 8192
    steps: int | None = None
    minutes: float | None = None
    batch: int = 3
    accumulate: int = 10
    lr: float = 5e-3
    warmup: int = 50
    weight_decay: float = 0.1
    documents: int | None = None
    held_out: int | None = None
    eval_every: int = 50
    save_every: int | None = None
    save_minutes: float = 10.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"

    FREE: ClassVar[frozenset[str]] = frozenset(
        {"device", "attention", "eval_every", "save_every", "save_minutes", "model", "corpus"}
    )
    """What may be another when a training is gone on with: it changes no weight, or by rounding only. Model and corpus
    may have been moved; that they are the same is seen when they are read."""

    def __post_init__(self) -> None:
        refuse_shape(self.model)
        refuse_others(self, {"dtype": _DTYPES})
        least = {
            "seq_len": self.shortest,
            "steps": 1,
            "batch": 1,
            "accumulate": 1,
            "warmup": 0,
            "documents": 2,
            "held_out": 1,
            "eval_every": 0,
            "save_every": 1,
            "seed": 0,
        }
        refuse_outside(self, least, {"seed": 2**63 - 1, "batch": _MOST_ROWS, "accumulate": _MOST_ROWS})
        for name, zero in (("lr", False), ("minutes", False), ("save_minutes", False), ("weight_decay", True)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                raise InputError(f"must be a number {'>= 0' if zero else 'above 0'}, got {value}", option(name))
        if self.steps is not None and self.minutes is not None:
            raise InputError("cannot be given together with --steps", "--minutes")

    @property
    def shortest(self) -> int:
        """Fewest tokens that a row can have."""
        return 2

    @property
    def last(self) -> int:
        """How many steps there are, where time does not decide."""
        return self.steps or STEPS

    @property
    def step_tokens(self) -> int:
        """Tokens that a process sees in a step."""
        return self.seq_len * self.batch * self.accumulate

    def positions(self, key: Sequence[int]) -> np.ndarray | None:
        """Where the tokens of a batch are: ``[batch, seq_len]`` int64; None for 0, 1, ...

        Args:
            key: as for :meth:`tswift.training.documents.Documents.batch`.
        """
        return None

    def settled(self: Plan) -> Plan:
        """The same with the steps said, and with absolute paths: it holds in another working directory, too."""
        model = self.model if self.model == DEMO else _absolute(self.model)
        steps = None if self.minutes is not None else self.last
        return replace(self, model=model, corpus=_absolute(self.corpus), steps=steps)

    def resumed(self: Plan, given: Mapping[str, Any], folder: Path) -> Plan:
        """The same plan, gone on with; what decides about weights stays as it was.

        Args:
            given: fields that were asked for now.
            folder: of the training, for the error.

        Raises:
            InputError: something else was asked for than the training was begun with.
        """
        ours = asdict(self)
        asked = asdict(replace(self, **{"steps": None, "minutes": None, **given}).settled()) if given else {}
        for name in given:
            if name not in self.FREE and asked[name] != ours[name]:
                told = "nothing" if ours[name] is None else ours[name]
                message = f"the training in {folder} was begun with {told}, got {asked[name]}"
                raise InputError(message, option(name))
        return replace(self, **{name: asked[name] for name in given if name in self.FREE})


Plan = TypeVar("Plan", bound=Schedule)


@dataclass(frozen=True)
class TrainPlan(Schedule):
    """A training of heads on a frozen model.

    Attributes:
        kind: ``chained`` or ``conditioned``.
        heads_count: how many heads.
        objective: ``text`` or ``distill``.
        alpha_tokens: tokens decoded after each held-out prompt to measure alpha, before and after; 0 for none.

    Raises:
        InputError: a value outside its range.
    """

    kind: str = "conditioned"
    heads_count: int = 3
    objective: str = TEXT
    alpha_tokens: int = 256

    FREE: ClassVar[frozenset[str]] = Schedule.FREE | {"alpha_tokens"}

    def __post_init__(self) -> None:
        refuse_others(self, {"kind": tuple(KINDS), "objective": OBJECTIVES})
        refuse_outside(self, {"heads_count": 1, "alpha_tokens": 0}, {"heads_count": _MOST_HEADS})
        super().__post_init__()

    @property
    def shortest(self) -> int:
        """Fewest tokens that a row can have: every head looks at one."""
        return self.heads_count + 2


def refuse_others(plan: Schedule, among: Mapping[str, Sequence[str]]) -> None:
    """Refuse fields that are none of the words they can be.

    Raises:
        InputError: there is one.
    """
    for name, words in among.items():
        value = getattr(plan, name)
        if value not in words:
            raise InputError(f"is one of {', '.join(words)}, got {value!r}", option(name))


def refuse_outside(plan: Schedule, least: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Refuse fields below the least or above the most that they can be; one that is None is fine.

    Raises:
        InputError: there is one.
    """
    for name, highest in most.items():
        if getattr(plan, name) > highest:
            raise InputError(f"must be at most {highest}, got {getattr(plan, name)}", option(name))
    for name, lowest in least.items():
        value = getattr(plan, name)
        if value is not None and value < lowest:
            raise InputError(f"must be at least {lowest}, got {value}", option(name))


def option(name: str) -> str:
    """What a field is called on the command line."""
    return f"--{name.replace('_', '-')}"


def _absolute(place: str) -> str:
    try:
        path = Path(place).expanduser()
        return str(path.resolve()) if path.exists() else place
    except (OSError, RuntimeError, ValueError):
        return place
