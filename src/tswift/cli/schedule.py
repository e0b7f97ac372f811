"""Options of every command that trains: declared once, so that they are named, typed and explained alike."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tswift.cli import options
from tswift.cli.codes import BAD_INPUT
from tswift.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tswift.cli.bars import Bars
    from tswift.training.course import Outcome
    from tswift.training.loop import Show

TEXT, SCHEDULE, MODEL, OUTPUT = "Text", "Schedule", "Model", "Output"
PLAN = (
    *("corpus", "model", "seq_len", "steps", "minutes", "batch", "accumulate", "lr", "warmup", "weight_decay"),
    *("documents", "held_out", "eval_every", "save_every", "save_minutes", "seed", "device", "dtype", "attention"),
)
_BAR = 42  # columns of a progress bar without its figures

Corpus = Annotated[
    str | None,
    options.option(TEXT, "Folder of .parquet or .txt files, one such file, or a hub id: emozilla/pg19.", "--corpus"),
]
Documents = Annotated[
    int | None, options.option(TEXT, "Look at so many documents, evenly spread. (default: all)", "--documents")
]
HeldOut = Annotated[
    int | None, options.option(TEXT, "Documents never trained on. (default: 4, a tenth at most)", "--held-out")
]
Steps = Annotated[int | None, options.option(SCHEDULE, "Optimizer steps. (default: 200)", "--steps")]
Minutes = Annotated[float | None, options.option(SCHEDULE, "Training time, instead of --steps.", "--minutes")]
Warmup = Annotated[
    int | None, options.option(SCHEDULE, "Steps of its rise, a quarter of all at most. (default: 50)", "--warmup")
]
Seed = Annotated[int | None, options.option(SCHEDULE, "Of first weights and rows. (default: 0)", "--seed")]
Model = Annotated[str | None, options.option(MODEL, "demo, a folder or a hub id. (default: demo)", "--model")]
Device = Annotated[str | None, options.option(MODEL, "auto, cpu, cuda, cuda:1 ... (default: auto)", "--device")]
Dtype = Annotated[
    str | None,
    options.option(MODEL, "bfloat16, float32 or float64. (default: bfloat16 on CUDA, float32 on CPU)", "--dtype"),
]
Attention = Annotated[
    str | None, options.option(MODEL, "auto, native, triton, flash or sdpa. (default: auto)", "--attention")
]
Resume = Annotated[Path | None, options.option(OUTPUT, "Go on with the training in this folder.", "--resume")]
EvalEvery = Annotated[
    int | None,
    options.option(OUTPUT, "Steps between scorings of the held-out text; 0 is none. (default: 50)", "--eval-every"),
]
SaveEvery = Annotated[
    int | None, options.option(OUTPUT, "Steps between checkpoints. (default: by time alone)", "--save-every")
]
SaveMinutes = Annotated[
    float | None, options.option(OUTPUT, "Most minutes between checkpoints. (default: 10)", "--save-minutes")
]


def refuse_unclear(corpus: str | None, out: Path | None, resume: Path | None) -> None:
    """Refuse a training that is neither begun nor gone on with.

    Raises:
        InputError: it is.
    """
    if resume is not None and out is not None:
        raise InputError("goes on in the folder of --resume", "--out")
    if resume is None and corpus is None:
        raise InputError("names a folder of .parquet or .txt files, or a hub id such as emozilla/pg19", "--corpus")


def run(
    name: str,
    result: str,
    work: Callable[[Show], Outcome],
    shown: Callable[[Outcome], None],
    quiet: bool,
    no_progress: bool,
) -> None:
    """Have a training done, show what it brought, and say where that is.

    Args:
        name: of the subcommand.
        result: the file that holds it.
        work: does it.
        shown: shows what was measured.
        quiet, no_progress: as typed.
    """
    from tswift.cli.bars import Bars
    from tswift.training.ranks import find_ranks

    first = find_ranks()[0] == 0
    bars = Bars(quiet or not first, not no_progress)
    try:
        with bars:
            outcome = work(_Progress(bars))
    except InputError:
        if first:
            raise
        raise typer.Exit(BAD_INPUT) from None  # the first process says it
    if first and outcome.after:
        shown(outcome)
    if outcome.signum is not None:
        bars.say(f"interrupted after step {outcome.steps:,}; tswift {name} --resume {outcome.folder} goes on")
        raise typer.Exit(128 + outcome.signum)
    bars.say(f"written: {outcome.folder / result}")


class _Progress:
    """One bar at a time, with as many of its figures as there is room for."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._task = bars, ""

    def say(self, message: str) -> None:
        self._bars.say(message)

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        if name != self._task:
            self._task = name
            self._bars.clear()
        if sys.stderr.isatty():
            room = shutil.get_terminal_size().columns - _BAR
            while len(figures) > room and ", " in figures:
                figures = figures.rpartition(", ")[0]
        self._bars.update(name, done, total, figures)
