"""``tswift train``: heads for a model."""

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
    from tswift.benchmarking.grid import Grid
    from tswift.cli.bars import Bars
    from tswift.training.session import Outcome

_HEADS, _ROWS, _SCHEDULE, _RECORDS = "Heads", "Text", "Schedule", "Output"
_BAR = 42  # columns of a progress bar without its figures
_PLAN = (
    *("corpus", "model", "kind", "heads_count", "seq_len", "steps", "minutes", "batch", "accumulate", "lr", "warmup"),
    *("weight_decay", "objective", "documents", "held_out", "eval_every", "save_every", "save_minutes"),
    *("alpha_tokens", "seed", "device", "dtype", "attention"),
)


def train(
    context: typer.Context,
    corpus: Annotated[
        str | None,
        options.option(
            _ROWS, "Folder of .parquet or .txt files, one such file, or a hub id: emozilla/pg19.", "--corpus"
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        options.option(_ROWS, "Tokens of a row; only longer documents are used. (default: 8192)", "--seq-len"),
    ] = None,
    documents: Annotated[
        int | None, options.option(_ROWS, "Look at so many documents, evenly spread. (default: all)", "--documents")
    ] = None,
    held_out: Annotated[
        int | None,
        options.option(_ROWS, "Documents never trained on. (default: 4, a tenth at most)", "--held-out"),
    ] = None,
    kind: Annotated[
        str | None, options.option(_HEADS, "conditioned or chained. (default: conditioned)", "--kind")
    ] = None,
    heads_count: Annotated[int | None, options.option(_HEADS, "How many. (default: 3)", "--heads-count")] = None,
    objective: Annotated[
        str | None,
        options.option(_HEADS, "text, or distill: the model's own distribution there. (default: text)", "--objective"),
    ] = None,
    steps: Annotated[int | None, options.option(_SCHEDULE, "Optimizer steps. (default: 200)", "--steps")] = None,
    minutes: Annotated[
        float | None, options.option(_SCHEDULE, "Training time, instead of --steps.", "--minutes")
    ] = None,
    batch: Annotated[int | None, options.option(_SCHEDULE, "Rows forwarded together. (default: 3)", "--batch")] = None,
    accumulate: Annotated[
        int | None, options.option(_SCHEDULE, "Batches of a step, for each process. (default: 10)", "--accumulate")
    ] = None,
    lr: Annotated[float | None, options.option(_SCHEDULE, "Highest learning rate. (default: 0.005)", "--lr")] = None,
    warmup: Annotated[
        int | None,
        options.option(_SCHEDULE, "Steps of its rise, a quarter of all at most. (default: 50)", "--warmup"),
    ] = None,
    weight_decay: Annotated[
        float | None, options.option(_SCHEDULE, "AdamW's. (default: 0.1)", "--weight-decay")
    ] = None,
    seed: Annotated[int | None, options.option(_SCHEDULE, "Of first weights and rows. (default: 0)", "--seed")] = None,
    model: Annotated[
        str | None, options.option("Model", "demo, a folder or a hub id. (default: demo)", "--model")
    ] = None,
    device: Annotated[
        str | None, options.option("Model", "auto, cpu, cuda, cuda:1 ... (default: auto)", "--device")
    ] = None,
    dtype: Annotated[
        str | None,
        options.option("Model", "bfloat16, float32 or float64. (default: bfloat16 on CUDA, float32 on CPU)", "--dtype"),
    ] = None,
    attention: Annotated[
        str | None, options.option("Model", "auto, triton, flash or sdpa. (default: auto)", "--attention")
    ] = None,
    out: Annotated[
        Path | None, options.option(_RECORDS, "Folder for it all. (default: ./runs/<UTC time>-train)", "--out")
    ] = None,
    resume: Annotated[
        Path | None, options.option(_RECORDS, "Go on with the training in this folder.", "--resume")
    ] = None,
    eval_every: Annotated[
        int | None,
        options.option(
            _RECORDS, "Steps between scorings of the held-out text; 0 is none. (default: 50)", "--eval-every"
        ),
    ] = None,
    save_every: Annotated[
        int | None, options.option(_RECORDS, "Steps between checkpoints. (default: by time alone)", "--save-every")
    ] = None,
    save_minutes: Annotated[
        float | None, options.option(_RECORDS, "Most minutes between checkpoints. (default: 10)", "--save-minutes")
    ] = None,
    alpha_tokens: Annotated[
        int | None,
        options.option(
            _RECORDS,
            "Tokens decoded after each held-out text for alpha, before and after; 0 is none. (default: 256)",
            "--alpha-tokens",
        ),
    ] = None,
    quiet: options.Quiet = False,
    no_progress: options.NoProgress = False,
) -> None:
    """Train heads that draft for a model, whose own weights stay as they are; what is not said is the paper's.

    A folder takes heads.safetensors, figures and checkpoints. Under torchrun, gradients of all processes are averaged.
    """
    given = options.given(context, _PLAN)
    if resume is not None and out is not None:
        raise InputError("goes on in the folder of --resume", "--out")
    if resume is None and corpus is None:
        raise InputError("names a folder of .parquet or .txt files, or a hub id such as emozilla/pg19", "--corpus")

    from tswift.cli import tables
    from tswift.cli.bars import Bars
    from tswift.training import train as training
    from tswift.training.plan import TrainPlan
    from tswift.training.ranks import find_ranks

    first = find_ranks()[0] == 0
    bars = Bars(quiet or not first, not no_progress)
    progress = _Progress(bars)
    try:
        with bars:
            if resume is None:
                outcome = training.train(TrainPlan(**given), out, progress, context.obj)
            else:
                outcome = training.resume(resume, given, progress, context.obj)
    except InputError:
        if first:
            raise
        raise typer.Exit(BAD_INPUT) from None  # the first process says it
    if first and outcome.after:
        tables.show(_grid(outcome))
    if outcome.signum is not None:
        bars.say(f"interrupted after step {outcome.steps:,}; tswift train --resume {outcome.folder} goes on")
        raise typer.Exit(128 + outcome.signum)
    bars.say(f"written: {outcome.folder / 'heads.safetensors'}")


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


def _grid(outcome: Outcome) -> Grid:
    from tswift.benchmarking.grid import Grid
    from tswift.training.plan import TrainPlan

    before, after, plan = outcome.before, outcome.after, outcome.plan
    assert isinstance(plan, TrainPlan)
    rows = [
        [
            str(head + 1),
            f"{head + 2} on",
            f"{before.loss[head]:.3f} -> {after.loss[head]:.3f}",
            *(f"{old:.3f} -> {new:.3f}" for old, new in zip(before.top[head], after.top[head], strict=True)),
        ]
        for head in range(plan.heads_count)
    ]
    notes = []
    if before.alpha is not None and after.alpha is not None:
        notes = [
            f"alpha {before.alpha:.3f} -> {after.alpha:.3f}, "
            f"tokens per step {before.tokens_per_step:.2f} -> {after.tokens_per_step:.2f}: "
            f"{plan.alpha_tokens:,} tokens after each held-out text, by tokenswift with its defaults."
        ]
    title = f"{plan.heads_count} {plan.kind} heads on held-out text, untrained -> after {outcome.steps:,} steps"
    return Grid(title, ["head", "token", "loss", "top-1", "top-2", "top-3"], rows, notes=notes)
